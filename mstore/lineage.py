"""Lineage: snapshots and where they came from, as `log` and `show` tell it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress

from mstore.errors import Corrupt, NotFound
from mstore.ids import PlanId, SnapshotId
from mstore.objects.plan import Plan
from mstore.objects.snapshot import SnapshotRecord
from mstore.reports import (
    FileReport,
    ParentReport,
    ReflogReport,
    RefReport,
    SnapshotReport,
    TensorOverflow,
    TensorReport,
)
from mstore.store import contents
from mstore.store import refs as ref_rows
from mstore.store.catalog import Catalog
from mstore.store.plans import overflow_of


def names_of(catalog: Catalog) -> dict[SnapshotId, list[str]]:
    """The refs that point at each snapshot."""
    found: dict[SnapshotId, list[str]] = defaultdict(list)
    for name, ref in catalog.refs().items():
        found[ref.snapshot_id()].append(name)
    return found


def describe(
    catalog: Catalog, id: SnapshotId, names: dict[SnapshotId, list[str]]
) -> SnapshotReport:
    """One snapshot."""
    # Of one that was asked for, that it is missing is an error.
    catalog.manifest(catalog.snapshot(id).manifest_id())
    return _described(catalog, id, names, _pruned(catalog, names))


def _pruned(catalog: Catalog, names: dict[SnapshotId, list[str]]) -> set[SnapshotId]:
    """The snapshots whose contents were let go; a ref keeps those of the one that it names."""
    with catalog.index.env.read() as transaction:
        return contents.pruned(catalog.index, transaction) - names.keys()


def _described(
    catalog: Catalog,
    id: SnapshotId,
    names: dict[SnapshotId, list[str]],
    pruned: set[SnapshotId],
) -> SnapshotReport:
    record = catalog.snapshot_if_there(id)
    manifest = None if record is None else catalog.manifest_if_there(record.manifest_id())
    if record is None or manifest is None:
        return _missing(id, record, names)
    plan_id = record.plan_id()
    return SnapshotReport(
        snapshot=id,
        manifest=record.manifest_id(),
        parents=parents(record, names),
        origin=record.origin,
        plan=plan_id,
        method=None if plan_id is None else _method(catalog, plan_id),
        virtual=record.is_virtual,
        message=record.message,
        time_ns=record.time_ns,
        refs=tuple(names.get(id, ())),
        plain_bytes=manifest.plain_bytes(),
        files=len(manifest.files),
        tensors=len(manifest.tensors()),
        pruned=id in pruned,
        overflow=() if plan_id is None else _overflow(catalog, plan_id),
    )


def _missing(
    id: SnapshotId, record: SnapshotRecord | None, names: dict[SnapshotId, list[str]]
) -> SnapshotReport:
    """All that is known of a snapshot whose record, or manifest, is lost."""
    return SnapshotReport(
        snapshot=id,
        manifest=None if record is None else record.manifest_id(),
        parents=() if record is None else parents(record, names),
        origin="" if record is None else record.origin,
        plan=None if record is None else record.plan_id(),
        method=None,
        virtual=record is not None and record.is_virtual,
        message="" if record is None else record.message,
        time_ns=0 if record is None else record.time_ns,
        refs=tuple(names.get(id, ())),
        plain_bytes=0,
        files=0,
        tensors=0,
        missing=True,
    )


def _overflow(catalog: Catalog, plan: PlanId) -> tuple[TensorOverflow, ...]:
    with suppress(Corrupt):
        return overflow_of(catalog, plan)
    return ()


def _method(catalog: Catalog, plan: PlanId) -> str | None:
    with suppress(NotFound, Corrupt):
        return catalog.record(Plan, plan).method
    return None


def plain_bytes(catalog: Catalog, id: SnapshotId) -> int:
    """Bytes of a snapshot's files; none where it is missing."""
    record = catalog.snapshot_if_there(id)
    manifest = None if record is None else catalog.manifest_if_there(record.manifest_id())
    return 0 if manifest is None else manifest.plain_bytes()


def parents(record: SnapshotRecord, names: dict[SnapshotId, list[str]]) -> tuple[ParentReport, ...]:
    """What a snapshot was made from, in the order of its record."""
    return tuple(
        ParentReport(p.role, p.snapshot_id(), tuple(names.get(p.snapshot_id(), ())))
        for p in record.parents
    )


def ancestry(
    catalog: Catalog, starts: Iterable[SnapshotId], limit: int | None = None
) -> list[SnapshotId]:
    """The snapshots that are reached from `starts`: children before parents, newest first.

    A parent never comes before its child, even where clocks disagree.  One that is missing is
    among them, and nothing is known of where it came from.
    """
    roots = sorted(set(starts))
    waiting = _children_count(catalog, roots)
    ready = [(-_time_ns(catalog, id), id) for id in roots if waiting[id] == 0]
    heapq.heapify(ready)
    found: list[SnapshotId] = []
    while ready and (limit is None or len(found) < limit):
        _, id = heapq.heappop(ready)
        found.append(id)
        for parent in _parents(catalog, id):
            waiting[parent] -= 1
            if waiting[parent] == 0:
                heapq.heappush(ready, (-_time_ns(catalog, parent), parent))
    return found


def _time_ns(catalog: Catalog, id: SnapshotId) -> int:
    record = catalog.snapshot_if_there(id)
    return 0 if record is None else record.time_ns


def _parents(catalog: Catalog, id: SnapshotId) -> set[SnapshotId]:
    record = catalog.snapshot_if_there(id)
    return set() if record is None else {parent.snapshot_id() for parent in record.parents}


def _children_count(catalog: Catalog, roots: list[SnapshotId]) -> dict[SnapshotId, int]:
    """How many children, within what is reached, each snapshot has."""
    counts: dict[SnapshotId, int] = dict.fromkeys(roots, 0)
    stack = list(roots)
    seen = set(roots)
    while stack:
        for parent in _parents(catalog, stack.pop()):
            counts[parent] = counts.get(parent, 0) + 1
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return counts


def log(
    catalog: Catalog, starts: Iterable[SnapshotId] | None, limit: int | None
) -> list[SnapshotReport]:
    """The lineage of some snapshots, or of all refs."""
    names = names_of(catalog)
    reached = ancestry(catalog, names if starts is None else starts, limit)
    pruned = _pruned(catalog, names)
    return [_described(catalog, id, names, pruned) for id in reached]


def unnamed_without(catalog: Catalog, removed: set[str]) -> int:
    """How many snapshots no ref leads to once these are removed, of those that refs lead to now."""
    named = catalog.refs()
    kept = {ref.snapshot_id() for name, ref in named.items() if name not in removed}
    waiting = [ref.snapshot_id() for name, ref in named.items() if name in removed]
    led_to: dict[SnapshotId, bool] = {}
    gone: set[SnapshotId] = set()
    while waiting:
        id = waiting.pop()
        # What a ref leads to leads on to all that it came from.
        if id not in gone and not _is_led_to(catalog, id, kept, led_to):
            gone.add(id)
            waiting += _parents(catalog, id)
    return sum(catalog.snapshot_if_there(id) is not None for id in gone)


def _is_led_to(
    catalog: Catalog, id: SnapshotId, tips: AbstractSet[SnapshotId], known: dict[SnapshotId, bool]
) -> bool:
    """Whether one of these snapshots is this one or came from it, looking from parent to child.

    known: what was found out before, to be used again for the same tips.
    """
    passed: list[SnapshotId] = []
    waiting = [id]
    while waiting:
        one = waiting.pop()
        if one in known and not known[one]:
            continue
        # Of one that is missing, nothing is known of where it came from.
        if one != id and catalog.snapshot_if_there(one) is None:
            continue
        if one in tips or one in known:
            for other in passed:
                del known[other]
            known[id] = True
            return True
        known[one] = False
        passed.append(one)
        waiting += sorted(catalog.children(one), key=tips.__contains__)
    return False


def reflog(catalog: Catalog, name: str | None) -> list[ReflogReport]:
    """The moves of a name, or of all names that ever were, newest first.  Raises NotFound."""
    with catalog.index.env.read() as transaction:
        if name is None:
            every: dict[str, list[ref_rows.Move]] = defaultdict(list)
            for one, move in ref_rows.walk_reflogs(catalog.index, transaction):
                every[one].append(move)
        else:
            every = {name: ref_rows.reflog(catalog.index, transaction, name)}
            if not every[name]:
                ref_rows.require(catalog.index, transaction, name)
    found = [
        ReflogReport(
            name=one,
            position=position,
            old=None if move.old is None else SnapshotId(move.old),
            new=None if move.new is None else SnapshotId(move.new),
            action=move.action,
            time_ns=move.time_ns,
        )
        for one, moves in every.items()
        for position, move in enumerate(reversed(moves))
    ]
    # Within a name the positions decide, whatever a clock said.
    return found if name is not None else sorted(found, key=lambda move: -move.time_ns)


def files(catalog: Catalog, id: SnapshotId) -> list[FileReport]:
    """The files of a snapshot, by path."""
    manifest = catalog.manifest(catalog.snapshot(id).manifest_id())
    return [
        FileReport(file.path, file.size, sum(1 for _ in file.tensors())) for file in manifest.files
    ]


def refs(catalog: Catalog) -> list[RefReport]:
    """All refs by name; `time_ns` is when each last moved."""
    moved: dict[str, int] = {}
    with catalog.index.env.read() as transaction:
        named = dict(ref_rows.walk(catalog.index, transaction))
        for name, move in ref_rows.walk_reflogs(catalog.index, transaction):
            moved[name] = move.time_ns
    return [_named(catalog, name, ref, moved.get(name, 0)) for name, ref in named.items()]


def ref(catalog: Catalog, name: str) -> RefReport:
    """One ref; looks at no other.  Raises NotFound."""
    with catalog.index.env.read() as transaction:
        found = ref_rows.require(catalog.index, transaction, name)
        moves = ref_rows.reflog(catalog.index, transaction, name)
    return _named(catalog, name, found, moves[-1].time_ns if moves else 0)


def _named(catalog: Catalog, name: str, ref: ref_rows.Ref, time_ns: int) -> RefReport:
    id = ref.snapshot_id()
    record = catalog.snapshot_if_there(id)
    manifest = None if record is None else record.manifest_id()
    return RefReport(name, ref.kind, id, manifest, time_ns, missing=record is None)


def tensors(catalog: Catalog, id: SnapshotId) -> list[TensorReport]:
    """The tensors of a snapshot, in file and data order."""
    manifest = catalog.manifest(catalog.snapshot(id).manifest_id())
    found = []
    for file in manifest.files:
        for part in file.tensors():
            assert part.name is not None
            tensor = catalog.content(part.tensor_id())
            found.append(
                TensorReport(part.name, tensor.dtype, tensor.shape, tensor.nbytes, file.path)
            )
    return found
