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
from contextlib import suppress
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import overload

import msgspec
import numpy as np
from msgspec.structs import replace

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.snapshots import lineage
from mstore.snapshots.lineage import ancestry
from mstore.store import leases, unnamed_packs
from mstore.store import refs as ref_rows
from mstore.store.catalog import Catalog
from mstore.store.disk_cache import used_bytes
from mstore.store.layout import FORMAT_VERSION
from mstore.store.leaning import Leaning, all_leaning
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.refs import refs_in
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import ManifestId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import Report
from mstore.upkeep.reachability import Inventory, Roots, is_recent, window_start
from mstore.upkeep.sharings import (
    STORED,
    CodecUsage,
    Figures,
    Numbers,
    Owners,
    Sharings,
    Sums,
    TensorBlocks,
    by_codec,
    distinct,
)

NAMED, INPUTS, LINEAGE, REFLOG, RUNNING = range(5)
"""Reasons for keeping contents, strongest first."""


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
    """Report what these refs take and share, and what removing them would free; no names: all.

    Reflog moves no older than `reflog_days` keep what they name. Raises NotFound, Corrupt.
    """
    began = time.monotonic()
    found = Usage.read(catalog, reflog_days)
    report = found.report(names, reflog_days=reflog_days)
    return replace(report, seconds=time.monotonic() - began)


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
            contents = catalog.manifest_if_there(own)
            files = () if contents is None else contents.files
            if not all(inventory.has_tensor(part.tensor) for file in files for part in file.parts):
                continue
        for manifest in _manifests(catalog, history.records[id]):
            reason = INPUTS if manifest != own and reasons[id] == NAMED else reasons[id]
            mark = 1 << reason | keepers << RUNNING + 1 | takers.get(id, 0) << RUNNING + 1 + width
            of_manifests[manifest] |= mark
    marks = list(dict.fromkeys(of_manifests.values()))
    groups = {mark: number for number, mark in enumerate(marks)}
    tensors = inventory.tables[Kind.TENSOR]
    pairs = [np.empty(0, np.int64)]
    for some in inventory.named_tensors(inventory.readable(catalog, Manifest, of_manifests)):
        for place, contents in some.manifests:
            plain |= dict.fromkeys(tips.get(ManifestId(place), ()), contents.plain_bytes())
        those_of = [groups[of_manifests[ManifestId(place)]] for place, _ in some.manifests]
        # Each once: most tensors are in many manifests of one group.
        found = some.rows * len(marks) + np.repeat(those_of, some.counts)
        pairs.append(distinct(found[some.rows >= 0]))
    both = distinct(np.concatenate(pairs))
    if not len(both):
        return
    rows, of_rows = np.divmod(both, len(marks))
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    together: dict[bytes, list[int]] = defaultdict(list)
    for row, those in zip(rows[starts].tolist(), np.split(of_rows, starts[1:]), strict=True):
        together[those.tobytes()].append(row)
    blocks = TensorBlocks(catalog, inventory, map(tensors.id, rows[starts].tolist()))
    for groups_of, same in together.items():
        owners = [marks[group] for group in np.frombuffer(groups_of, np.int64).tolist()]
        yield reduce(or_, owners), blocks.of(np.array(same))


def _manifests(catalog: Catalog, record: SnapshotRecord) -> Iterator[ManifestId]:
    """Yield the manifests that must be stored to read a snapshot."""
    yield record.manifest_id()
    plan = record.plan_id()
    if record.is_virtual and plan is not None:
        # Its missing tensors are computed from these.
        with suppress(NotFound, Corrupt):
            yield from catalog.record(Plan, plan).manifest_ids()


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
        records = dict(inventory.readable(catalog, SnapshotRecord, inventory.snapshots))
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

    def _ref(self, number: int, taken: Figures, kept: Figures, shared_with: SharedWith) -> RefUsage:
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


class StoreReport(Report, frozen=True):
    """Sizes and counts of a whole store.

    `stored_bytes` includes `unreachable_bytes`, `dead_bytes` and `overhead_bytes`.  It does not
    include `condemned_bytes`, `leftover_bytes` and `lost_found_bytes`.
    """

    path: str
    """the store"""
    uuid: str
    """the store's UUID"""
    format_version: int
    """version of the format on disk"""
    block_size: int
    """bytes"""
    refs: int
    """number of branches and tags"""
    snapshots: int
    """number of snapshots"""
    packs: int
    """number of packs"""
    blocks: int
    """number of distinct blocks"""
    tensors: int
    """number of distinct tensors"""
    plain_bytes: int
    """size of all snapshots that refs reach, as plain files"""
    unique_bytes: int
    """the same with every block counted once"""
    stored_bytes: int
    """size of the packs"""
    index_bytes: int
    """size of the index"""
    statistics_bytes: int
    """size of the cached statistics, which can be discarded"""
    memo_bytes: int
    """size of the memo table, which can be discarded"""
    cache_bytes: int
    """size of what came of lazy remotes and was computed of virtual merges, and is kept on the
    disk, which can be discarded"""
    leans_on: tuple[Leaning, ...]
    """what is only at lazy remotes, of all snapshots"""
    codecs: tuple[CodecUsage, ...]
    """blocks by how they are stored"""
    unreachable_bytes: int
    """stored bytes of blocks that nothing keeps: gc drops them"""
    dead_bytes: int
    """bytes of payloads in packs that no index row names"""
    overhead_bytes: int
    """bytes of headers, tables and padding in packs"""
    condemned_bytes: int
    """bytes of further packs that are deleted once their last readers end"""
    leftover_bytes: int
    """bytes of files in tmp/ that interrupted commands left"""
    lost_found_bytes: int
    """bytes that gc and reindex put aside in lost+found/"""


def store_report(catalog: Catalog, *, statistics_bytes: int, memo_bytes: int) -> StoreReport:
    """Report a whole store; the caller gives the sizes of the tables that can be discarded.

    Raises Corrupt if a needed record is missing, StorageFailed.
    """
    usage = Usage.read(catalog, catalog.config.reflog_days)
    inventory = usage.inventory
    kept = Sums(usage.kept, inventory.blocks)
    rows, stored = inventory.count_by_pack()
    dead = 0
    for number, (pack, _) in inventory.packs.items():
        # fsck reports damaged packs; a pack that was just removed holds no dead bytes.
        with suppress(Corrupt):
            dead += catalog.packs.dead_bytes(pack, int(rows[number]), int(stored[number]))
    size = sum(size for _, size in inventory.packs.values())
    index = catalog.index
    with index.env.read() as transaction:
        condemned = sum(pack.size for pack in index.condemned(transaction))
        packs = list(index.packs(transaction))
        unique = sum(location.raw_length for _, location in index.blocks(transaction))
        tensors = sum(1 for kind, _, _ in index.records(transaction) if kind == Kind.TENSOR)
        blocks = index.count(transaction, "blocks")
    reached = ancestry(catalog, lineage.names_of(catalog))
    return StoreReport(
        path=str(catalog.layout.root),
        uuid=str(catalog.layout.uuid),
        format_version=FORMAT_VERSION,
        block_size=catalog.block_size,
        refs=len(catalog.refs()),
        snapshots=len(catalog.snapshot_ids()),
        packs=len(packs),
        blocks=blocks,
        tensors=tensors,
        plain_bytes=sum(lineage.plain_bytes(catalog, id) for id in reached),
        unique_bytes=unique,
        stored_bytes=sum(size for _, size in packs),
        index_bytes=index.env.file_bytes(),
        statistics_bytes=statistics_bytes,
        memo_bytes=memo_bytes,
        cache_bytes=used_bytes(catalog.layout.cache),
        leans_on=all_leaning(catalog),
        codecs=kept.codecs(kept.all()),
        unreachable_bytes=kept.stored(~kept.of_any()),
        dead_bytes=dead,
        overhead_bytes=size - int(stored.sum()) - dead,
        condemned_bytes=condemned,
        leftover_bytes=sum(one.size for one in leases.leftovers(catalog.layout)),
        lost_found_bytes=unnamed_packs.aside_bytes(catalog.layout),
    )
