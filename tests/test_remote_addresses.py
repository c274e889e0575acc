"""Addresses of remotes: which are taken, what opens them, and who gets credentials."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import obstore
import pytest
import servers
from gcs_stub import QuietServer
from obstore.store import AzureStore
from small_models import BLOCK, small_model

from mstore import Store
from mstore.remotes import address, bucket
from mstore.remotes.bucket import Bucket
from mstore.remotes.objects import Absent
from mstore.remotes.shared_directory import SharedDirectory
from mstore.store.config import RemoteConfig
from mstore.terms.errors import BadName, BadRequest, Conflict, Unavailable

SECRET = "wJalrXUtnFEMI"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.init(tmp_path / "store", block_size=BLOCK)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("s3://models/family", "s3://models/family"),
        ("s3://models", "s3://models"),
        ("s3://models/", "s3://models"),
        ("S3://models/Family//", "s3://models/Family"),
        ("s3://models/a b/ä@c", "s3://models/a b/ä@c"),
        ("gs://my_models/x", "gs://my_models/x"),
        ("az://models/family/llama", "az://models/family/llama"),
        ("file:///srv/models/", "file:///srv/models"),
        ("FILE:///srv/my%20models", "file:///srv/my%20models"),
    ],
)
def test_an_address_is_kept_in_one_form(store: Store, url: str, kept: str) -> None:
    """The scheme is in small letters, and no slash ends it."""
    assert store.add_remote("origin", url).url == kept
    assert [one.url for one in store.remotes()] == [kept]


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@models/family",
        f"s3://{SECRET}@models/family",
        f"s3://:{SECRET}@models",
        f"s3:AKIA:{SECRET}@models/family",
        f"s3:/AKIA:{SECRET}@models/family",
        f"s3://AKIA:{SECRET}/models",
        f"az://models/family?sv=2021&sig={SECRET}",
        f"s3://models/family?X-Amz-Signature={SECRET}",
        f"gs://models#{SECRET}",
        f"https://{SECRET}@host/remote",
        f"file:///srv/models?{SECRET}",
        f"{SECRET}@host:models",
        f"s3://models@{SECRET}:x/y",
    ],
)
def test_an_address_with_a_secret_is_refused(store: Store, url: str) -> None:
    """A user, a password, a query and a signature are refused, and are not repeated; also as a
    store's endpoint and in its settings."""
    for attempt in (
        lambda: store.add_remote("origin", url),
        lambda: store.add_remote("origin", "s3://models", endpoint=url.replace("s3:", "https:")),
        lambda: address.opened(RemoteConfig("origin", url), ()),
    ):
        with pytest.raises(BadRequest) as caught:
            attempt()
        assert SECRET not in servers.shown(caught.value)
    assert store.remotes() == []
    assert SECRET not in (Path(store.path) / "config").read_text()


@pytest.mark.parametrize(
    "url",
    [
        *("", "s3", "s3:", "s3:/", "s3://", "s3:///prefix", "models", "/srv/models", "//models/x"),
        *(
            "file:",
            "file://",
            "file:///",
            "file:srv/models",
            "file:/srv/models",
            "file://srv/models",
        ),
        *("file:///srv/../etc", "file:///srv/%2e%2e/etc", "file:///srv/%00", "file:////srv/models"),
        *("s3://models/../other", "s3://models/a/%2E%2E/b", "s3://models/./a", "s3://models//a"),
        *(
            "s3://mo dels/a",
            "s3://-models",
            "s3://m",
            "s3://models:9000/a",
            "s3://[::1",
            "s3://é/a",
        ),
        *("s3://models/a\nb", "s3://models/a\x00", "s3://models/a\x1b[2J", "s3://models/\u202ea"),
        *("\ns3://models/a", "s3://models/%0a", "s3://models/%ff", "s3://models/" + "a" * 1024),
        *("s3a://models/a", "abfs://models/a", "memory:///", "ssh://host/models", "hf://a/b"),
        *("http://", "https:///remote", "javascript:alert(1)", "s3://models\\a"),
    ],
)
def test_what_is_no_address_is_refused(store: Store, url: str) -> None:
    """Relative paths, other schemes, control characters and paths that say more than one thing."""
    with pytest.raises(BadRequest) as caught:
        store.add_remote("origin", url)
    assert str(caught.value).isprintable()
    with pytest.raises(BadRequest):
        address.opened(RemoteConfig("origin", url), ())
    assert store.remotes() == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "127.0.0.1:9000"},
        {"endpoint": "ftp://host"},
        {"endpoint": "http://"},
        {"endpoint": "http://host:port"},
        {"endpoint": "http://host/?a=b"},
        {"region": "us east"},
        {"region": "eu\nx"},
        {"region": "é"},
        {"addressing_style": "auto"},
        {"url": "gs://models", "addressing_style": "path"},
        {"endpoint": "http://127.0.0.1:9000", "addressing_style": "virtual"},
        {"endpoint": "http://[::1]:9000", "addressing_style": "virtual"},
        {"url": "gs://models", "region": "us-east-1"},
        {"url": "file:///srv", "region": "us-east-1"},
        {"url": "file:///srv", "endpoint": "http://host"},
    ],
)
def test_what_is_no_setting_is_refused(store: Store, given: dict[str, str]) -> None:
    """An endpoint is the address of a server; only S3 has regions and styles; a directory has none;
    a server that is named by its number has no buckets in its name."""
    with pytest.raises(BadRequest):
        store.add_remote("origin", **{"url": "s3://models", **given})
    assert store.remotes() == []


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-o", "..", "a\nb", '"', "x" * 300])
def test_what_is_no_name_is_refused(store: Store, name: str) -> None:
    """A remote's name is part of refs and of a directory."""
    with pytest.raises((BadName, BadRequest)):
        store.add_remote(name, "s3://models")
    store.add_remote("origin", "s3://models")
    with pytest.raises((BadName, BadRequest)):
        store.rename_remote("origin", name)
    assert [one.name for one in store.remotes()] == ["origin"]


def test_a_directory_is_opened_by_its_path(tmp_path: Path) -> None:
    """What is written with percent signs is the directory that is meant, in any case of letters."""
    path = tmp_path / "my models"
    opened = address.opened(RemoteConfig("origin", path.as_uri()), ())
    assert isinstance(opened, SharedDirectory)
    opened.put_bytes("lists/1", b"1")
    assert (path / "lists" / "1").read_bytes() == b"1"
    shouted = path.as_uri().replace("file:", "FILE:")
    assert isinstance(address.opened(RemoteConfig("origin", shouted), ()), SharedDirectory)


# -- endpoints -----------------------------------------------------------------------------------


def test_an_endpoint_of_a_stranger_gets_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's settings name a server that the user does not: nothing is sent to it, and the error
    says how to trust it. Once the user does, it is asked."""
    with servers.gcs() as server, Store.init(tmp_path / "store", block_size=BLOCK) as store:
        server.use(monkeypatch)
        # The environment has credentials, but does not name this server.
        monkeypatch.delenv("GOOGLE_BASE_URL")
        store.add(small_model(tmp_path / "model", "llama"), name="llama")
        store.add_remote("origin", server.below(), endpoint=f"{server.endpoint}/")
        for attempt in (
            lambda: store.push("origin", every=True),
            lambda: store.push("origin", every=True, dry_run=True),
            lambda: store.fetch("origin"),
            lambda: store.pull("origin"),
            lambda: store.remote_contents("origin"),
        ):
            with pytest.raises(Conflict, match="your own settings do not name") as caught:
                attempt()
            assert server.endpoint in (caught.value.hint or "")
        assert server.asked() == []
        for trusted in (server.endpoint, f"{server.endpoint}/"):
            store.trusted_endpoints = {trusted}
            store.push("origin", every=True)
        assert server.asked() != []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["moto", "azurite", "gcs"])
def test_an_endpoint_that_is_named_is_asked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The endpoint of the settings goes before that of the environment, at every provider; also in
    a clone by address."""
    running = nullcontext(request.getfixturevalue(kind)) if kind != "gcs" else servers.gcs()
    with running as server:
        server.use(monkeypatch)
        for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        url = server.below()
        region = "eu-central-1" if kind == "moto" else ""
        config = RemoteConfig("origin", url, server.endpoint, region)
        address.opened(config, {server.endpoint}).put_bytes("lists/1", b"1")
        with Store.init(tmp_path / "store", block_size=BLOCK) as store:
            store.add(small_model(tmp_path / "model", "llama"), name="llama")
            store.add_remote("origin", url, endpoint=server.endpoint, region=region)
            store.trusted_endpoints = {server.endpoint}
            store.push("origin", every=True)
        Store.clone(url, tmp_path / "clone", endpoint=server.endpoint, region=region)
        with Store.open(tmp_path / "clone") as clone:
            (found,) = clone.remotes()
            assert (found.url, found.endpoint, found.region) == (url, server.endpoint, region)
            assert clone.ref("llama").name == "llama"


class _Host(BaseHTTPRequestHandler):
    """A proxy that notes whom requests are for, and has nothing."""

    asked: ClassVar[list[str]]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)


def test_where_requests_name_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the path, or with the addressing style `virtual` in the host, below the endpoint, which
    alone must be trusted."""
    servers.forget(monkeypatch)
    for name, value in servers.s3_environment("http://unused.test").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    asked: list[str] = []
    server = QuietServer(("127.0.0.1", 0), type("Host", (_Host,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    endpoint = "http://minio.test:9000"
    try:
        for style in ("", "path", "virtual"):
            config = RemoteConfig("origin", "s3://models/x", endpoint, "", style)
            with pytest.raises(Absent):
                address.opened(config, {endpoint}).read_root()
            with pytest.raises(Conflict, match="your own settings do not name"):
                address.opened(config, {"http://models.minio.test:9000"})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    path = f"{endpoint}/models/x/mstore-remote"
    assert asked == [path, path, "http://models.minio.test:9000/x/mstore-remote"]


def test_azure_names_a_container_and_the_environment_the_account(
    azurite: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """az://CONTAINER/PREFIX: obstore takes the first part for the container, never for an account;
    without an account it is an error that names the variable."""
    azurite.use(monkeypatch)
    bucket.connect(f"{azurite.url}/a/b", {}).put_bytes("lists/1", b"1")
    account = azurite.environment["AZURE_STORAGE_ACCOUNT_NAME"]
    store = AzureStore(servers.BUCKET, prefix="a", client_options={"allow_http": True})
    assert obstore.head(store, "b/lists/1")["size"] == 1
    with_account = bucket.connect(f"az://{account}/{servers.BUCKET}/a/b", {})
    with pytest.raises(Unavailable, match="no such bucket"):
        with_account.put_bytes("lists/1", b"1")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(Unavailable, match="AZURE_STORAGE_ACCOUNT_NAME"):
        bucket.connect(azurite.url, {})


# -- copies of a store ---------------------------------------------------------------------------


def test_a_clone_of_a_directory_has_no_remotes(store: Store, tmp_path: Path) -> None:
    """The settings of a store that somebody else made would send this user's credentials; the
    other settings come along. A backup is the same store, and keeps its remotes."""
    store.configure("reflog_days", 7)
    store.add_remote("origin", "s3://models/family", endpoint="https://storage.example")
    kept = store.remotes()
    Store.clone(store.path, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as clone:
        assert clone.remotes() == []
        assert clone.config["reflog_days"] == 7
    assert "remote" not in (tmp_path / "clone" / "config").read_text()
    store.backup(tmp_path / "backup")
    with Store.open(tmp_path / "backup") as backup:
        assert backup.remotes() == kept
    assert store.remotes() == kept


def test_a_bucket_is_what_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address of object storage opens, without a word to its provider."""
    servers.forget(monkeypatch)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    for url in ("s3://models/a b/ä@c", "gs://my_models/x", "az://models/x", "s3://models"):
        assert isinstance(address.opened(RemoteConfig("origin", url), ()), Bucket)
