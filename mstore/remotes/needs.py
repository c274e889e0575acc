"""What snapshots need so that they can be read elsewhere: records, and blocks in file order.

    named snapshot      its contents, and all ancestors over every parent role
    ancestor            its record, manifest, plan and coverage; its contents only if asked for
    virtual snapshot    the contents of its plan's inputs, too
    note                goes with its snapshot

What a difference is made to is not here: that depends on how a block lies at rest. Where records
come from is the source's: the store, for a push; the remote, and the store, for a fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from mstore.blocks.location import Key
from mstore.blocks.packs import Kind
from mstore.blocks.schema import NOTES, PRUNED
from mstore.store import listing
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import Record
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor, VirtualTensor
from mstore.terms.ids import NoteId, SnapshotId, TensorId, split_ids

R = TypeVar("R", bound=Record)
_SMALL = 1 << 20
"""Longest header or file without tensors that is needed before anything reads it, in bytes."""
_TOGETHER = 4096
"""Records that are asked for at once."""


class RecordSource(Protocol):
    """Where records come from."""

    def load(self, kind: type[R], ids: Sequence[bytes]) -> list[R]:
        """Return these records. Raises Corrupt or NotFound for one that is not there."""

    def contents(self, ids: Sequence[TensorId]) -> list[Tensor | VirtualTensor]:
        """Return what parts of manifests name."""

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[tuple[SnapshotId, NoteId]]:
        """Return the notes of snapshots."""

    def is_known(self, snapshot: SnapshotId) -> bool:
        """Return whether the source has a snapshot's record."""

    def has_contents(self, snapshot: SnapshotId) -> bool:
        """Return whether the source has a snapshot's contents."""

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        """Return which of these need no look: the target has them, and all that they need."""


class LocalRecords:
    """The records of this store."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def load(self, kind: type[R], ids: Sequence[bytes]) -> list[R]:
        return [self._catalog.record(kind, kind.id_type(id)) for id in ids]

    def contents(self, ids: Sequence[TensorId]) -> list[Tensor | VirtualTensor]:
        self._catalog.preload_tensors(ids)
        return [self._catalog.content(id) for id in ids]

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[tuple[SnapshotId, NoteId]]:
        index = self._catalog.index
        with index.env.read() as transaction:
            return [key for one in snapshots for key, _ in index.walk(transaction, NOTES, one)]

    def is_known(self, snapshot: SnapshotId) -> bool:
        with self._catalog.index.env.read() as transaction:
            return listing.is_listed(self._catalog.index, transaction, snapshot)

    def has_contents(self, snapshot: SnapshotId) -> bool:
        with self._catalog.index.env.read() as transaction:
            return self._catalog.index.get(transaction, PRUNED, snapshot) is None

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        # The remote may have a record, and not what it needs.
        return [False] * len(ids)


class Needs(msgspec.Struct):
    """What snapshots need, each thing once, in the order in which it was found.

    snapshots: children before their parents. whole: those whose contents are needed.
    weights: whether all their blocks are; else only those of headers and other small files.
    """

    snapshots: dict[SnapshotId, SnapshotRecord] = msgspec.field(default_factory=dict)
    whole: set[SnapshotId] = msgspec.field(default_factory=set)
    records: dict[Key, None] = msgspec.field(default_factory=dict)
    blocks: dict[bytes, None] = msgspec.field(default_factory=dict)
    notes: list[tuple[SnapshotId, NoteId]] = msgspec.field(default_factory=list)
    weights: bool = True

    def by_kind(self) -> dict[Kind, list[bytes]]:
        """Return the ids of all records by their kinds, then those of the blocks."""
        found: dict[Kind, list[bytes]] = {}
        for kind, id in self.records:
            found.setdefault(kind, []).append(id)
        return {**found, Kind.BLOCK: list(self.blocks)}


def whole(
    source: RecordSource, heads: Collection[SnapshotId], *, ancestors: bool
) -> Callable[[SnapshotId], bool]:
    """Return which snapshots `gather` takes with contents: heads, and if asked for ancestors."""
    named = set(heads)
    return lambda id: id in named or (ancestors and source.has_contents(id))


def gather(
    source: RecordSource,
    named: Iterable[SnapshotId],
    is_whole: Callable[[SnapshotId], bool],
    *,
    weights: bool = True,
) -> Needs:
    """Return what these snapshots need, with the contents of those that are to be whole.

    weights: as in `Needs`.  Raises as the source does.
    """
    needs = Needs(weights=weights)
    manifests: dict[bytes, None] = {}
    plans: dict[bytes, None] = {}
    waiting = list(dict.fromkeys(named))
    while waiting:
        passed = source.passes(Kind.SNAPSHOT, waiting)
        new = [id for id, is_passed in zip(waiting, passed, strict=True) if not is_passed]
        waiting = []
        for id, record in zip(new, source.load(SnapshotRecord, new), strict=True):
            needs.snapshots[id] = record
            needs.records[Kind.SNAPSHOT, id] = None
            needs.records[Kind.MANIFEST, record.manifest] = None
            for kind, other in ((Kind.PLAN, record.plan), (Kind.COVERAGE, record.coverage)):
                if other is not None:
                    needs.records[kind, other] = None
            if is_whole(id):
                needs.whole.add(id)
                manifests[record.manifest] = None
                if record.is_virtual and record.plan is not None:
                    plans[record.plan] = None
            for parent in map(SnapshotId, (one.snapshot for one in record.parents)):
                # History ends at a parent that a repair had to drop.
                if parent not in needs.snapshots and source.is_known(parent):
                    waiting.append(parent)
        waiting = [id for id in dict.fromkeys(waiting) if id not in needs.snapshots]
    needs.notes = source.notes(list(needs.snapshots))
    needs.records.update(dict.fromkeys((Kind.NOTE, note) for _, note in needs.notes))
    _contents(source, needs, manifests, plans)
    return needs


def _contents(
    source: RecordSource, needs: Needs, manifests: dict[bytes, None], plans: dict[bytes, None]
) -> None:
    done: set[bytes] = set()
    parts: set[bytes] = set()
    while manifests or plans:
        for plan in source.load(Plan, list(plans)):
            manifests.update(dict.fromkeys(plan.manifest_ids()))
        needs.records.update(dict.fromkeys((Kind.PLAN, id) for id in plans))
        plans.clear()
        new = [id for id in manifests if id not in done]
        manifests.clear()
        done.update(new)
        for id, manifest in zip(new, source.load(Manifest, new), strict=True):
            needs.records[Kind.MANIFEST, id] = None
            named = dict.fromkeys(part.tensor for file in manifest.files for part in file.parts)
            for some in _batches([one for one in named if one not in parts]):
                parts.update(some)
                _tensors(source, needs, some, plans)


def _tensors(
    source: RecordSource, needs: Needs, ids: Sequence[bytes], plans: dict[bytes, None]
) -> None:
    passed = source.passes(Kind.TENSOR, ids)
    asked = [TensorId(id) for id, is_passed in zip(ids, passed, strict=True) if not is_passed]
    for id, content in zip(asked, source.contents(asked), strict=True):
        needs.records[content.kind, bytes(id)] = None
        if isinstance(content, VirtualTensor):
            plans[content.plan] = None
        elif needs.weights or (content.dtype == BYTES and content.nbytes <= _SMALL):
            needs.blocks.update(dict.fromkeys(split_ids(content.blocks)))


def _batches(ids: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    for start in range(0, len(ids), _TOGETHER):
        yield ids[start : start + _TOGETHER]


def is_ancestor(source: RecordSource, old: SnapshotId, news: Collection[SnapshotId]) -> bool:
    """Return whether a snapshot is one of others, or an ancestor of one, over any parent role."""
    return any(old in some for some in _generations(source, news))


def lineage(source: RecordSource, head: SnapshotId) -> set[SnapshotId]:
    """Return a snapshot and its ancestors over any parent role, as far as the source has them."""
    return {id for some in _generations(source, [head]) for id in some}


def _generations(
    source: RecordSource, heads: Collection[SnapshotId]
) -> Iterator[Collection[SnapshotId]]:
    """Yield snapshots, then their parents, then theirs, each id once."""
    seen: set[SnapshotId] = set()
    waiting = list(heads)
    while waiting:
        yield waiting
        seen.update(waiting)
        known = [id for id in waiting if source.is_known(id)]
        parents = (p.snapshot_id() for r in source.load(SnapshotRecord, known) for p in r.parents)
        waiting = [id for id in dict.fromkeys(parents) if id not in seen]
