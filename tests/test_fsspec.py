"""Snapshots through fsspec: as any program that reads URLs sees them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.core import url_to_fs
from small_models import files_of, small_model

from mstore import Store
from mstore.api.integrations.fsspec import MstoreFileSystem
from mstore.terms.errors import BadRequest, Conflict, Corrupt

BLOCK = 1 << 16


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A store with two refs, one below a common word, and a checkpoint with a subdirectory."""
    fsspec.register_implementation("mstore", MstoreFileSystem, clobber=True)
    MstoreFileSystem.clear_instance_cache()
    small_model(tmp_path / "one", "one")
    (tmp_path / "one" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "one" / "sub" / "deep" / "note.txt").write_text("deep\n")
    small_model(tmp_path / "two", "two")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "one", name="llama/one")
        store.add(tmp_path / "two", name="two")
    yield tmp_path
    MstoreFileSystem.clear_instance_cache()


def url(place: Path, path: str) -> str:
    return f"mstore://{path}?store={place / 'store'}"


def files(place: Path) -> Any:
    return fsspec.filesystem("mstore", store=str(place / "store"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a store away")
def test_a_store_of_another_user_has_to_be_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of the current directory is used without being named only if it is the user's."""
    monkeypatch.chdir(place)
    (place / "store").rename(place / ".mstore")
    assert MstoreFileSystem().exists("two/config.json")
    MstoreFileSystem.clear_instance_cache()
    os.chown(place / ".mstore" / "format", 70001, 70001)
    with pytest.raises(Conflict, match="not named"):
        MstoreFileSystem().ls("")
    assert MstoreFileSystem(store=".mstore").exists("two/config.json")


def test_every_file_is_read(place: Path) -> None:
    """Whole files, by URL and by path, are those that were added."""
    for ref, folder in (("llama/one", "one"), ("two", "two")):
        for path, content in files_of(place / folder).items():
            with fsspec.open(url(place, f"{ref}/{path}")) as file:
                assert file.read() == content
            assert files(place).cat_file(f"{ref}/{path}") == content
            assert files(place).info(f"{ref}/{path}")["size"] == len(content)
    found = files(place).find("")
    assert found == sorted(
        [f"llama/one/{path}" for path in files_of(place / "one")]
        + [f"two/{path}" for path in files_of(place / "two")]
    )


def test_parts_of_files(place: Path) -> None:
    """Ranges, from either end, and seeks read what a file on disk gives."""
    path = "llama/one/model.safetensors"
    raw = (place / "one" / "model.safetensors").read_bytes()
    for start, end in ((0, 9), (5, BLOCK + 7), (-11, None), (None, -3), (len(raw) + 5, None)):
        assert files(place).cat_file(path, start, end) == raw[start:end]
    with files(place).open(path) as file:
        assert file.seek(BLOCK - 3) == BLOCK - 3
        assert file.read(10) == raw[BLOCK - 3 : BLOCK + 7]
        assert file.seek(-4, 2) == len(raw) - 4
        assert file.read() == raw[-4:]


def test_directories(place: Path) -> None:
    """Words of refs and directories of snapshots are directories; a file lists itself."""
    fs = files(place)
    assert fs.ls("", detail=False) == ["llama", "two"]
    assert fs.ls("mstore://llama", detail=False) == ["llama/one"]
    assert fs.ls("llama/one/sub", detail=False) == ["llama/one/sub/deep"]
    assert fs.ls("llama/one/config.json", detail=False) == ["llama/one/config.json"]
    assert fs.isdir("llama")
    assert fs.isdir("llama/one/sub")
    assert fs.isfile("two/config.json")
    assert not fs.exists("two/none")
    assert sorted(fs.glob("*/config.json") + fs.glob("llama/*/config.json")) == [
        "llama/one/config.json",
        "two/config.json",
    ]
    for path in ("none", "llama/none/config.json", "two/none", "llama/one/sub/none"):
        with pytest.raises(FileNotFoundError):
            fs.ls(path)
        with pytest.raises(FileNotFoundError):
            fs.open(path)
    for path in ("", "llama", "two", "llama/one/sub"):
        with pytest.raises(IsADirectoryError):
            fs.cat_file(path)


def test_revisions(place: Path) -> None:
    """A path begins with any revision; what is open stays, and what is opened is new."""
    fs = files(place)
    first = fs.store["two"].id
    before = files_of(place / "two")["config.json"]
    held = fs.open("two/config.json")
    keys = fs.ukey("two/config.json"), fs.checksum("two/config.json")
    small_model(place / "new", "new")
    fs.store.add(place / "new", name="two")
    after = files_of(place / "new")["config.json"]
    assert held.read() == before
    assert held.snapshot == first
    assert fs.cat_file("two/config.json") == after
    for name in ("two~1", "two@{1}", first.hex(), first.hex()[:12]):
        assert fs.cat_file(f"{name}/config.json") == before
    assert (fs.ukey("two/config.json"), fs.checksum("two/config.json")) != keys
    assert fs.modified("two/config.json") > fs.modified("two~1/config.json")
    assert fs.info("two/config.json")["snapshot"] == fs.store["two"].id.hex()


def test_urls(place: Path) -> None:
    """A URL names its store; the default is .mstore, and anything else is refused."""
    fs, path = url_to_fs(url(place, "two/config.json"))
    assert path == "two/config.json"
    assert fs is files(place)
    assert fs.unstrip_protocol(path) == url(place, "two/config.json").replace(
        str(place / "store"), str(place / "store").replace("/", "%2F")
    )
    assert url_to_fs(fs.unstrip_protocol(path))[0] is fs
    assert "?store=.mstore" in MstoreFileSystem().unstrip_protocol("two")
    for query in ("?shop=1", "?store=a&store=b"):
        with pytest.raises(BadRequest, match="nothing else"):
            url_to_fs(f"mstore://two{query}")


def test_nothing_is_written(place: Path) -> None:
    """Every way to write is refused."""
    fs = files(place)
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(OSError, match="read-only"):
            fs.open("two/new.txt", mode)
    for call in (fs.rm_file, fs.mkdir, fs.makedirs):
        with pytest.raises((NotImplementedError, OSError)):
            call("two/config.json")
    with pytest.raises(OSError, match="read-only"):
        fs.pipe_file("two/config.json", b"")
    for path, content in files_of(place / "two").items():
        assert fs.cat_file(f"two/{path}") == content


def read_elsewhere(given: bytes, path: str) -> bytes:
    found: bytes = pickle.loads(given).cat_file(path)
    return found


@pytest.mark.rest
def test_other_processes(place: Path) -> None:
    """It travels to workers, which open the store by themselves."""
    fs = files(place)
    wanted = fs.cat_file("two/model.safetensors")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        jobs = [(pickle.dumps(fs), "two/model.safetensors")] * 4
        assert pool.starmap(read_elsewhere, jobs) == [wanted] * 4


def test_damage_is_found(place: Path) -> None:
    """Damaged bytes are an error that names the block, never data."""
    for pack in (place / "store").rglob("*.pack"):
        raw = bytearray(pack.read_bytes())
        for at in range(4096 + 100, min(len(raw) - 4096, 60_000), 64):
            raw[at] ^= 0xFF
        pack.chmod(0o600)
        pack.write_bytes(raw)
    with pytest.raises(Corrupt):
        files(place).cat_file("llama/one/model.safetensors")
