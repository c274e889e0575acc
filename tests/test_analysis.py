"""Analysis of stored pairs: the same statistics as `add --base` takes, and only what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK, Family

from mstore import MergeRequest, Store
from mstore.models.stats.store import PAIRS
from mstore.models.stats.table import DeltaTable
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest, Incompatible, NotFound
from mstore.terms.ids import TensorId
from mstore.terms.report import Progress

FAMILY = families.layered(rows=70)
WITHOUT = {"model.empty", "model.inv_freq", "model.steps"}
"""Tensors of no elements, or of dtypes whose differences are not measured."""
MIXED = families.layered(rows=70, expert_dtypes=("F32", "F16", "BF16"))


def build(root: Path) -> None:
    """The family, and a store that has it and took no statistics, closed."""
    FAMILY.write(root / "family")
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as opened:
        for name in ("base", *FAMILY.names):
            opened.add(root / "family" / name, name=name)


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def tables(store: Store, expert: str, base: str) -> dict[str, DeltaTable | None]:
    """What is kept of each tensor that differs; of tied ones, under the first name."""
    bases, experts = _ids(store, base), _ids(store, expert)
    first: dict[tuple[TensorId, TensorId], str] = {}
    for name in bases:
        if bases[name] != experts[name] and name not in WITHOUT:
            first.setdefault((bases[name], experts[name]), name)
    return dict(zip(first.values(), store._statistics.pairs(list(first)), strict=True))


def changed_bytes(base: families.Array, expert: families.Array) -> int:
    """Stored bytes of the expert's blocks that differ from the base's at the same place."""
    ours, theirs = base.tobytes(), expert.tobytes()
    total = 0
    for start in range(0, len(ours), BLOCK):
        block = theirs[start : start + BLOCK]
        element = block[: expert.itemsize]
        repeated = len(block) > len(element) and block == element * (len(block) // len(element))
        if block != ours[start : start + BLOCK]:
            total += len(element) if repeated else len(block)
    return total


def _ids(store: Store, revision: str) -> dict[str, TensorId]:
    catalog = store._catalog
    return tensors_of(catalog, catalog.manifest_of(catalog.resolve(revision)))


def test_the_same_as_add_takes(store: Store, tmp_path: Path) -> None:
    """Statistics of a stored pair are, bit for bit, those of `add --base`; bytes and counts fit."""
    with Store.init(tmp_path / "other", block_size=BLOCK, codec="raw") as other:
        other.add(tmp_path / "family" / "base", name="base")
        for name in FAMILY.names:
            other.add(tmp_path / "family" / name, name=name, base="base")
            # A tensor that an earlier expert has too is known from there.
            missing = [t for t, table in tables(store, name, "base").items() if table is None]
            report = store.analyze(name, "base", threads=3)
            taken, expected = tables(store, name, "base"), tables(other, name, "base")
            assert taken == expected
            assert None not in taken.values()
            assert report.tensors_measured == len(missing) > 0
            assert report.tensors_known == len(taken) - len(missing)
            expert = FAMILY.experts[int(name[1:])]
            differing = sum(changed_bytes(FAMILY.base[t], expert[t]) for t in missing)
            assert report.expert_bytes_read == differing > 0
            for id in _ids(other, "base").values():
                assert store._statistics.squares(id) == other._statistics.squares(id)


def test_a_second_run_reads_nothing(store: Store) -> None:
    """What is known stays; a merge then reads nothing for statistics either."""
    first = store.analyze("e0", "base")
    again = store.analyze("e0", "base")
    assert (again.tensors_measured, again.expert_bytes_read, again.statistics_bytes) == (0, 0, 0)
    assert again.tensors_known == first.tensors_measured
    assert again.tensors_equal == first.tensors_equal
    plan = store.plan(
        MergeRequest(
            base="base", experts=["e0"], method="ties", parameters={"density": 0.5}, analyze=False
        )
    )
    assert plan.analyze_bytes_read == 0


def test_an_interrupted_run_keeps_what_it_took(store: Store) -> None:
    """After Ctrl-C the next run measures only the rest; progress reaches the end."""
    whole = len(tables(store, "e0", "base"))

    def stop(progress: Progress) -> None:
        if 2 * progress.done > progress.total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.analyze("e0", "base", progress=stop)
    kept = sum(table is not None for table in tables(store, "e0", "base").values())
    assert 0 < kept < whole
    seen: list[Progress] = []
    rest = store.analyze("e0", "base", progress=seen.append)
    assert (rest.tensors_known, rest.tensors_measured) == (kept, whole - kept)
    assert seen[-1].done == seen[-1].total
    assert {tick.phase for tick in seen} == {"analyze"}


def test_other_dtypes_than_the_base(tmp_path: Path) -> None:
    """An expert stored in another floating-point type has statistics too, chunk by chunk."""
    root = MIXED.write(tmp_path / "family")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", *MIXED.names):
            store.add(root / name, name=name)
        for name in MIXED.names:
            store.analyze(name, "base")
            assert None not in tables(store, name, "base").values()


def test_damaged_statistics_are_taken_again(store: Store) -> None:
    """A row that does not decode counts as missing, alone and among others."""
    store.analyze("e0", "base")
    good = tables(store, "e0", "base")
    name = next(iter(good))
    base, expert = _ids(store, "base")[name], _ids(store, "e0")[name]
    store._statistics._put(PAIRS, [(base + expert, b"MDT2 but no more")])
    store._statistics.flush()
    assert store._statistics.pair(base, expert) is None
    assert [n for n, table in tables(store, "e0", "base").items() if table is None] == [name]
    assert store.analyze("e0", "base").tensors_measured == 1
    assert tables(store, "e0", "base") == good


@pytest.mark.parametrize("row", [b"", b"short", bytes(12), b"\xff" * 12])
def test_damaged_places_count_as_missing(store: Store, row: bytes) -> None:
    """A row that says no place, or one where no table lies, is no row."""
    store.analyze("e0", "base")
    good = tables(store, "e0", "base")
    name = list(good)[-1]
    key = _ids(store, "base")[name] + _ids(store, "e0")[name]
    environment = store._statistics._env
    with environment.write() as transaction:
        transaction.put(key, row, db=environment.databases["pairs"])
    assert [n for n, table in tables(store, "e0", "base").items() if table is None] == [name]
    store.analyze("e0", "base")
    assert tables(store, "e0", "base") == good


def test_tables_fill_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are found wherever they lie: alone in a batch, behind others, in a later flush."""
    monkeypatch.setattr("mstore.models.stats.store.BATCH_BYTES", 1500)
    for name in FAMILY.names:
        store.analyze(name, "base")
    environment = store._statistics._env
    with environment.read() as transaction:
        batches = transaction.stat(db=environment.databases["tables"])["entries"]
        rows = transaction.stat(db=environment.databases["pairs"])["entries"]
    assert 4 < batches < rows
    kept = {name: tables(store, name, "base") for name in FAMILY.names}
    monkeypatch.undo()
    for name in FAMILY.names:
        assert None not in kept[name].values()
    with Store.init(store.path.parent / "other", block_size=BLOCK) as other:
        other.add(store.path.parent / "family" / "base", name="base")
        for name in FAMILY.names:
            other.add(store.path.parent / "family" / name, name=name, base="base")
            assert tables(other, name, "base") == kept[name]


def test_other_shapes_are_refused(store: Store, tmp_path: Path) -> None:
    """Another architecture is refused before anything is read, with the command that shows why."""
    other = {name: array.copy() for name, array in FAMILY.base.items()}
    other["extra"] = np.zeros(5, dtype=np.float32)
    Family(other, ()).write(tmp_path / "other")
    store.add(tmp_path / "other" / "base", name="other")
    with pytest.raises(Incompatible, match="extra is not in the base") as refused:
        store.analyze("other", "base")
    assert (refused.value.hint or "").startswith("store.diff('base', 'other'); skip=[PATTERN]")
    with pytest.raises(NotFound):
        store.analyze("nothing", "base")
    with pytest.raises(BadRequest):
        store.analyze("e0", "base", threads=0)


def test_on_the_command_line(tmp_path: Path) -> None:
    """For people: what was done, and that there is nothing to do; two experts make a pair too."""
    root = FAMILY.write(tmp_path / "family")
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    for name in ("base", "e0", "e1"):
        mstore.succeed("add", root / name, "--name", name, "--base", "none")
    assert mstore.succeed("analyze", "e0", "--base", "e1").out.startswith(
        "analyzed e0 against e1\n"
    )
    assert mstore.succeed("analyze", "e0", "--base", "e1").out.startswith("nothing to do: e0")
    document = mstore.succeed("analyze", "e0", "--base", "base", "--json").document
    assert document["tensors_measured"] > 0
    assert document["statistics_bytes"] > 0
