"""Lineage: what `log` and `show` tell, in an order that no clock can spoil."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mstore import MergeRequest, SnapshotId, Store
from mstore.blocks.location import Location
from mstore.blocks.schema import SNAPSHOTS
from mstore.snapshots import lineage
from mstore.snapshots.lineage import ancestry
from mstore.store import refs
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.snapshot import BASE, EXPERT, PREVIOUS, Parent, SnapshotRecord
from mstore.store.refs import BRANCH, Ref
from mstore.store.transaction import RefMove, Transaction
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import Id

FAMILY = families.layered(rows=40)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def put(store: Store, time: int, *parents: SnapshotId, ref: str | None = None) -> SnapshotId:
    """A snapshot of nothing with these parents, made at this time."""
    catalog = store._catalog
    roles = [PREVIOUS, BASE, EXPERT]
    with Transaction(catalog, "test") as transaction:
        record = SnapshotRecord(
            manifest=transaction.put_record(Manifest(())),
            parents=tuple(Parent(roles[min(n, 2)], parent) for n, parent in enumerate(parents)),
            made="add",
            origin=None,
            author="",
            plan=None,
            coverage=None,
            message=f"at {time}",
            time_ns=time,
            tool="test",
        )
        new = refs.Ref(refs.BRANCH, record.id())
        current = None if ref is None else catalog.ref(ref)
        moves = [] if ref is None else [RefMove(ref, current, new, "test")]
        transaction.commit(snapshots=[record], moves=moves)
    return SnapshotId(record.id())


def times(store: Store, revision: str | None = None, limit: int | None = None) -> list[int]:
    return [report.time_ns for report in store.log(revision, limit)]


def test_children_come_before_parents_whatever_the_clock(store: Store) -> None:
    """Newest first among those whose children were all listed; a wrong clock moves no parent up."""
    root = put(store, 90)
    left = put(store, 20, root)
    right = put(store, 50, root)
    tip = put(store, 10, left, right, ref="tip")
    assert times(store, "tip") == [10, 50, 20, 90]
    put(store, 15, tip, ref="later")
    put(store, 70, right, ref="other")
    assert times(store) == [70, 15, 10, 50, 20, 90]
    assert times(store, "other") == [70, 50, 90]
    assert times(store, limit=2) == [70, 15]
    assert times(store, "tip", 0) == []


def test_equal_times_come_in_order_of_ids(store: Store) -> None:
    """Where times are equal, ids decide: the order is always the same."""
    tips = sorted(put(store, 5, put(store, n), ref=f"r{n}") for n in range(5))
    assert [report.snapshot for report in store.log(limit=5)] == tips


@settings(max_examples=20)
@given(st.integers(0, 10**9))
def test_any_graph(seed: int) -> None:
    """For any lineage each snapshot is listed once, after all of its children."""
    draw = random.Random(seed)
    records: dict[SnapshotId, SnapshotRecord] = {}
    for number in range(draw.randrange(1, 14)):
        known = list(records)
        parents = draw.sample(known, min(len(known), draw.randrange(4)))
        record = SnapshotRecord(
            manifest=Manifest(()).id(),
            parents=tuple(Parent(EXPERT, parent) for parent in parents),
            made="add",
            origin=None,
            author="",
            plan=None,
            coverage=None,
            message=str(number),
            time_ns=draw.randrange(4),
            tool="test",
        )
        records[SnapshotId(record.id())] = record

    class Records:
        """As much of a catalog as lineage asks for."""

        def snapshot_if_there(self, id: SnapshotId) -> SnapshotRecord:
            return records[id]

    starts = draw.sample(list(records), draw.randrange(1, len(records) + 1))
    found = ancestry(Records(), starts)  # type: ignore[arg-type]
    reached = set(starts)
    for id in reversed(list(records)):
        if id in reached:
            reached.update(parent.snapshot_id() for parent in records[id].parents)
    assert set(found) == reached
    assert len(found) == len(reached)
    place = {id: number for number, id in enumerate(found)}
    for id in found:
        for parent in records[id].parents:
            assert place[id] < place[parent.snapshot_id()]


@pytest.mark.parametrize("at_most", [-1, 3])
@settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9))
def test_a_limit_only_shortens_the_list(
    seed: int, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any lineage, clocks wrong and records lost: with a limit the list begins the same."""
    monkeypatch.setattr("mstore.snapshots.lineage._WALKED", 0)
    monkeypatch.setattr("mstore.snapshots.lineage._WALKED_ANYWAY", at_most)
    draw = random.Random(seed)
    ids = [SnapshotId(draw.randbytes(32)) for _ in range(draw.randrange(1, 16))]
    parents = {
        id: draw.sample(ids[:number], draw.randrange(min(number, 3) + 1))
        for number, id in enumerate(ids)
    }
    clock = draw.choice([lambda number: 10 + number, lambda _: draw.randrange(1, 5)])
    made = {id: clock(number) for number, id in enumerate(ids)}
    lost = set(draw.sample(ids, draw.randrange(len(ids)))) if draw.randrange(2) else set()
    unlisted = set(draw.sample(ids, draw.randrange(len(ids)))) if draw.randrange(2) else set()
    damaged = draw.randrange(8) == 0
    read: set[SnapshotId] = set()

    class Records:
        """As much of a catalog as ancestry asks for."""

        def snapshot_if_there(self, id: SnapshotId) -> SnapshotRecord | None:
            read.add(id)
            if id in lost:
                return None
            edges = tuple(Parent(EXPERT, parent) for parent in parents[id])
            manifest = Manifest(()).id()
            return SnapshotRecord(
                manifest, edges, "add", None, "", None, None, "", made[id], "test"
            )

        def times(self, asked: Iterable[SnapshotId]) -> dict[SnapshotId, int]:
            if damaged:
                raise Corrupt("a damaged row")
            return {id: made[id] for id in asked if id not in unlisted}

        def children(self, id: SnapshotId) -> set[SnapshotId]:
            return {child for child, of in parents.items() if id in of}

    starts = draw.sample(ids, draw.randrange(1, len(ids) + 1))
    catalog: Any = Records()
    whole = ancestry(catalog, starts)
    for limit in range(len(whole) + 2):
        assert ancestry(catalog, starts, limit) == whole[:limit]


@pytest.mark.rest
def test_a_limit_reads_few_records(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of many snapshots are found without reading the records of the others."""
    base = put(store, 1, ref="base")
    for number in range(100):
        put(store, 2 + number, base, ref=f"r{number}")
    before = times(store)
    read: list[SnapshotId] = []
    with Store.open(store.path) as other:
        catalog = other._catalog
        whole = catalog.snapshot

        def reading(id: SnapshotId) -> SnapshotRecord:
            read.append(id)
            return whole(id)

        monkeypatch.setattr(catalog, "snapshot", reading)
        assert times(other, limit=3) == before[:3]
    assert len(set(read)) < 20


@pytest.mark.parametrize("told", [5, 15, 25, 40])
def test_records_decide_where_a_row_has_another_time(
    store: Store, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a wrong time moves nothing in the list that reaches its snapshot."""
    monkeypatch.setattr("mstore.snapshots.lineage._WALKED", 0)
    monkeypatch.setattr("mstore.snapshots.lineage._WALKED_ANYWAY", 0)
    made = {time: put(store, time, ref=f"r{time}") for time in (10, 20, 30)}
    index = store._catalog.index
    for time, id in made.items():
        with index.env.write() as rows:
            value = index.get(rows, SNAPSHOTS, id)
            assert value is not None
            index.put(rows, SNAPSHOTS, id, (value[0], told))
        assert times(store, limit=3) == [30, 20, 10]
        if told >= time:
            assert times(store, limit=1) == [30]
        with index.env.write() as rows:
            index.put(rows, SNAPSHOTS, id, value)


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_what_a_removal_leaves_without_a_name(seed: int) -> None:
    """For any lineage, with records missing too: as many snapshots as only the removed led to."""
    draw = random.Random(seed)
    ids = [SnapshotId(draw.randbytes(32)) for _ in range(draw.randrange(1, 12))]
    parents = {
        id: draw.sample(ids[:number], draw.randrange(min(number, 3) + 1))
        for number, id in enumerate(ids)
    }
    lost = set(draw.sample(ids, draw.randrange(len(ids)))) if draw.randrange(2) else set()
    named = {f"r{number}": draw.choice(ids) for number in range(draw.randrange(1, 6))}
    removed = set(draw.sample(sorted(named), draw.randrange(1, len(named) + 1)))

    class Records:
        """As much of a catalog as lineage asks for."""

        def refs(self) -> dict[str, Ref]:
            return {name: Ref(BRANCH, id) for name, id in named.items()}

        def snapshot_if_there(self, id: SnapshotId) -> SnapshotRecord | None:
            if id in lost:
                return None
            edges = tuple(Parent(EXPERT, parent) for parent in parents[id])
            manifest = Manifest(()).id()
            return SnapshotRecord(manifest, edges, "add", None, "", None, None, "", 0, "test")

        def children(self, id: SnapshotId) -> set[SnapshotId]:
            return {child for child, of in parents.items() if id in of}

    def reached(names: set[str]) -> set[SnapshotId]:
        found = {named[name] for name in names}
        for id in reversed(ids):
            if id in found and id not in lost:
                found.update(parents[id])
        return found

    wanted = reached(set(named)) - reached(set(named) - removed) - lost
    found = lineage.unnamed_without(Records(), removed)  # type: ignore[arg-type]
    assert found == len(wanted)


def test_log_of_a_family(store: Store, tmp_path: Path) -> None:
    """A merge tells of base and experts by role, of its plan; refs stand where they point."""
    root = FAMILY.write(tmp_path / "family")
    base = store.add(root / "base", name="base", message="the base").snapshot
    expert = store.add(root / "e0", name="e0", base="base").snapshot
    plan = store.plan(
        MergeRequest(base="base", experts=["e0"], method="ties", parameters={"density": 0.5})
    )
    merged = store.merge(plan, name="merged", message="once more").snapshot
    store.tag("v1", "merged")

    told = store.log("merged")
    assert [(item.snapshot, item.made) for item in told] == [
        (merged, "merge"),
        (expert, "add"),
        (base, "add"),
    ]
    assert [(p.role, p.snapshot) for p in told[0].parents] == [("base", base), ("expert", expert)]
    assert (told[0].plan, told[0].method, told[0].message) == (plan.plan, "ties", "once more")
    assert (told[0].refs, told[1].refs) == (("merged", "v1"), ("e0",))
    assert (told[2].plan, told[2].method, told[2].message) == (None, None, "the base")
    assert told == store["merged"].lineage() == store.log(str(merged)[:10])
    assert store.show("v1") == told[0]

    files = store.files("base")
    assert told[2].files == len(files)
    assert told[2].plain_bytes == sum(file.size for file in files)
    assert told[2].tensors == sum(file.tensors for file in files) == len(FAMILY.base)
    on_disk = {path: len(data) for path, data in families.contents(root / "base").items()}
    assert {file.path: file.size for file in files} == on_disk

    listed = {ref.name: (ref.kind, ref.snapshot, ref.manifest) for ref in store.refs()}
    manifest = store["merged"].manifest
    assert listed["v1"] == ("tag", merged, manifest)
    assert listed["merged"] == ("branch", merged, manifest)
    assert list(listed) == sorted(listed)


def test_removed_refs_leave_the_log(store: Store) -> None:
    """The log of all refs reaches only what they reach; a removed one's snapshot keeps its id."""
    kept = put(store, 1, ref="kept")
    gone = put(store, 2, kept, ref="gone")
    assert times(store) == [2, 1]
    store.remove("gone")
    assert times(store) == [1]
    assert times(store, str(gone)) == [2, 1]
    assert store.show(str(gone)).refs == ()
    with pytest.raises(NotFound):
        store.log("gone")


def test_an_empty_store_has_an_empty_log(store: Store) -> None:
    """Nothing was added: nothing to tell, and that is no error."""
    assert (store.log(), store.refs(), store.snapshot_ids()) == ([], [], [])


def test_refs_say_when_they_moved(tmp_path: Path) -> None:
    """A ref's time is that of its last move, not that of the snapshot that it points at."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for number in range(2):
            directory = tmp_path / str(number)
            directory.mkdir()
            save_file({"a": np.full(4, number, dtype=np.float32)}, directory / "model.safetensors")
            store.add(directory, name="a")
        made = store.show("a~1").time_ns
        store.reset("a", "a~1")
        (ref,) = store.refs()
        assert ref.snapshot == store.show("a").snapshot
        assert ref.time_ns == store.reflog("a")[0].time_ns > made


def records_read(path: Path, refs: int) -> int:
    """How many records naming takes that is done in a store of so many refs."""
    read = []
    with Store.init(path, block_size=1 << 16) as store:
        for number in range(refs):
            data = {"a": np.full(4, number, dtype=np.float32)}
            save_file(data, path / "one.safetensors")
            store.add(path / "one.safetensors", name=f"r{number}")
    with Store.open(path) as store:
        record_bytes = store._catalog.record_bytes

        def counted(id: Id, location: Location) -> bytes:
            read.append(id)
            return record_bytes(id, location)

        store._catalog.record_bytes = counted  # type: ignore[method-assign]
        store.tag("v1", "r0")
        store.reset("r1", "r0")
        store.remove("v1", "r1")
    return len(read)


def test_one_ref_is_told_without_the_others(tmp_path: Path) -> None:
    """tag, reset and rm read as many records for many refs as for few."""
    assert records_read(tmp_path / "many", 20) == records_read(tmp_path / "few", 2)


def test_tensors_are_listed(tmp_path: Path) -> None:
    """The tensors of a snapshot are listed with dtype, shape, size and file, in data order."""
    tensors = {"b": np.zeros((2, 3), dtype=np.float16), "a": np.zeros((), dtype=np.int64)}
    save_file(tensors, tmp_path / "one.safetensors")
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(tmp_path / "one.safetensors", name="one")
        found = {t.name: (t.dtype, t.shape, t.nbytes, t.file) for t in store.tensors("one")}
    assert found == {
        "a": ("I64", (), 8, "one.safetensors"),
        "b": ("F16", (2, 3), 12, "one.safetensors"),
    }
