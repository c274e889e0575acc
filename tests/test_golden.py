"""Golden stores: what a store of each format version held when it was made, this version reads.

`golden/make.py` makes a store and the JSON file beside it; a released one stays as it is.  git
keeps no empty directories and no modes but the executable bit; a copy of a store gets `tmp/` back.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import write_safetensors
from independent_reader import (
    ALONE,
    BLOCK,
    OF_FLOATS,
    Entry,
    IndependentStore,
    read_coded,
    verify_pack,
)

from mstore.api import Store
from mstore.blocks.codecs import Codec
from mstore.store.layout import FORMAT_VERSION
from mstore.terms.errors import NotFound

GOLDEN = Path(__file__).resolve().parent / "golden"
STORES = sorted(path for path in GOLDEN.iterdir() if (path / "format").is_file())


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _maker()


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    """The store as it lies in the repository; not for use, only for copies."""
    return Path(request.param)


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    """A copy that may be used, migrated to this version."""
    root = tmp_path / "store"
    shutil.copytree(golden, root)
    (root / "tmp").mkdir(mode=0o700, exist_ok=True)
    Store.migrate(root)
    return root


@pytest.fixture
def expected(golden: Path) -> dict[str, Any]:
    """What it held when it was made."""
    told: dict[str, Any] = json.loads(golden.with_suffix(".json").read_text())
    return told


def test_there_is_one_of_this_version() -> None:
    """The format version that this program writes has its store."""
    assert [path.name for path in STORES] == [f"format-{FORMAT_VERSION}"]


def test_it_is_read_exactly(copy: Path, expected: dict[str, Any]) -> None:
    """Each file, ref, snapshot, parent, message, signature and reflog is as it was, and sound."""
    with Store.open(copy) as store:
        assert json.loads(json.dumps(make.contents(store))) == expected
        assert store.fsck(read_data=True).problems == ()


@pytest.mark.sampled(2)
def test_it_is_read_without_the_library(copy: Path, expected: dict[str, Any]) -> None:
    """The reader that was written from the format's description finds the same bytes."""
    virtual = {one["snapshot"] for one in expected["log"] if one["virtual"]}
    for index in (True, False):
        store = IndependentStore(copy, index=index)
        assert store.refs() == {name: id for name, (_, id) in expected["refs"].items()}
        for name, files in expected["files"].items():
            snapshot = expected["refs"][name][1]
            if snapshot in virtual:
                continue
            found = {
                path: hashlib.sha256(store.file_bytes(snapshot, path)).hexdigest()
                for path in store.files(snapshot)
            }
            assert found == files


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["from the old index", "from packs and mirror alone"])
def test_a_reindexed_copy_is_equal(copy: Path, expected: dict[str, Any], way: str) -> None:
    """An index that is made anew tells the same; without the old one, but for reflogs."""
    alone = way == "from packs and mirror alone"
    if alone:
        (copy / "index" / "data.mdb").unlink()
    Store.reindex(copy, use_old_index=not alone)
    with Store.open(copy) as store:
        found = {"refs": {ref.name: [ref.kind, str(ref.snapshot)] for ref in store.refs()}}
        found["files"] = {name: make.files(store, name) for name in found["refs"]}
        assert found == {key: expected[key] for key in found}
        assert store.fsck(read_data=True).problems == ()
        if not alone:
            assert json.loads(json.dumps(make.contents(store))) == expected


def test_it_is_written_to(copy: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    """This version adds to it, merges in it, and collects in it, and all that was there stays."""
    write_safetensors(tmp_path / "x" / "model.safetensors", [("x", "U8", (3,), b"xyz")])
    with Store.open(copy) as store:
        store.add(tmp_path / "x", name="new", threads=1)
        store.materialize("virtual", threads=1)
        store.gc()
        for name, files in expected["files"].items():
            assert make.files(store, name) == files
        assert store["new"].tensor("x").tobytes() == b"xyz"
        report = store.fsck(read_data=True)
        assert report.problems == ()
        assert report.garbage == ()


def test_a_pruned_snapshot_is_told_of(copy: Path, expected: dict[str, Any]) -> None:
    """One snapshot's contents are gone; its place in the lineage is not."""
    [pruned] = [one["snapshot"] for one in expected["log"] if one["message"] == "an old one"]
    with Store.open(copy) as store, pytest.raises(NotFound, match="pruned"):
        store.view(pruned)


@pytest.mark.rest
def test_everything_that_the_format_knows_is_in_it(golden: Path) -> None:
    """All codecs and all kinds of records: one that lacks any proves little."""
    entries = [entry for _, entry in entries_of(golden)]
    assert {entry.codec for entry in entries if entry.kind == BLOCK} == set(Codec)
    assert {entry.kind for entry in entries} == set(range(8))


@pytest.mark.rest
def test_every_way_to_code_elements_is_in_it(golden: Path) -> None:
    """Each mode in each width, few lanes and many, rows that are listed, raw bits, low zeros."""
    coded = [
        read_coded(_slice(data, entry), entry.width, entry.plain, is_delta=entry.is_delta)
        for data, entry in entries_of(golden)
        if entry.kind == BLOCK and entry.codec in (Codec.FLOATS, Codec.DELTA)
    ]
    every = {(mode, width) for mode in range(3) for width in (1, 2, 4)}
    assert {(one.mode, one.width) for one in coded} == every
    floats = [one for one in coded if one.mode == OF_FLOATS]
    lists = {(one.width, one.lists, len(one.states)) for one in floats}
    assert {(width, lists) for width, lists, _ in lists} == {
        (width, lists) for width in (1, 2, 4) for lists in (False, True)
    }
    assert {(lists, lanes) for _, lists, lanes in lists} == {
        (lists, lanes) for lists in (False, True) for lanes in (32, 128)
    }
    assert {one.width for one in floats if any(one.raw_bits)} == {2, 4}
    assert {one.mode for one in coded if one.zeros} >= {ALONE, OF_FLOATS}
    assert {len(one.frequencies) for one in floats} >= {1, 8}


def entries_of(golden: Path) -> list[tuple[bytes, Entry]]:
    """What its packs list, with their bytes, after all of it was checked."""
    packs = [(path.read_bytes(), verify_pack(path)) for path in golden.glob("packs/*/*.pack")]
    return [(data, entry) for data, pack in packs for entry in pack.entries]


def _slice(data: bytes, entry: Entry) -> bytes:
    return data[entry.offset : entry.offset + entry.stored]
