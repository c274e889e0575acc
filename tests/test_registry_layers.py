"""Artifacts of other tools: tars, compressed or not, and Docker's own types.

They are made by hand here, as KitOps (1.15), modctl (0.2) and Docker Model Runner write them
according to their sources: none of these programs runs in a test.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import zstandard
from registries import Proxy, Registry
from test_hub import shard, sharded
from test_registry import name, proxy, server, store, stored

from mstore import Store
from mstore.oci import tars
from mstore.origins import registry as origins
from mstore.terms.errors import BadCheckpoint

__all__ = ["name", "proxy", "server", "store"]
KIT = "application/vnd.kitops.modelkit."
CNCF = "application/vnd.cncf.model."
DOCKER = "application/vnd.docker.ai."
FILEPATH = "org.cncf.model.filepath"
PACK: Mapping[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar+gzip": gzip.compress,
    "tar+zstd": zstandard.compress,
}


def tar(files: Mapping[str, bytes], *, top: str = "") -> bytes:
    """A tar of files, with their directories."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for directory in sorted({path.rpartition("/")[0] for path in files} - {""}):
            made = tarfile.TarInfo(f"{top}{directory}")
            made.type = tarfile.DIRTYPE
            archive.addfile(made)
        for path, data in files.items():
            made = tarfile.TarInfo(f"{top}{path}")
            made.size = len(data)
            archive.addfile(made, io.BytesIO(data))
    return out.getvalue()


def modelkit(form: str, files: Mapping[str, bytes]) -> list[tuple[str, bytes, dict[str, str]]]:
    """The layers of a ModelKit: the model's directory, a part of it, documents, a data set."""
    pack = PACK[form]
    model = {path: data for path, data in files.items() if path != "README.md"}
    return [
        (f"{KIT}model.v1.{form}", pack(tar(model, top="./")), {}),
        (f"{KIT}docs.v1.{form}", pack(tar({"README.md": files["README.md"]})), {}),
        (f"{KIT}code.v1.{form}", pack(tar({"src/run.py": b"# run\n"})), {}),
        (f"{KIT}dataset.v1.{form}", pack(tar({"data/train.jsonl": b"{}\n"})), {}),
    ]


def modctl(form: str, files: Mapping[str, bytes]) -> list[tuple[str, bytes, dict[str, str]]]:
    """The layers of a ModelPack of modctl: a tar for each file."""
    pack = PACK[form]
    return [
        (
            f"{CNCF}weight{'' if path.endswith('.safetensors') else '.config'}.v1.{form}",
            pack(tar({path: data})),
            {FILEPATH: path, "org.cncf.model.file.mediatype.untested": "true"},
        )
        for path, data in files.items()
    ]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", PACK)
@pytest.mark.parametrize("tool", [modelkit, modctl])
def test_tars_of_other_tools(
    tool: Callable[[str, Mapping[str, bytes]], list[tuple[str, bytes, dict[str, str]]]],
    form: str,
    proxy: Proxy,
    server: Registry,
    store: Store,
    name: str,
    tmp_path: Path,
) -> None:
    """The files of tar layers are stored byte for byte; data sets are left out."""
    files = sharded(2)
    server.put_artifact(
        f"{name}:v1",
        tool(form, files),
        kind=f"{KIT}manifest.v1+json",
        config=f"{KIT}config.v1+json",
    )
    store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    found = stored(store, "x", tmp_path / "out")
    found.pop("src/run.py", None)
    assert found == files


def test_docker_model_runner_v01(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """Docker's layers without names get those that its runner gives them; configs are in a tar."""
    files = {f"model-0000{n}-of-00002.safetensors": shard(f"d{n}") for n in (1, 2)}
    configs = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"}
    server.put_artifact(
        f"{name}:v1",
        [
            *((f"{DOCKER}safetensors", data, {}) for data in files.values()),
            (f"{DOCKER}vllm.config.tar", tar(configs), {}),
            (f"{DOCKER}chat.template.jinja", b"{{ x }}", {}),
            (f"{DOCKER}license", b"MIT", {}),
            (f"{DOCKER}license", b"Apache", {}),
        ],
        config=f"{DOCKER}model.config.v0.1+json",
    )
    store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    licences = {"LICENSE": b"MIT", "LICENSE-2": b"Apache"}
    assert stored(store, "x", tmp_path / "out") == {**files, **configs, **licences}


def test_docker_model_runner_v02(
    proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """Docker's layers with names keep them, with their directories."""
    files = {"unet/m.safetensors": shard("u"), "unet/config.json": b"{}", "LICENSE": b"MIT"}
    kinds = ("safetensors", "model.file", "license")
    server.put_artifact(
        f"{name}:v1",
        [
            (f"{DOCKER}{kind}", data, {FILEPATH: path})
            for kind, (path, data) in zip(kinds, files.items(), strict=True)
        ],
        config=f"{DOCKER}model.config.v0.2+json",
    )
    store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert stored(store, "x", tmp_path / "out") == files


def test_safetensors_as_docker_once_wrote_them(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """The ModelPack type that ends in .safetensors is read, though no specification has it."""
    layer = (f"{CNCF}weight.v1.safetensors", shard("s"), {FILEPATH: "m.safetensors"})
    server.put_artifact(f"{name}:v1", [layer])
    store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert store["x"].read("m.safetensors") == shard("s")


@pytest.mark.rest
def test_one_large_layer_at_a_time_lies_beside_the_store(
    proxy: Proxy, server: Registry, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large tars, one lies unpacked; another takes its place and is read to its end."""
    monkeypatch.setattr(origins, "_STAYING", 1 << 10)
    files = sharded(4, elements=400_000)
    server.put_artifact(f"{name}:v1", modctl("tar+zstd", files))
    scratch = store.path / "tmp"
    most = 0

    def measure(_: object) -> None:
        nonlocal most
        held = [p.stat().st_blocks * 512 for p in scratch.glob("*/layers/*/*") if p.is_file()]
        most = max(most, sum(held))

    store.add(f"oci://{proxy.host}/{name}:v1", name="x", codec="raw", progress=measure)
    assert {path: store["x"].read(path) for path in files} == files
    assert 0 < most <= 1.1 * max(map(len, files.values()))
    assert not [path for path in scratch.rglob("*") if path.is_file()]


# Tars that lie


def member(path: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        made = tarfile.TarInfo(path)
        made.type, made.linkname = kind, link
        archive.addfile(made, io.BytesIO(b""))
    return out.getvalue()


def long_header() -> bytes:
    """A sound tar, but for a header of 8 MiB before its member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        made = tarfile.TarInfo("x.json")
        made.pax_headers = {"comment": "a" * (8 << 20)}
        archive.addfile(made, io.BytesIO(b""))
    return out.getvalue()


def sparse() -> bytes:
    made = tarfile.TarInfo("x")
    made.type, made.size = tarfile.GNUTYPE_SPARSE, 0
    return made.tobuf() + bytes(1024)


HOSTILE: Mapping[str, tuple[str, bytes]] = {
    "up": ("tar", member("../x.json")),
    "absolute": ("tar", member("/etc/x.json")),
    "middle": ("tar", member("a/../../x.json")),
    "control": ("tar", member("a\x1b[31m")),
    "link": ("tar", member("x.json", tarfile.SYMTYPE, "/etc/passwd")),
    "hard link": ("tar", member("x.json", tarfile.LNKTYPE, "/etc/passwd")),
    "device": ("tar", member("x.json", tarfile.CHRTYPE)),
    "fifo": ("tar", member("x.json", tarfile.FIFOTYPE)),
    "sparse": ("tar", sparse()),
    "long header": ("tar", long_header()),
    "no tar": ("tar", b"no tar at all" * 100),
    "cut": ("tar", tar({"x.json": bytes(5000)})[:3000]),
    "no gzip": ("tar+gzip", b"no gzip"),
    "cut gzip": ("tar+gzip", gzip.compress(tar({"x.json": bytes(range(256)) * 99}))[:-200]),
    "no zstd": ("tar+zstd", b"no zstd"),
    "cut zstd": ("tar+zstd", zstandard.compress(tar({"x": b"abc" * 999}))[:-20]),
    "twice": ("tar", tar({"config.json": b"[]"})),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("sort", HOSTILE)
def test_hostile_tars_are_refused(
    sort: str, proxy: Proxy, server: Registry, store: Store, name: str, tmp_path: Path
) -> None:
    """What leads out, is no file, or no sound tar stops an add, and nothing is left of it."""
    before = set(tmp_path.iterdir())
    form, data = HOSTILE[sort]
    layers = [
        (f"{CNCF}weight.v1.raw", shard("s"), {FILEPATH: "m.safetensors"}),
        (f"{CNCF}weight.config.v1.raw", b"{}", {FILEPATH: "config.json"}),
        (f"{CNCF}weight.config.v1.{form}", data, {FILEPATH: "y.json"}),
    ]
    server.put_artifact(f"{name}:v1", layers)
    with pytest.raises(BadCheckpoint) as refused:
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert str(store.path) not in str(refused.value)
    assert not store.ref_ids()
    assert set(tmp_path.iterdir()) == before
    assert not [path for path in (store.path / "tmp").rglob("*") if path.is_file()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_is_refused(
    pack: Callable[[bytes], bytes],
    proxy: Proxy,
    server: Registry,
    store: Store,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small layer that unpacks to very much is given up before it has filled the disk."""
    monkeypatch.setattr(tars, "_FREE", 1 << 20)
    monkeypatch.setattr(tars, "_MOST_TIMES", 10)
    form = "tar+gzip" if pack is gzip.compress else "tar+zstd"
    bomb = pack(tar({"x.bin": bytes(8 << 20)}))
    server.put_artifact(f"{name}:v1", [(f"{CNCF}weight.v1.{form}", bomb, {})])
    with pytest.raises(BadCheckpoint, match="unpacks to more than 1048576 bytes"):
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")


def test_too_many_members_are_refused() -> None:
    """A tar of more members than the limit is given up at the first that is too many."""
    data = tar({f"f{number}": b"" for number in range(20)})
    found = tars.members(iter([data]), compression="", size=len(data), most_files=10, where="x")
    with pytest.raises(BadCheckpoint, match="more than 10 members"):
        list(found)


def test_a_tar_of_another_digest_is_refused(
    proxy: Proxy, server: Registry, store: Store, name: str
) -> None:
    """A tar whose bytes have not the digest of the manifest is not stored, however sound."""
    layers = modctl("tar", sharded(1))
    server.put_artifact(f"{name}:v1", layers)
    told = server.manifest(f"{name}:v1")
    for layer, (_, data, _) in zip(told["layers"], layers, strict=True):
        if b"tiny" in data:
            proxy.replaced[layer["digest"]] = data.replace(b"tiny", b"evil")
    assert proxy.replaced
    with pytest.raises(BadCheckpoint, match="other bytes"):
        store.add(f"oci://{proxy.host}/{name}:v1", name="x")
    assert not store.ref_ids()


def _pieces(data: bytes) -> Iterator[bytes]:
    yield data


def test_members_that_nobody_reads_are_skipped() -> None:
    """A member whose bytes are not asked for is no hindrance for the next."""
    data = tar({"a": bytes(10_000), "b": b"b"})
    found = {}
    for one in tars.members(_pieces(data), compression="", size=len(data), most_files=9, where="x"):
        if one.path == "b":
            found[one.path] = b"".join(one.pieces())
    assert found == {"b": b"b"}
