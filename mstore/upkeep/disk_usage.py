"""Usage: what takes the space of a store, who shares it, and what removal would free.

Counts the stored bytes of blocks; records take less than a thousandth of that. A block has one row,
however many snapshots contain it. Blocks that the same refs need form a *sharing*, and every figure
is a sum over sharings, so figures add up exactly:

    what a ref takes  the blocks of its snapshot, and the bases of those that are deltas
    unique + shared   of that: what no other ref takes, and the rest
    freed             what nothing keeps once refs and their reflogs are removed: not only their
                      snapshots but everything reached through their history, as gc sees it
    held              what is kept at all, each block counted for the first reason that applies:
                      refs, inputs of virtual merges, lineage, reflogs, running operations

Reads the index and each record once, and never a block. Takes time linear in these and in the size
of the sets of refs, as bits; computes with whom a ref shares only on request. Blocks that are
needed but not stored (in a damaged store) count nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from mstore.blocks.codecs import Codec
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location_arrays import Table, id_at
from mstore.blocks.packs import Kind
from mstore.store import refs as ref_rows
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import Record
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor
from mstore.store.refs import refs_in
from mstore.terms.errors import Corrupt, Incompatible, NotFound
from mstore.terms.ids import ID_BYTES, Id, ManifestId, SnapshotId, TensorId
from mstore.terms.phrases import call
from mstore.terms.report import Report
from mstore.upkeep.reachability import Inventory, Roots, is_recent, window_start

Numbers = npt.NDArray[np.int64]
R = TypeVar("R", bound=Record)
N = TypeVar("N", bound=Id)
Chosen = npt.NDArray[np.bool_]
Owners = int
"""A set of refs: bit k for ref number k. Or a set of reasons."""
NAMED, INPUTS, LINEAGE, REFLOG, RUNNING = range(5)
"""Reasons for keeping contents, strongest first."""
BLOCKS, _PLAIN, STORED = range(3)
_CHUNK = 1 << 10
_BATCH = 1 << 17


class CodecUsage(Report, frozen=True):
    """Blocks stored with one codec: how many, and their bytes."""

    codec: str
    """raw, constant, zstd, floats or delta"""
    blocks: int
    """number of blocks"""
    plain_bytes: int
    """their size as plain bytes"""
    stored_bytes: int
    """their size at rest"""


class SharedBytes(Report, frozen=True):
    """Stored bytes that another ref's snapshot uses as well."""

    name: str
    """the other ref"""
    stored_bytes: int
    """stored bytes that both use"""


class RefUsage(Report, frozen=True):
    """What one ref takes: the blocks of its snapshot, and the bases of those that are deltas.

    stored_bytes = unique_bytes + shared_bytes.
    """

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    plain_bytes: int
    """size of the files as checked out"""
    stored_bytes: int
    """stored bytes of its snapshot's blocks and of their delta bases"""
    unique_bytes: int
    """of these, bytes that no other ref uses"""
    shared_bytes: int
    """of these, bytes that other refs also use"""
    portion_bytes: int
    """stored bytes, where a block that n refs share counts as 1/n"""
    freed_bytes: int
    """what gc frees once the ref and its reflog are gone"""
    shared_with: Sequence[SharedBytes]
    """the refs it shares blocks with, most shared first; in JSON only if refs were named"""
    unique: tuple[CodecUsage, ...]
    """bytes that no other ref uses, by codec"""
    shared: tuple[CodecUsage, ...]
    """bytes that other refs also use, by codec"""


class HeldBytes(Report, frozen=True):
    """Why blocks are kept, in stored bytes: each counts for the first reason that applies."""

    refs: int
    """stored bytes of the snapshots that refs name"""
    virtual_inputs: int
    """stored bytes of the inputs of virtual merges among these"""
    lineage: int
    """stored bytes of their ancestors: earlier versions, bases and experts"""
    reflog: int
    """stored bytes of what refs named in the last days, with its lineage"""
    running: int
    """stored bytes that running operations are reading"""


class UsageReport(Report, frozen=True):
    """What refs take and share, in stored bytes of blocks, and what gc would free without them."""

    refs: tuple[RefUsage, ...]
    """each requested ref, or all"""
    stored_bytes: int
    """stored bytes of all of them, shared blocks counted once"""
    freed_bytes: int
    """what gc frees once all of them and their reflogs are gone"""
    codecs: tuple[CodecUsage, ...]
    """their blocks by how they are stored"""
    live_bytes: int
    """stored bytes of all kept blocks: the sum of `held`"""
    held: HeldBytes
    """why they are kept, each block for the first reason that applies"""
    unreachable_bytes: int
    """stored bytes of blocks that nothing keeps: gc drops them"""
    reflog_days: int
    """number of days for which the reflog keeps what refs named"""
    seconds: float
    """how long it took"""


def usage(catalog: Catalog, names: Sequence[str], *, reflog_days: int) -> UsageReport:
    """Report what refs take and share, and what removing them would free; no names mean all refs.

    Reflog moves no older than `reflog_days` keep what they name. Raises NotFound, Corrupt.
    """
    began = time.monotonic()
    found = Usage.read(catalog, reflog_days)
    report = found.report(names, reflog_days=reflog_days)
    return replace(report, seconds=time.monotonic() - began)


# Who keeps what -----------------------------------------------------------------------------------


class History(msgspec.Struct, frozen=True):
    """Snapshots, their parents, and the refs that name them: all that decides what is kept.

    names: refs in order. tips: the snapshot of each. starts: for each ref, what it and its reflog
    name. held: what only reflogs of removed refs, or holds, name. logged: what any reflog names.
    pruned: snapshots whose contents are kept only if they are named directly.
    """

    names: tuple[str, ...]
    tips: tuple[SnapshotId, ...]
    starts: tuple[frozenset[SnapshotId], ...]
    held: frozenset[SnapshotId]
    logged: frozenset[SnapshotId]
    pruned: frozenset[SnapshotId]
    records: Mapping[SnapshotId, SnapshotRecord]

    @classmethod
    def read(cls, catalog: Catalog, transaction: IndexTransaction, since_ns: int) -> History:
        """Read the current history without records; from reflogs, the moves since `since_ns`."""
        index = catalog.index
        refs = dict(refs_in(index, transaction).walk())
        roots = Roots.read(catalog, transaction, since_ns)
        logged: dict[str, set[SnapshotId]] = defaultdict(set)
        for name, move in refs_in(index, transaction).reflogs():
            if is_recent(move.time_ns, since_ns) and not ref_rows.is_candidate(name):
                logged[name].update(SnapshotId(id) for id in (move.old, move.new) if id is not None)
        of_refs = frozenset[SnapshotId]().union(*(logged[name] for name in refs))
        gone = frozenset[SnapshotId]().union(*(logged[name] for name in logged if name not in refs))
        return cls(
            names=tuple(refs),
            tips=tuple(ref.snapshot_id() for ref in refs.values()),
            starts=tuple(frozenset({ref.snapshot_id(), *logged[n]}) for n, ref in refs.items()),
            held=gone | (roots.loose - of_refs),
            logged=gone | of_refs,
            pruned=roots.pruned,
            records={},
        )

    def keepers(self) -> dict[SnapshotId, Owners]:
        """Return which refs keep each snapshot's contents; the bit after the last ref is `held`."""
        direct: dict[SnapshotId, Owners] = defaultdict(int)
        for number, starts in enumerate((*self.starts, self.held)):
            # A reflog or a hold may name a snapshot that is gone already.
            for id in starts & self.records.keys():
                direct[id] |= 1 << number
        reached: dict[SnapshotId, Owners] = defaultdict(int, direct)
        for id in self._children_first():
            for parent in self.records[id].parents:
                reached[parent.snapshot_id()] |= reached[id]
        kept = {id: (direct if id in self.pruned else reached).get(id, 0) for id in self.records}
        return {id: owners for id, owners in kept.items() if owners}

    def reasons(self) -> dict[SnapshotId, int]:
        """Return the strongest reason for each snapshot that is kept."""
        named = set(self.tips)
        came_from = self._lineage(named)
        logged = self.logged | self._lineage(self.logged)
        found = {}
        for id in self.keepers():
            if id in named:
                found[id] = NAMED
            elif id in came_from and id not in self.pruned:
                found[id] = LINEAGE
            else:
                found[id] = REFLOG if id in logged else RUNNING
        return found

    def _lineage(self, starts: Iterable[SnapshotId]) -> set[SnapshotId]:
        found: set[SnapshotId] = set()
        waiting = [id for id in starts if id in self.records]
        while waiting:
            new = self._parents(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    def _children_first(self) -> list[SnapshotId]:
        waiting: dict[SnapshotId, int] = dict.fromkeys(self.records, 0)
        for id in self.records:
            for parent in self._parents(id):
                waiting[parent] += 1
        ready = [id for id, count in waiting.items() if count == 0]
        for id in ready:
            for parent in self._parents(id):
                waiting[parent] -= 1
                if waiting[parent] == 0:
                    ready.append(parent)
        return ready

    def _parents(self, id: SnapshotId) -> set[SnapshotId]:
        parents = {parent.snapshot_id() for parent in self.records[id].parents}
        return parents & self.records.keys()


def needed(
    catalog: Catalog, history: History, inventory: Inventory, plain: dict[SnapshotId, int]
) -> Iterator[tuple[Owners, Numbers]]:
    """Group blocks by who takes, who keeps and why: (owners, row numbers).

    owners: three sets in one integer, from low bits to high: reasons, keepers, takers.

    Reads every manifest that is kept once. Skips pruned snapshots whose contents are gone. plain:
    receives the bytes of the files of each snapshot that a ref names.
    """
    takers: dict[SnapshotId, Owners] = defaultdict(int)
    for number, tip in enumerate(history.tips):
        takers[tip] |= 1 << number
    width = len(history.names) + 1
    of_manifests: dict[ManifestId, int] = defaultdict(int)
    tips: dict[ManifestId, list[SnapshotId]] = defaultdict(list)
    reasons = history.reasons()
    for id, keepers in history.keepers().items():
        own = history.records[id].manifest_id()
        if id in takers:
            tips[own].append(id)
            plain[id] = 0
        elif id in history.pruned:
            # The contents of a snapshot that only a reflog or a hold names may have been collected.
            parts = _parts(catalog, own)
            if not all(_is_stored(inventory, tensor) for tensor in parts):
                continue
        for manifest in _manifests(catalog, history.records[id]):
            reason = INPUTS if manifest != own and reasons[id] == NAMED else reasons[id]
            mark = 1 << reason | keepers << RUNNING + 1 | takers.get(id, 0) << RUNNING + 1 + width
            of_manifests[manifest] |= mark
    marks: dict[bytes, int] = {}
    for place, contents in _readable(catalog, inventory, Manifest, of_manifests):
        for id in tips.get(place, ()):
            plain[id] = contents.plain_bytes()
        mark = of_manifests[place]
        for file in contents.files:
            for part in file.parts:
                # Twice as fast as to look for tensors with equal sets, which few are.
                marks[part.tensor] = marks.get(part.tensor, 0) | mark
    together: dict[int, list[bytes]] = defaultdict(list)
    for tensor, mark in marks.items():
        together[mark].append(tensor)
    blocks = Blocks(catalog, inventory, marks)
    for mark, tensors in together.items():
        yield mark, blocks.of(tensors)


def _readable(
    catalog: Catalog, inventory: Inventory, kind: type[R], ids: Iterable[N]
) -> Iterator[tuple[N, R]]:
    """Yield (id, record) of those that are not lost, in the order in which most of them lie."""
    asked = list(ids)
    found = inventory.tables[kind.kind].find(b"".join(asked))
    left = dict(zip(found.tolist(), asked, strict=True))
    lost = [asked[at] for at in np.flatnonzero(found < 0).tolist()]
    left.pop(-1, None)
    for number, record in inventory.records(catalog, kind, found[found >= 0]):
        yield left.pop(number), record
    for id in (*lost, *left.values()):
        with suppress(NotFound, Corrupt):
            yield id, catalog.record(kind, id)


def _parts(catalog: Catalog, id: ManifestId) -> set[bytes]:
    """Return the tensors of a manifest; none if it is lost."""
    manifest = catalog.manifest_if_there(id)
    return {part.tensor for file in manifest.files for part in file.parts} if manifest else set()


def _is_stored(inventory: Inventory, tensor: bytes) -> bool:
    kinds = (Kind.TENSOR, Kind.VIRTUAL)
    return any(inventory.tables[kind].find(tensor)[0] >= 0 for kind in kinds)


def _manifests(catalog: Catalog, record: SnapshotRecord) -> Iterator[ManifestId]:
    """Yield the manifests that must be stored to read a snapshot."""
    yield record.manifest_id()
    plan = record.plan_id()
    if record.is_virtual and plan is not None:
        # Its missing tensors are computed from these.
        with suppress(NotFound, Corrupt):
            inputs = catalog.record(Plan, plan)
            yield inputs.base_id()
            yield from (expert.manifest_id() for expert in inputs.experts)


class Blocks:
    """The row numbers of the blocks of tensors: four bytes for each block of each tensor.

    Virtual tensors, and those whose records are lost, have none.
    """

    def __init__(self, catalog: Catalog, inventory: Inventory, tensors: Iterable[bytes]) -> None:
        """Read the records of these tensors."""
        self._tensors = inventory.tables[Kind.TENSOR]
        self._base = inventory.blocks.base
        self._starts = np.zeros(len(self._tensors), np.int64)
        self._counts = np.zeros(len(self._tensors), np.int64)
        ids = b"".join(tensors)
        found = self._tensors.find(ids)
        stored = [TensorId(id_at(ids, at)) for at in np.flatnonzero(found >= 0).tolist()]
        done = 0
        # The search runs beside the reading: numpy lets other threads run meanwhile.
        with ThreadPoolExecutor(1, "usage") as pool:
            searches: list[Future[npt.NDArray[np.int32]]] = []
            for some in _together(catalog, inventory, stored):
                lists = b"".join([tensor.blocks for _, tensor in some])
                if searches:
                    # One waits at most: its ids take eight times what is found.
                    searches[-1].result()
                searches.append(pool.submit(_found, inventory.blocks, lists))
                numbers = self._tensors.find(b"".join([id for id, _ in some]))
                counts = np.array([tensor.block_count() for _, tensor in some], np.int64)
                self._starts[numbers] = done + np.cumsum(counts) - counts
                self._counts[numbers] = counts
                done += len(lists) // ID_BYTES
            pieces = [search.result() for search in searches]
        self._blocks = np.concatenate([np.empty(0, np.int32), *pieces])

    def of(self, tensors: Sequence[bytes]) -> Numbers:
        """Return the row numbers of their blocks and these blocks' bases, each once, ascending."""
        found = self._tensors.find(b"".join(tensors))
        found = found[found >= 0]
        starts, counts = self._starts[found], self._counts[found]
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = self._blocks[np.repeat(starts, counts) + steps].astype(np.int64)
        blocks = blocks[blocks >= 0]
        bases = self._base[blocks].astype(np.int64)
        # Sorted by hand: numpy's `unique` takes ten times as long on integers like these.
        both = np.sort(np.concatenate([blocks, bases[bases >= 0]]))
        return both[np.append(True, both[1:] != both[:-1])] if len(both) else both


def _found(blocks: Table, ids: bytes) -> npt.NDArray[np.int32]:
    return blocks.find(ids).astype(np.int32)


def _together(
    catalog: Catalog, inventory: Inventory, tensors: Iterable[TensorId]
) -> Iterator[list[tuple[TensorId, Tensor]]]:
    """Yield the records that are not lost, in groups of about `_BATCH` blocks."""
    some: list[tuple[TensorId, Tensor]] = []
    blocks = 0
    for id, tensor in _readable(catalog, inventory, Tensor, tensors):
        if tensor.fits(catalog.block_size):
            some.append((id, tensor))
            blocks += 1 + tensor.block_count()
        if blocks >= _BATCH:
            yield some
            some, blocks = [], 0
    yield some


# Sums over sharings -------------------------------------------------------------------------------


class Sharings:
    """Blocks grouped by who needs them. Filled by `add`; two sharings may have the same owners.

    labels: the sharing of each block, int32[blocks]; 0 means nobody's. owners: of each sharing, a
    set of numbers below `width`.
    """

    def __init__(self, blocks: int, width: int) -> None:
        self.labels = np.zeros(blocks, np.int32)
        self.owners: list[Owners] = [0]
        self.width = width
        self._table: Numbers | None = None

    def part(self, lowest: int, width: int) -> Sharings:
        """Return the same sharings with only these owners, of whom the lowest is number 0."""
        found = Sharings(0, width)
        found.labels, found._table = self.labels, self._table
        mask = (1 << width) - 1
        found.owners = [owners >> lowest & mask for owners in self.owners]
        return found

    def add(self, owners: Owners, numbers: Numbers) -> None:
        """Record that these owners need these blocks (each listed once)."""
        if not owners:
            return
        self._table = None
        # Split every sharing that is touched: its touched blocks become a new sharing.
        labels = self.labels[numbers]
        first = int(labels[0]) if len(labels) else 0
        if (labels == first).all():
            touched = [first]
            self.labels[numbers] = len(self.owners)
        else:
            found, within = np.unique(labels, return_inverse=True)
            touched = found.tolist()
            self.labels[numbers] = len(self.owners) + within
        self.owners += [self.owners[label] | owners for label in touched]

    def table(self, blocks: Table) -> Numbers:
        """Return int64[sharings, codecs, 3]: blocks, plain and stored bytes by codec.

        Counted at the first call, also for later parts.
        """
        if self._table is None:
            self._table = self._counted(blocks)
        return self._table

    def _counted(self, blocks: Table) -> Numbers:
        shape = (len(self.owners), len(Codec))
        codec = blocks.heads["codec"].astype(np.int64)
        if len(codec) and codec.max() >= len(Codec):
            raise Incompatible("a block's codec needs a newer mstore", hint="pip install -U mstore")
        cells = self.labels * np.int64(len(Codec)) + codec
        columns = (
            np.bincount(cells, weights, shape[0] * shape[1]).reshape(shape)
            for weights in (None, blocks.heads["plain"], blocks.heads["stored"])
        )
        # bincount sums in float64; integers below 2**53 are exact there.
        return np.stack([column.astype(np.int64) for column in columns], axis=2)


class Alone(msgspec.Struct, frozen=True):
    """The figures of one owner, int64[codecs, 3]: counts, plain and stored bytes by codec.

    all: of everything that it has. unique: of what it alone has. portion: its stored bytes, where a
    block with n owners counts as an n-th.
    """

    all: Numbers
    unique: Numbers
    portion: int


class Sums:
    """Sums over chosen sharings: every figure of a report."""

    def __init__(self, sharings: Sharings, blocks: Table) -> None:
        table = sharings.table(blocks)
        # Later sharings split many earlier ones; drop those without blocks.
        used = np.flatnonzero(table[:, :, BLOCKS].any(axis=1)).tolist()
        # Merge sharings of the same owners.
        owners = [sharings.owners[label] for label in used]
        places = {who: place for place, who in enumerate(dict.fromkeys(owners))}
        into = np.array([places[who] for who in owners], np.int64)
        self._table = np.zeros((len(places), len(Codec), 3), np.int64)
        np.add.at(self._table, into, table[used])
        self._stored = self._table[:, :, STORED].sum(axis=1)
        self._owned = flags(list(places), sharings.width)
        self._owners = self._owned.sum(axis=1)

    def all(self) -> Chosen:
        """Select every sharing."""
        return np.ones(len(self._owners), np.bool_)

    def of_any(self, *asked: int) -> Chosen:
        """Select the sharings that any of these owners has; with none, those that anyone has."""
        counted = self._owned[:, list(asked)] if asked else self._owned
        return np.asarray(counted.any(axis=1), np.bool_)

    def of_none_but(self, asked: Sequence[int]) -> Chosen:
        """Select the sharings that only these owners have."""
        mine = self._owned[:, list(asked)].sum(axis=1)
        return np.asarray((mine > 0) & (mine == self._owners), np.bool_)

    def stored(self, chosen: Chosen) -> int:
        """Return the stored bytes of these sharings."""
        return int(self._stored[chosen].sum())

    def each(self, asked: Sequence[int]) -> list[Alone]:
        """Return the sums of each of these owners, in one pass over all sharings."""
        cells = self._table.reshape(len(self._table), len(Codec) * 3).astype(np.float64)
        unique = cells * (self._owners == 1)[:, None]
        portion = self._stored / np.maximum(self._owners, 1)
        columns = np.hstack([cells, unique, portion[:, None]])
        found = np.zeros((len(asked), columns.shape[1]))
        for start in range(0, len(columns), _CHUNK):
            # float64 products are fast, and exact for integers below 2**53.
            owned = self._owned[start : start + _CHUNK, list(asked)].astype(np.float64)
            found += owned.T @ columns[start : start + _CHUNK]
        whole = found[:, :-1].astype(np.int64).reshape(len(asked), 2, len(Codec), 3)
        return [
            Alone(sums[0], sums[1], int(own[-1])) for sums, own in zip(whole, found, strict=True)
        ]

    def common(self, owner: int) -> Numbers:
        """Return the stored bytes that an owner has in common with each owner: int64[owners]."""
        mine = self._owned[:, owner]
        return np.asarray(self._stored[mine] @ self._owned[mine], np.int64)

    def codecs(self, chosen: Chosen) -> tuple[CodecUsage, ...]:
        """Return counts and bytes by codec."""
        return by_codec(self._table[chosen].sum(axis=0))


def by_codec(sums: Numbers) -> tuple[CodecUsage, ...]:
    """Convert sums of int64[codecs, 3] to report rows."""
    return tuple(
        CodecUsage(codec.name.lower(), *figures)
        for codec, figures in zip(Codec, sums.tolist(), strict=True)
        if figures[BLOCKS]
    )


class SharedWith(Sequence[SharedBytes]):
    """With whom a ref shares blocks, largest first; computed on first access.

    For all refs the cost is quadratic in their number, and few callers need it.
    """

    def __init__(self, taken: Sums, number: int, names: Sequence[str]) -> None:
        self._ask = taken, number, names
        self._found: tuple[SharedBytes, ...] | None = None

    def _counted(self) -> tuple[SharedBytes, ...]:
        if self._found is None:
            taken, number, names = self._ask
            common = taken.common(number)
            self._found = tuple(
                SharedBytes(names[other], int(common[other]))
                for other in np.argsort(-common, kind="stable").tolist()
                if common[other] and other != number
            )
        return self._found

    def __len__(self) -> int:
        return len(self._counted())

    @overload
    def __getitem__(self, place: int) -> SharedBytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[SharedBytes]: ...
    def __getitem__(self, place: int | slice) -> SharedBytes | Sequence[SharedBytes]:
        return self._counted()[place]


def flags(sets: Sequence[Owners], width: int) -> Chosen:
    """Convert sets to rows of flags: bool[sets, width]."""
    size = -(-width // 8)
    packed = b"".join(who.to_bytes(size, "little") for who in sets)
    rows = np.frombuffer(packed, np.uint8).reshape(len(sets), size)
    return np.unpackbits(rows, axis=1, count=width, bitorder="little").astype(np.bool_)


class Usage(msgspec.Struct, frozen=True):
    """One consistent reading of a store, from which all figures are computed.

    plain: bytes of the files of what refs name. taken: sharings by the refs whose snapshots need a
    block; kept: by the refs for which gc keeps it (the bit after the last ref: kept without a ref);
    why: by the reasons for keeping it.
    """

    catalog: Catalog
    history: History
    inventory: Inventory
    plain: Mapping[SnapshotId, int]
    taken: Sharings
    kept: Sharings
    why: Sharings

    @classmethod
    def read(cls, catalog: Catalog, reflog_days: int) -> Usage:
        """Read the whole index. Raises Corrupt if a needed record is missing."""
        with catalog.index.env.read() as transaction:
            inventory = Inventory(catalog, transaction)
            named = History.read(catalog, transaction, window_start(reflog_days))
        records = dict(_readable(catalog, inventory, SnapshotRecord, inventory.snapshots))
        history = replace(named, records=records)
        width, reasons = len(history.names) + 1, RUNNING + 1
        plain: dict[SnapshotId, int] = {}
        sharings = Sharings(len(inventory.blocks), reasons + 2 * width)
        for owners, numbers in needed(catalog, history, inventory, plain):
            sharings.add(owners, numbers)
        sharings.table(inventory.blocks)
        taken, kept = (sharings.part(low, width) for low in (reasons + width, reasons))
        why = sharings.part(0, reasons)
        return cls(catalog, history, inventory, plain, taken, kept, why)

    def report(self, names: Sequence[str], *, reflog_days: int) -> UsageReport:
        """Report what these refs take, and what removing them would free; no names: all refs."""
        asked = self._numbers(names) if names else list(range(len(self.history.names)))
        blocks = self.inventory.blocks
        taken, kept = Sums(self.taken, blocks), Sums(self.kept, blocks)
        together = taken.of_any(*asked) if asked else ~taken.all()
        figures = zip(asked, taken.each(asked), kept.each(asked), strict=True)
        return UsageReport(
            refs=tuple(
                self._ref(number, mine, theirs, SharedWith(taken, number, self.history.names))
                for number, mine, theirs in figures
            ),
            stored_bytes=taken.stored(together),
            freed_bytes=kept.stored(kept.of_none_but(asked)),
            codecs=taken.codecs(together),
            live_bytes=kept.stored(kept.of_any()),
            held=self._held(),
            unreachable_bytes=kept.stored(~kept.of_any()),
            reflog_days=reflog_days,
            seconds=0.0,
        )

    def _held(self) -> HeldBytes:
        why = Sums(self.why, self.inventory.blocks)
        so_far = [why.stored(why.of_any(*range(reason + 1))) for reason in range(RUNNING + 1)]
        return HeldBytes(so_far[0], *(more - less for less, more in pairwise(so_far)))

    def _numbers(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of these refs, each once. Raises NotFound."""
        known = {name: number for number, name in enumerate(self.history.names)}
        names = ref_rows.chosen(known, names)
        for name in names:
            if name not in known:
                raise ref_rows.missing(name, known)
            tip = self.history.tips[known[name]]
            if tip not in self.history.records:
                what = f"its snapshot {tip.short} is missing"
                raise NotFound(what, where=name, hint=call("fsck"))
        return [known[name] for name in dict.fromkeys(names)]

    def _ref(self, number: int, taken: Alone, kept: Alone, shared_with: SharedWith) -> RefUsage:
        tip = self.history.tips[number]
        shared = taken.all - taken.unique
        return RefUsage(
            name=self.history.names[number],
            snapshot=tip,
            plain_bytes=self.plain.get(tip, 0),
            stored_bytes=_stored(taken.all),
            unique_bytes=_stored(taken.unique),
            shared_bytes=_stored(shared),
            portion_bytes=taken.portion,
            freed_bytes=_stored(kept.unique),
            shared_with=shared_with,
            unique=by_codec(taken.unique),
            shared=by_codec(shared),
        )


def _stored(sums: Numbers) -> int:
    return int(sums[:, STORED].sum())
