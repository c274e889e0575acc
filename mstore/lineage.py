"""Lineage: snapshots and where they came from, as `log` and `show` tell it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from mstore.ids import SnapshotId
from mstore.objects.plan import Plan
from mstore.objects.snapshot import SnapshotRecord
from mstore.reports import (
    FileReport,
    ParentReport,
    ReflogReport,
    RefReport,
    SnapshotReport,
    TensorReport,
)
from mstore.store import contents
from mstore.store import refs as ref_rows
from mstore.store.catalog import Catalog


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
    record = catalog.snapshot(id)
    manifest = catalog.manifest(record.manifest_id())
    plan_id = record.plan_id()
    return SnapshotReport(
        snapshot=id,
        manifest=record.manifest_id(),
        parents=parents(record, names),
        origin=record.origin,
        plan=plan_id,
        method=None if plan_id is None else catalog.record(Plan, plan_id).method,
        virtual=record.is_virtual,
        message=record.message,
        time_ns=record.time_ns,
        refs=tuple(names.get(id, ())),
        plain_bytes=manifest.plain_bytes(),
        files=len(manifest.files),
        tensors=len(manifest.tensors()),
        pruned=id in pruned,
    )


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

    A parent never comes before its child, even where clocks disagree.
    """
    roots = sorted(set(starts))
    waiting = _children_count(catalog, roots)
    ready = [(-catalog.snapshot(id).time_ns, id) for id in roots if waiting[id] == 0]
    heapq.heapify(ready)
    found: list[SnapshotId] = []
    while ready and (limit is None or len(found) < limit):
        _, id = heapq.heappop(ready)
        found.append(id)
        for parent in {p.snapshot_id() for p in catalog.snapshot(id).parents}:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                heapq.heappush(ready, (-catalog.snapshot(parent).time_ns, parent))
    return found


def _children_count(catalog: Catalog, roots: list[SnapshotId]) -> dict[SnapshotId, int]:
    """How many children, within what is reached, each snapshot has."""
    counts: dict[SnapshotId, int] = dict.fromkeys(roots, 0)
    stack = list(roots)
    seen = set(roots)
    while stack:
        for parent in {p.snapshot_id() for p in catalog.snapshot(stack.pop()).parents}:
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
    kept = (ref.snapshot_id() for name, ref in catalog.refs().items() if name not in removed)
    return len(ancestry(catalog, names_of(catalog))) - len(ancestry(catalog, kept))


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
    with catalog.index.env.read() as transaction:
        moved = {
            name: ref_rows.reflog(catalog.index, transaction, name)[-1].time_ns
            for name, _ in ref_rows.walk(catalog.index, transaction)
        }
    found = []
    for name, ref in catalog.refs().items():
        manifest = catalog.snapshot(ref.snapshot_id()).manifest_id()
        found.append(RefReport(name, ref.kind, ref.snapshot_id(), manifest, moved.get(name, 0)))
    return found


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
