"""Diff: files, tensors and blocks by id; distances by reading only what is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, write_safetensors
from cli_runs import Program
from families import BLOCK, Arrays

from mstore import Store
from mstore.api.reports import DiffReport, TensorDiff
from mstore.store.catalog import Catalog
from mstore.terms.ids import TensorId

FAMILY = families.layered(rows=60)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *FAMILY.names):
            store.add(root / name, name=name)
        yield store


def of(report: DiffReport) -> dict[str, TensorDiff]:
    return {item.name: item for item in report.tensors}


def pair(path: Path, a: list[Tensor], b: list[Tensor], *, blocks: bool = False) -> DiffReport:
    """The diff of two checkpoints of these tensors."""
    for name, tensors in (("a", a), ("b", b)):
        write_safetensors(path / name / "m.safetensors", tensors)
    with Store.init(path / "store", block_size=BLOCK) as store:
        store.add(path / "a", name="a")
        store.add(path / "b", name="b")
        return store.diff("a", "b", blocks=blocks)


def relative(a: Arrays, b: Arrays, name: str) -> float:
    before, after = a[name].astype(np.float64).ravel(), b[name].astype(np.float64).ravel()
    return float(np.linalg.norm(after - before) / np.linalg.norm(before))


def test_records_are_read_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of tensors are not looked up one by one; the index of a sharded model is read."""
    wanted = store.diff("base", "e0")
    alone: list[object] = []
    read = Catalog.record_bytes

    def counted(self: Catalog, id: Any, location: Any) -> Any:
        if isinstance(id, TensorId):
            alone.append(id)
        return read(self, id, location)

    monkeypatch.setattr(Catalog, "record_bytes", counted)
    with Store.open(store.path) as again:
        assert again.diff("base", "e0") == wanted
    assert len(alone) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fine_tune_against_its_base(threads: int, store: Store) -> None:
    """Changed tensors are listed with the numbers of their changed blocks and the relative L2
    distance that numpy gives; equal ones are counted.
    """
    expert = FAMILY.experts[0]
    report = store.diff("base", "e0", blocks=True, threads=threads)
    assert (report.a, report.b) == (store["base"].id, store["e0"].id)
    found = of(report)
    total = changed = 0
    for name, before in FAMILY.base.items():
        mine, theirs = expert[name].tobytes(), before.tobytes()
        starts = range(0, len(mine), BLOCK)
        numbers = [at // BLOCK for at in starts if mine[at : at + BLOCK] != theirs[at : at + BLOCK]]
        total += len(starts)
        changed += len(numbers)
        if not numbers:
            assert name not in found
            continue
        item = found.pop(name)
        assert (item.status, item.dtype_a, item.dtype) == ("changed", "BF16", "BF16")
        assert item.shape_a == item.shape == before.shape
        assert (item.blocks_total, item.blocks_changed) == (len(starts), len(numbers))
        assert item.changed_blocks == tuple(numbers)
        assert item.relative_l2 == pytest.approx(relative(FAMILY.base, expert, name), rel=1e-12)
    assert found == {}
    assert (report.blocks_total, report.blocks_changed) == (total, changed)
    assert report.tensors_equal == len(FAMILY.base) - len(report.tensors)


def test_blocks_are_listed_only_on_request(store: Store) -> None:
    """Without `blocks` the same diff has counts and no lists."""
    brief, full = store.diff("base", "e0"), store.diff("base", "e0", blocks=True)
    assert all(item.changed_blocks is None for item in brief.tensors)
    assert [item.blocks_changed for item in brief.tensors] == [
        len(item.changed_blocks or ()) for item in full.tensors
    ]


def test_files_of_both_sides(store: Store) -> None:
    """Files are added, removed or changed, with their sizes; equal ones are counted."""
    report = store.diff("base", "e0")
    status = {item.path: (item.status, item.size_a, item.size_b) for item in report.files}
    sizes = [{file.path: file.size for file in store.files(name)} for name in ("base", "e0")]
    assert status["README.md"] == ("changed", sizes[0]["README.md"], sizes[1]["README.md"])
    assert status["model.safetensors"] == ("added", None, sizes[1]["model.safetensors"])
    shard = "model-00001-of-00003.safetensors"
    assert status[shard] == ("removed", sizes[0][shard], None)
    assert report.files_equal == 2  # config.json, tokenizer.json
    assert list(status) == sorted(status)


def test_resharded_is_equal(store: Store, tmp_path: Path) -> None:
    """The same tensors in another file are no difference between tensors."""
    families.write_checkpoint(tmp_path / "one", FAMILY.base)
    store.add(tmp_path / "one", name="one")
    report = store.diff("base", "one")
    assert (report.tensors, report.tensors_equal) == ((), len(FAMILY.base))
    assert (report.blocks_changed, len(report.files)) == (0, 5)


def test_a_snapshot_against_itself(store: Store) -> None:
    """Nothing differs, and everything is counted."""
    report = store.diff("e1", "e1")
    assert (report.files, report.tensors, report.blocks_changed) == ((), (), 0)
    assert report.files_equal == len(store.files("e1"))
    assert report.tensors_equal == len(FAMILY.base)
    assert report.blocks_total > 0


def test_either_way(store: Store) -> None:
    """Turned round, added is removed, and the distance is relative to the other side."""
    ahead, back = of(store.diff("base", "e2")), of(store.diff("e2", "base"))
    assert ahead.keys() == back.keys()
    for name, item in ahead.items():
        assert item.blocks_changed == back[name].blocks_changed
    name = "model.scale"
    expert = FAMILY.experts[2]
    assert back[name].relative_l2 == pytest.approx(relative(expert, FAMILY.base, name))
    assert ahead[name].relative_l2 != back[name].relative_l2


def test_tensors_that_come_and_go(tmp_path: Path) -> None:
    """Added and removed tensors have no distance, and all of their blocks count as changed."""
    size = 3 * BLOCK + 1
    kept: Tensor = ("kept", "U8", (4,), b"kept")
    old: Tensor = ("old", "U8", (size,), bytes(size))
    new: Tensor = ("new", "U8", (5,), b"fresh")
    report = pair(tmp_path, [old, kept], [kept, new], blocks=True)
    found = of(report)
    assert [(item.name, item.status) for item in report.tensors] == [
        ("old", "removed"),
        ("new", "added"),
    ]
    assert (found["old"].blocks_total, found["old"].changed_blocks) == (4, (0, 1, 2, 3))
    assert (found["new"].blocks_total, found["new"].relative_l2) == (1, None)
    assert (report.blocks_total, report.blocks_changed, report.tensors_equal) == (6, 5, 1)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("F64", np.float64),
        ("F32", np.float32),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
    ],
)
def test_distance_of_every_float(dtype: str, kind: type, tmp_path: Path) -> None:
    """Every floating-point type has a distance, over blocks that differ and blocks that do not."""
    rng = np.random.default_rng(3)
    a: families.Array = rng.standard_normal(3 * BLOCK // np.dtype(kind).itemsize + 11).astype(kind)
    b = a.copy()
    b[-700:] = (b[-700:].astype(np.float32) * 1.5).astype(kind)
    sides: list[list[Tensor]] = [[("t", dtype, x.shape, x.tobytes())] for x in (a, b)]
    report = pair(tmp_path, *sides, blocks=True)
    item = of(report)["t"]
    assert item.blocks_changed < item.blocks_total == 4
    assert item.relative_l2 == pytest.approx(relative({"t": a}, {"t": b}, "t"), rel=1e-12)


def _floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("t", "I32", (2,), b"12345678"), ("t", "I32", (2,), b"12345679")),
        (("t", "F4", (2,), b"1"), ("t", "F4", (2,), b"2")),
        (("t", "F32", (2,), _floats(1, 2)), ("t", "F32", (2, 1), _floats(1, 3))),
        (("t", "F32", (2,), _floats(1, 2)), ("t", "F16", (2,), b"1234")),
        (("t", "F32", (2,), _floats(0, 0)), ("t", "F32", (2,), _floats(1, 0))),
        (("t", "F32", (2,), _floats(1, np.nan)), ("t", "F32", (2,), _floats(2, np.nan))),
        (("t", "F32", (2,), _floats(1, 2)), ("t", "F32", (2,), _floats(1, np.inf))),
    ],
    ids=["integers", "sub-byte", "shape", "dtype", "zero base", "NaN", "infinity"],
)
def test_where_there_is_no_distance(a: Tensor, b: Tensor, tmp_path: Path) -> None:
    """Integers, other shapes or types, a base of norm 0 and odd numbers have None, not a number."""
    item = of(pair(tmp_path, [a], [b]))["t"]
    assert (item.status, item.relative_l2, item.blocks_changed) == ("changed", None, 1)
    assert (item.dtype_a, item.shape_a, item.dtype, item.shape) == (*a[1:3], *b[1:3])
    assert item.blocks_changed <= item.blocks_total


def test_both_forms_are_told(tmp_path: Path) -> None:
    """Where a tensor's type or shape changed, both are told: `BF16>F16`, and in JSON each side's;
    one that only one side has has one."""
    a: list[Tensor] = [("t", "BF16", (2, 2), bytes(8)), ("old", "U8", (), b"1")]
    b: list[Tensor] = [("t", "F16", (4,), bytes(8)), ("new", "I8", (1,), b"1")]
    pair(tmp_path, a, b)
    mstore = Program(tmp_path / "store")
    # Of two refs, and of a ref and a directory.
    for other in ("b", tmp_path / "b"):
        lines = [line.split() for line in mstore.succeed("diff", "a", other).lines]
        told = {line[0]: line[1:4] for line in lines if line and line[0] in ("t", "old", "new")}
        assert told == {
            "t": ["changed", "BF16>F16", "2x2>4"],
            "old": ["removed", "U8", "scalar"],
            "new": ["added", "I8", "1"],
        }
        document = mstore.succeed("diff", "a", other, "--json").document
        keys = ("dtype_a", "dtype", "shape_a", "shape")
        assert {one["name"]: [one[key] for key in keys] for one in document["tensors"]} == {
            "t": ["BF16", "F16", [2, 2], [4]],
            "old": ["U8", "U8", [], []],
            "new": [None, "I8", None, [1]],
        }


def test_the_same_bytes_in_another_shape(tmp_path: Path) -> None:
    """Equal blocks of another shape are a changed tensor without a changed block."""
    data = bytes(range(24))
    report = pair(tmp_path, [("t", "U8", (4, 6), data)], [("t", "U8", (6, 4), data)])
    assert [(i.status, i.blocks_changed) for i in report.tensors] == [("changed", 0)]
