"""`export REF oci://...` and `add oci://...`: models in a registry, byte for byte.

The registry is Debian's docker-registry; a proxy before it counts requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import lmdb
import pytest
from cli_runs import Program
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from registries import Proxy, Registry, registry
from small_models import BLOCK, files_of, small_model
from test_hub import ADAPTER, PIPELINE, shard, sharded

from mstore import MergeRequest, Store
from mstore.oci import client
from mstore.snapshots.signing import load_key, signed_message
from mstore.terms.errors import BadCheckpoint, BadRequest, NotFound, Unavailable
from mstore.terms.ids import SnapshotId

SORTS = {"sharded": sharded(3), "adapter": ADAPTER, "pipeline": PIPELINE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


@pytest.fixture
def proxy(server: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A registry of its own host, so that no test knows what another one exported."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with Proxy(server.host) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A repository of the test's own."""
    return "tests/" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        yield made


def kept(store: Store, files: dict[str, bytes], ref: str = "x") -> Store:
    """The store, with a snapshot of these files."""
    directory = store.path.parent / f"of-{ref.replace('/', '-')}"
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    store.add(directory, name=ref)
    return store


def stored(store: Store, ref: str, directory: Path) -> dict[str, bytes]:
    store.checkout(ref, directory)
    return files_of(directory)


# There and back


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sort", SORTS)
def test_there_and_back(
    sort: str, proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """What is exported has the files as raw layers, and adding it gives the same snapshot's files.

    Its origin is the repository, the tag and the digest.
    """
    kept(store, SORTS[sort])
    report = store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert report.is_new
    assert server.files(f"{name}:v1") == SORTS[sort]
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        added = other.add(f"oci://{proxy.host}/{name}:v1", name="y")
        assert added.manifest == store["x"].manifest
        assert stored(other, "y", tmp_path / "out") == SORTS[sort]
        origin = other["y"].origin
        assert origin is not None
        assert origin.url == f"oci://{proxy.host}/{name}"
        assert (origin.revision, origin.commit) == ("v1", report.commit)
        again = other.add(f"oci://{proxy.host}/{name}@{report.commit}", name="z")
        assert again.manifest == added.manifest
        assert set(other.ref_ids()) == {"y", "z"}


def test_a_merge_there_and_back(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """A merged snapshot goes to a registry as its files are."""
    for one, changed in (("base", ""), ("a", "1"), ("b", "2")):
        (tmp_path / one).mkdir()
        small_model(tmp_path / one, "s", changed=changed)
        store.add(tmp_path / one, name=one, base=None if one == "base" else "base")
    plan = store.plan(MergeRequest(base="base", experts=["a", "b"], method="linear"))
    store.merge(plan, name="merged")
    store.export("merged", f"oci://{proxy.host}/{name}:v1", card=False)
    assert server.files(f"{name}:v1") == stored(store, "merged", tmp_path / "out")


def test_the_manifest_is_a_modelpack(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """The manifest has the types of the CNCF ModelPack, and its config lists the layers."""
    kept(store, {**sharded(1), "run.py": b"", "tokenizer.json": b"{}"})
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    told = server.manifest(f"{name}:v1")
    assert told["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert told["annotations"]["org.mstore.snapshot"] == str(store["x"].id)
    kinds = {
        one["annotations"]["org.cncf.model.filepath"]: one["mediaType"].removeprefix(
            "application/vnd.cncf.model."
        )
        for one in told["layers"]
    }
    assert kinds == {
        "README.md": "doc.v1.raw",
        "config.json": "weight.config.v1.raw",
        "model-00001-of-00001.safetensors": "weight.v1.raw",
        "model.safetensors.index.json": "weight.config.v1.raw",
        "run.py": "code.v1.raw",
        "tokenizer.json": "weight.config.v1.raw",
    }
    assert told["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    config = json.loads(server.ask("GET", f"/v2/{name}/blobs/{told['config']['digest']}")[2])
    assert config["modelfs"] == {
        "type": "layers",
        "diffIds": [one["digest"] for one in told["layers"]],
    }
    assert config["config"]["format"] == "safetensors"
    assert config["descriptor"]["revision"] == str(store["x"].id)


# Nothing twice


def test_the_same_again_is_one_request(proxy: Proxy, store: Store, name: str) -> None:
    """A tag that names this snapshot already is asked for, and nothing is sent."""
    kept(store, sharded(2))
    address = f"oci://{proxy.host}/{name}:v1"
    first = store.export("x", address, card=False)
    proxy.log.clear()
    second = store.export("x", address, card=False)
    assert [one.method for one in proxy.log] == ["HEAD"]
    assert (second.commit, second.bytes_sent) == (first.commit, 0)
    assert {one.what for one in second.files} == {"there"}


def test_a_fine_tune_costs_what_changed(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """Of a second snapshot, only files are sent whose bytes are new."""
    files = sharded(3)
    kept(store, files)
    store.export("x", f"oci://{proxy.host}/{name}:base", card=False)
    second = "model-00002-of-00003.safetensors"
    files = {**files, second: shard("other")[:-2] + b"ab", "new.json": b"{}"}
    files[second] = files[second].replace(b"t.other", b"t.s1\0\0\0".replace(b"\0", b" "))
    del files["README.md"]
    kept(store, {**files, second: shard("s1")[:-2] + b"ab"}, "tuned")
    proxy.log.clear()
    report = store.export("tuned", f"oci://{proxy.host}/{name}:base", card=False)
    changed = {one.path: one.what for one in report.files if one.what != "there"}
    assert changed == {second: "changed", "new.json": "added", "README.md": "removed"}
    assert report.bytes_sent == report.bytes_to_send == len(shard("s1")) + 2
    assert proxy.sent() == report.bytes_sent + server.manifest(f"{name}:base")["config"]["size"]


@pytest.mark.rest
def test_another_repository_gives_what_it_has(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """Files that were exported to another repository of the registry are not sent again."""
    kept(store, sharded(2))
    store.export("x", f"oci://{proxy.host}/{name}-base:v1", card=False)
    proxy.log.clear()
    report = store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert report.bytes_sent == 0
    assert server.files(f"{name}:v1") == sharded(2)
    mounts = [one for one in proxy.log if "mount=" in one.query]
    assert [one.status for one in mounts] == [201] * len(sharded(2))


@pytest.mark.rest
def test_the_repository_of_an_origin_gives_what_it_has(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """A store that only added a model from a registry knows where its files are there."""
    kept(store, sharded(2))
    store.export("x", f"oci://{proxy.host}/{name}-base:v1", card=False)
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        other.add(f"oci://{proxy.host}/{name}-base:v1", name="base")
        report = other.export("base", f"oci://{proxy.host}/{name}:v1", card=False)
    assert report.bytes_sent == 0
    assert server.files(f"{name}:v1") == sharded(2)


def test_what_is_remembered(proxy: Proxy, store: Store, name: str) -> None:
    """Rows of digests and repositories are what docs/format.md says."""
    files = sharded(1)
    kept(store, files)
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    path = "model-00001-of-00001.safetensors"
    digest = hashlib.sha256(files[path])
    parts = store["x"]._view().manifest.file(path).parts
    content = blake3.blake3(b"".join(part.tensor for part in parts)).digest()
    place = hashlib.sha256(f"{proxy.host}\nsha256:{digest.hexdigest()}".encode()).digest()
    store.close()
    memo = str(store.path / "memo")
    with lmdb.open(memo, readonly=True, lock=False, max_dbs=16) as env, env.begin() as reading:
        rows = {
            table: reading.get(key, db=env.open_db(table.encode(), reading, create=False))
            for table, key in (("digests", content), ("repositories", place))
        }
    assert rows["digests"][:-8] == digest.digest()
    assert rows["repositories"][:-8] == name.encode()


@pytest.mark.rest
def test_a_wrong_memory_costs_a_request(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """If the remembered repository has lost a blob, the blob is sent."""
    kept(store, sharded(1))
    store.export("x", f"oci://{proxy.host}/{name}-base:v1", card=False)
    for layer in server.manifest(f"{name}-base:v1")["layers"]:
        assert server.ask("DELETE", f"/v2/{name}-base/blobs/{layer['digest']}")[0] == 202
    report = store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert report.bytes_sent == report.plain_bytes
    assert server.files(f"{name}:v1") == sharded(1)


def test_a_dry_run_sends_nothing(proxy: Proxy, store: Store, name: str) -> None:
    """With dry_run, only questions go to the registry."""
    kept(store, sharded(2))
    report = store.export("x", f"oci://{proxy.host}/{name}:v1", card=False, dry_run=True)
    assert report.commit is None
    assert report.bytes_to_send == report.plain_bytes
    assert {one.method for one in proxy.log} == {"HEAD"}


def test_an_interrupted_add_goes_on(proxy: Proxy, store: Store, name: str, tmp_path: Path) -> None:
    """Files that arrived before an error are read from the store by the next add."""
    files = sharded(4)
    kept(store, files)
    address = f"oci://{proxy.host}/{name}:v1"
    store.export("x", address, card=False)
    third = hashlib.sha256(files["model-00003-of-00004.safetensors"]).hexdigest()
    proxy.fault = lambda method, path, number: 404 if third in path else None
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        with pytest.raises(NotFound):
            other.add(address, name="y")
        # The header is asked for first; so let it through, and nothing behind it.
        proxy.fault = _after(third, 1)
        with pytest.raises(NotFound):
            other.add(address, name="y")
        assert set(other.ref_ids()) == {"candidates/download/y"}
        proxy.fault = lambda *_: None
        proxy.log.clear()
        other.add(address, name="y")
        asked = {one.path.rpartition(":")[2] for one in proxy.log if "/blobs/" in one.path}
        first = hashlib.sha256(files["model-00001-of-00004.safetensors"]).hexdigest()
        assert sum(first in one.path for one in proxy.log) == 1
        assert third in asked
        assert other["y"].manifest == store["x"].manifest


def _after(text: str, count: int):  # type: ignore[no-untyped-def]
    seen = 0

    def fault(method: str, path: str, number: int) -> int | None:
        nonlocal seen
        seen += text in path
        return 404 if text in path and seen > count else None

    return fault


# Large blobs


def test_large_blobs_go_in_chunks(
    proxy: Proxy, server: Registry, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob of more than a chunk is sent chunk by chunk, each behind the one before."""
    monkeypatch.setattr(client, "CHUNK_BYTES", 1 << 16)
    files = {"model.safetensors": shard("big", 200_000), "config.json": b"{}"}
    kept(store, files)
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    sizes = [one.sent for one in proxy.log if one.method == "PATCH"]
    assert sum(sizes) == len(files["model.safetensors"])
    assert max(sizes) == 1 << 16
    assert server.files(f"{name}:v1") == files


# Addresses


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("oci://nohost", "'nohost' is no host"),
        ("oci://org/model", "no host of a registry"),
        ("oci://h.example/Model", "no repository"),
        ("oci://h.example/../x", "no repository"),
        ("oci://h.example/x:a b", "no tag"),
        ("oci://h.example/x@sha256:12", "no digest"),
        ("oci://h.example/x@sha512:" + "0" * 128, "no digest"),
        ("oci://u:pw@h.example/x", "no user and no password"),
        ("oci://h.example/" + "x/" * 400, "no address"),
    ],
)
def test_addresses_that_are_none(text: str, why: str, store: Store) -> None:
    """An address that is none says what is wrong, and never shows a password."""
    with pytest.raises(BadRequest, match=why) as refused:
        store.add(text, name="x")
    assert "pw" not in str(refused.value)


def test_docker_hub_has_its_own_names() -> None:
    """docker.io/NAME is docker.io/library/NAME, and other hosts are asked."""
    from mstore.oci.address import ArtifactAddress

    hub = ArtifactAddress.parse("oci://docker.io/gemma")
    assert (hub.repository, hub.tag, hub.server) == (
        "library/gemma",
        "latest",
        "registry-1.docker.io",
    )
    assert (
        ArtifactAddress.parse("oci://index.docker.io/ai/gemma:2").url == "oci://docker.io/ai/gemma"
    )
    assert ArtifactAddress.parse("oci:[::1]:5000/a/b").is_on_this_machine
    assert not ArtifactAddress.parse("oci://localhost.example.org/a").is_on_this_machine


def test_what_is_not_there(proxy: Proxy, server: Registry, store: Store, name: str) -> None:
    """A tag or repository that the registry has not is an error that says so."""
    with pytest.raises(NotFound, match="no artifact 'none'"):
        store.add(f"oci://{proxy.host}/{name}:none", name="x")
    with pytest.raises(BadRequest, match="names a digest"):
        store.export("x", f"oci://{proxy.host}/{name}@sha256:{'0' * 64}")
    with pytest.raises(BadRequest, match="nothing like private"):
        store.export("x", f"oci://{proxy.host}/{name}:v1", private=True)
    assert not store.ref_ids()


def test_docker_hub_is_suggested(store: Store) -> None:
    """An address without a host is taken for one of Docker Hub that is not written out."""
    with pytest.raises(BadRequest) as refused:
        store.add("oci://ai/gemma:2", name="x")
    assert "oci://docker.io/ai/gemma:2" in str(refused.value.hint)


def test_nobody_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that is away is an error that says how to go on."""
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    with pytest.raises(Unavailable, match="does not answer") as refused:
        store.add("oci://127.0.0.1:9/x", name="x")
    assert "again" in str(refused.value.hint)


def test_differences_and_conversions_need_all_files(store: Store) -> None:
    """What needs all files at once says how to download them."""
    kept(store, sharded(1), "base")
    with pytest.raises(BadRequest) as refused:
        store.add("oci://h.example/x:1", name="x", kind="delta", base="base")
    assert "oras pull -o DIR h.example/x:1" in str(refused.value.hint)


# The command line


def test_the_commands(proxy: Proxy, store: Store, name: str, tmp_path: Path) -> None:
    """`mstore export` and `mstore add` take addresses in registries; a name is suggested."""
    kept(store, sharded(1))
    address = f"oci://{proxy.host}/{name}/tiny:v1"
    mstore = Program(tmp_path / "store")
    told = mstore.succeed("export", "x", address, "--no-card").out
    assert f"exported to {address}" in told
    assert (
        f"{address} has these files already"
        in mstore.succeed("export", "x", address, "--no-card").out
    )
    other = Program(tmp_path / "other")
    other.succeed("init", "--block-size", "64KiB")
    assert "--name tiny" in other("add", address).err
    assert "added p/tiny" in other.succeed("add", address, "--name-prefix", "p/").out
    assert f"{proxy.host}/{name}/tiny" in other.succeed("show", "p/tiny").out


# Registries that lie


def _broken(server: Registry, name: str, **changes: object) -> None:
    layers = [
        ("application/vnd.cncf.model.weight.v1.raw", shard("s"), {FILEPATH: "m.safetensors"}),
        ("application/vnd.cncf.model.weight.config.v1.raw", b"{}", {FILEPATH: "config.json"}),
    ]
    server.put_artifact(f"{name}:v1", layers)
    told = server.manifest(f"{name}:v1")
    told["layers"][1] |= changes
    server.put_manifest(name, "v1", told)


FILEPATH = "org.cncf.model.filepath"
HOSTILE = {
    "up": {"annotations": {FILEPATH: "../x.json"}},
    "absolute": {"annotations": {FILEPATH: "/etc/x.json"}},
    "middle": {"annotations": {FILEPATH: "a/../../x.json"}},
    "backslash": {"annotations": {FILEPATH: "a\\..\\x.json"}},
    "control": {"annotations": {FILEPATH: "a\x1b[31m.json"}},
    "same": {"annotations": {FILEPATH: "m.safetensors"}},
    "below a file": {"annotations": {FILEPATH: "m.safetensors/x"}},
    "nameless": {"annotations": {}},
    "type": {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"},
    "compression": {"mediaType": "application/vnd.cncf.model.weight.v1.tar+br"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sort", HOSTILE)
def test_hostile_manifests_are_refused(
    sort: str, proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """Names that lead out, names twice, and unknown types stop an add before weights come."""
    before = set(tmp_path.iterdir())
    _broken(server, name, **HOSTILE[sort])
    with pytest.raises(BadCheckpoint):
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert not store.ref_ids()
    assert not [one for one in proxy.log if "/blobs/" in one.path]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("size", [-1, 1, 3, 1 << 41, pytest.param(1 << 30, marks=pytest.mark.rest)])
def test_sizes_that_lie_are_refused(
    size: int, proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """A blob of another length than the manifest says is not stored."""
    _broken(server, name, size=size)
    with pytest.raises(BadCheckpoint):
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert "x" not in store.ref_ids()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["config.json", "model-00002-of-00002.safetensors"])
def test_other_bytes_are_refused(
    path: str, proxy: Proxy, store: Store, name: str, tmp_path: Path
) -> None:
    """Bytes of the right length that have not the digest are not stored."""
    files = sharded(2)
    kept(store, files)
    address = f"oci://{proxy.host}/{name}:v1"
    store.export("x", address, card=False)
    data = files[path]
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    proxy.replaced[digest] = data[:-1] + bytes([data[-1] ^ 1])
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        with pytest.raises(BadCheckpoint, match="other bytes"):
            other.add(address, name="y")
        assert "y" not in other.ref_ids()


def test_a_manifest_of_another_digest_is_refused(
    proxy: Proxy, server: Registry, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that is asked for by its digest must have it."""
    _broken(server, name)
    digest = server.ask("HEAD", f"/v2/{name}/manifests/v1", headers=_ACCEPT)[1][
        "docker-content-digest"
    ]
    proxy.replaced[digest] = b'{"layers": []}'
    with pytest.raises(BadCheckpoint, match="another manifest"):
        store.add(f"oci://{proxy.host}/{name}@{digest}", name="x")


_ACCEPT = {"Accept": "application/vnd.oci.image.manifest.v1+json"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[]", "not a JSON object|object"),
        (b"{" * 5000, "JSON|nest"),
        (b'{"layers": {}}', "no list of layers"),
        (b'{"layers": [' + b"{}," * 99 + b"{}]}", "without media type"),
        (b" " * (5 << 20), "more than 4 MiB"),
        (b'{"layers": []}', "safetensors"),
    ],
)
def test_manifests_that_are_none(
    data: bytes, why: str, proxy: Proxy, store: Store, name: str
) -> None:
    """What is no manifest is refused in a sentence."""
    proxy.replaced["v1"] = data
    proxy.made["v1"] = "application/vnd.oci.image.manifest.v1+json"
    with pytest.raises(BadCheckpoint, match=why):
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")


# Indexes


def _entry(server: Registry, name: str, tag: str, kind: str = "manifest") -> dict[str, object]:
    accept = f"application/vnd.oci.image.{kind}.v1+json"
    _, told, body = server.ask("GET", f"/v2/{name}/manifests/{tag}", headers={"Accept": accept})
    return {"mediaType": accept, "digest": told["docker-content-digest"], "size": len(body)}


def _put_index(server: Registry, name: str, tag: str, entries: list[dict[str, object]]) -> None:
    kind = "application/vnd.oci.image.index.v1+json"
    told = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
    server.put_manifest(name, tag, told, kind)


def test_an_index_of_one_model_is_that_model(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """An index with a model and its attestation is the model; the origin has the index's digest."""
    _broken(server, name)
    attestation = {**_entry(server, name, "v1"), "annotations": {"vnd.docker.reference.type": "a"}}
    server.put_artifact(f"{name}:v2", [(*_RAW, shard("t"), {FILEPATH: "t.safetensors"})])
    _put_index(server, name, "all", [_entry(server, name, "v2"), attestation])
    store.add(f"oci://{proxy.host}/{name}:all", name="x")
    origin = store["x"].origin
    assert origin is not None
    assert origin.commit == _entry(server, name, "all", "index")["digest"]


_RAW = ("application/vnd.cncf.model.weight.v1.raw",)


def test_an_index_of_several_models_names_them(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """An index with two models is refused; the error has the address of each."""
    for tag in ("a", "b"):
        server.put_artifact(f"{name}:{tag}", [(*_RAW, shard(tag), {FILEPATH: "m.safetensors"})])
    entries = [_entry(server, name, tag) for tag in ("a", "b")]
    _put_index(server, name, "all", entries)
    with pytest.raises(BadCheckpoint, match="index of 2 artifacts") as refused:
        store.add(f"oci://{proxy.host}/{name}:all", name="x")
    for one in entries:
        assert f"oci://{proxy.host}/{name}@{one['digest']}" in str(refused.value.hint)


@pytest.mark.rest
def test_indexes_without_end_are_refused(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """An index of indexes of indexes ends in an error."""
    server.put_artifact(f"{name}:0", [(*_RAW, shard("a"), {FILEPATH: "m.safetensors"})])
    _put_index(server, name, "1", [_entry(server, name, "0")])
    for depth in range(2, 6):
        _put_index(server, name, str(depth), [_entry(server, name, str(depth - 1), "index")])
    store.add(f"oci://{proxy.host}/{name}:3", name="x")
    with pytest.raises(BadCheckpoint, match="index of indexes"):
        store.add(f"oci://{proxy.host}/{name}:5", name="x")


# Signatures


def _signed(store: Store, directory: Path) -> bytes:
    """Sign `x` with a new key; return the public key."""
    path = directory / "key"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ada", "-f", str(path)]
    subprocess.run(command, check=True)
    key = load_key(path)
    store.sign("x", key)
    return key.public_key


def _referring(server: Registry, name: str, digest: str) -> list[dict[str, Any]]:
    """Manifests that refer to a digest, by the tag that stands for the registry's own list."""
    accept = {"Accept": "application/vnd.oci.image.index.v1+json"}
    status, _, body = server.ask(
        "GET", f"/v2/{name}/manifests/{digest.replace(':', '-')}", headers=accept
    )
    return json.loads(body)["manifests"] if status == 200 else []


def test_signatures_refer_to_the_manifest(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """A signature is an artifact whose subject is the manifest, listed under the digest's tag.

    It has the record that the signed id is the hash of: so it can be checked without the store.
    """
    kept(store, sharded(1))
    public = _signed(store, tmp_path)
    address = f"oci://{proxy.host}/{name}:v1"
    digest = store.export("x", address, card=False).commit
    assert digest is not None
    (entry,) = _referring(server, name, digest)
    assert entry["artifactType"] == "application/vnd.mstore.signature.v1+json"
    told = server.manifest(f"{name}:{entry['digest']}")
    assert told["subject"]["digest"] == digest
    data = server.ask("GET", f"/v2/{name}/blobs/{told['layers'][0]['digest']}")[2]
    found = json.loads(data)
    id = SnapshotId.of(base64.b64decode(found["record"]))
    assert id == store["x"].id
    assert str(id) == found["snapshot"]
    assert bytes.fromhex(found["key"]) == public
    Ed25519PublicKey.from_public_bytes(public).verify(
        bytes.fromhex(found["signature"]), signed_message(id)
    )


@pytest.mark.rest
def test_a_later_signature_is_added(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """Exported again, a snapshot that was signed since gets its signature, and no second one."""
    kept(store, sharded(1))
    address = f"oci://{proxy.host}/{name}:v1"
    digest = store.export("x", address, card=False).commit
    assert digest is not None
    assert _referring(server, name, digest) == []
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        _signed(store, tmp_path / str(count))
        assert store.export("x", address, card=False).commit == digest
        proxy.log.clear()
        assert store.export("x", address, card=False).commit == digest
        assert len(_referring(server, name, digest)) == count
        assert {one.method for one in proxy.log} <= {"HEAD", "GET"}


def test_a_registry_that_lists_referrers_does_so_itself(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """Where the registry links a manifest to its subject, no tag is made for that."""
    proxy.lists_referrers = True
    kept(store, sharded(1))
    _signed(store, tmp_path)
    digest = store.export("x", f"oci://{proxy.host}/{name}:v1", card=False).commit
    assert digest is not None
    assert _referring(server, name, digest) == []
    assert [one for one in proxy.log if one.method == "PUT" and "manifests/sha256:" in one.path]


# Newer states


@pytest.mark.rest
def test_outdated_asks_the_registry(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """A snapshot of a tag is outdated when the tag moved; one of a digest never is."""
    kept(store, sharded(1))
    address = f"oci://{proxy.host}/{name}"
    digest = store.export("x", f"{address}:v1", card=False).commit
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        other.add(f"{address}:v1", name="tagged")
        other.add(f"{address}@{digest}", name="fixed")
        assert {one.name: one.state for one in other.outdated()} == {
            "tagged": "up to date",
            "fixed": "pinned",
        }
        kept(store, sharded(1, "other"), "new")
        newest = store.export("new", f"{address}:v1", card=False).commit
        (moved,) = [one for one in other.outdated() if one.state == "outdated"]
        assert (moved.name, moved.commit, moved.newest) == ("tagged", digest, newest)
        assert moved.address == f"oci://{proxy.host}/{name}:v1"
        proxy.fault = lambda *_: 404
        (gone,) = [one for one in other.outdated() if one.name == "tagged"]
        assert gone.state == "unknown"
        assert "no such artifact" in gone.reason
