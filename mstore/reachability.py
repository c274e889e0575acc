"""Reachability: from names to snapshots, records and blocks.

    roots      refs, reflog moves of the last days, holds of live processes
    snapshot   keeps its contents, and all its ancestors over every parent role (as in git)
    missing    a parent that is not stored any more ends the history there; a ref's must be stored
    pruned     keeps its record, manifest, plan and coverage; its contents only if a root names it
    virtual    keeps the contents of its plan's base and experts as well
    delta      keeps its base
    plan       lives as long as the contents of all its inputs do, and keeps nothing alive
    signature  lives with its snapshot

An `Inventory` holds all rows of an index at one moment, as arrays: about 67 bytes per block.
`Reach` marks the rows that are reached; it only ever adds marks. It reads and decodes every record
once, bypassing the catalog's cache. Takes time linear in what is reached. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstore.blocks import location_arrays
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Location
from mstore.blocks.location_arrays import LOST_BASE, Flags, Numbers, Table
from mstore.blocks.packs import NO_BASE, Kind, PackGone
from mstore.errors import Corrupt, MstoreError
from mstore.ids import ID_BYTES, BlockId, ManifestId, PlanId, SnapshotId, TensorId
from mstore.objects.canonical import Record, decode
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.objects.snapshot import SnapshotRecord
from mstore.objects.tensor import Tensor
from mstore.objects.virtual import VirtualTensor
from mstore.phrases import call, phrase
from mstore.store import leases, pruned_rows, refs, signature_rows, snapshot_rows
from mstore.store.catalog import Catalog

NS_A_DAY = 86_400 * 10**9
NEVER_NS = 1 << 64
"""The start of a window of zero days: no move is that recent."""
_FIRST_NS, _LAST_NS = 1_735_689_600 * 10**9, 4_891_363_200 * 10**9
"""2025 and 2125: no store existed before, and a clock beyond that is wrong."""
_BATCH = 1 << 16


def is_recent(time_ns: int, since_ns: int) -> bool:
    """Return whether a move is within the window that starts at `since_ns`.

    A move with the time of an unset clock may be of any age, and with a clock that runs ahead no
    move is known to be old: both count as recent. In a window of zero days no move is recent.
    """
    if since_ns >= NEVER_NS:
        return False
    return time_ns >= since_ns or time_ns < _FIRST_NS or since_ns >= _LAST_NS


@dataclass(frozen=True, slots=True)
class Roots:
    """What keeps snapshots: `refs` must be stored, `loose` ones (reflog, holds) may be gone."""

    refs: frozenset[SnapshotId]
    loose: frozenset[SnapshotId]
    pruned: frozenset[SnapshotId]

    @classmethod
    def read(cls, catalog: Catalog, transaction: IndexTransaction, since_ns: int) -> Roots:
        """Read the current roots; from reflogs, the moves since `since_ns` (`is_recent`).

        `since_ns` only says how much history people want to keep. Locks alone guarantee that
        nothing in use is removed.
        """
        index = catalog.index
        named = {ref.snapshot_id() for _, ref in refs.walk(index, transaction)}
        loose = leases.holds(catalog.layout)
        for _, move in refs.walk_reflogs(index, transaction):
            if is_recent(move.time_ns, since_ns):
                loose.update(SnapshotId(id) for id in (move.old, move.new) if id is not None)
        return cls(
            frozenset(named),
            frozenset(loose - named),
            frozenset(pruned_rows.ids(index, transaction)),
        )


class Inventory:
    """All rows of an index at one moment: blocks, records by kind, and packs by number."""

    def __init__(self, catalog: Catalog, transaction: IndexTransaction) -> None:
        index = catalog.index
        packs = index.named_packs(transaction)
        self.packs = {pack.number: (pack.id, pack.size) for pack in packs}
        self.snapshots = set(snapshot_rows.ids(index, transaction))
        self.tables = location_arrays.read(index, transaction)

    @classmethod
    def read(cls, catalog: Catalog) -> Inventory:
        """Read all rows of the index as it is now."""
        with catalog.index.env.read() as transaction:
            return cls(catalog, transaction)

    @property
    def blocks(self) -> Table:
        """The table of blocks."""
        return self.tables[Kind.BLOCK]

    def location(self, table: Table, number: int) -> Location:
        """Return where a row says its payload lies. Raises Corrupt for an unknown pack."""
        head = table.heads[number]
        pack = self.packs.get(int(head["pack"]))
        if pack is None:
            raise Corrupt(f"the index names an unknown pack {head['pack']}", hint=call("fsck"))
        return Location(
            pack[0],
            int(head["offset"]),
            int(head["stored"]),
            int(head["plain"]),
            int(head["codec"]),
            int(head["width"]),
            table.base_id(number) or NO_BASE,
        )


class Reach:
    """The rows of an inventory that are reached.

    live: by kind, a flag per row. missing: needed blocks without a row. lost_bases: needed blocks
    that are differences to a block without a row. snapshots: all that are reached, pruned or not.
    """

    def __init__(self, catalog: Catalog, inventory: Inventory) -> None:
        self._catalog = catalog
        self.inventory = inventory
        self.live: dict[Kind, Flags] = {
            kind: np.zeros(len(table), np.bool_) for kind, table in inventory.tables.items()
        }
        self.snapshots: set[SnapshotId] = set()
        self.missing: set[bytes] = set()
        self.lost_bases: set[bytes] = set()
        self._whole: set[SnapshotId] = set()
        self._contents: set[ManifestId] = set()
        self._manifests: list[ManifestId] = []
        self._blocks: list[bytes] = []
        self._blocks_waiting = 0
        # Rows newer than the inventory: they may be read, and never dropped.
        self._later: IndexTransaction | None = None

    def of(self, snapshots: Iterable[SnapshotId]) -> Flags:
        """Return a flag per block row: what just these snapshots contain, with bases of deltas."""
        alone = Reach(self._catalog, self.inventory)
        for id in snapshots:
            alone._keep_contents(alone._snapshot(id))
        alone._finish()
        return alone.live[Kind.BLOCK]

    def live_among(self, kind: Kind, ids: Sequence[bytes]) -> list[bytes]:
        """Return those of these ids that have a reached row."""
        found = self.inventory.tables[kind].find(b"".join(ids))
        there = np.flatnonzero(found >= 0)
        return [ids[at] for at in there[self.live[kind][found[there]]].tolist()]

    def grow(self, roots: Roots, later: IndexTransaction | None = None) -> None:
        """Mark everything that these roots keep.

        later: an open index transaction, newer than the inventory, in which the roots were read.
        Raises Corrupt if a record is missing or damaged: then it is unknown what is needed.
        """
        self._later = later
        try:
            self._require(roots.refs)
            known = {id for id in roots.loose if self._has_snapshot(id)}
            for id in roots.refs | known:
                # A snapshot that a reflog names may have been collected under a shorter reflog
                # window.
                named = id in roots.refs or id not in roots.pruned or self._has_contents(id)
                self._keep_snapshot(id, named=named, pruned=roots.pruned)
            self._finish()
            self._keep_plans()
        finally:
            self._later = None

    # -- snapshots ---------------------------------------------------------------------------

    def _require(self, snapshots: Iterable[SnapshotId]) -> None:
        """Raise Corrupt, naming a ref, if its snapshot is not stored."""
        lost = {id for id in snapshots if not self._has_snapshot(id)}
        if not lost:
            return
        for name, ref in self._catalog.refs().items():
            if ref.snapshot_id() in lost:
                raise Corrupt(
                    f"its snapshot {ref.snapshot_id().short} is missing",
                    where=name,
                    hint=phrase(
                        "{rm}, or {reset}",
                        rm=call("remove", name),
                        reset=call("reset", name, "OTHER"),
                    ),
                )

    def _has_snapshot(self, id: SnapshotId) -> bool:
        if id in self.inventory.snapshots:
            return True
        return self._later is not None and snapshot_rows.is_listed(
            self._catalog.index, self._later, id
        )

    def _has_contents(self, id: SnapshotId) -> bool:
        manifest = self._load(Manifest, self._load(SnapshotRecord, id).manifest)
        return all(
            self.inventory.tables[Kind.TENSOR].find(part.tensor)[0] >= 0
            or self.inventory.tables[Kind.VIRTUAL].find(part.tensor)[0] >= 0
            or self._found_later(Kind.TENSOR, part.tensor) is not None
            or self._found_later(Kind.VIRTUAL, part.tensor) is not None
            for file in manifest.files
            for part in file.parts
        )

    def _keep_snapshot(self, id: SnapshotId, *, named: bool, pruned: frozenset[SnapshotId]) -> None:
        waiting = [(id, named)]
        while waiting:
            id, named = waiting.pop()
            wanted = named or id not in pruned
            if id in self.snapshots and (id in self._whole or not wanted):
                continue
            record = self._snapshot(id)
            if id not in self.snapshots:
                self.snapshots.add(id)
                parents = [parent.snapshot_id() for parent in record.parents]
                # History ends at a parent that a repair had to drop.
                waiting += [(parent, False) for parent in parents if self._has_snapshot(parent)]
            if wanted:
                self._whole.add(id)
                self._keep_contents(record)

    def _snapshot(self, id: SnapshotId) -> SnapshotRecord:
        """Return a snapshot's record; mark it, its manifest, plan, coverage and signatures."""
        record: SnapshotRecord = self._load(SnapshotRecord, id)
        self._mark(Kind.MANIFEST, record.manifest)
        if record.plan is not None:
            self._mark(Kind.PLAN, record.plan)
        if record.coverage is not None:
            self._mark(Kind.COVERAGE, record.coverage)
        index = self._catalog.index
        if self._later is not None:
            self._mark_signatures(self._later, id)
        else:
            with index.env.read() as transaction:
                self._mark_signatures(transaction, id)
        return record

    def _mark_signatures(self, transaction: IndexTransaction, id: SnapshotId) -> None:
        for signature in signature_rows.of(self._catalog.index, transaction, id):
            self._mark(Kind.SIGNATURE, signature)

    def _keep_contents(self, record: SnapshotRecord) -> None:
        self._manifests.append(record.manifest_id())
        if record.is_virtual:
            self._keep_inputs(PlanId(record.plan or b""))

    def _keep_inputs(self, id: PlanId) -> None:
        plan = self._load(Plan, id)
        for manifest in (plan.base_id(), *(expert.manifest_id() for expert in plan.experts)):
            self._mark(Kind.MANIFEST, manifest)
            self._manifests.append(manifest)

    def _keep_plans(self) -> None:
        """Keep unnamed plans as long as they can be run."""
        table = self.inventory.tables[Kind.PLAN]
        for number in np.flatnonzero(~self.live[Kind.PLAN]).tolist():
            try:
                plan = self._load(Plan, PlanId(table.id(number)), mark=False)
            except MstoreError:
                # Unreadable, so its inputs are unknown; keep it, it is small.
                self.live[Kind.PLAN][number] = True
                continue
            inputs = (plan.base_id(), *(expert.manifest_id() for expert in plan.experts))
            if all(id in self._contents for id in inputs):
                self.live[Kind.PLAN][number] = True

    # -- contents ----------------------------------------------------------------------------

    def _finish(self) -> None:
        while self._manifests:
            id = self._manifests.pop()
            if id not in self._contents:
                self._contents.add(id)
                self._keep_manifest(id)
        self._flush()

    def _keep_manifest(self, id: ManifestId) -> None:
        manifest = self._load(Manifest, id)
        parts = {part.tensor for file in manifest.files for part in file.parts}
        ids = b"".join(parts)
        found = self.inventory.tables[Kind.TENSOR].find(ids)
        new = found[found >= 0]
        new = new[~self.live[Kind.TENSOR][new]]
        table = self.inventory.tables[Kind.TENSOR]
        heads = table.heads[new]
        # In pack order, so that a disk reads forward.
        for number in new[np.lexsort((heads["offset"], heads["pack"]))].tolist():
            self._keep_tensor(TensorId(table.id(number)))
        for at in np.flatnonzero(found < 0).tolist():
            self._keep_stranger(TensorId(ids[at * ID_BYTES : (at + 1) * ID_BYTES]))

    def _keep_tensor(self, id: TensorId) -> None:
        tensor = self._load(Tensor, id)
        tensor.check(self._catalog.block_size, f"tensor {id}")
        self._blocks.append(tensor.blocks)
        self._blocks_waiting += tensor.block_count()
        if self._blocks_waiting >= _BATCH:
            self._flush()

    def _keep_stranger(self, id: TensorId) -> None:
        """Keep a tensor without a row in the inventory: virtual, newer, or missing."""
        virtual = self.inventory.tables[Kind.VIRTUAL].find(id)
        if virtual[0] < 0 and self._found_later(Kind.VIRTUAL, id) is None:
            self._keep_tensor(id)
            return
        if virtual[0] >= 0 and self.live[Kind.VIRTUAL][virtual[0]]:
            return
        record = self._load(VirtualTensor, id)
        self._mark(Kind.PLAN, record.plan)
        self._keep_inputs(record.plan_id())

    def _flush(self) -> None:
        """Mark the gathered blocks, and the bases of those that are deltas."""
        ids, self._blocks, self._blocks_waiting = b"".join(self._blocks), [], 0
        for start in range(0, len(ids), _BATCH * ID_BYTES):
            some = ids[start : start + _BATCH * ID_BYTES]
            found = self.inventory.blocks.find(some)
            self._mark_blocks(found[found >= 0])
            for at in np.flatnonzero(found < 0).tolist():
                self._mark_later(BlockId(some[at * ID_BYTES : (at + 1) * ID_BYTES]))

    def _mark_blocks(self, numbers: Numbers) -> None:
        live = self.live[Kind.BLOCK]
        while len(numbers):
            live[numbers] = True
            bases = self.inventory.blocks.base[numbers]
            lost = numbers[bases == LOST_BASE].tolist()
            self.lost_bases.update(map(self.inventory.blocks.id, lost))
            numbers = bases[bases >= 0].astype(np.int64)
            numbers = numbers[~live[numbers]]

    def _mark_later(self, block: BlockId) -> None:
        """Mark the base of a block that is newer than the inventory: the base may be older."""
        location = None
        if self._later is not None:
            location = self._catalog.index.block(self._later, block)
        if location is None:
            self.missing.add(block)
        elif location.base != NO_BASE:
            found = self.inventory.blocks.find(location.base)
            self._mark_blocks(found[found >= 0])

    # -- records -----------------------------------------------------------------------------

    def _mark(self, kind: Kind, id: bytes) -> None:
        number = self.inventory.tables[kind].find(id)[0]
        if number >= 0:
            self.live[kind][number] = True

    def _found_later(self, kind: Kind, id: bytes) -> Location | None:
        if self._later is None:
            return None
        row = self._catalog.index.row(self._later, (kind, id))
        return None if row is None else self._catalog.index.location(self._later, row)

    def _load(self, kind: type[Any], id: bytes, *, mark: bool = True) -> Any:
        """Read and check a record, bypassing the cache. Raises Corrupt if it is not stored."""
        record_type: type[Record] = kind
        table = self.inventory.tables[record_type.kind]
        number = int(table.find(id)[0])
        name = record_type.id_type(id)
        if number >= 0:
            if mark:
                self.live[record_type.kind][number] = True
            location: Location | None = self.inventory.location(table, number)
        else:
            location = self._found_later(record_type.kind, id)
        if location is None:
            raise Corrupt(
                f"this {record_type.kind.name.lower()} is needed and is not stored",
                where=str(name),
                hint=phrase(
                    "{repair}; while it is missing, what it needs is unknown",
                    repair=call("repair"),
                ),
            )
        try:
            data = self._catalog.record_bytes(name, location)
        except PackGone:
            with self._catalog.index.env.read() as transaction:
                location = self._catalog.index.record(transaction, record_type.kind, name)
            if location is None:
                raise
            data = self._catalog.record_bytes(name, location)
        return decode(record_type, data, str(name))
