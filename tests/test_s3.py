"""The S3 face: keys, listings and errors, by botocore and by bare requests."""

from __future__ import annotations

import logging
import random
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from checkpoints import write_safetensors
from damage import flip_bit
from http_server import Served, served
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import forget
from small_models import files_of, small_model

from mstore import MergeRequest, Store
from mstore_serve.conditions import http_date
from mstore_serve.s3 import face
from mstore_serve.s3.documents import S3Object
from mstore_serve.s3.listing import keys, page
from mstore_serve.serving import S3Keys
from mstore_serve.shown import Showing

KEYS = S3Keys("models", "-".join(["secret"] * 4))
BLOCK = 1 << 16
ODD = 'sub/deep/ünï "c:d"#?%+&<e> ~.txt'
NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
NS = 1_000_000_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `one` and `two`, and a store of both under several names."""
    root = tmp_path_factory.mktemp("s3")
    one = small_model(root / "one", "one")
    (one / "sub" / "deep").mkdir(parents=True)
    (one / ODD).write_text("deep\n")
    (one / "empty").write_bytes(b"")
    (one / "noise.dat").write_bytes(random.Random(1).randbytes(3 << 20))
    small_model(root / "two", "two")
    with Store.init(root / "store", block_size=BLOCK) as store:
        first = store.add(root / "one", name="llama/one").snapshot
        store.add(root / "two", name="llama/two")
        store.add(root / "two", name="llama-2")
        store.tag("v1", first)
        store.tag("v1-x", first)
    return root


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The same store, free to be changed."""
    return Path(shutil.copytree(root / "store", tmp_path / "store"))


@pytest.fixture(scope="module", autouse=True)
def _no_credentials() -> Iterator[None]:
    """Nothing that this machine's user has set up."""
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    """A server of that store, which checks signatures.  Tests that use it only read."""
    with served(root / "store", s3=True, s3_keys=KEYS) as found:
        yield found


@pytest.fixture(scope="module")
def is_open(root: Path) -> Iterator[Served]:
    """A server of that store that checks nothing."""
    with served(root / "store", s3=True) as found:
        yield found


def client(server: Served, keys: S3Keys = KEYS) -> Any:
    """A client of boto3 that tries once."""
    return boto3.client(
        "s3",
        endpoint_url=server.info.s3_url,
        region_name="eu-west-7",
        aws_access_key_id=keys.key,
        aws_secret_access_key=keys.secret,
        config=Config(signature_version="s3v4", retries={"total_max_attempts": 1}),
    )


def id_of(server: Served, ref: str) -> str:
    return server.store.ref(ref).snapshot.hex()


def error_of(body: bytes) -> dict[str, str | None]:
    found = ET.fromstring(body)
    assert found.tag == "Error"
    return {one.tag: one.text for one in found}


# -- objects -----------------------------------------------------------------------------------


def test_every_file_is_an_object(server: Served, root: Path) -> None:
    """Each file is an object under its id and under its ref, with the ETag that HTTP shows; names
    with odd signs are signed right."""
    s3 = client(server)
    for path, content in files_of(root / "one").items():
        for below in (f"snapshots/{id_of(server, 'llama/one')}", "refs/llama/one", "refs/v1"):
            found = s3.get_object(Bucket="mstore", Key=f"{below}/{path}")
            assert found["Body"].read() == content, path
            head = s3.head_object(Bucket="mstore", Key=f"{below}/{path}")
            assert (head["ContentLength"], head["ETag"]) == (len(content), found["ETag"])
            assert head["AcceptRanges"] == "bytes"
        same = server.ask(f"/refs/llama/one/-/files/{quote(path)}", method="HEAD")
        assert same.headers["etag"] == head["ETag"]


def test_parts_of_objects(server: Served, root: Path) -> None:
    """A range, an open one and a suffix are answered; one beyond the end is InvalidRange."""
    content = (root / "one" / "noise.dat").read_bytes()
    s3 = client(server)
    for header, part in (
        ("bytes=5-1048580", content[5:1048581]),
        ("bytes=3145720-", content[3145720:]),
        ("bytes=-9", content[-9:]),
    ):
        found = s3.get_object(Bucket="mstore", Key="refs/v1/noise.dat", Range=header)
        assert found["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert found["Body"].read() == part
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="mstore", Key="refs/v1/noise.dat", Range=f"bytes={len(content)}-")
    assert error.value.response["Error"]["Code"] == "InvalidRange"


def test_conditions(server: Served) -> None:
    """If-Match and If-None-Match name a version of an object."""
    s3 = client(server)
    where = {"Bucket": "mstore", "Key": "refs/v1/config.json"}
    etag = s3.head_object(**where)["ETag"]
    assert s3.get_object(**where, IfMatch=etag)["ETag"] == etag
    for condition, status in (({"IfMatch": '"other"'}, 412), ({"IfNoneMatch": etag}, 304)):
        with pytest.raises(ClientError) as error:
            s3.get_object(**where, **condition)
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


def test_times(server: Served) -> None:
    """An object of a snapshot is as old as that, one of a ref as its last move; listings agree."""
    s3 = client(server)
    one = server.store.ref("v1")
    for below, time_ns in (
        (f"snapshots/{one.snapshot.hex()}", server.store["v1"].time_ns),
        ("refs/v1", one.time_ns),
    ):
        head = s3.head_object(Bucket="mstore", Key=f"{below}/empty")
        assert int(head["LastModified"].timestamp()) == time_ns // NS
        (listed,) = s3.list_objects_v2(Bucket="mstore", Prefix=f"{below}/empty")["Contents"]
        assert listed["LastModified"] == head["LastModified"]
        assert (listed["ETag"], listed["Size"]) == (head["ETag"], 0)


def test_a_ref_is_as_old_as_its_move(
    copy: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ref that moves to an older snapshot is new: who compares times reads it again."""
    later = (1 << 32) * NS
    with Store.open(copy) as store:
        monkeypatch.setattr("time.time_ns", lambda: later)
        store.reset("llama-2", "v1")
        monkeypatch.undo()
    with served(copy, s3=True, s3_keys=KEYS) as server:
        head = client(server).head_object(Bucket="mstore", Key="refs/llama-2/empty")
        assert int(head["LastModified"].timestamp()) == later // NS


def test_a_ref_that_moves_back(copy: Path, root: Path) -> None:
    """A date is no condition for what a ref names: a ref that moved back is sent."""
    with served(copy, s3=True) as server:
        path, late = "/mstore/refs/llama-2/config.json", {"If-Modified-Since": http_date(1 << 32)}
        assert server.ask_s3(path, late).body == (root / "two" / "config.json").read_bytes()
        server.store.reset("llama-2", "v1")
        assert server.ask_s3(path, late).body == (root / "one" / "config.json").read_bytes()


def test_refs_that_come_and_go(copy: Path) -> None:
    """A ref that is made, or removed, while the server runs has its keys, or none, at once."""
    path = "/mstore/refs/new/name/empty"
    with served(copy, s3=True) as server:
        assert server.ask_s3(path).status == 404
        with Store.open(copy) as other:
            other.tag("new/name", "v1")
            assert server.ask_s3(path).status == 200
            other.remove("new/name")
            assert server.ask_s3(path).status == 404


@pytest.mark.parametrize(
    "key",
    [
        *("x", "refs", "refs/", "refs/llama", "refs/llama/", "refs/llama/one", "refs/llama/one/"),
        *("refs/v1/sub", "refs/v1/sub/", "refs/v1//config.json", "refs/v1/../v1/config.json"),
        *("refs/nope/config.json", "snapshots/", f"snapshots/{'0' * 64}/config.json"),
        *("snapshots/abcd/config.json", "remote/mstore-remote", "a" * 2000, "refs/" + "a/" * 500),
    ],
)
def test_what_is_no_key(is_open: Served, key: str) -> None:
    """A directory, an abbreviated id and whatever else is no file of a snapshot is NoSuchKey."""
    found = is_open.ask_s3(f"/mstore/{key}")
    assert found.status == 404
    assert error_of(found.body)["Code"] == "NoSuchKey"
    head = is_open.ask_s3(f"/mstore/{key}", method="HEAD")
    assert (head.status, head.body) == (404, b"")


def test_an_abbreviated_id_is_no_key(is_open: Served) -> None:
    """Only the whole id of a snapshot makes a key."""
    id = id_of(is_open, "v1")
    assert is_open.ask_s3(f"/mstore/snapshots/{id}/empty").status == 200
    assert is_open.ask_s3(f"/mstore/snapshots/{id[:12]}/empty").status == 404


# -- buckets and listings ----------------------------------------------------------------------


def test_the_bucket(server: Served) -> None:
    """There is one bucket, in any region, without versions."""
    s3 = client(server)
    assert [one["Name"] for one in s3.list_buckets()["Buckets"]] == ["mstore"]
    s3.head_bucket(Bucket="mstore")
    assert s3.get_bucket_location(Bucket="mstore")["LocationConstraint"] is None
    assert "Status" not in s3.get_bucket_versioning(Bucket="mstore")
    for call in (s3.list_objects_v2, s3.get_bucket_location):
        with pytest.raises(ClientError) as error:
            call(Bucket="other")
        assert error.value.response["Error"]["Code"] == "NoSuchBucket"
    with pytest.raises(ClientError) as error:
        s3.get_object_acl(Bucket="mstore", Key="refs/v1/empty")
    assert error.value.response["Error"]["Code"] == "NotImplemented"


def every_key(store: Store) -> list[str]:
    """The keys of the bucket, in the order of their bytes, from the store itself."""
    folders = {f"refs/{ref.name}": ref.snapshot for ref in store.refs()}
    folders |= {f"snapshots/{id.hex()}": id for id in store.snapshot_ids()}
    found = [f"{folder}/{file.path}" for folder, id in folders.items() for file in store.files(id)]
    return sorted(found, key=str.encode)


@pytest.mark.parametrize(("operation", "size"), [("list_objects_v2", 5), ("list_objects", 7)])
def test_pages_are_the_whole(server: Served, operation: str, size: int) -> None:
    """Pages of both versions of the listing have every key once, in order."""
    pages = client(server).get_paginator(operation)
    found = [
        one["Key"]
        for page in pages.paginate(Bucket="mstore", PaginationConfig={"PageSize": size})
        for one in page["Contents"]
    ]
    assert found == every_key(server.store)


def wanted(every: list[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """What S3 says of a listing, the long way."""
    found = set()
    for key in every:
        if key.startswith(prefix):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            found.add(key if end < 0 else key[: end + len(delimiter)])
    return sorted(one for one in found if one > after)


@settings(max_examples=50)
@given(st.data())
def test_a_listing_is_that_of_s3(server: Served, data: st.DataObject) -> None:
    """For any prefix, delimiter and start, also such that cut names of refs and ids, a listing has
    the keys and common prefixes that S3's rules give, and its pages are parts of it."""
    every = every_key(server.store)
    showing = Showing(server.store)
    some_key = st.sampled_from(every)
    cut = st.builds(lambda key, n: key[:n], some_key, st.integers(0, 90))
    prefix = data.draw(cut)
    delimiter = data.draw(st.sampled_from(["", "/", "/", "s/", "e", "-", "//"]))
    after = data.draw(st.one_of(st.just(""), some_key, cut, st.just("refs/llama/~")))
    names = [
        one.key if isinstance(one, S3Object) else one
        for one in keys(showing, prefix, delimiter, after)
    ]
    expected = wanted(every, prefix, delimiter, after)
    assert names == expected
    most = data.draw(st.integers(1, 5))
    first, more = page(showing, prefix, delimiter, after, most)
    assert len(first) == min(most, len(expected))
    assert more == (len(expected) > most)


def test_folders_are_not_opened(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of refs and ids are listed without reading a snapshot; a page opens no more than it
    shows, and nothing before its start."""
    showing = Showing(server.store)
    opened: list[str] = []
    find = Showing.snapshot

    def noted(self: Showing, place: Any) -> Any:
        opened.append(place.name)
        return find(self, place)

    monkeypatch.setattr(Showing, "snapshot", noted)
    assert list(keys(showing, "refs/", "/", "")) == [
        *("refs/llama-2/", "refs/llama/", "refs/v1-x/", "refs/v1/")
    ]
    assert len(list(keys(showing, "snapshots/", "/", ""))) == 3
    assert opened == []
    page(showing, "", "", "", 1)
    assert opened == ["llama-2"]
    opened.clear()
    last = every_key(server.store)[-1]
    assert list(keys(showing, "", "", last)) == []
    assert opened == [last.split("/")[1]]


def test_remote_refs_and_candidates(copy: Path) -> None:
    """Candidates are listed below their own directory only, and read like any ref."""
    with Store.open(copy) as store:
        request = MergeRequest(method="linear", base="llama/one", experts=["llama/two"])
        store.merge(store.plan(request), name="merged", candidate="run", threads=1)
        store.reset("llama/two", "candidates/run/merged")
    with served(copy, s3=True, s3_keys=KEYS) as server:
        s3 = client(server)
        listed = s3.list_objects_v2(Bucket="mstore", Prefix="refs/", Delimiter="/")
        assert "refs/candidates/" not in {one["Prefix"] for one in listed["CommonPrefixes"]}
        key = "refs/candidates/run/merged/model.safetensors"
        below = s3.list_objects_v2(Bucket="mstore", Prefix="refs/candidates/")
        assert key in {one["Key"] for one in below["Contents"]}
        same = s3.head_object(Bucket="mstore", Key="refs/llama/two/model.safetensors")
        assert s3.head_object(Bucket="mstore", Key=key)["ETag"] == same["ETag"]


def test_a_pruned_snapshot_has_no_keys(copy: Path, root: Path) -> None:
    """Of a snapshot whose contents were pruned nothing is listed, and the rest is."""
    with Store.open(copy) as store:
        old = store.ref("llama-2").snapshot
        store.configure("reflog_days", 0)
        store.remove("llama/two")
        store.add(root / "one", name="llama-2")
        store.prune(keep_last=1)
        store.gc()
        assert old in store.snapshot_ids()
    with served(copy, s3=True, s3_keys=KEYS) as server:
        s3 = client(server)
        found = [one["Key"] for one in s3.list_objects_v2(Bucket="mstore")["Contents"]]
        assert not [key for key in found if old.hex() in key]
        assert "refs/llama-2/empty" in found


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("list-type=2&max-keys=x", "InvalidArgument"),
        ("list-type=2&max-keys=-1", "InvalidArgument"),
        ("list-type=2&max-keys=%D9%A3", "InvalidArgument"),
        ("list-type=2&encoding-type=gzip", "InvalidArgument"),
        ("list-type=2&continuation-token=%21", "InvalidArgument"),
        ("list-type=2&prefix=%FF", "InvalidArgument"),
        ("marker=%FF", "InvalidArgument"),
        ("uploads", "NotImplemented"),
        ("versions", "NotImplemented"),
    ],
)
def test_listings_that_cannot_be(is_open: Served, query: str, code: str) -> None:
    """A number, token or text that cannot be is an error of its own."""
    found = is_open.ask_s3(f"/mstore?{query}")
    assert (found.status, error_of(found.body)["Code"]) == (
        501 if code == "NotImplemented" else 400,
        code,
    )


def test_a_page_has_at_most_a_thousand(is_open: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than a page may have are not sent, whatever a client asks for; none is possible."""
    monkeypatch.setattr(face, "MOST_KEYS", 4)
    for asked, count in (("", 4), ("&max-keys=99999", 4), ("&max-keys=3", 3), ("&max-keys=0", 0)):
        found = ET.fromstring(is_open.ask_s3(f"/mstore?list-type=2{asked}").body)
        assert len(found.findall(f"{NAMESPACE}Contents")) == count
        assert found.findtext(f"{NAMESPACE}IsTruncated") == ("true" if count else "false")


def test_a_page_repeats_what_was_asked(is_open: Served) -> None:
    """A page repeats its token as it was sent, and other texts encoded."""
    first = ET.fromstring(is_open.ask_s3("/mstore?list-type=2&max-keys=3").body)
    token = first.findtext(f"{NAMESPACE}NextContinuationToken") or ""
    asked = f"continuation-token={quote(token)}&start-after=a%20b&encoding-type=url"
    found = ET.fromstring(is_open.ask_s3(f"/mstore?list-type=2&{asked}").body)
    assert found.findtext(f"{NAMESPACE}ContinuationToken") == token
    assert "=" in token
    assert found.findtext(f"{NAMESPACE}StartAfter") == "a%20b"


def test_versions(is_open: Served) -> None:
    """An object has the version null and no other."""
    path = "/mstore/refs/v1/empty?versionId="
    assert is_open.ask_s3(f"{path}null").status == 200
    assert error_of(is_open.ask_s3(f"{path}abc").body)["Code"] == "NoSuchVersion"


def test_names_in_xml(is_open: Served) -> None:
    """Odd signs of names come back from XML as they are, and percent-encoded if that is asked."""
    listing = "/mstore?list-type=2&prefix=refs/v1/sub/"
    key = f"refs/v1/{ODD}"
    plain = ET.fromstring(is_open.ask_s3(listing).body)
    assert [one.text for one in plain.iter(f"{NAMESPACE}Key")] == [key]
    encoded = ET.fromstring(is_open.ask_s3(f"{listing}&encoding-type=url").body)
    assert [one.text for one in encoded.iter(f"{NAMESPACE}Key")] == [quote(key)]
    error = error_of(is_open.ask_s3("/mstore/%3Cb%3E%26%01%0D").body)
    assert (error["Code"], error["Key"]) == ("NoSuchKey", "<b>&\ufffd\r")


# -- who may ask, and what --------------------------------------------------------------------


def test_who_did_not_sign(server: Served) -> None:
    """Without a signature, or with one of other keys, nothing is shown: not even that a key is
    missing."""
    for path in ("/", "/mstore", "/mstore/refs/v1/empty", "/mstore/nope", "/other"):
        found = server.ask_s3(path)
        assert (found.status, error_of(found.body)["Code"]) == (403, "AccessDenied")
        assert found.headers["x-amz-request-id"] == error_of(found.body)["RequestId"]
    for wrong, code in (
        (S3Keys("models", "x" * 20), "SignatureDoesNotMatch"),
        (S3Keys("other", KEYS.secret), "InvalidAccessKeyId"),
    ):
        with pytest.raises(ClientError) as error:
            client(server, wrong).list_buckets()
        assert error.value.response["Error"]["Code"] == code


def test_a_presigned_address(server: Served, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A presigned address shows one object to whoever has it, and the log does not have it."""
    url = client(server).generate_presigned_url(
        "get_object", Params={"Bucket": "mstore", "Key": f"refs/v1/{ODD}"}
    )
    parts = urlsplit(url)
    # Other tests keep the log from its parents.
    logger = logging.getLogger("mstore_serve.access")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        found = server.ask_s3(f"{parts.path}?{parts.query}")
        assert (found.status, found.body) == (200, (root / "one" / ODD).read_bytes())
        other = parts.path.replace("v1", "llama/one")
        assert server.ask_s3(f"{other}?{parts.query}").status == 403
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
    assert "X-Amz-Expires=3600" in caplog.text
    assert KEYS.key not in caplog.text
    assert parts.query.partition("X-Amz-Signature=")[2][:64] not in caplog.text


def test_nothing_can_be_written(server: Served, is_open: Served) -> None:
    """Whatever writes is MethodNotAllowed."""
    s3 = client(server)
    for call, options in (
        (s3.put_object, {"Key": "refs/x", "Body": b"x" * 100_000}),
        (s3.delete_object, {"Key": "refs/v1/empty"}),
        (s3.delete_objects, {"Delete": {"Objects": [{"Key": "refs/v1/empty"}]}}),
        (s3.create_multipart_upload, {"Key": "refs/x"}),
        (s3.create_bucket, {}),
    ):
        with pytest.raises(ClientError) as error:
            call(Bucket="mstore", **options)
        assert error.value.response["Error"]["Code"] == "MethodNotAllowed"
    assert is_open.ask_s3("/mstore/x", method="POST").headers["allow"] == "GET, HEAD"


def test_other_peoples_pages(is_open: Served) -> None:
    """At a loopback address, a name that was not allowed is refused, as over HTTP."""
    found = is_open.ask_s3("/mstore", {"Host": "evil.example"})
    assert (found.status, error_of(found.body)["Code"]) == (421, "InvalidRequest")


def test_paths_that_are_no_text(is_open: Served) -> None:
    """A path that is no UTF-8 is InvalidURI; a whole URL, as a proxy sends it, is understood."""
    found = is_open.ask_s3("/mstore/%FF")
    assert (found.status, error_of(found.body)["Code"]) == (400, "InvalidURI")
    assert is_open.ask_s3(f"{is_open.info.s3_url}mstore/refs/v1/empty").status == 200


def test_two_faces_of_one_server(is_open: Served) -> None:
    """Each port has its own face, and both count towards the requests that there may be at once."""
    assert is_open.ask("/refs/v1/-/files/empty").status == 200
    assert is_open.ask("/mstore/refs/v1/empty").status == 404
    assert is_open.ask_s3("/refs/v1/-/files/empty").status == 404


def test_too_many_requests(root: Path) -> None:
    """One more request than there may be, of both faces together, is ServiceUnavailable."""
    with (
        served(root / "store", s3=True, most=1) as server,
        server.begin("/refs/v1/-/files/noise.dat") as other,
    ):
        other.recv(1)
        found = server.ask_s3("/mstore")
    assert (found.status, error_of(found.body)["Code"]) == (503, "ServiceUnavailable")
    assert found.headers["retry-after"] == "2"


def test_damage(tmp_path: Path) -> None:
    """A damaged block is InternalError, not wrong bytes; other objects are sent."""
    content = random.Random(2).randbytes(BLOCK)
    write_safetensors(tmp_path / "m" / "model.safetensors", [("t", "U8", (BLOCK,), content)])
    (tmp_path / "m" / "README.md").write_text("a\n")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "m", name="m")
    flip_bit(tmp_path / "store", content[9:99])
    with served(tmp_path / "store", s3=True) as server:
        found = server.ask_s3("/mstore/refs/m/model.safetensors")
        assert (found.status, error_of(found.body)["Code"]) == (500, "InternalError")
        assert str(tmp_path) not in found.body.decode()
        assert server.ask_s3("/mstore/refs/m/README.md").body == b"a\n"
