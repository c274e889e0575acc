"""Reachability: from names to snapshots, records and blocks.

    roots      refs, reflog moves of the last days, holds of live processes
    candidate  is a root while it is recent or a live process holds it; its reflog keeps nothing
    snapshot   keeps its contents, and all its ancestors over every parent role (as in git)
    missing    a parent that is not stored any more ends the history there; a ref's must be stored
    pruned     keeps its record, manifest, plan and coverage; its contents only if a root names it
    virtual    keeps the contents of its plan's base and experts as well
    delta      keeps its base
    plan       lives as long as the contents of all its inputs do, and keeps nothing alive
    note       lives with its snapshot

An `Inventory` holds all rows of an index at one moment, as arrays: about 59 bytes per block.
`Reach` marks the rows that are reached; it only ever adds marks. It reads and decodes every record
once, bypassing the catalog's cache. Takes time linear in what is reached. Used by one thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np

from mstore.blocks import location_arrays
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Location
from mstore.blocks.location_arrays import LOST_BASE, Flags, LocationTable, Numbers, id_at
from mstore.blocks.packs import NO_BASE, Kind, PackGone
from mstore.blocks.schema import NOTES, PRUNED
from mstore.store import leases, listing, refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.canonical import Record, decode
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.refs import Ref, refs_in
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import ID_BYTES, BlockId, Id, ManifestId, PlanId, SnapshotId, TensorId
from mstore.terms.phrases import call, phrase

R = TypeVar("R", bound=Record)
N = TypeVar("N", bound=Id)
NS_A_DAY = 86_400 * 10**9
NEVER_NS = 1 << 64
"""The start of a window of zero days: no move is that recent."""
_FIRST_NS, _LAST_NS = 1_735_689_600 * 10**9, 4_891_363_200 * 10**9
"""2025 and 2125: no store existed before, and a clock beyond that is wrong."""
_BATCH = 1 << 17
_STEP = 1 << 20


def window_start(reflog_days: int) -> int:
    """Return the time from which moves are within so many days; zero days keep none at all."""
    return now_ns() - reflog_days * NS_A_DAY if reflog_days else NEVER_NS


def is_recent(time_ns: int, since_ns: int) -> bool:
    """Return whether a move is within the window that starts at `since_ns`.

    A move with the time of an unset clock may be of any age, and with a clock that runs ahead no
    move is known to be old: both count as recent. In a window of zero days no move is recent.
    """
    if since_ns >= NEVER_NS:
        return False
    return time_ns >= since_ns or time_ns < _FIRST_NS or since_ns >= _LAST_NS


class Roots(msgspec.Struct, frozen=True):
    """What keeps snapshots: `refs` must be stored, `loose` ones (reflog, holds) may be gone.

    expired: candidates that keep nothing any more, which garbage collection drops.
    """

    refs: frozenset[SnapshotId]
    loose: frozenset[SnapshotId]
    pruned: frozenset[SnapshotId]
    expired: tuple[tuple[str, Ref], ...] = ()

    @classmethod
    def read(cls, catalog: Catalog, transaction: IndexTransaction, since_ns: int) -> Roots:
        """Read the current roots; from reflogs, the moves since `since_ns` (`is_recent`).

        `since_ns` only says how much history people want. Locks alone keep what is in use.
        """
        index = catalog.index
        found = dict(refs_in(index, transaction).walk())
        loose = leases.holds(catalog.layout)
        held = frozenset(loose)
        moved: dict[str, int] = {}
        for name, move in refs_in(index, transaction).reflogs():
            if refs.is_candidate(name):
                moved[name] = move.time_ns
            elif is_recent(move.time_ns, since_ns):
                loose.update(SnapshotId(id) for id in (move.old, move.new) if id is not None)
        expired = {
            name: ref
            for name, ref in found.items()
            if ref.kind == refs.CANDIDATE
            and not is_recent(moved.get(name, 0), since_ns)
            and ref.snapshot_id() not in held
        }
        named = {ref.snapshot_id() for name, ref in found.items() if name not in expired}
        return cls(
            frozenset(named),
            frozenset(loose - named),
            frozenset(id for id, _ in index.walk(transaction, PRUNED)),
            tuple(expired.items()),
        )


class NamedTensors(msgspec.Struct, frozen=True):
    """The tensors that some manifests name, those of one manifest after those of another.

    counts: of each manifest, how many. ids: concatenated. rows: of each id, its row; -1 if a tensor
    is virtual, or lost.
    """

    manifests: list[tuple[bytes, Manifest]]
    counts: list[int]
    ids: bytes
    rows: Numbers


class Inventory:
    """All rows of an index at one moment: blocks, records by kind, and packs by number."""

    def __init__(self, catalog: Catalog, transaction: IndexTransaction) -> None:
        index = catalog.index
        packs = index.named_packs(transaction)
        self.packs = {pack.number: (pack.id, pack.size) for pack in packs}
        self.snapshots = set(listing.ids(index, transaction))
        self.tables = location_arrays.read(index, transaction)

    @classmethod
    def read(cls, catalog: Catalog) -> Inventory:
        """Read all rows of the index as it is now."""
        with catalog.index.env.read() as transaction:
            return cls(catalog, transaction)

    @property
    def blocks(self) -> LocationTable:
        """The table of blocks."""
        return self.tables[Kind.BLOCK]

    def has_tensor(self, id: bytes) -> bool:
        """Return whether a tensor, stored or virtual, has a row."""
        return any(self.tables[kind].find(id)[0] >= 0 for kind in (Kind.TENSOR, Kind.VIRTUAL))

    def location(self, table: LocationTable, number: int) -> Location:
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

    def records(self, catalog: Catalog, kind: type[R], numbers: Numbers) -> Iterator[tuple[int, R]]:
        """Yield (row number, record) of those that are sound where they lie, in that order."""
        table = self.tables[kind.kind]
        heads = table.heads[numbers]
        columns = (heads[name].tolist() for name in ("pack", "offset", "stored", "codec"))
        rows = {table.id(number): number for number in numbers.tolist()}
        places = [
            (self.packs[pack][0], offset, stored, codec, id)
            for pack, offset, stored, codec, id in zip(*columns, rows, strict=True)
            if pack in self.packs
        ]
        for id, record in catalog.sound_records(kind, places):
            yield rows[id], record

    def readable(self, catalog: Catalog, kind: type[R], ids: Iterable[N]) -> Iterator[tuple[N, R]]:
        """Yield (id, record) of those that are not lost, in the order in which most of them lie."""
        asked = list(ids)
        found = self.tables[kind.kind].find(b"".join(asked))
        left = dict(zip(found.tolist(), asked, strict=True))
        lost = [asked[at] for at in np.flatnonzero(found < 0).tolist()]
        left.pop(-1, None)
        for number, record in self.records(catalog, kind, found[found >= 0]):
            yield left.pop(number), record
        for id in (*lost, *left.values()):
            with suppress(NotFound, Corrupt):
                yield id, catalog.record(kind, id)

    def named_tensors(self, manifests: Iterable[tuple[bytes, Manifest]]) -> Iterator[NamedTensors]:
        """Yield what these manifests name, some 10^5 tensors at a time."""
        each = iter(manifests)
        while True:
            some: list[tuple[bytes, Manifest]] = []
            lists: list[bytes] = []
            length = 0
            while length < _BATCH * ID_BYTES and (one := next(each, None)) is not None:
                some.append(one)
                lists.append(
                    b"".join([part.tensor for file in one[1].files for part in file.parts])
                )
                length += len(lists[-1])
            if not some:
                return
            ids = b"".join(lists)
            counts = [len(one) // ID_BYTES for one in lists]
            yield NamedTensors(some, counts, ids, self.tables[Kind.TENSOR].find(ids))

    def count_by_pack(self, live: Mapping[Kind, Flags] | None = None) -> tuple[Numbers, Numbers]:
        """Return the rows in each pack, and their stored bytes: int64 by the pack's number.

        live: count these rows only.
        """
        tops = [int(table.heads["pack"].max()) for table in self.tables.values() if len(table)]
        length = 1 + max([*self.packs, *tops], default=-1)
        rows, stored = np.zeros(length, np.int64), np.zeros(length, np.int64)
        for kind, table in self.tables.items():
            for start in range(0, len(table), _STEP):
                heads = table.heads[start : start + _STEP]
                if live is not None:
                    heads = heads[live[kind][start : start + _STEP]]
                numbers = heads["pack"].astype(np.int64)
                rows += np.bincount(numbers, minlength=length)
                # bincount sums in float64; integers below 2**53 are exact there.
                stored += np.bincount(numbers, heads["stored"], length).astype(np.int64)
        return rows, stored


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
        self._planned: set[PlanId] = set()
        self._manifests: list[ManifestId] = []
        self._blocks: list[bytes] = []
        self._blocks_waiting = 0
        self._searches: deque[tuple[bytes, Future[Numbers]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        # Rows newer than the inventory: they may be read, and never dropped.
        self._later: IndexTransaction | None = None

    @property
    def whole(self) -> frozenset[SnapshotId]:
        """The reached snapshots whose contents are reached, too."""
        return frozenset(self._whole)

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
            # A snapshot that a reflog names may have been collected under a shorter reflog window.
            whole = {id for id in known if id not in roots.pruned or self._has_contents(id)}
            self._keep_snapshots(roots.refs | whole, known, roots.pruned)
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
        return self._later is not None and listing.is_listed(self._catalog.index, self._later, id)

    def _has_contents(self, id: SnapshotId) -> bool:
        manifest = self._load(Manifest, self._load(SnapshotRecord, id).manifest)
        return all(
            self.inventory.has_tensor(part.tensor)
            or self._found_later(Kind.TENSOR, part.tensor) is not None
            or self._found_later(Kind.VIRTUAL, part.tensor) is not None
            for file in manifest.files
            for part in file.parts
        )

    def _keep_snapshots(
        self,
        named: Iterable[SnapshotId],
        others: Iterable[SnapshotId],
        pruned: AbstractSet[SnapshotId],
    ) -> None:
        """Keep these snapshots and all their ancestors, generation by generation.

        named: keep their contents even if they are pruned.
        """
        wanted = set(named)
        waiting = {*wanted, *others}
        while waiting:
            kept = {id for id in waiting if id in wanted or id not in pruned}
            new = {id for id in waiting if id not in self.snapshots or id in kept - self._whole}
            waiting = set()
            for id, record in self._snapshots(new):
                if id not in self.snapshots:
                    self.snapshots.add(id)
                    parents = [parent.snapshot_id() for parent in record.parents]
                    # History ends at a parent that a repair had to drop.
                    waiting.update(parent for parent in parents if self._has_snapshot(parent))
                if id in kept:
                    self._whole.add(id)
                    self._keep_contents(record)

    def _snapshots(self, ids: Iterable[SnapshotId]) -> Iterator[tuple[SnapshotId, SnapshotRecord]]:
        """Yield records; mark them, and their manifests, plans, coverage and notes."""
        named: dict[Kind, list[bytes]] = defaultdict(list)
        noted = []
        for id, record in self._loaded(SnapshotRecord, ids):
            named[Kind.MANIFEST].append(record.manifest)
            if record.plan is not None:
                named[Kind.PLAN].append(record.plan)
            if record.coverage is not None:
                named[Kind.COVERAGE].append(record.coverage)
            noted.append(SnapshotId(id))
            yield SnapshotId(id), record
        for kind, some in named.items():
            self._mark_all(kind, some)
        if self._later is not None:
            self._mark_notes(self._later, noted)
        else:
            with self._catalog.index.env.read() as transaction:
                self._mark_notes(transaction, noted)

    def _mark_notes(self, transaction: IndexTransaction, snapshots: Iterable[SnapshotId]) -> None:
        index = self._catalog.index
        if index.count(transaction, NOTES.name):
            for id in snapshots:
                self._mark_all(
                    Kind.NOTE, (one for (_, one), _ in index.walk(transaction, NOTES, id))
                )

    def _keep_contents(self, record: SnapshotRecord) -> None:
        self._manifests.append(record.manifest_id())
        if record.is_virtual:
            self._keep_inputs(PlanId(record.plan or b""))

    def _keep_inputs(self, id: PlanId) -> None:
        # A plan is as long as a model has tensors, and each of them names it.
        if id in self._planned:
            return
        self._planned.add(id)
        plan: Plan = self._load(Plan, id)
        for manifest in plan.manifest_ids():
            self._mark(Kind.MANIFEST, manifest)
            self._manifests.append(manifest)

    def _keep_plans(self) -> None:
        """Keep unnamed plans as long as they can be run."""
        table = self.inventory.tables[Kind.PLAN]
        for number in np.flatnonzero(~self.live[Kind.PLAN]).tolist():
            try:
                plan: Plan = self._load(Plan, PlanId(table.id(number)), mark=False)
            except (NotFound, Corrupt):
                # Damaged, so its inputs are unknown; keep it, it is small.
                self.live[Kind.PLAN][number] = True
                continue
            if self._contents.issuperset(plan.manifest_ids()):
                self.live[Kind.PLAN][number] = True

    # -- contents ----------------------------------------------------------------------------

    def _finish(self) -> None:
        while self._manifests:
            new = dict.fromkeys(id for id in self._manifests if id not in self._contents)
            self._manifests.clear()
            self._contents.update(new)
            named = np.zeros(len(self.inventory.tables[Kind.TENSOR]), np.bool_)
            others: set[bytes] = set()
            for some in self.inventory.named_tensors(self._loaded(Manifest, new)):
                named[some.rows[some.rows >= 0]] = True
                others.update(id_at(some.ids, at) for at in np.flatnonzero(some.rows < 0).tolist())
            # May name more manifests: those of a virtual tensor's inputs.
            self._keep_tensors(np.flatnonzero(named & ~self.live[Kind.TENSOR]), others)
        self._flush()
        while self._searches:
            self._mark_found()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _keep_tensors(self, rows: Numbers, others: Iterable[bytes]) -> None:
        """Keep the tensors of these rows, and those that have none."""
        for id, tensor in self._loaded_rows(Tensor, rows):
            self._keep_tensor(TensorId(id), tensor)
        for one in others:
            self._keep_without_row(TensorId(one))

    def _keep_tensor(self, id: TensorId, tensor: Tensor) -> None:
        if not tensor.fits(self._catalog.block_size):
            tensor.check(self._catalog.block_size, f"tensor {id}")
        self._blocks.append(tensor.blocks)
        self._blocks_waiting += tensor.block_count()
        if self._blocks_waiting >= _BATCH:
            self._flush()

    def _keep_without_row(self, id: TensorId) -> None:
        """Keep a tensor without a row in the inventory: virtual, newer, or missing."""
        virtual = self.inventory.tables[Kind.VIRTUAL].find(id)
        if virtual[0] < 0 and self._found_later(Kind.VIRTUAL, id) is None:
            self._keep_tensor(id, self._load(Tensor, id))
            return
        if virtual[0] >= 0 and self.live[Kind.VIRTUAL][virtual[0]]:
            return
        record = self._load(VirtualTensor, id)
        self._mark(Kind.PLAN, record.plan)
        self._keep_inputs(record.plan_id())

    def _flush(self) -> None:
        """Search the gathered blocks, in another thread while more records are read."""
        ids, self._blocks, self._blocks_waiting = b"".join(self._blocks), [], 0
        for start in range(0, len(ids), _BATCH * ID_BYTES):
            some = ids[start : start + _BATCH * ID_BYTES]
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "reach")
            self._searches.append((some, self._pool.submit(self.inventory.blocks.find, some)))
        while len(self._searches) > 1:
            self._mark_found()

    def _mark_found(self) -> None:
        """Mark the blocks of the oldest search, and the bases of those that are deltas."""
        ids, search = self._searches.popleft()
        found = search.result()
        self._mark_blocks(found[found >= 0])
        absent = [BlockId(id_at(ids, at)) for at in np.flatnonzero(found < 0).tolist()]
        lost = [block for block in absent if not self._mark_later(block)]
        elsewhere = self._catalog.index.elsewhere
        if elsewhere is not None and lost:
            there = elsewhere.locate(lost)
            lost = [block for block, at in zip(lost, there, strict=True) if at is None]
        self.missing.update(lost)

    def _mark_blocks(self, numbers: Numbers) -> None:
        live = self.live[Kind.BLOCK]
        while len(numbers):
            live[numbers] = True
            bases = self.inventory.blocks.base[numbers]
            lost = numbers[bases == LOST_BASE].tolist()
            self.lost_bases.update(self._without_base(map(self.inventory.blocks.id, lost)))
            numbers = bases[bases >= 0].astype(np.int64)
            numbers = numbers[~live[numbers]]

    def _without_base(self, blocks: Iterable[bytes]) -> list[bytes]:
        """Return those of these differences whose base is not elsewhere, either."""
        index = self._catalog.index
        if index.elsewhere is None:
            return list(blocks)
        reading = index.env.read() if self._later is None else nullcontext(self._later)
        with reading as transaction:
            own = {block: index.block(transaction, BlockId(block)) for block in blocks}
            named = [at.base for at in own.values() if at is not None]
            rows = dict(zip(named, index.base_rows(transaction, named), strict=True))
        return [block for block, at in own.items() if at is None or rows[at.base] is None]

    def _mark_later(self, block: BlockId) -> bool:
        """Mark the base of a block that is newer than the inventory: the base may be older.

        Returns whether the block is stored at all.
        """
        location = None
        if self._later is not None:
            location = self._catalog.index.block(self._later, block)
        if location is not None and location.base != NO_BASE:
            found = self.inventory.blocks.find(location.base)
            self._mark_blocks(found[found >= 0])
        return location is not None

    # -- records -----------------------------------------------------------------------------

    def _mark(self, kind: Kind, id: bytes) -> None:
        number = self.inventory.tables[kind].find(id)[0]
        if number >= 0:
            self.live[kind][number] = True

    def _mark_all(self, kind: Kind, ids: Iterable[bytes]) -> None:
        numbers = self.inventory.tables[kind].find(b"".join(ids))
        self.live[kind][numbers[numbers >= 0]] = True

    def _found_later(self, kind: Kind, id: bytes) -> Location | None:
        if self._later is None:
            return None
        row = self._catalog.index.row(self._later, (kind, id))
        return None if row is None else self._catalog.index.location(self._later, row)

    def _loaded(self, kind: type[R], ids: Iterable[bytes]) -> Iterator[tuple[bytes, R]]:
        """Yield each id with its record, marked.  Raises Corrupt for one that cannot be read."""
        asked = list(ids)
        found = self.inventory.tables[kind.kind].find(b"".join(asked))
        yield from self._loaded_rows(kind, found[found >= 0])
        for at in np.flatnonzero(found < 0).tolist():
            yield asked[at], self._load(kind, asked[at])

    def _loaded_rows(self, kind: type[R], numbers: Numbers) -> Iterator[tuple[bytes, R]]:
        table, live = self.inventory.tables[kind.kind], self.live[kind.kind]
        left = dict.fromkeys(numbers.tolist())
        for number, record in self.inventory.records(self._catalog, kind, numbers):
            del left[number]
            live[number] = True
            yield table.id(number), record
        # Moved meanwhile, damaged or gone: each case is handled one by one.
        for number in left:
            yield table.id(number), self._load(kind, table.id(number))

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
