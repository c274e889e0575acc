"""Reindex: rebuild the index from packs and the ref mirror.

The new LMDB environment is built in tmp/ and exchanged with the old one in one step: a crash leaves
the old index or the new one. A process that has the old one open can still read it, but can commit
nothing. What packs do not contain (refs, reflogs, names of plans' inputs, what was pruned or
pinned) comes from the mirror and the old index (`upkeep.check.index_file`). Where they differ, or
something was unreadable, the remarks say so, and the old index stays in lost+found/. Statistics and
the memo table are functions of contents and stay; remembered requests are dropped.

A snapshot in the packs that no ref leads to is one of three cases. If the old index named its packs
but not the snapshot, it was collected, and is left out. If it is complete, it is unknown whether a
ref ever named it: it gets a branch `recovered/...`, which protects it from the next garbage
collection. If it is incomplete, it counts as pruned, and tensors that only it has are left out
where blocks of them are missing. Packs in lost+found/ are taken back first.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from mstore import fs
from mstore.blocks import lmdb_env
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Kind
from mstore.blocks.schema import PINNED, PLANS, PRUNED, REFLOG, PlanInputs
from mstore.snapshots import notes
from mstore.store import leases, listing, memo, mirror, pack_list, plans, refs, unnamed_packs
from mstore.store.catalog import elsewhere_of, now_ns
from mstore.store.config import Config
from mstore.store.layout import Layout, locate, require_local, require_writable
from mstore.store.objects.canonical import decode
from mstore.store.objects.note import Note
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.refs import refs_in
from mstore.terms.errors import Conflict, Corrupt, MstoreError
from mstore.terms.ids import Buffer, PackId, PlanId, SnapshotId, TensorId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, Report
from mstore.upkeep.check import index_file, pack_rows
from mstore.upkeep.check.index_file import ChosenRefs, OldIndex, choose_refs
from mstore.upkeep.check.pack_rows import PackRows

_DATA = "data.mdb"


class ReindexReport(Report, frozen=True):
    """The result of `reindex`."""

    packs: int
    """packs read"""
    blocks: int
    """blocks in the new index"""
    records: int
    """records in the new index"""
    snapshots: int
    """snapshots in the new index"""
    refs: int
    """branches and tags in the new index"""
    pruned: int
    """snapshots marked as pruned"""
    old_index: bool
    """whether names and history were taken from the old index"""
    reflog_moves: int
    """moves of refs taken from the old index"""
    index_bytes: int
    """size of the new index"""
    recovered: tuple[str, ...]
    """branches created for snapshots that nothing led to"""
    remarks: tuple[str, ...]
    """what could not be read, and which source was used on disagreement, as text"""
    kept_index: str | None
    """path of the old index; None if it did not disagree"""
    seconds: float
    """how long it took"""


def reindex(
    root: Path, *, use_old_index: bool = True, progress: ProgressCallback | None = None
) -> ReindexReport:
    """Rebuild the index of the store at `root`.

    Raises Conflict while anyone has the store open, NotFound, Incompatible, StorageFailed.
    """
    began = time.monotonic()
    layout = locate(root)
    require_writable(layout)
    config = Config()
    # Ignore an unreadable config here; opening the store reports it.
    with suppress(Corrupt):
        config = Config.load(layout)
    require_local(root, config.filesystem)
    fs.share(root, config.shared)
    _make_directories(layout)
    with leases.collecting(layout), _alone(layout):
        old = OldIndex.read(layout) if use_old_index else None
        workplace = layout.tmp / f"reindex-{secrets.token_hex(4)}"
        fs.make_directory(workplace, private=True)
        try:
            fs.make_directory(workplace / "index")
            packs = PackFiles(layout.packs)
            index = Index(workplace / "index", create=True)
            # A tensor may lean on what remotes have: their tables are kept.
            index.elsewhere = elsewhere_of(layout.remotes, config)
            try:
                returned = unnamed_packs.bring_back(layout, packs, pack_rows.fits)
                built = _Building(layout, index, packs, old, returned, progress).run()
                _list_packs(layout, index, packs)
            finally:
                index.close()
                packs.close()
            kept = _put_in_place(layout, workplace, keep=bool(built.remarks))
        finally:
            fs.remove_tree(workplace)
        _forget_requests(layout)
        index = Index(layout.index)
        try:
            mirror.write(layout, index)
            size = index.env.file_bytes()
        finally:
            index.close()
    return replace(
        built,
        index_bytes=size,
        kept_index=None if kept is None else str(kept),
        seconds=time.monotonic() - began,
    )


def _list_packs(layout: Layout, index: Index, packs: Packs) -> None:
    """Give each pack a line in the list of the new index, taken or not, before it is in place."""
    with index.env.read() as transaction:
        own = index.generation(transaction)
    pack_list.write(layout, pack_list.made_of(packs.listed(), own, layout))


def _make_directories(layout: Layout) -> None:
    """Make the directories that a copy of a store may lack; their contents are rebuilt."""
    made = [
        fs.make_directory(directory, private=directory == layout.tmp, exist_ok=True)
        for directory in (layout.tmp, layout.index, layout.stats, layout.mirror.parent)
    ]
    if any(made):
        fs.sync_directory(layout.root)


@contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """Hold the writer lock while no other process uses the store. Raises Conflict naming users."""
    if lmdb_env.is_open(layout.index):
        raise Conflict("this process has the store open", where=str(layout.root))
    lock = fs.LockFile(layout.lock)
    try:
        if not lock.acquire(blocking=False):
            raise Conflict(
                "another command is publishing",
                where=str(layout.root),
                hint="run the command again when it has ended",
            )
        _require_idle(layout)
        yield
    finally:
        lock.release()


def _require_idle(layout: Layout) -> None:
    live = sorted(leases.live(layout))
    held = sorted(leases.holds(layout))
    names: dict[str, str] = {}
    if live:
        with suppress(MstoreError):
            names = {
                lease: f"{purpose} (process {pid})"
                for lease, pid, purpose in index_file.at_work(layout)
            }
    holder = _holder(layout.index / "lock.mdb")
    if live or held or holder is not None:
        who = [names.get(lease, f"lease {lease}") for lease in live]
        who += [f"a reader of snapshot {snapshot.short}" for snapshot in held]
        who = who or [f"process {holder} has the store open"]
        raise Conflict(
            f"the store is in use: {', '.join(who)}",
            where=str(layout.root),
            hint=phrase(
                "end mounts ({mounts} lists them) and let commands end, then: {reindex}",
                mounts=call("mounts", all=True),
                reindex=call("reindex"),
            ),
        )


# struct flock of 64-bit Linux.
_FLOCK = struct.Struct("hhqqi4x")


def _holder(lock: Path) -> int | None:
    """Return a process that has an LMDB environment open, from LMDB's byte lock; None for none.

    Raises StorageFailed if that cannot be known.
    """
    with fs.translated(lock):
        try:
            fd = fs.open_file(lock)
        except FileNotFoundError:
            return None
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        finally:
            os.close(fd)
    return None if kind == fcntl.F_UNLCK else pid


def _put_in_place(layout: Layout, workplace: Path, *, keep: bool) -> Path | None:
    """Exchange the new environment with the old one, both files at once.

    keep: move the old one to lost+found/, and return its path there. Raises Conflict if a writer
    started meanwhile: its work would be lost.
    """
    fresh = workplace / "index"
    fs.sync_directory(fresh)
    fs.sync_directory(workplace)
    working = leases.live(layout)
    if working:
        raise Conflict(
            f"the store came into use meanwhile: lease {min(working)}",
            where=str(layout.root),
            hint="run the command again when it has ended",
        )
    fs.exchange(fresh, layout.index)
    fs.sync_directory(layout.root)
    if keep and (fresh / _DATA).exists():
        return unnamed_packs.keep_index(layout, fresh)
    return None


def _forget_requests(layout: Layout) -> None:
    """Drop remembered requests, whose plans may be gone; ignore damage of this disposable table."""
    if not (layout.memo / _DATA).exists():
        return
    with suppress(MstoreError):
        memo.forget_requests(layout.memo)


class _Building:
    """Builds one new index, from the first pack to the last ref."""

    def __init__(
        self,
        layout: Layout,
        index: Index,
        packs: Packs,
        old: OldIndex | None,
        returned: list[PackId],
        progress: ProgressCallback | None,
    ) -> None:
        self._layout = layout
        self._index = index
        self._old = old or OldIndex()
        self._returned = frozenset(returned)
        self._packs = PackRows(layout, index, packs, self._old, progress)
        self._remarks: list[str] = [f"old index: {remark}" for remark in self._old.remarks]
        if returned:
            self._remarks.append(f"packs taken back from lost+found: {len(returned)}")

    def run(self) -> ReindexReport:
        """Fill the index; report all but its size, what becomes of the old one, and the time."""
        packs = self._packs.fill()
        self._remarks += self._packs.remarks
        chosen = choose_refs(self._layout, self._old)
        self._remarks += chosen.remarks
        self._tell_lost_moves(chosen)
        with self._index.env.write() as transaction:
            # Later than any that a witness states, so that nothing looks newer.
            self._index.set_generation(transaction, chosen.generation + 1)
        snapshots = self._snapshots(self._collected(chosen))
        names = self._refs(chosen, set(snapshots))
        recovered = self._recover(snapshots, names)
        names.update(recovered)
        self._plans(snapshots, names)
        pruned = self._pruned(snapshots, names)
        self._drop_partial_tensors([snapshots[id] for id in snapshots.keys() - pruned])
        with self._index.env.read() as transaction:
            blocks, records = (
                self._index.count(transaction, name) for name in ("blocks", "records")
            )
        return ReindexReport(
            packs=packs,
            blocks=blocks,
            records=records,
            snapshots=len(snapshots),
            refs=len(names),
            pruned=len(pruned),
            old_index=bool(self._old.refs or self._old.reflog),
            reflog_moves=len(self._old.reflog),
            index_bytes=0,
            recovered=tuple(recovered),
            remarks=tuple(self._remarks),
            kept_index=None,
            seconds=0.0,
        )

    def _tell_lost_moves(self, chosen: ChosenRefs) -> None:
        known = self._old.generation
        if known is not None and known < chosen.generation:
            self._remarks.append(
                f"reflogs end at generation {known} of {chosen.generation}: later moves are lost, "
                "and what was removed since may be a branch recovered/... now"
            )

    def _collected(self, chosen: ChosenRefs) -> set[bytes]:
        """Return snapshots that the old index no longer had, if it is the latest witness."""
        old = self._old
        if old.snapshots is None or old.generation is None or old.generation < chosen.generation:
            return set()
        known = old.packs - self._returned
        return {id for id, packs in self._packs.homes.items() if packs <= known} - old.snapshots

    # -- snapshots ---------------------------------------------------------------------------

    def _snapshots(self, collected: set[bytes]) -> dict[SnapshotId, SnapshotRecord]:
        """Insert rows of snapshots and their notes, except for collected snapshots."""
        index = self._index
        snapshots: dict[SnapshotId, SnapshotRecord] = {}
        noted: list[Note] = []
        for id in self._stored(Kind.SNAPSHOT):
            data = None if id in collected else self._record(Kind.SNAPSHOT, id)
            if data is not None:
                with suppress(Corrupt):
                    snapshots[SnapshotId(id)] = decode(SnapshotRecord, data, id.hex())
        for id in self._stored(Kind.NOTE):
            data = self._record(Kind.NOTE, id)
            if data is not None:
                with suppress(Corrupt):
                    noted.append(decode(Note, data, id.hex()))
        with index.env.write() as transaction:
            for id in collected:
                # Its blocks may be gone as well: a listed record without them would be reported as
                # damage.
                index.delete_row(transaction, (Kind.SNAPSHOT, id))
            for snapshot in snapshots.values():
                listing.insert(index, transaction, snapshot)
            for note in noted:
                # A note of a snapshot that is gone is garbage, which gc drops.
                if note.snapshot_id() in snapshots:
                    notes.insert(index, transaction, note)
        return snapshots

    def _stored(self, kind: Kind) -> list[bytes]:
        with self._index.env.read() as transaction:
            return list(self._index.record_ids(transaction, kind))

    def _record(self, kind: Kind, id: bytes) -> Buffer | None:
        data = self._packs.record(kind, id)
        if data is None:
            self._remarks.append(f"{kind.name.lower()} {id.hex()} is unreadable")
        return data

    def _refs(self, chosen: ChosenRefs, known: set[SnapshotId]) -> dict[str, refs.Ref]:
        """Insert the chosen refs, and the old index's reflogs with a move to the chosen state."""
        old, index = self._old, self._index
        with index.env.write() as transaction:
            for key, move in old.reflog.items():
                index.put(transaction, REFLOG, key, move)
            for name in chosen.removed:
                self._restore(transaction, name, None, old.moves[name].new)
            for name, ref in sorted(chosen.refs.items()):
                if ref.snapshot_id() not in known:
                    what = f"{name} is at {ref.snapshot_id()}, which is in no pack"
                    self._remarks.append(
                        phrase("{what}; next: {fsck}", what=what, fsck=call("fsck"))
                    )
                last = old.moves[name].new if name in old.moves else None
                self._restore(transaction, name, ref, last)
        return dict(chosen.refs)

    def _restore(
        self,
        transaction: IndexTransaction,
        name: str,
        new: refs.Ref | None,
        old: bytes | None,
        action: str = "reindex",
    ) -> None:
        refs_in(self._index, transaction).restore(
            name, new, old=old, action=action, time_ns=now_ns()
        )

    def _recover(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> dict[str, refs.Ref]:
        """Add a branch for each complete snapshot that nothing leads to.

        "Nothing" means no ref, no reflog, no child snapshot and no row of the old index. Where
        names of the old index are lost, a row of it does not count: a lost name may have led to the
        snapshot.
        """
        old = self._old
        told: set[bytes | None] = set(old.snapshots or ()) if old.are_refs_whole else set()
        if old.are_refs_whole or old.is_reflog_whole:
            with self._index.env.read() as transaction:
                for _, move in refs_in(self._index, transaction).reflogs():
                    told |= {move.old, move.new}
        parents = {p.snapshot_id() for record in snapshots.values() for p in record.parents}
        named = {ref.snapshot_id() for ref in names.values()}
        directory = "recovered"
        while directory in names:
            directory += "-again"
        found: dict[str, refs.Ref] = {}
        with self._index.env.write() as transaction:
            for id in sorted(snapshots.keys() - parents - named):
                if bytes(id) in told or not self._packs.is_complete(snapshots[id]):
                    continue
                name = f"{directory}/{id.short}"
                if name in names or name in found:
                    name = f"{directory}/{id}"
                found[name] = refs.Ref(refs.BRANCH, id)
                self._restore(transaction, name, found[name], None, "reindex: recovered")
        if found:
            first = next(iter(found))
            self._remarks.append(
                phrase(
                    "no ref leads to {count} of the snapshots: each is a branch {directory}/... "
                    "now. {log} shows them, and older ones that they came from; to name one: "
                    "{reset} (or its id), then {rm}; where it is not needed, {rm} alone",
                    count=len(found),
                    directory=directory,
                    log=call("log"),
                    reset=call("reset", "NAME", first),
                    rm=call("remove", first),
                )
            )
        return found

    def _plans(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> None:
        """Insert the names of plans' inputs: from the old index, else their current names."""
        # Prefer branch names: those are what people type.
        ordered = sorted(names.items(), key=lambda item: (item[1].kind == refs.BRANCH, item[0]))
        called = {ref.snapshot_id(): name for name, ref in ordered}
        derived: dict[PlanId, PlanInputs] = {}
        for record in snapshots.values():
            plan, sources = record.plan_id(), plans.named(record, called)
            if plan is not None and sources is not None:
                derived[plan] = sources
        index, told = self._index, self._old.plans
        with index.env.write() as transaction:
            for plan, sources in {**derived, **told}.items():
                if index.has_record(transaction, Kind.PLAN, plan):
                    index.put(transaction, PLANS, plan, sources)

    # -- contents ----------------------------------------------------------------------------

    def _pruned(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> set[SnapshotId]:
        """Mark pruned snapshots (of the old index, or without contents) and pinned ones."""
        named = {ref.snapshot_id() for ref in names.values()}
        now = now_ns()
        old = self._old.pruned or {}
        listed = self._old.snapshots if self._old.pruned is not None else None
        pruned = {id: time_ns for id, time_ns in old.items() if id in snapshots}
        for id, record in snapshots.items():
            # A snapshot that the old index listed and did not mark as pruned may be damaged
            # instead.
            doubted = listed is None or id not in listed
            if doubted and id not in named and not self._packs.is_complete(record):
                pruned.setdefault(id, now)
        with self._index.env.write() as transaction:
            for id, time_ns in pruned.items():
                self._index.put(transaction, PRUNED, id, time_ns)
            for id, time_ns in self._old.pinned.items():
                # The newest copies of its blocks are raw.
                if id in snapshots:
                    self._index.put(transaction, PINNED, id, time_ns)
        return set(pruned)

    def _drop_partial_tensors(self, kept: Iterable[SnapshotRecord]) -> None:
        """Drop tensors without all their blocks that no snapshot with its contents has.

        A pack that came whole from a remote may hold such records, of snapshots that did not come.
        Of a stored tensor everybody expects all blocks.
        """
        needed = self._packs.tensors_of(kept)
        with self._index.env.read() as transaction:
            others = set(self._index.record_ids(transaction, Kind.TENSOR)) - needed
        partial = [id for id in sorted(others) if not self._packs.has_tensor(TensorId(id))]
        if partial:
            with self._index.env.write() as transaction:
                for id in partial:
                    self._index.delete_row(transaction, (Kind.TENSOR, id))
