"""docs/format.md against real stores, through a reader that was written from that page alone.

The library makes the stores here and says what it made; `independent_reader`, which shares no line
with it, has to find the same in the bytes.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import independent_reader as reader
import lmdb
import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from cli_runs import Program
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from independent_reader import FormatError, IndependentStore
from safetensors.numpy import save_file

import mstore
from mstore import MergeRequest
from mstore.snapshots.signing import SigningKey
from mstore.store.objects.canonical import DEFAULT_LIMITS

BLOCK_SIZE = 65536
PAGE = (Path(__file__).resolve().parent.parent / "docs" / "format.md").read_text()

Tensors = dict[str, np.ndarray]
Files = dict[str, bytes]


# --- a real store --------------------------------------------------------------------------------


NOTED = {"mmlu": {"score": 0.625, "of": [300, True, None]}, "tool": "wörd"}


@dataclass
class Made:
    """What the library was given and what it answered."""

    path: Path
    added: dict[str, Files] = field(default_factory=dict)
    snapshots: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Tensors] = field(default_factory=dict)
    refs: dict[str, tuple[str, str]] = field(default_factory=dict)
    merged: Files = field(default_factory=dict)
    plan: Any = None
    signature: Any = None
    notes: list[Any] = field(default_factory=list)
    times: tuple[int, int] = (0, 0)


def base_tensors(draw: np.random.Generator) -> Tensors:
    """Three blocks of bf16 and four of f32 to merge; and what else a checkpoint can hold."""
    return {
        "body.weight": draw.standard_normal((300, 257)).astype(ml_dtypes.bfloat16),
        "head.weight": draw.standard_normal(50000).astype(np.float32),
        "ids": np.arange(9000),
        "constant": np.full((200, 200), 0.5, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(3.5, np.float32),
    }


def tuned(draw: np.random.Generator, tensors: Tensors) -> Tensors:
    """An expert: noise on the tensors that can be merged."""
    noisy = {
        name: (tensors[name] + 0.1 * draw.standard_normal(tensors[name].shape)).astype(
            tensors[name].dtype
        )
        for name in ("body.weight", "head.weight")
    }
    return {**tensors, **noisy}


def write_checkpoint(directory: Path, tensors: Tensors, draw: np.random.Generator) -> Files:
    (directory / "sub" / "deep").mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"layers": 1}')
    (directory / "empty.txt").write_bytes(b"")
    (directory / "sub" / "deep" / "blob.bin").write_bytes(draw.bytes(150000))
    # By code point the first of these two comes first, in UTF-16 it would not.
    (directory / "z\uffee").write_bytes(b"halfwidth")
    (directory / "z\U00010000").write_bytes(b"beyond")
    paths = [p for p in directory.rglob("*") if p.is_file()]
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in paths}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Six snapshots: a base, an expert twice, another expert, a merge with half the bytes, and the
    same merge virtual.
    """
    root = tmp_path_factory.mktemp("format")
    draw = np.random.default_rng(20)
    found = Made(root / "store")
    base = base_tensors(draw)
    old, one, two = (tuned(draw, base) for _ in range(3))
    # A block of the base and one of the other expert, and a tensor that no method can merge.
    two["head.weight"][:16384] = base["head.weight"][:16384]
    two["head.weight"][16384:32768] = one["head.weight"][16384:32768]
    two["ids"] = base["ids"] + 1
    start = time.time_ns()
    names = {"base": "m/base", "old": "m/one", "one": "m/one", "two": "m/two"}
    store = mstore.Store.init(found.path, block_size=BLOCK_SIZE, codec="raw")
    for key, tensors in {"base": base, "old": old, "one": one, "two": two}.items():
        files = write_checkpoint(root / key, tensors, draw)
        of = None if key == "base" else "m/base"
        report = store.add(root / key, name=names[key], base=of, message=key)
        found.tensors[key] = tensors
        found.snapshots[key] = str(report.snapshot)
        found.added[str(report.snapshot)] = files
    request = {"base": "m/base", "experts": ["m/one", ("m/two", 0.5)], "method": "ties"}
    request["skip"] = ["ids"]
    store.plan(
        MergeRequest(**request, parameters={"density": 0.3})
    )  # in full, so that thresholds are exact
    found.plan = store.plan(MergeRequest(**request, parameters={"density": 0.3}, budget=0.5))
    found.snapshots["merged"] = str(store.merge(found.plan, name="m/merged").snapshot)
    found.snapshots["virtual"] = str(
        store.merge(found.plan, name="m/virtual", virtual=True).snapshot
    )
    store.tag("v1", "m/merged")
    key = SigningKey(Ed25519PrivateKey.generate())
    found.signature = store.sign("v1", key, signer="me").signature
    found.notes = [one.note for one in store.note("v1", NOTED, kind="evaluation")]
    found.notes.append(store.sign("v1", key, note=found.notes[0]).signature)
    store.remove_notes("v1", [found.notes[1]])
    found.refs = {ref.name: (ref.kind, str(ref.snapshot)) for ref in store.refs()}
    files = [file.path for file in store.files("m/merged")]
    found.merged = {path: b"".join(store.read_file("m/merged", path)) for path in files}
    store.close()
    found.times = (start, time.time_ns())
    return found


@pytest.fixture(scope="module", params=["index", "packs"])
def read(made: Made, request: pytest.FixtureRequest) -> IndependentStore:
    """The store by one way and then by the other."""
    return IndependentStore(made.path, index=request.param == "index")


@pytest.fixture(scope="module")
def indexed(made: Made) -> IndependentStore:
    return IndependentStore(made.path)


def pack_paths(made: Made) -> list[Path]:
    return sorted((made.path / "packs").glob("*/*.pack"))


def tensor_ids(read: IndependentStore, snapshot: str) -> dict[str, str]:
    """Name to TensorId, over the files of a snapshot."""
    files = read.manifest(read.snapshot(snapshot).manifest)
    return {p.name: p.tensor for f in files for p in f.parts if p.name is not None}


def test_added_files(made: Made, read: IndependentStore) -> None:
    """Both ways return every file of every added snapshot byte for byte, and no other file."""
    for snapshot, files in made.added.items():
        assert read.files(snapshot) == {path: len(data) for path, data in files.items()}
        for path, data in files.items():
            assert read.file_bytes(snapshot, path) == data


def test_merged_files(made: Made, read: IndependentStore) -> None:
    """Both ways return the files of a merge as the library reads them, untouched ones as the base
    has them."""
    snapshot = made.snapshots["merged"]
    assert {path: read.file_bytes(snapshot, path) for path in read.files(snapshot)} == made.merged
    base = made.added[made.snapshots["base"]]
    assert [path for path in base if made.merged[path] != base[path]] == ["model.safetensors"]


def test_refs(made: Made, read: IndependentStore) -> None:
    """Index, mirror and library name the same refs of the same kinds."""
    assert read.ref_kinds == made.refs
    assert read.refs() == {name: snapshot for name, (_, snapshot) in made.refs.items()}
    assert {kind for kind, _ in made.refs.values()} == {"branch", "tag"}


def test_everything_is_in_both(made: Made, indexed: IndependentStore) -> None:
    """The packs hold what the index names, and nothing more: blocks and records of each kind."""
    packs = IndependentStore(made.path, index=False)
    for kind, _ in enumerate(reader.KINDS):
        assert indexed.ids(kind) == packs.ids(kind) != set()
        assert all(indexed.place(kind, i) == packs.place(kind, i) for i in packs.ids(kind))
    assert packs.ids(reader.SNAPSHOT) == set(made.snapshots.values())


def test_snapshots(made: Made, read: IndependentStore) -> None:
    """A snapshot says where it comes from: its parents by role, by what it was made, message, time,
    tool."""
    s = made.snapshots
    parents = {
        "base": [],
        "old": [("base", s["base"])],
        "one": [("previous", s["old"]), ("base", s["base"])],
        "two": [("base", s["base"])],
        "merged": [("base", s["base"]), ("expert", s["one"]), ("expert", s["two"])],
        "virtual": [("base", s["base"]), ("expert", s["one"]), ("expert", s["two"])],
    }
    found = {key: read.snapshot(snapshot) for key, snapshot in s.items()}
    assert {key: snapshot.parents for key, snapshot in found.items()} == parents
    merged, virtual = found.pop("merged"), found.pop("virtual")
    assert (merged.made, merged.plan) == ("merge", str(made.plan.plan))
    assert read.coverage(merged.coverage or "").plan == merged.plan
    assert (virtual.made, virtual.plan, virtual.coverage) == ("merge", merged.plan, None)
    for key, snapshot in found.items():
        assert (snapshot.made, snapshot.message) == ("add", key)
        assert (snapshot.origin, snapshot.author) == (None, "")
        assert (snapshot.plan, snapshot.coverage) == (None, None)
    times = [snapshot.time_ns for snapshot in [*found.values(), merged, virtual]]
    assert [made.times[0], *times, made.times[1]] == sorted([*made.times, *times])
    assert re.fullmatch(r"mstore \S+", merged.tool)


def test_virtual_snapshot(made: Made, read: IndependentStore) -> None:
    """A virtual merge has the files of the real one, and its merged tensors name the plan."""
    real, virtual = made.snapshots["merged"], made.snapshots["virtual"]
    assert read.files(virtual) == read.files(real)
    ids, stored = tensor_ids(read, virtual), tensor_ids(read, real)
    planned = {tensor.name for tensor in read.plan(str(made.plan.plan)).tensors}
    assert {name for name in ids if ids[name] != stored[name]} == planned
    assert set(ids.values()) & read.ids(reader.VIRTUAL) == {ids[name] for name in planned}
    for name in planned:
        record, tensor = read.virtual(ids[name]), read.tensor(stored[name])
        assert (record.plan, record.tensor) == (str(made.plan.plan), name)
        assert (record.dtype, record.shape, record.length) == (
            (tensor.dtype, tensor.shape, tensor.length)
        )


def test_tensors(made: Made, read: IndependentStore) -> None:
    """A tensor's record has its shape, and blocks cut from its own start, the last one short."""
    ids = tensor_ids(read, made.snapshots["base"])
    tensors = made.tensors["base"]
    assert ids.keys() == tensors.keys()
    for name, array in tensors.items():
        record = read.tensor(ids[name])
        data = array.tobytes()
        cut = [data[i : i + BLOCK_SIZE] for i in range(0, len(data), BLOCK_SIZE)]
        assert record.shape == list(array.shape)
        assert [read.block(block) for block in record.blocks] == cut
    assert read.tensor(ids["empty"]).blocks == []
    assert read.tensor(ids["scalar"]).shape == []


def test_element_widths_and_constants(made: Made, read: IndependentStore) -> None:
    """A block's entry has its tensor's element width; a constant block is stored as one element."""
    ids = tensor_ids(read, made.snapshots["base"])
    entries = {
        name: [read.place(reader.BLOCK, block)[1] for block in read.tensor(tensor).blocks]
        for name, tensor in ids.items()
    }
    for name, array in made.tensors["base"].items():
        assert {e.width for e in entries[name]} <= {array.itemsize}
        codec = reader.CONSTANT if name == "constant" else reader.RAW
        assert {e.codec for e in entries[name]} <= {codec}
    assert [(e.stored, e.plain) for e in entries["constant"]] == [(2, 65536), (2, 80000 - 65536)]


def test_plan(made: Made, read: IndependentStore) -> None:
    """A plan has one state a chunk and expert, true of the blocks, and adds up to its own bytes."""
    plan = read.plan(str(made.plan.plan))
    keys = ("base", "one", "two")
    tensors = [tensor_ids(read, made.snapshots[key]) for key in keys]
    manifests = [read.snapshot(made.snapshots[key]).manifest for key in keys]
    assert [one.manifest for one in plan.inputs] == manifests
    assert [one.role for one in plan.inputs] == ["base", "expert", "expert"]
    assert {(one.of, one.model) for one in plan.inputs} == {(None, None)}
    (operation,) = plan.operations
    assert operation.weights == [1.0, 0.5]
    assert (operation.method, plan.dtype, plan.block_size) == ("ties", None, BLOCK_SIZE)
    assert (plan.allow_missing, plan.layers, plan.without) == (False, [], [])
    assert operation.parameters == made.plan.parameters
    assert operation.parameters["density"] == 0.3
    assert sorted(t.name for t in plan.tensors) == ["body.weight", "head.weight"]
    planned = 0
    for tensor in plan.tensors:
        base, *experts = (read.tensor(ids[tensor.name]) for ids in tensors)
        chunks = math.ceil(math.prod(base.shape) / tensor.chunk_elements)
        assert tensor.chunk_elements * made.tensors["base"][tensor.name].itemsize == BLOCK_SIZE
        assert len(tensor.thresholds) == len(tensor.omitted) == len(experts)
        assert all(value > 0 for value, _ in tensor.thresholds)
        for number, (states, expert) in enumerate(zip(tensor.states, experts, strict=True)):
            assert len(states) == chunks == len(base.blocks)
            for i, state in enumerate(states):
                block = expert.blocks[i]
                assert (state == 2) == (block == base.blocks[i])
                assert state != 1 or block in [other.blocks[i] for other in experts[:number]]
                planned += len(read.block(block)) if state == 0 else 0
            assert (tensor.omitted[number] == 0.0) == (4 not in states)
    assert plan.planned_expert_bytes == planned == made.plan.planned_expert_bytes
    assert plan.full_expert_bytes == made.plan.full_expert_bytes
    assert plan.budget == plan.full_expert_bytes // 2 >= planned > 0
    assert [name for name, _ in plan.copied] == ["ids"]


def test_plan_in_full(made: Made, read: IndependentStore) -> None:
    """A plan without a budget leaves nothing out, and knows chunks that two experts share."""
    (name,) = read.ids(reader.PLAN) - {str(made.plan.plan)}
    plan = read.plan(name)
    assert plan.budget is None
    assert plan.full_expert_bytes == plan.planned_expert_bytes
    states = {tensor.name: [list(s) for s in tensor.states] for tensor in plan.tensors}
    assert states == {
        "body.weight": [[0, 0, 0], [0, 0, 0]],
        "head.weight": [[0, 0, 0, 0], [2, 1, 0, 0]],
    }


def test_thresholds(made: Made, read: IndependentStore) -> None:
    """More than a threshold's value, and the first `quota` of those equal to it: that is the
    density's share of a tensor."""
    (name,) = read.ids(reader.PLAN) - {str(made.plan.plan)}
    plan = read.plan(name)
    (tensor,) = [t for t in plan.tensors if t.name == "head.weight"]
    base = made.tensors["base"]["head.weight"]
    for key, (value, quota) in zip(("one", "two"), tensor.thresholds, strict=True):
        delta = np.abs(made.tensors[key]["head.weight"] - base)
        assert 0 <= quota <= np.count_nonzero(delta == value)
        assert np.count_nonzero(delta > value) + quota == 15000


def test_coverage(made: Made, read: IndependentStore) -> None:
    """Coverage has, for the tensors of its plan, a bit for each block of the output and expert."""
    merged = read.snapshot(made.snapshots["merged"])
    plan = read.plan(merged.plan or "")
    coverage = read.coverage(merged.coverage or "")
    base, output = (tensor_ids(read, made.snapshots[key]) for key in ("base", "merged"))
    assert [t.name for t in coverage.tensors] == [t.name for t in plan.tensors]
    for covered, planned in zip(coverage.tensors, plan.tensors, strict=True):
        before, after = (read.tensor(ids[covered.name]).blocks for ids in (base, output))
        assert covered.blocks == len(after)
        assert covered.reused == [a == b for a, b in zip(after, before, strict=True)]
        assert [list(map(bool, bits)) for bits in covered.contributed] == [
            [state in (0, 1) for state in states] for states in planned.states
        ]
    assert any(any(t.reused) for t in coverage.tensors)
    copied = [name for name, _ in plan.copied]
    assert all(output[name] == base[name] for name in [*copied, "constant", "scalar"])


# --- packs of a real store -----------------------------------------------------------------------


def test_every_pack_verifies(made: Made, indexed: IndependentStore) -> None:
    """Every pack is sound by itself, belongs to this store, and can be read only."""
    packs = [reader.verify_pack(path) for path in pack_paths(made)]
    # Four checkpoints, two plans, two merges, two signatures, notes, and a removal.
    assert len(packs) == 12
    assert {path.stat().st_mode & 0o777 for path in pack_paths(made)} == {0o444}


def test_runs(made: Made, read: IndependentStore) -> None:
    """Raw blocks that touch in a file touch in the pack, and lie on the file's own pages."""
    snapshot = read.snapshot(made.snapshots["base"])
    pages = 0
    for file in read.manifest(snapshot.manifest):
        at, expected = 0, None
        for part in file.parts:
            for block in read.tensor(part.tensor).blocks:
                entry = read.place(reader.BLOCK, block)[1]
                raw = entry.codec == reader.RAW
                assert not raw or entry.offset % reader.PAGE == at % reader.PAGE
                assert not raw or expected in (None, entry.offset)
                expected = entry.offset + entry.stored if raw else None
                pages += entry.plain // reader.PAGE if raw else 0
                at += entry.plain
    assert pages > 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", [True, False], ids=["index", "packs"])
def test_pinned_files(tmp_path: Path, index: bool) -> None:
    """A reader that knows nothing of pins reads a pinned snapshot, and one that was unpinned."""
    draw = np.random.default_rng(3)
    base = base_tensors(draw)
    for name, tensors in (("base", base), ("one", tuned(draw, base)), ("two", tuned(draw, base))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    with mstore.Store.init(tmp_path / "store", block_size=BLOCK_SIZE, codec="dense") as store:
        ids = {}
        for name in ("base", "one", "two"):
            parent = None if name == "base" else "base"
            ids[name] = str(store.add(tmp_path / name, name=name, base=parent).snapshot)
            store.pin(name, raw=True)
        store.unpin("two")
        store.gc(dead_share=0.0)
    read = IndependentStore(tmp_path / "store", index=index)
    for name, id in ids.items():
        whole = (tmp_path / name / "model.safetensors").read_bytes()
        assert read.file_bytes(id, "model.safetensors") == whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", [True, False])
def test_codecs(tmp_path: Path, index: bool) -> None:
    """Frames, floats and differences of every width decode as the page says, to the very bytes."""
    draw = np.random.default_rng(21)
    floats = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    floats += [np.float16, np.float32, np.float64]
    base, expert = {}, {}
    for kind in (np.dtype(one) for one in floats):
        count = 40_000 // kind.itemsize
        values = 0.02 * draw.standard_normal(count)
        base[kind.name] = values.astype(kind)
        expert[kind.name] = (values + 1e-4 * draw.standard_normal(count)).astype(kind)
        # Infinities and NaN, in one of the two or in both.
        base[kind.name].view(np.uint8)[5:900] = draw.integers(0, 256, 895)
        expert[kind.name].view(np.uint8)[400:1400] = draw.integers(0, 256, 1000)
    for kind in map(np.dtype, "b?hilBHIL"):
        values = draw.integers(0, 2 if kind.kind == "b" else 100, 40_000 // kind.itemsize)
        base[f"int {kind.name}"] = values.astype(kind)
        expert[f"int {kind.name}"] = (values + (draw.random(values.size) < 0.02)).astype(kind)
    for name, tensors in (("base", base), ("expert", expert)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    with mstore.Store.init(tmp_path / "store", block_size=BLOCK_SIZE, codec="dense") as store:
        added = [
            store.add(tmp_path / "base", name="base"),
            store.add(tmp_path / "expert", name="expert", base="base"),
        ]
    read = IndependentStore(tmp_path / "store", index=index)
    for name, report in zip(("base", "expert"), added, strict=True):
        plain = (tmp_path / name / "model.safetensors").read_bytes()
        assert read.file_bytes(str(report.snapshot), "model.safetensors") == plain
    found = set()
    for id in read.ids(reader.BLOCK):
        path, entry = read.place(reader.BLOCK, id)
        mode = path.read_bytes()[entry.offset] if entry.codec in CODED else None
        found.add((entry.codec, mode, entry.width))
    assert {one[2] for one in found if one[0] == reader.ZSTD} == {1, 2, 4, 8}
    for codec, mode in CODED_AS:
        assert {one[2] for one in found if one[:2] == (codec, mode)} == {1, 2, 4}


CODED = (reader.FLOATS, reader.DELTA)
CODED_AS = (
    (reader.FLOATS, reader.ALONE),
    (reader.DELTA, reader.OF_FLOATS),
    (reader.DELTA, reader.OF_INTEGERS),
)


def test_directory(made: Made, indexed: IndependentStore) -> None:
    """The directory has the entries of the page (no remote is known), and tmp/ is empty."""
    listed = set(re.findall(r"^ {6}([a-z]+)(?=[ /])", PAGE, re.MULTILINE))
    assert {path.name for path in made.path.iterdir()} == listed - {"remotes", "cache"}
    assert list((made.path / "tmp").iterdir()) == []
    assert (made.path / "lock").read_bytes() == b""
    line = f"mstore 3 {indexed.uuid} {BLOCK_SIZE}\n"
    assert (made.path / "format").read_bytes() == line.encode()


def test_all_of_it(made: Made, indexed: IndependentStore) -> None:
    """Packs, their list, rows, records and files agree, and the index is not behind."""
    indexed.verify()
    assert not indexed.is_behind()
    _, lines = indexed.pack_list()
    assert lines.keys() == {path.stem for path in pack_paths(made)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("commits", "lost", "is_behind"),
    [
        (1, (), True),
        (1, ("mirror", "packs.*", "*.pack"), True),
        (1, ("mirror", "mirror.*", "packs.*"), True),
        (1, ("mirror", "mirror.*"), True),
        (1, ("mirror", "mirror.*", "*.pack"), False),
        (2, ("mirror", "mirror.*", "*.pack"), True),
        (2, ("mirror", "mirror.*", "packs.*", "*.pack"), False),
    ],
)
def test_an_index_that_is_behind(
    tmp_path: Path, commits: int, lost: tuple[str, ...], is_behind: bool
) -> None:
    """Mirror, replaced mirror, list of packs, and packs each tell of later commits than an old
    index knows.
    """
    path = tmp_path / "store"
    save_file({"w": np.full(3, -1)}, tmp_path / "model.safetensors")
    with mstore.Store.init(path) as store:
        store.add(tmp_path / "model.safetensors", name="one")
    shutil.copy(path / "index" / "data.mdb", tmp_path)
    before = set(path.rglob("*.pack"))
    for number in range(commits):
        save_file({"w": np.full(3, number)}, tmp_path / "model.safetensors")
        with mstore.Store.open(path) as store:
            store.add(tmp_path / "model.safetensors", name=f"more{number}")
    assert not IndependentStore(path).is_behind()
    shutil.copy(tmp_path / "data.mdb", path / "index")
    for pattern in lost:
        for file in set(path.rglob(pattern)) - before:
            file.unlink()
    assert IndependentStore(path).is_behind() == is_behind
    with mstore.Store.open(path) as store:
        assert (store.doubt() is not None) == is_behind


def test_a_place_that_is_none(tmp_path: Path) -> None:
    """A pack whose row names a place other than 0 is refused."""
    path = tmp_path / "store"
    save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors")
    with mstore.Store.init(path) as store:
        store.add(tmp_path / "model.safetensors", name="one")
    with lmdb.open(str(path / "index"), max_dbs=32) as env:
        packs = env.open_db(b"packs", create=False)
        with env.begin(write=True) as writing:
            ((key, row),) = writing.cursor(db=packs)
            value = row[:40] + struct.pack(">I", 1)
            writing.put(key, value + reader.row_check("packs", key, value), db=packs)
    with pytest.raises(FormatError, match="place 1 of a pack"):
        IndependentStore(path)
    with pytest.raises(mstore.MstoreError), mstore.Store.open(path) as store:
        list(store.read_file("one", "model.safetensors"))


ONE, TWO = "model-00001-of-00002", "model-00002-of-00002"
INDEX = {"model.safetensors.index": {"a": ONE, "b": TWO}}

# Each directory's files with their tensors, and indexes with their maps; without `.safetensors`.
LAYOUTS: dict[str, tuple[dict[str, str], dict[str, dict[str, str]]]] = {
    "index": ({ONE: "ac", TWO: "abc", "model-1-of-3": "x"}, INDEX),
    "beside": ({ONE: "a", TWO: "b", "model": "c"}, INDEX),
    "below": ({"sub/x": "a", "model": "b"}, {"model.safetensors.index": {"a": "sub/x"}}),
    "later": (
        {ONE: "a", TWO: "b", "extra": "c"},
        INDEX | {"other.safetensors.index": {"b": TWO, "c": "extra"}},
    ),
    "variants": ({"model.fp16": "a", "model": "b", "model-1-of-1.ema": "c"}, {}),
    "named": ({"u-1-of-1": "a", "b": "b"}, {"u.safetensors.index.q": {"a": "u-1-of-1"}}),
    "variant-index": (
        {"model.q-1-of-1": "a", "model.q": "b"},
        {"model.safetensors.index.q": {"a": "model.q-1-of-1"}},
    ),
    "smallest": ({ONE: "a", TWO: "ab", **{f"model-{i}-of-3": "c" for i in (1, 2, 3)}}, {}),
    "consolidated": ({"consolidated.0": "a", "consolidated-1-of-1": "b", "model.v1.5": "c"}, {}),
    "stems": ({"adapter_model": "a", "diffusion_pytorch_model": "b", "adapter_model.q": "c"}, {}),
    "same": ({"x": "a", "x/model": "b", "x.safetensors": "c"}, {}),
    "same-stem": (
        {"x-1-of-1": "a", "x": "b", "y": "c"},
        {"x.safetensors.index": {"a": "x-1-of-1"}},
    ),
    "alone": ({"model.fp16": "a"}, {}),
    "both": ({"u-1-of-1": "a", "b": "b"}, {"model.r.safetensors.index.q": {"a": "u-1-of-1"}}),
    "a%:b": ({"q:r": "a", "z": "c"}, {}),
    "none": ({"model-1-of-2": "a", "model-01-of-02": "b"}, {}),
}


def test_models(tmp_path: Path) -> None:
    """Files make the models that the page says, with its names, and so have their tensors."""
    for directory, (files, indexes) in LAYOUTS.items():
        for path, names in files.items():
            place = tmp_path / "all" / directory / f"{path}.safetensors"
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: np.frombuffer(name.encode(), np.uint8) for name in names}, place)
        for path, weights in indexes.items():
            shards = {name: f"{shard}.safetensors" for name, shard in weights.items()}
            place = tmp_path / "all" / directory / f"{path}.json"
            place.write_text(json.dumps({"weight_map": shards}))
    # A colon in the model that has no name.
    save_file({"a:b": np.zeros(1), "c": np.zeros(1)}, tmp_path / "all" / "model.safetensors")
    program = Program(tmp_path / "store")
    with mstore.Store.init(tmp_path / "store") as store:
        snapshot = str(store.add(tmp_path / "all", name="all").snapshot)
        tensors = {tensor.name: tensor.file for tensor in store.tensors("all")}
    shown = program.succeed("show", "all", "--json").document["models"]
    read = IndependentStore(tmp_path / "store")
    assert sorted(read.models(snapshot)) == sorted(shown)
    assert {name: path for name, (path, _) in read.tensors(snapshot).items()} == tensors


@pytest.mark.parametrize(
    ("offsets", "order"),
    [
        ({"a": (0, 12), "b": (0, 0)}, "ba"),
        ({"c": (12, 20), "d": (12, 12), "a": (0, 12), "e": (12, 12)}, "adec"),
    ],
)
def test_the_order_of_parts(tmp_path: Path, offsets: dict[str, Any], order: str) -> None:
    """Tensors are in the order of their first byte, then of their end, then of the JSON."""
    told = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in offsets.items()
    }
    header = json.dumps(told).encode()
    size = max(end for _, end in offsets.values())
    whole = struct.pack("<Q", len(header)) + header + bytes(range(size))
    (tmp_path / "model.safetensors").write_bytes(whole)
    with mstore.Store.init(tmp_path / "store") as store:
        snapshot = str(store.add(tmp_path / "model.safetensors", name="one").snapshot)
    read = IndependentStore(tmp_path / "store")
    (file,) = read.manifest(read.snapshot(snapshot).manifest)
    assert [part.name for part in file.parts] == [None, *order]
    assert read.file_bytes(snapshot, "model.safetensors") == whole


# --- the page's tables ---------------------------------------------------------------------------


def page_tables(*head: str) -> list[list[list[str]]]:
    """The rows of the page's tables under these headings."""
    tables: list[list[list[str]]] = [[]]
    for line in PAGE.splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    return [table[2:] for table in tables if table and table[0] == list(head)]


def page_fields(table: list[list[str]], end: int) -> Iterator[tuple[int, int, str]]:
    """(offset, size, what) of the rows with a fixed place; "size - 64" counts from `end`."""
    for offset, size, what in table:
        from_end = offset.startswith("size - ")
        if offset.removeprefix("size - ").isdigit() and size.isdigit():
            number = int(offset.removeprefix("size - "))
            yield end - number if from_end else number, int(size), what


def is_id(name: bytes, data: bytes, context: str | None = None) -> bool:
    return name == blake3(data, derive_key_context=context).digest()


def test_pack_table(made: Made, indexed: IndependentStore) -> None:
    """Each field of the page's pack table is in real packs, where it says and as it says."""
    table, entries = page_tables("offset", "size", "what")
    (entry_size,) = [int(size.split()[0]) for offset, size, _ in table if offset == "table_offset"]
    assert sum(int(size) for _, size, _ in entries) == entry_size
    for path in pack_paths(made):
        data = path.read_bytes()
        rows = list(page_fields(table, len(data)))
        values = {what: data[at : at + size] for at, size, what in rows}
        start = int.from_bytes(values["u64 table_offset"], "little")
        length = int.from_bytes(values["u64 table length in bytes"], "little")
        assert length % entry_size == 0
        assert values["BLAKE3 (plain hash) of the table"] == blake3(data[start:][:length]).digest()
        for at, size, what in rows:
            if magic := re.fullmatch(r"magic `(\w+)`", what):
                assert data[at : at + size] == magic[1].encode()
            if what == "zero":
                assert data[at : at + size] == bytes(size)
            if version := re.fullmatch(r"u32 version, (\d+)", what):
                assert data[at : at + size] == struct.pack("<I", int(version[1]))
        ends = [at + size for at, size, _ in rows]
        head = ends.index(4096)
        assert [at for at, _, _ in rows[1 : head + 1]] == ends[:head]
        assert [at for at, _, _ in rows[head + 2 :]] == ends[head + 1 : -1]
        assert ends[-1] == len(data)


def test_entry_table(made: Made) -> None:
    """Each field of the page's entry table is in real entries; its kinds are those of records."""
    _, table = page_tables("offset", "size", "what")
    rows = list(page_fields(table, 0))
    assert [at for at, _, _ in rows[1:]] == [at + size for at, size, _ in rows[:-1]]
    (kinds,) = [
        re.findall(r"\b(\d) (\w+)", what) for *_, what in rows if what.startswith("u8 kind")
    ]
    seen = set()
    for path in pack_paths(made):
        data = path.read_bytes()
        start, length = struct.unpack("<QQ", data[-64:-48])
        for entry in range(start, start + length, rows[-1][0] + rows[-1][1]):
            name, base, *cells, zero = [data[entry + at :][:size] for at, size, _ in rows]
            at, stored, plain, kind, codec, _ = [int.from_bytes(c, "little") for c in cells]
            tag = dict(kinds)[str(kind)]
            seen.add(tag)
            payload = data[at : at + stored]
            assert zero == bytes(5)
            assert base == bytes(32)
            # An array of up to 15 fields has a head of one byte, a longer one of three.
            head = re.match(rb"(?:[\x90-\x9f]|\xdc..)[\xa0-\xbf](\w+)/\d", payload, re.DOTALL)
            assert (head is not None and head[1].decode() == tag) == (tag != "block")
            assert codec == 1 or (stored == plain and (tag != "block" or is_id(name, payload)))
    assert seen == set(reader.KINDS) == {name for _, name in kinds}


def test_id_table(made: Made, indexed: IndependentStore) -> None:
    """The page's contexts make the ids of real records and packs; blocks have none."""
    (table,) = page_tables("id", "BLAKE3 of", "mode")
    contexts = {name: re.findall(r"context `(.+)`", mode) for name, _, mode in table}
    assert contexts.pop("BlockId") == []
    (pack_context,) = contexts.pop("PackId")
    assert contexts.keys() == {f"{kind.capitalize()}Id" for kind in reader.KINDS[1:]}
    for number, kind in enumerate(reader.KINDS[1:], 1):
        (context,) = contexts[f"{kind.capitalize()}Id"]
        for name in indexed.ids(number):
            path, entry = indexed.place(number, name)
            data = path.read_bytes()[entry.offset :][: entry.stored]
            assert is_id(bytes.fromhex(name), data, context)
    for path in pack_paths(made):
        data = path.read_bytes()
        start, length = struct.unpack("<QQ", data[-64:-48])
        table_bytes = data[start : start + length]
        assert is_id(bytes.fromhex(path.stem), data[:48] + table_bytes, pack_context)


def test_index_table(made: Made, indexed: IndependentStore) -> None:
    """The index has the page's databases, and each row is what the packs and records say."""
    table, *_ = page_tables("database", "key", "value", "proof", "what it says")
    index = indexed.index
    assert index.keys() == {name for name, *_ in table}
    packs = {path.stem: path.stat().st_size for path in pack_paths(made)}
    # Size, and place 0.
    sizes = {row[:32].hex(): int.from_bytes(row[32:40], "big") for row in index["packs"].values()}
    assert {row[40:] for row in index["packs"].values()} == {bytes(4)}
    assert sizes == packs
    assert index["pack_ids"] == {row[:32]: number for number, row in index["packs"].items()}
    contents, children = {}, {}
    for key, value in index["snapshots"].items():
        snapshot = indexed.snapshot(key.hex())
        assert value == bytes.fromhex(snapshot.manifest) + struct.pack(">Q", snapshot.time_ns)
        contents[value[:32] + key] = b""
        for role, parent in snapshot.parents:
            children[bytes.fromhex(parent) + key + role.encode()] = b""
    assert index["snapshots"].keys() == {bytes.fromhex(s) for s in made.snapshots.values()}
    assert (index["contents"], index["children"]) == (contents, children)
    assert index["leases"] == index["backup"] == index["pinned"] == {}
    assert index["counters"].keys() == {b"packs", b"generation"}
    snapshot = bytes.fromhex(made.snapshots["merged"])
    assert set(index["notes"].values()) == {b""}
    assert {key[:32] for key in index["notes"]} == {snapshot}
    assert {key[32:].hex() for key in index["notes"]} == indexed.ids(reader.NOTE)


def test_limits() -> None:
    """The limits of the page are those of the library."""
    (table,) = page_tables("limit", "of")
    limits = DEFAULT_LIMITS
    assert table == [
        [f"{limits.tensor_record_bytes >> 20} MiB", "a tensor record"],
        [f"{limits.record_bytes >> 20} MiB", "a manifest, plan or coverage"],
        [
            f"{limits.note_bytes >> 10} KiB; {limits.small_record_bytes >> 20} MiB",
            "a note; a snapshot or virtual tensor",
        ],
        [f"{limits.tensors:,}", "tensors that a manifest, plan or coverage names"],
        [f"{limits.files:,}", "files of a manifest; operations of a plan"],
        [f"{limits.patterns:,}", "patterns of a plan; remarks of a plan"],
        [f"{limits.parents:,}", "parents of a snapshot; inputs of a plan besides the base"],
        [
            f"{limits.removed:,}; {limits.parameters}; {limits.rank}",
            "notes that a removal names; parameters of an operation; dimensions of a tensor",
        ],
        [f"{limits.text_bytes >> 20} MiB", "a message, remark or reason"],
        [f"{limits.name_bytes:,} bytes", "any other text"],
    ]
    assert (limits.files, limits.patterns) == (limits.operations, limits.remarks)
    assert limits.parents == limits.experts


def test_notes(made: Made, read: IndependentStore) -> None:
    """Notes say of which snapshot they are, their values come back, and keys made signatures."""
    assert len(read.ids(reader.NOTE)) == 5
    found = {name: read.note(name) for name in read.ids(reader.NOTE)}
    assert {one.snapshot for one in found.values()} == {made.snapshots["merged"]}
    values = [found[str(id)] for id in made.notes[:2]]
    assert {one.key: one.value for one in values} == NOTED
    assert {one.kind for one in values} == {"evaluation"}
    ours, of_a_note = found[str(made.signature)], found[str(made.notes[2])]
    assert (ours.kind, ours.notes, ours.author) == ("signature", [], "me")
    assert (of_a_note.kind, of_a_note.notes) == ("signature", [str(made.notes[0])])
    assert [one.notes for one in found.values() if one.kind == "removal"] == [[str(made.notes[1])]]
    assert read.noted(made.snapshots["merged"]) == {"mmlu": ("evaluation", NOTED["mmlu"])}


def test_one_value_of_a_key_counts(tmp_path: Path) -> None:
    """The newest value of a key counts, whatever its kind; without it the one before."""
    save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors")
    with mstore.Store.init(tmp_path / "store") as store:
        snapshot = str(store.add(tmp_path / "model.safetensors", name="one").snapshot)
        store.note("one", {"k": 1})
        (verdict,) = store.note("one", {"k": 2}, kind="verdict")
        counting = {note.key: (note.kind, note.value) for note in store.show("one").notes}
    assert IndependentStore(tmp_path / "store").noted(snapshot) == counting == {"k": ("verdict", 2)}
    with mstore.Store.open(tmp_path / "store") as store:
        store.remove_notes("one", [verdict.note])
    assert IndependentStore(tmp_path / "store").noted(snapshot) == {"k": ("value", 1)}


def test_reflog(made: Made, indexed: IndependentStore) -> None:
    """A reflog leads from nothing to the ref, move by move, at positions from 0."""
    s = made.snapshots
    moves: dict[str, list[tuple[str | None, str]]] = {}
    for key, value in indexed.index["reflog"].items():
        name, position = key[:-9].decode(), int.from_bytes(key[-8:], "big")
        old, new, action, time_ns, generation, kind = reader.decode(value)
        assert 0 < generation <= int.from_bytes(indexed.index["counters"][b"generation"], "big")
        assert kind == indexed.ref_kinds[name][0]
        assert key[-9] == 0
        assert position == len(moves.setdefault(name, []))
        assert isinstance(action, str)
        assert made.times[0] <= time_ns <= made.times[1]
        moves[name].append((old and old.hex(), new.hex()))
    assert moves == {
        "m/base": [(None, s["base"])],
        "m/one": [(None, s["old"]), (s["old"], s["one"])],
        "m/two": [(None, s["two"])],
        "m/merged": [(None, s["merged"])],
        "m/virtual": [(None, s["virtual"])],
        "v1": [(None, s["merged"])],
    }


def test_plans_of_the_index(made: Made, indexed: IndependentStore) -> None:
    """The index remembers from which snapshots, under which names, a plan was asked for."""
    s = made.snapshots
    assert {key.hex() for key in indexed.index["plans"]} == indexed.ids(reader.PLAN)
    for value in indexed.index["plans"].values():
        (base, name), experts, change, risks = reader.decode(value)
        assert risks == []
        assert change is None or 0 < change < 1
        assert (base.hex(), name) == (s["base"], "m/base")
        assert [(i.hex(), n) for i, n in experts] == [(s["one"], "m/one"), (s["two"], "m/two")]


def test_memo(made: Made) -> None:
    """Every row of memo/ ends with the check that the page says."""
    path = str(made.path / "memo")
    with lmdb.open(path, readonly=True, lock=False, max_dbs=16) as env, env.begin() as reading:
        for name in ("outputs", "requests", "outcomes"):
            with reading.cursor(db=env.open_db(name.encode(), reading, create=False)) as cursor:
                rows = list(cursor)
            assert rows
            for key, row in rows:
                assert row[-8:] == reader.row_check(name, key, row[:-8])


def test_statistics(made: Made, indexed: IndependentStore) -> None:
    """The databases of stats/ have the page's keys; squares and thresholds are true."""
    base, one = (tensor_ids(indexed, made.snapshots[key])["head.weight"] for key in ("base", "one"))
    pair = bytes.fromhex(base + one)
    a, b = (made.tensors[key]["head.weight"] for key in ("base", "one"))
    path = str(made.path / "stats")
    with lmdb.open(path, readonly=True, lock=False, max_dbs=16) as env, env.begin() as reading:
        names = [bytes(name).decode() for name, _ in reading.cursor()]
        handles = {name: env.open_db(name.encode(), reading, create=False) for name in names}
        _, table, memo = page_tables("database", "key", "value", "proof", "what it says")
        assert sorted(names) == sorted(name for name, *_ in table)
        listed = ["outputs", "requests", "outcomes", "digests", "repositories"]
        assert [name for name, *_ in memo] == listed
        place = reading.get(pair, db=handles["pairs"])
        batch, offset, length, check = struct.unpack(">III8s", place)
        tables = reading.get(struct.pack(">I", batch), db=handles["tables"])
        assert tables[offset : offset + 4] == b"MDT2"
        assert offset + length <= len(tables)
        assert check == reader.row_check("pairs", pair, tables[offset : offset + length])
        row = reading.get(pair[:32], db=handles["squares"])
        squares, check = struct.unpack(">d8s", row)
        assert check == reader.row_check("squares", pair[:32], row[:-8])
        key = pair + struct.pack(">Q", 15000)
        row = reading.get(key, db=handles["thresholds"])
    assert squares == pytest.approx(np.sum(a.astype(np.float64) ** 2), rel=1e-12)
    magnitude, quota, check = struct.unpack(">fQ8s", row)
    assert check == reader.row_check("thresholds", key, row[:-8])
    assert np.count_nonzero(np.abs(b - a) > np.float32(magnitude)) + quota == 15000


# --- a pack by hand ------------------------------------------------------------------------------

SAFETENSORS_HEADER = b'{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
WEIGHT = bytes(range(100, 112))
UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"
ID = "ab" * 32
GOLDEN_ID = "87638c96924c729ef1eb039d740adeffab72c60619b8e11eb11f71fcb06cdc7a"


def digest(data: bytes, context: str) -> bytes:
    return blake3(data, derive_key_context=context).digest()


def text(string: str) -> bytes:
    return bytes([0xA0 + len(string)]) + string.encode()


def bin32(name: bytes) -> bytes:
    return b"\xc4\x20" + name


@dataclass
class Draft:
    """A pack in pieces, so that a test can spoil one before it is sealed."""

    head: bytearray
    payloads: dict[str, bytes] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    gap: bytes = bytes(32)
    start: int = 4096
    ordered: Callable[[list[bytes]], list[bytes]] = sorted
    tail: dict[str, Any] = field(default_factory=dict)

    def put(self, what: str, kind: int, payload: bytes, name: bytes, **fields: int) -> bytes:
        plain = fields.pop("plain", len(payload))
        fields = {"kind": kind, "codec": 0, "width": 1, **fields}
        numbers = {"stored": len(payload), "plain": plain, **fields}
        self.payloads[what] = payload
        self.entries[what] = {"id": name, "base": bytes(32), **numbers, "zero": bytes(5)}
        return name

    def seal(self) -> tuple[bytes, Path]:
        """Payloads, a gap, the table, padding and the tail; and the path where it belongs."""
        body, rows = b"", []
        for what, entry in self.entries.items():
            entry.setdefault("offset", self.start + len(body))
            body += self.payloads.get(what, b"")
            row = [entry[key] for key in ("id", "base", "offset", "stored", "plain")]
            row += [entry[key] for key in ("kind", "codec", "width", "zero")]
            # The kind stands in front for the sorting only.
            rows.append(bytes([entry["kind"]]) + struct.pack("<32s32sQIIBBB5s", *row))
        data = bytes(self.head) + bytes(self.start - 4096) + body + self.gap
        table = b"".join(row[1:] for row in self.ordered(rows))
        fields = {"offset": len(data), "length": len(table), "hash": blake3(table).digest()}
        fields |= {"version": 3, "zero": bytes(4), "magic": b"KPEROTSM", **self.tail}
        data += table + bytes(-(len(data) + len(table) + 64) % 4096)
        data += struct.pack("<QQ32sI4s8s", *fields.values())
        name = digest(data[:48] + table, "mstore 1 pack").hex()
        return data, Path("packs") / name[:2] / f"{name}.pack"

    def snapshot(self, manifest: bytes, time: bytes) -> None:
        record = (
            b"\x9b"
            + text("snapshot/1")
            + bin32(manifest)
            + b"\x90"
            + text("add")
            + b"\xc0"
            + text("ada")
        )
        record += b"\xc0\xc0" + text("by hand") + time + text("a pencil")
        self.put("snapshot", 3, record, digest(record, "mstore 1 snapshot"))


def draft() -> Draft:
    """A safetensors file and 5000 zero bytes, with all the records that a reader needs."""
    made = Draft(bytearray(struct.pack("<8sII32s4048x", b"MSTOREPK", 3, 0, b"n" * 32)))
    header = struct.pack("<Q", len(SAFETENSORS_HEADER)) + SAFETENSORS_HEADER
    head = made.put("header", 0, header, blake3(header).digest())
    weight = made.put("weight", 0, WEIGHT, blake3(WEIGHT).digest(), width=2)
    zeros = made.put("zeros", 0, b"\0", blake3(bytes(5000)).digest(), codec=1, plain=5000)
    ids = []
    for what, dtype, shape, size, block in (
        ("header", "BYTES", bytes([0x91, len(header)]), bytes([len(header)]), head),
        ("weight", "BF16", b"\x92\x02\x03", b"\x0c", weight),
        ("zeros", "BYTES", b"\x91\xcd\x13\x88", b"\xcd\x13\x88", zeros),
    ):
        record = b"\x95" + text("tensor/1") + text(dtype) + shape + size + bin32(block)
        name = digest(record, "mstore 1 tensor record")
        ids.append(made.put(f"tensor {what}", 1, record, name))
    parts = b"\x92\x93\xc0" + bin32(ids[0]) + bytes([len(header)])
    parts += b"\x93" + text("w") + bin32(ids[1]) + b"\x0c"
    first = b"\x94" + text("m.safetensors") + b"\x01" + bytes([len(header) + 12]) + parts
    second = b"\x94" + text("zeros") + b"\x00\xcd\x13\x88\x91\x93\xc0" + bin32(ids[2])
    record = b"\x92" + text("manifest/1") + b"\x92" + first + second + b"\xcd\x13\x88"
    manifest = made.put("manifest", 2, record, digest(record, "mstore 1 manifest"))
    made.snapshot(manifest, b"\xcf" + struct.pack(">Q", 1 << 60))
    return made


def example() -> tuple[Draft, bytes, Path]:
    """The pack of the page's example: one file `a` with three bytes."""
    made = Draft(bytearray(struct.pack("<8sII32s4048x", b"MSTOREPK", 3, 0, b"n" * 32)), gap=b"")
    plain = b"hi\n"
    block = made.put("block", 0, plain, blake3(plain).digest())
    record = b"\x95" + text("tensor/1") + text("BYTES") + b"\x91\x03\x03" + bin32(block)
    tensor = made.put("tensor record", 1, record, digest(record, "mstore 1 tensor record"))
    file = b"\x94" + text("a") + b"\x00\x03\x91\x93\xc0" + bin32(tensor) + b"\x03"
    record = b"\x92" + text("manifest/1") + b"\x91" + file
    manifest = made.put("manifest", 2, record, digest(record, "mstore 1 manifest"))
    made.snapshot(manifest, b"\xcf" + struct.pack(">Q", 1 << 60))
    return made, *made.seal()


def shown_example() -> str:
    """The page's example: the pieces of the pack, each under a line that says what it is."""
    made, data, path = example()
    start, length = struct.unpack("<QQ", data[-64:-48])
    pieces = [("header", 0, data[:48])]
    for what, entry in made.entries.items():
        pieces.append((f"{what}, id {entry['id'].hex()}", entry["offset"], made.payloads[what]))
    pieces += [("table", start, data[start : start + length])]
    pieces += [("the last 64 bytes", len(data) - 64, data[-64:])]
    lines = []
    for what, at, piece in pieces:
        rows = [(at + n, piece[n : n + 32].hex()) for n in range(0, len(piece), 32)]
        lines += [f"# {what}", *(f"{offset:>5}  {row}" for offset, row in rows)]
    return "\n".join([*lines, f"# {len(data)} bytes, PackId {path.stem}"])


def test_example() -> None:
    """The page shows every byte of a sound pack that is not zero."""
    (shown,) = re.findall(r"^## Example\n.*?^```\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == shown_example()
    _, whole, path = example()
    data = bytearray(len(whole))
    for at, piece in re.findall(r"^ *(\d+)  ([0-9a-f]+)$", shown, re.MULTILINE):
        data[int(at) : int(at) + len(piece) // 2] = bytes.fromhex(piece)
    assert bytes(data) == whole
    pack = reader.verify_pack_bytes(whole, path)
    assert [entry.kind for entry in pack.entries] == [0, 1, 2, 3]


def test_golden_pack(tmp_path: Path) -> None:
    """A pack put together by hand from the page is a pack, and its id is the same for good."""
    data, path = draft().seal()
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(data)
    pack = reader.verify_pack(tmp_path / path)
    assert pack.id == GOLDEN_ID
    assert [entry.kind for entry in pack.entries] == [0, 0, 0, 1, 1, 1, 2, 3]


def test_golden_store(tmp_path: Path) -> None:
    """Such a pack, a format line and a mirror are a store, and its files can be read."""
    made = draft()
    data, path = made.seal()
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(data)
    (tmp_path / "format").write_text(f"mstore 3 {UUID} 65536\n")
    snapshot = made.entries["snapshot"]["id"].hex()
    (tmp_path / "refs").mkdir()
    mirror = sealed(f"mstore refs 2\ngeneration 1\nbranch {snapshot} hand/made\n")
    (tmp_path / "refs" / "mirror").write_bytes(mirror)
    packs = f"mstore packs 1\ngeneration 1\nstore {UUID}\n1 {Path(path).stem}\n"
    (tmp_path / "refs" / "packs.1").write_bytes(sealed(packs))
    store = IndependentStore(tmp_path, index=False)
    assert store.refs() == {"hand/made": snapshot}
    assert {path: store.file_bytes(snapshot, path) for path in store.files(snapshot)} == {
        "m.safetensors": struct.pack("<Q", len(SAFETENSORS_HEADER)) + SAFETENSORS_HEADER + WEIGHT,
        "zeros": bytes(5000),
    }


def test_payloads_at_any_offset() -> None:
    """Where a payload lies decides nothing about what it is."""
    made = draft()
    made.start = 4104
    pack = reader.verify_pack_bytes(*made.seal())
    assert min(entry.offset for entry in pack.entries) == 4104


def test_no_byte_can_change() -> None:
    """A pack with any one byte changed is refused, whether it is data, table, padding or tail."""
    data, path = draft().seal()
    spoiled = bytearray(data)
    for i in range(len(data)):
        spoiled[i] ^= 0x41
        with pytest.raises(FormatError):
            reader.verify_pack_bytes(bytes(spoiled), path)
        spoiled[i] ^= 0x41
    assert reader.verify_pack_bytes(bytes(spoiled), path)


def test_no_length_but_its_own() -> None:
    """A pack cut short or with a page more is refused, and so is one under another name."""
    data, path = draft().seal()
    other = "0" * 64
    for cut in (b"", data[:64], data[:4096], data[:-4096], data[:-1], data + b"\0", data[4096:]):
        with pytest.raises(FormatError):
            reader.verify_pack_bytes(cut, path)
    with pytest.raises(FormatError, match="magic"):
        reader.verify_pack_bytes(data + bytes(4096), path)
    for name in (path.with_name(f"{other}.pack"), Path("packs") / "no" / path.name):
        with pytest.raises(FormatError, match="another pack"):
            reader.verify_pack_bytes(data, name)


def spoil(what: str, **fields: Any) -> Callable[[Draft], object]:
    return lambda made: made.entries[what].update(fields)


def spoil_head(at: int, value: int) -> Callable[[Draft], object]:
    return lambda made: made.head.__setitem__(at, value)


def spoil_draft(**fields: Any) -> Callable[[Draft], object]:
    return lambda made: made.__dict__.update(fields)


def spoil_time(time_ns: bytes) -> Callable[[Draft], object]:
    return lambda made: made.snapshot(made.entries["manifest"]["id"], time_ns)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (spoil_head(0, 0), "magic or version of the header"),
        (spoil_head(8, 2), "magic or version of the header"),
        (spoil_head(8, 4), "magic or version of the header"),
        (spoil_head(12, 1), "header with more than zeros"),
        (spoil_head(4095, 1), "header with more than zeros"),
        (spoil_draft(gap=b"\1"), "a gap with more than zeros"),
        (spoil_draft(ordered=lambda rows: sorted(rows)[::-1]), "entry order"),
        (spoil_draft(ordered=lambda rows: sorted([*rows, rows[0]])), "entry order"),
        (spoil_draft(tail={"offset": 4096 - 88}), "table out of bounds"),
        (spoil_draft(tail={"offset": 1 << 63}), "table out of bounds"),
        (spoil_draft(tail={"length": 8 * 88 + 1}), "half an entry"),
        (spoil_draft(tail={"length": 7 * 88}), "table hash"),
        (spoil_draft(tail={"hash": bytes(32)}), "table hash"),
        (spoil_draft(tail={"version": 2}), "magic or version of the tail"),
        (spoil_draft(tail={"zero": b"\0\0\0\1"}), "tail with more than zeros"),
        (spoil_draft(tail={"magic": b"MSTOREPK"}), "magic or version of the tail"),
        (spoil("header", offset=4095), "payload in the header"),
        (spoil("weight", offset=4100), "in another payload"),
        (spoil("weight", offset=1 << 40), "payload in the table"),
        (spoil("weight", stored=13), "raw bytes of another length"),
        (spoil("weight", stored=0, plain=0), "an empty payload"),
        (spoil("weight", width=3), "element width 3"),
        (spoil("weight", codec=2), "a payload that saves nothing"),
        (spoil("weight", codec=2, plain=14), "the frame of block"),
        (spoil("weight", codec=3, plain=14), "mode 100"),
        (spoil("weight", codec=3, plain=16, width=8), "wide elements that are coded"),
        (spoil("weight", codec=4, plain=14), "a base without a delta"),
        (spoil("weight", codec=4, plain=14, base=b"\1" * 32), "mode 100"),
        (spoil("weight", codec=2, plain=13), "half an element"),
        (spoil("weight", codec=5), "codec 5"),
        (spoil("weight", base=b"\1" * 32), "a base without a delta"),
        (spoil("weight", zero=b"\0\0\0\0\1"), "entry with more than zeros"),
        (spoil("weight", id=bytes(32)), "has other bytes"),
        (spoil("zeros", width=2), "a constant of another width"),
        (spoil("zeros", plain=4999), "has other bytes"),
        (spoil("weight", codec=1, width=8, stored=8), "half an element"),
        (spoil("snapshot", kind=8), "kind 8"),
        (spoil("snapshot", kind=4), "has other bytes"),
        (spoil("snapshot", codec=1, stored=1), "codec 1 for a snapshot"),
        (spoil("snapshot", width=2), "a record with an element width"),
        (spoil_time(b"\xcf" + struct.pack(">Q", 1)), "not in canonical form"),
        (spoil_time(b"\xff"), "time_ns is negative"),
        (spoil_time(b"\xcb" + struct.pack(">d", 1.0)), "time_ns is no int"),
        (spoil_time(b"\x01\x02"), "bytes after the record's end"),
    ],
)
def test_unsound_packs(change: Callable[[Draft], object], why: str) -> None:
    """A pack with true hashes that breaks one rule of the page is refused for that rule."""
    made = draft()
    change(made)
    with pytest.raises(FormatError, match=why):
        reader.verify_pack_bytes(*made.seal())


# --- records by hand -----------------------------------------------------------------------------


def changes(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Places in a record, and what may stand there instead."""
    for i, item in enumerate(value):
        here = (*at, i)
        for other in (None, -1, 0, 1 << 63, True, "", "x", b"", bytes(32), 0.5, math.inf, []):
            if other != item or type(other) is not type(item):
                yield here, other
        if isinstance(item, list):
            yield from ((here, item + item[-1:]), (here, item[::-1]))
            yield from changes(item, here)


def changed(record: Any, at: tuple[int, ...], other: Any) -> bytes:
    """The record with another item there."""
    copy = reader.decode(reader.encode(record))
    item = copy
    for i in at[:-1]:
        item = item[i]
    item[at[-1]] = other
    return reader.encode(copy)


def test_unsound_records(made: Made, indexed: IndependentStore, tmp_path: Path) -> None:
    """Reader and library refuse the same records, whatever is wrong in them."""
    draw = random.Random(37)
    found: dict[str, tuple[int, bytes]] = {}
    for kind in range(reader.MANIFEST, reader.NOTE + 1):
        path, entry = indexed.place(kind, min(indexed.ids(kind)))
        data = path.read_bytes()[entry.offset :][: entry.stored]
        record = reader.decode(data)
        every = [changed(record, *change) for change in changes(record)]
        for other in draw.sample(every, min(len(every), 60)):
            if other != data:
                found[digest(other, CONTEXTS[kind]).hex()] = (kind, other)
    path = write_store(tmp_path / "store", [(kind, data) for kind, data in found.values()])
    mstore.Store.reindex(path)
    with mstore.Store.open(path) as store:
        problems = store.fsck(read_data=True).problems
    refused = {problem.where for problem in problems if " record" in problem.what}
    told = {}
    for id, (kind, data) in found.items():
        try:
            reader.read_record(kind, data)
        except FormatError as error:
            told[id] = str(error)
    assert {id: why for id, why in told.items() if id not in refused} == {}
    assert {problem for problem in problems if problem.where in refused - told.keys()} == set()
    assert 0 < len(told) < len(found)


CONTEXTS = {
    number: f"mstore 1 {'virtual tensor' if kind == 'virtual' else kind}"
    for number, kind in enumerate(reader.KINDS)
}


def write_store(root: Path, records: list[tuple[int, bytes]]) -> Path:
    """A store without an index that has these records, each in a pack of its own."""
    for directory in ("tmp", "index", "refs"):
        (root / directory).mkdir(parents=True, mode=0o700)
    (root / "lock").touch()
    (root / "format").write_text(f"mstore 3 {UUID} {BLOCK_SIZE}\n")
    packs = []
    for kind, data in records:
        one = Draft(bytearray(draft().head), gap=b"")
        one.put("record", kind, data, digest(data, CONTEXTS[kind]))
        pack, path = one.seal()
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(pack)
        packs.append(path.stem)
    lines = "".join(f"1 {pack}\n" for pack in sorted(packs))
    (root / "refs" / "packs.1").write_bytes(
        sealed(f"mstore packs 1\ngeneration 1\nstore {UUID}\n{lines}")
    )
    (root / "refs" / "mirror").write_bytes(sealed("mstore refs 2\ngeneration 1\n"))
    return root


# --- refs and lists by hand ----------------------------------------------------------------------


def sealed(text: str) -> bytes:
    return f"{text}blake3 {blake3(text.encode()).hexdigest()}\n".encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mstore refs 1\ngeneration 1\n", "the head"),
        ("mstore refs 2\ngeneration 01\n", "the generation"),
        ("mstore refs 2\n", "the generation"),
        (f"mstore refs 2\ngeneration 1\nbranch {'0' * 63} a\n", "line"),
        (f"mstore refs 2\ngeneration 1\nbranch {ID} b\nbranch {ID} a\n", "the order of refs"),
        (f"mstore refs 2\ngeneration 1\nbranch {ID} a\ntag {ID} a\n", "the order of refs"),
        (f"mstore refs 2\ngeneration 1\nbranch {ID} a\ntag {ID} a/b\n", "a directory of another"),
        (f"mstore refs 2\ngeneration 1\nhead {ID} a\n", "kind head"),
        (f"mstore refs 2\ngeneration 1\nremote {ID} a/b/c\n", "is no remote"),
        (f"mstore refs 2\ngeneration 1\nremote {ID} remotes/a\n", "is no remote"),
        (f"mstore refs 2\ngeneration 1\ntag {ID} candidates/a/b\n", "is no tag"),
    ],
)
def test_unsound_mirrors(text: str, why: str) -> None:
    """A mirror that breaks one rule of the page is refused for that rule."""
    with pytest.raises(FormatError, match=why):
        reader.read_mirror(sealed(text))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (f"store {'0' * 36}\n", "another store"),
        (f"store {UUID}\n3 {ID}\n", "a later generation"),
        (f"store {UUID}\n01 {ID}\n", "line"),
        (f"store {UUID}\n2 {ID}\n1 {'1' * 64}\n", "the order of packs"),
        (f"store {UUID}\n1 {ID}\n2 {ID}\n", "a pack twice"),
    ],
)
def test_unsound_lists(lines: str, why: str) -> None:
    """A list of packs that breaks one rule of the page is refused for that rule."""
    with pytest.raises(FormatError, match=why):
        reader.read_pack_list(sealed(f"mstore packs 1\ngeneration 2\n{lines}"), UUID)


def test_no_text_without_its_hash() -> None:
    """A mirror with any one byte changed, or cut anywhere, is refused."""
    data = sealed(f"mstore refs 2\ngeneration 1\nbranch {ID} a/b\n")
    assert reader.read_mirror(data) == (1, {"a/b": ("branch", ID)})
    for i in range(len(data)):
        for other in (data[:i], data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :]):
            with pytest.raises(FormatError):
                reader.read_mirror(other)


def test_names_of_refs(tmp_path: Path) -> None:
    """Reader and library allow the same names."""
    good = ["x", "z/y", "caf\u00e9", "team/0123456789abcdef", "y" * 200, "remote", "x.lock.y"]
    bad = ["", "a b", "-x", "x/.y", "x.lock/y", "x//y", "x/", "cafe\u0301", "y" * 201, "0" * 16]
    bad += ["remotes", "remotes/a/b", "candidates", "candidates/a/b", "a\u200bb", "a\x7f"]
    bad += [f"a{character}" for character in "~^:@{}\\*?[]=\"'<>|$`"]
    save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors")
    with mstore.Store.init(tmp_path / "store") as store:
        snapshot = store.add(tmp_path / "model.safetensors", name="one").snapshot
        for name in bad:
            with pytest.raises(FormatError):
                reader.check_ref("tag", name)
            with pytest.raises(mstore.MstoreError):
                store.tag(name, str(snapshot))
        for name in good:
            reader.check_ref("tag", name)
            store.tag(name, str(snapshot))


# --- coded elements by hand ----------------------------------------------------------------------

ONE = 1 << 16
BASE = b"".join(struct.pack("<H", 500 * i) for i in range(128))


def coded(**changes: Any) -> bytes:
    """A payload of 128 integers of two bytes, each one more than the base's: all have symbol 2."""
    made = {
        "head": [2, 0, 1, 0, 0, 0],
        "zero": bytes(2),
        "count": len(changes.get("words", ())),
        "listed": b"",
        "raw": bytes(1),
        "table": [2, 2, 128, 8],
        "words": [],
        "states": [ONE] * 32,
        "behind": b"",
        **changes,
    }
    start = bytes(made["head"]) + made["zero"] + struct.pack("<I", made["count"])
    start += made["listed"] + made["raw"] + bytes(made["table"])
    words = struct.pack(f"<{len(made['words'])}H", *made["words"])
    return start + words + struct.pack("<32I", *made["states"]) + made["behind"]


def added(*differences: int) -> bytes:
    """The base, with one difference for each row of 32 elements."""
    base = struct.unpack("<128H", BASE)
    return struct.pack("<128H", *((b + differences[i // 32]) % ONE for i, b in enumerate(base)))


def test_coded_elements_by_hand() -> None:
    """Payloads put together by hand from the page are what the page says."""
    assert reader.from_coded(coded(), 2, 256, BASE) == added(1, 1, 1, 1)
    listed = coded(head=[2, 0, 1, 0, 0, 1], listed=b"\x06")
    assert reader.from_coded(listed, 2, 256, BASE) == added(1, 0, 0, 1)
    # All are escapes: a state has the number itself, and then a word of the next row's.
    numbers = {"states": [ONE + 7] * 32, "words": [9] * 32 + [ONE - 1] * 32 + [8] * 32 + [0] * 32}
    escapes = coded(table=[255, 255, 128, 8], **numbers)
    assert reader.from_coded(escapes, 2, 256, BASE) == added(-4, -5, -(ONE // 2), 4)
    # 17 and more: symbol 3, and three raw bits of the state, which ends without them.
    raw = coded(table=[3, 3, 128, 8], raw=b"\3", states=[ONE << 12 | 0o7531] * 32)
    assert reader.from_coded(raw, 2, 256, BASE) == added(9, 10, 11, 12)


MANY = {"words": [0] * 128}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head": [0, 0, 1, 0, 0, 0]}, "mode 0"),
        ({"head": [3, 0, 1, 0, 0, 0]}, "mode 3"),
        ({"head": [2, 1, 1, 0, 0, 0]}, "1 zero bits"),
        ({"head": [2, 0, 0, 0, 0, 0]}, "0 contexts"),
        ({"head": [2, 0, 2, 0, 0, 0]}, "2 contexts"),
        ({"head": [1, 0, 9, 0, 0, 0]}, "9 contexts"),
        ({"head": [1, 0, 1, 16, 0, 0]}, "a shift by 16 bits"),
        ({"head": [2, 0, 1, 1, 0, 0]}, "classes that nothing has"),
        ({"head": [2, 0, 1, 0, 1, 0]}, "classes that nothing has"),
        ({"head": [2, 0, 1, 0, 0, 2]}, "a header with other flags"),
        ({"zero": b"\0\1"}, "a header with other flags"),
        ({"head": [2, 0, 1, 0, 0, 1], "listed": b"\x10"}, "a row behind the last one"),
        (
            {"head": [2, 0, 1, 0, 0, 1], "listed": b"\1", "table": [0, 0, 128, 8]},
            "an empty row that is not listed",
        ),
        ({"raw": b"\x10"}, "raw bits of a whole element"),
        ({"table": [3, 2]}, "a table of no symbols"),
        ({"table": [2, 2, 127]}, "a table with another sum"),
        ({"table": [2, 3, 128, 8, 1]}, "a table with another sum"),
        ({"table": [2, 2, 228, 0]}, "a frequency in two bytes for one"),
        ({"table": [1, 2, 0, 0, 128, 8]}, "a table that begins or ends"),
        ({"table": [2, 3, 128, 8, 0, 0]}, "a table that begins or ends"),
        ({"states": [ONE] * 31 + [ONE - 1]}, "a state that is none"),
        ({"states": [ONE] * 31 + [ONE + 1]}, "a state at the end"),
        ({"count": 1}, "the payload ends too early"),
        ({"words": [0]}, "words that are left"),
        ({"words": [0], "count": 0}, "something behind the states"),
        ({"behind": bytes(4)}, "something behind the states"),
        ({"table": [255, 255, 128, 8]}, "too few words"),
        ({"table": [3, 3, 128, 8], "raw": b"\x0f", **MANY}, "a number of too many bits"),
        # Half of the slots are symbol 3's, and half escapes, which tell a number of symbol 3.
        (
            {"table": [3, 255, 128, 4, 0, 250, 128, 4], "states": [131587] * 32, **MANY},
            "a number that another symbol has",
        ),
    ],
)
def test_unsound_coded_elements(changes: dict[str, Any], why: str) -> None:
    """A payload that breaks one rule of the page is refused for that rule."""
    with pytest.raises(FormatError, match=why):
        reader.from_coded(coded(**changes), 2, 256, BASE)


def test_what_fills_up_the_last_row() -> None:
    """An element behind the block is zero."""
    with pytest.raises(FormatError, match="an element behind the block"):
        reader.from_coded(coded(), 2, 254, BASE[:-2])


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x7f", 127),
        (b"\xcc\x80", 128),
        (b"\xcd\x01\x00", 256),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00", 1 << 32),
        (b"\xff", -1),
        (b"\xd0\xdf", -33),
        (b"\xc4\x00", b""),
        (b"\xd9\x20" + b"a" * 32, "a" * 32),
        (b"\xdc\x00\x10" + b"\xc0" * 16, [None] * 16),
        (b"\x92\xc2\xc3", [False, True]),
        (b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", 1.0),
    ],
)
def test_canonical_values(data: bytes, value: object) -> None:
    """A value has one form, the shortest, and the reader reads and writes it."""
    assert reader.decode(data) == value
    assert reader.encode(value) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x02",
        b"\xcc\x7f",
        b"\xd0\x05",
        b"\xcd\x00\xff",
        b"\xd1\xff\xff",
        b"\xd9\x01a",
        b"\xa1\xff",
        b"\xc5\x00\x01a",
        b"\xdc\x00\x01\xc0",
        b"\x92\x01",
        b"\xca\x3f\x80\x00\x00",
        b"\x80",
        b"\xc1",
        b"\xd4\x00\x00",
    ],
)
def test_other_forms_are_refused(data: bytes) -> None:
    """Longer forms, narrow floats, maps, extensions, cut and trailing bytes are no record."""
    with pytest.raises(FormatError):
        reader.decode(data)
