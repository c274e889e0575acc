"""Push: what refs need goes to a remote, then the refs move there, in one step.

    what the refs need -> which of it no pack of the remote's root has -> new packs of it, put
    -> their tables, put -> lists with the new rows, put -> the root, replaced if it is the one read
    -> else read the new root, and again from the second step, but no pack is put twice

A push that is killed leaves objects that no root names, and here the tables of the packs that it
put (`sent/`), so that the next one counts them as there. Nothing at the remote is visible before
its root is replaced, and everything is after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import compress
from typing import Final
from uuid import uuid4

import msgspec

from mstore import fs
from mstore.blocks.location import Key, Location
from mstore.blocks.packs import ENTRY, HEADER_BYTES, NO_BASE, Kind, SentPack
from mstore.remotes import layout, statistics
from mstore.remotes.layout import (
    MOST_MOVES,
    NoteRow,
    PackRow,
    PackState,
    RefRow,
    RemoteMove,
    RemoteRoot,
    SnapshotRow,
    StatisticsId,
    StatisticsRow,
    TableId,
    pack_name,
    table_name,
)
from mstore.remotes.needs import LocalRecords, Needs, RecordSource, gather, is_ancestor, whole
from mstore.remotes.objects import MOST_JOBS, Absent, Overtaken, requests_to_put
from mstore.remotes.outgoing import Outgoing, SentPacks, laid_out, pieces
from mstore.remotes.places import RemotePlaces
from mstore.remotes.state import Changes, Remote, RemoteState
from mstore.remotes.tracking import MovedRef, follow, may_write, moved_ref
from mstore.store import contents, refs
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.leases import Lease
from mstore.store.refs import refs_in
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    Interrupted,
    NotFound,
    StorageFailed,
    did_you_mean,
)
from mstore.terms.ids import PackId, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

_ACTION: Final = "push"
_TOGETHER: Final = 1 << 16
"""Blocks that are looked for at once."""


class PushReport(Report, frozen=True):
    """What a push did, or with `dry_run` would do."""

    remote: str
    """the remote's name"""
    url: str
    """its address"""
    dry_run: bool
    """whether this only reports what would be sent"""
    moved: tuple[MovedRef, ...]
    """refs that moved at the remote"""
    snapshots: int
    """snapshots that are new there"""
    without_contents: tuple[SnapshotId, ...]
    """those of which only records went: ancestors, whose contents were left out"""
    blocks: int
    """blocks that were sent"""
    packs: int
    """packs that were put"""
    bytes_sent: int
    """their size"""
    requests: int
    """requests that put something there; a part of a large pack takes one, too"""
    generation: int
    """number of changes that the remote has seen"""
    seconds: float
    """how long it took"""


class PacksGone(Interrupted):
    """The remote's gc has removed packs of this work, which no root named in time."""


class Staged(msgspec.Struct, frozen=True):
    """What goes to a remote and is not published here: refs, records, and packs that are there."""

    refs: Mapping[str, refs.Ref]
    source: RecordSource
    packs: Sequence[SentPack]


class _Used:
    """Packs that have something of what is needed; and of records, which has which."""

    def __init__(self) -> None:
        self.packs: set[PackId] = set()
        self.records: dict[Key, PackId] = {}

    def note(self, kind: Kind, id: bytes, pack: PackId) -> None:
        """Note where a record is."""
        self.packs.add(pack)
        self.records[kind, id] = pack


class Push:
    """One push.

    tracks: whether refs below remotes/ say what is there afterwards. outgoing: statistics that go
    along. staged: what to push in place of refs of this store.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        names: Sequence[str],
        *,
        delete: Sequence[str] = (),
        contents_of_ancestors: bool = False,
        force_with_lease: bool = False,
        tracks: bool = True,
        outgoing: statistics.OutgoingStatistics | None = None,
        staged: Staged | None = None,
        jobs: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._catalog = catalog
        self._staged = staged
        self._statistics = outgoing
        self._remote = remote
        self._delete = delete
        self._force = force_with_lease
        # A ref names what is here.
        self._tracks = tracks and staged is None
        self._jobs = jobs
        self._progress = progress
        self._source: RecordSource = LocalRecords(catalog) if staged is None else staged.source
        self._refs = refs_to_send(catalog, names) if staged is None else dict(staged.refs)
        for name in delete:
            if name in self._refs:
                raise BadRequest("cannot be pushed and deleted at once", where=name)
        self._with_contents = contents_of_ancestors
        self._needs = Needs()
        self._sent = SentPacks()
        self._used = _Used()
        self._table: str | None = None
        self._blocks = self._packs = self._bytes = 0

    def run(self, *, dry_run: bool) -> PushReport:
        """Push. Raises Conflict for a ref that moved there, Corrupt, Unavailable."""
        began = time.monotonic()
        self._remote.dry_run = dry_run
        self._remote.objects.require_writable()
        self._remote.make_directory()
        named = [ref.snapshot_id() for ref in self._refs.values()]
        own = named if self._staged is None else []
        with _lease(self._catalog, self._remote), contents.held(self._catalog, own):
            wanted = whole(self._source, named, ancestors=self._with_contents)
            self._needs = gather(self._source, named, wanted)
            state = self._state()
            self._take_up(state)
            if self._staged is not None:
                self._sent.add(*self._staged.packs)
            for attempt in self._remote.attempts():
                if attempt:
                    state = self._remote.state()
                try:
                    moved, changes = self._decided(state)
                    if not changes:
                        break
                    self._stamp(changes)
                except Absent as error:
                    self._remote.require_replaced(state, error)
                    continue
                with suppress(Overtaken):
                    state = self._remote.change(state, changes)
                    break
        if not dry_run:
            self._remote.remember(state)
            statistics.know(self._remote, state, list(changes.rows["statistics"].values()))
            self._forget_sent()
            if self._tracks and may_write(self._catalog):
                self._follow()
        new = changes.rows["snapshots"].values()
        return PushReport(
            remote=self._remote.name,
            url=self._remote.where,
            dry_run=dry_run,
            moved=tuple(moved),
            snapshots=len(new),
            without_contents=tuple(SnapshotId(row.id) for row in new if not row.is_whole),
            blocks=self._blocks,
            packs=self._packs,
            bytes_sent=self._bytes,
            requests=self._remote.requests,
            generation=state.root.generation,
            seconds=time.monotonic() - began,
        )

    # -- what is there -----------------------------------------------------------------------

    def _state(self) -> RemoteState:
        """Return the remote's state; make a remote where there is none."""
        size = self._catalog.block_size
        try:
            state = self._remote.state()
        except Absent:
            state = self._remote.create(
                RemoteRoot(layout.VERSION, uuid4(), size, 0, uuid4().hex, ())
            )
        if state.root.block_size != size:
            raise Incompatible(
                f"the remote has blocks of {state.root.block_size} bytes, this store of {size}",
                where=self._remote.where,
                hint="another address for a remote of this store",
            )
        return state

    def _take_up(self, state: RemoteState) -> None:
        """Count packs as sent that an earlier push put and no root names."""
        for name in self._remote.kept("sent"):
            path = self._remote.directory / "sent" / name
            # Another push of this store may have removed it meanwhile.
            with suppress(Corrupt, Absent, StorageFailed, ValueError, msgspec.MsgspecError):
                one = msgspec.msgpack.decode(fs.read_file(path, 1 << 30), type=tuple[int, bytes])
                pack = PackId(bytes.fromhex(name))
                row = state.packs().get(pack)
                is_stray = row is None or (row.is_there and not row.is_known)
                if is_stray and self._remote.objects.size(pack_name(pack)) == one[0]:
                    self._sent.add(SentPack(pack, *one))
                    continue
            fs.unlink(path, missing_ok=True)

    def _drop_deleted(self, state: RemoteState) -> None:
        """Forget packs that were put, and that the remote removed before a root named them."""
        rows = {pack: state.packs().get(pack) for pack in self._sent.packs}
        gone = {pack for pack, row in rows.items() if row is not None and not row.is_there}
        if self._staged is not None and any(one.id in gone for one in self._staged.packs):
            raise PacksGone(
                f"{self._remote.name} has removed packs of this merge before it ended",
                where=self._remote.where,
                hint="run the same merge again: it makes these packs again",
            )
        self._sent.drop(gone)

    def _forget_sent(self) -> None:
        for pack in self._used.packs & self._sent.packs.keys():
            fs.unlink(self._remote.directory / "sent" / pack.hex(), missing_ok=True)

    # -- deciding ----------------------------------------------------------------------------

    def _decided(self, state: RemoteState) -> tuple[list[MovedRef], Changes]:
        """Send what this state of the remote lacks; return what moves, and the rows that change."""
        changes = Changes()
        moved = self._moves(state, changes)
        if not self._refs:
            return moved, changes
        self._drop_deleted(state)
        places = RemotePlaces(self._remote, state)
        used = self._used = self._send(places)
        self._rows(state, changes, used)
        self._put_statistics(state, changes, used, places)
        return moved, changes

    def _stamp(self, changes: Changes) -> None:
        """Give the moves of refs the remote's time, by which its gc keeps them."""
        rows = changes.rows["refs"]
        if rows:
            now = self._remote.clock_ns(self._table)
            for key, row in rows.items():
                *before, last = row.moves
                moves = (*before, msgspec.structs.replace(last, time_ns=now))
                rows[key] = msgspec.structs.replace(row, moves=moves)

    def _moves(self, state: RemoteState, changes: Changes) -> list[MovedRef]:
        before = state.refs()
        generation = state.root.generation + 1
        wanted: dict[str, refs.Ref | None] = {**self._refs, **dict.fromkeys(self._delete)}
        moved = []
        for name, ref in wanted.items():
            row = before.get(name)
            new = None if ref is None else ref.snapshot
            old = None if row is None else row.snapshot
            if old is None and new is None:
                there = [one for one, known in before.items() if known.snapshot is not None]
                what = f"{self._remote.name} has no such ref"
                shown = call("remote_contents", self._remote.name)
                raise NotFound(what, where=name, hint=did_you_mean(name, there, shown))
            if old == new:
                continue
            if row is not None and old is not None and ref is not None:
                self._require_allowed(name, row.kind, ref.kind, old, ref.snapshot)
            elif new is not None:
                _refuse_nesting(name, before, self._delete)
            move = RemoteMove(old, new, _ACTION, 0, generation)
            moves = (*(() if row is None else row.moves), move)[-MOST_MOVES:]
            kind = ref.kind if ref is not None else row.kind if row is not None else refs.BRANCH
            changes.put("refs", RefRow(name, kind, new, moves))
            moved.append(moved_ref(name, old, new))
        return moved

    def _require_allowed(self, name: str, kind: str, new_kind: str, old: bytes, new: bytes) -> None:
        """Raise Conflict unless a ref at the remote may move so."""
        if kind != new_kind or kind == refs.TAG:
            raise Conflict(
                f"is another {kind} at {self._remote.name}, and tags do not move",
                where=name,
                hint=call("push", self._remote.name, delete=(name,)),
            )
        with self._catalog.index.env.read() as transaction:
            own = refs.below(refs.REMOTE, self._remote.name, name)
            seen = refs_in(self._catalog.index, transaction).get(own)
        if self._force:
            if seen is not None and seen.snapshot == old:
                return
            raise Conflict(
                f"moved at {self._remote.name} since this store looked",
                where=name,
                hint=phrase("{fetch}, then look at it", fetch=call("fetch", self._remote.name)),
            )
        if not is_ancestor(self._source, SnapshotId(old), [SnapshotId(new)]):
            raise Conflict(
                f"{self._remote.name} has {SnapshotId(old).short}, which is no ancestor of "
                f"{SnapshotId(new).short}",
                where=name,
                hint=phrase(
                    "{fetch}; then merge or add on top of it, or, to replace what it has, {force}",
                    fetch=call("fetch", self._remote.name),
                    force=call("push", self._remote.name, refs=(name,), force_with_lease=True),
                ),
            )

    # -- sending -----------------------------------------------------------------------------

    def _send(self, places: RemotePlaces) -> _Used:
        """Put packs with what the remote lacks; return which packs have what is needed."""
        used = _Used()
        lacking: dict[Key, Location] = {}
        bases: set[bytes] = set()
        blocks = list(self._needs.blocks)
        for start in range(0, len(blocks), _TOGETHER):
            some = blocks[start : start + _TOGETHER]
            for key, at in self._located(Kind.BLOCK, self._missing(some, places, used)):
                lacking[key] = at
                if at.base != NO_BASE:
                    bases.add(at.base)
        # A base must be at the remote in a form that needs none itself.
        more = self._not_alone(sorted(bases), places, used)
        lacking.update(self._located(Kind.BLOCK, more))
        for kind, ids in self._needs.by_kind().items():
            if kind != Kind.BLOCK:
                missing = self._missing_records(kind, ids, places, used)
                lacking.update(self._located(kind, missing))
        order = list(laid_out(lacking.items()))
        total = sum(one.size for one in order)
        tick = ProgressCounter("push", total, self._progress)
        for one in order:
            self._blocks += sum(entry.kind == Kind.BLOCK for entry in one.entries)
            self._packs += 1
            self._bytes += one.size
            self._remote.requests += requests_to_put(one.size)
        if self._remote.dry_run:
            self._sent.add(*(SentPack(one.pack, one.size, one.table) for one in order))
        else:
            self._put_each(order, tick)
        for one in order:
            used.packs.add(one.pack)
            used.records.update(
                ((Kind(entry.kind), entry.id), one.pack)
                for entry in one.entries
                if entry.kind != Kind.BLOCK
            )
        return used

    def _missing(self, blocks: Sequence[bytes], places: RemotePlaces, used: _Used) -> list[bytes]:
        """Note which packs have these blocks, and what they are differences to; return the rest."""
        there = places.found(blocks)
        used.packs |= there.packs_of(there.is_there)
        self._not_alone(there.bases(), places, used)
        left = list(compress(blocks, ~there.is_there))
        sent = self._sent.found(Kind.BLOCK, left)
        # An earlier push may have put a difference, and not what it is made to.
        lacking = self._not_alone(sent.bases(), places, used)
        needed = self._catalog.stored_alone(lacking)
        lost = set(lacking) - needed
        if lost:
            for number, base in enumerate(sent.base.tolist()):
                if base in lost:
                    sent.put_one(number, None)
        used.packs |= sent.packs_of(sent.is_there)
        return [*compress(left, ~sent.is_there), *sorted(needed)]

    def _not_alone(self, blocks: Sequence[bytes], places: RemotePlaces, used: _Used) -> list[bytes]:
        """Note which packs have these without a base; return those of which none has."""
        there = places.found(blocks)
        alone = there.is_alone
        used.packs |= there.packs_of(alone)
        left = list(compress(blocks, ~alone))
        missing = []
        for id, place in zip(left, places.alone(left), strict=True):
            if place is None:
                missing.append(id)
            else:
                used.packs.add(place.pack)
        sent = self._sent.found(Kind.BLOCK, missing)
        alone = sent.is_alone
        used.packs |= sent.packs_of(alone)
        return list(compress(missing, ~alone))

    def _missing_records(
        self, kind: Kind, ids: Sequence[bytes], places: RemotePlaces, used: _Used
    ) -> list[bytes]:
        """Note which packs have these records; return those that none has."""
        missing = []
        for id, place in zip(ids, places.locate(kind, ids), strict=True):
            if place is None:
                missing.append(id)
            else:
                used.note(kind, id, place.pack)
        sent = self._sent.found(kind, missing)
        for id, pack in compress(zip(missing, sent.pack, strict=True), sent.is_there):
            used.note(kind, id, sent.packs[pack])
        return list(compress(missing, ~sent.is_there))

    def _located(self, kind: Kind, ids: Sequence[bytes]) -> list[tuple[Key, Location]]:
        """Return where these lie here. Raises Corrupt for one that is neither here nor there."""
        index = self._catalog.index
        found = []
        with index.env.read() as transaction:
            if kind == Kind.BLOCK:
                rows = index.readable_rows(transaction, ids)
            else:
                rows = [index.row(transaction, (kind, id)) for id in ids]
            for id, row in zip(ids, rows, strict=True):
                if row is None:
                    raise Corrupt(
                        f"this {kind.name.lower()} is needed, and is neither here nor at "
                        f"{self._remote.name}",
                        where=id.hex(),
                        hint=call("fsck"),
                    )
                found.append(((kind, id), index.location(transaction, row)))
        return found

    def _put_each(self, order: Sequence[Outgoing], tick: ProgressCounter) -> None:
        """Put packs, two at a time: while one ends, the other's parts keep the network at work."""
        count = min(2, self._jobs, len(order))
        if not count:
            return
        lock, stopped = threading.Lock(), threading.Event()

        def told(more: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                tick(more)

        def stop(left: Sequence[Outgoing]) -> None:
            stopped.set()
            if left:
                # Those that wait for their turn end, too: the work has failed.
                self._remote.objects.wake()

        def put(one: Outgoing) -> None:
            self._put(one, max(1, min(self._jobs, MOST_JOBS) // count), told)

        with (
            ThreadPoolExecutor(count, "push") as pool,
            closing(
                in_order(lambda one: pool.submit(put, one), order, ahead=count, stopping=stop)
            ) as done,
        ):
            for one, _ in done:
                self._sent.add(SentPack(one.pack, one.size, one.table))

    def _put(self, one: Outgoing, jobs: int, told: Callable[[int], None]) -> None:
        # Before the put: whoever is killed in it finds the pack there, or not.
        record = msgspec.msgpack.encode((one.size, one.table))
        self._remote.keep(f"sent/{one.pack.hex()}", record)
        data = pieces(self._catalog, one, told)
        self._remote.objects.put(pack_name(one.pack), one.size, data, jobs=jobs)

    # -- rows --------------------------------------------------------------------------------

    def _rows(self, state: RemoteState, changes: Changes, used: _Used) -> None:
        """Add the rows of packs, snapshots and notes."""
        self._pack_rows(state, changes, used.packs)
        for id in self._needs.snapshots:
            pack = used.records[Kind.SNAPSHOT, bytes(id)]
            is_whole = id in self._needs.whole
            row = state.snapshot(id)
            home = None if row is None else state.packs().get(row.pack)
            if row is None or home is None or not home.is_there or is_whole > row.is_whole:
                changes.put("snapshots", SnapshotRow(bytes(id), bytes(pack), is_whole))
        known = state.rows("notes")
        for snapshot, note in self._needs.notes:
            told = known.get(snapshot + note)
            home = None if told is None else state.packs().get(told.pack)
            if home is None or not home.is_there:
                pack = used.records[Kind.NOTE, bytes(note)]
                changes.put("notes", NoteRow(bytes(snapshot), bytes(note), bytes(pack)))

    def _pack_rows(self, state: RemoteState, changes: Changes, needed: set[PackId]) -> None:
        rows = state.packs()
        new = [
            one
            for pack, one in self._sent.packs.items()
            if pack in needed and (pack not in rows or not rows[pack].is_known)
        ]
        if new:
            data = b"".join([one.table for one in new])
            table, made = TableId.of(data), state.root.generation + 1
            self._table = table_name(made, table)
            self._remote.put_bytes(self._table, data)
            offset = 0
            for one in new:
                changes.put(
                    "packs",
                    PackRow(
                        id=bytes(one.id),
                        size=one.size,
                        state=PackState.LIVE,
                        time_ns=0,
                        entries=(len(one.table) - HEADER_BYTES) // ENTRY.size,
                        made=made,
                        table=bytes(table),
                        offset=offset,
                        length=len(one.table),
                    ),
                )
                offset += len(one.table)
        for pack in sorted(needed):
            row = rows.get(pack)
            if row is not None and row.is_known and row.state == PackState.CONDEMNED:
                changes.put("packs", msgspec.structs.replace(row, state=PackState.LIVE, time_ns=0))

    def _put_statistics(
        self,
        state: RemoteState,
        changes: Changes,
        used: _Used,
        places: RemotePlaces,
    ) -> None:
        """Put statistics of the snapshots that go with contents, where the remote has none."""
        known = state.rows("statistics")
        lacking = [id for id in self._needs.snapshots if id in self._needs.whole - known.keys()]
        if self._statistics is None or not lacking:
            return

        def are_there(tensors: Sequence[bytes]) -> list[bool]:
            found = places.locate(Kind.TENSOR, tensors)
            return [
                at is not None or (Kind.TENSOR, id) in used.records
                for id, at in zip(tensors, found, strict=True)
            ]

        made = state.root.generation + 1
        there = self._statistics.of(lacking, are_there, finds=not self._remote.dry_run)
        for id, data in there.items():
            row = StatisticsRow(bytes(id), made, bytes(StatisticsId.of(data)), len(data))
            self._remote.put_bytes(row.name, data)
            changes.put("statistics", row)

    # -- afterwards --------------------------------------------------------------------------

    def _follow(self) -> None:
        """Let this store's refs of the remote say what it has now."""
        wanted: dict[str, SnapshotId | None] = {
            name: ref.snapshot_id() for name, ref in self._refs.items()
        }
        wanted |= dict.fromkeys(self._delete)
        follow(self._catalog, self._remote.name, wanted, _ACTION)


def refs_to_send(catalog: Catalog, names: Sequence[str]) -> dict[str, refs.Ref]:
    """Return the branches and tags of these names. Raises NotFound, BadRequest for others."""
    found: dict[str, refs.Ref] = {}
    with catalog.index.env.read() as transaction:
        known = refs_in(catalog.index, transaction)
        for name in refs.chosen((one for one, _ in known.walk()), names):
            ref = known.require(name)
            if ref.kind not in (refs.BRANCH, refs.TAG):
                what = f"is a {ref.kind} ref: only branches and tags are pushed"
                raise BadRequest(what, where=name, hint=call("reset", "NAME", name))
            found[name] = ref
    return found


@contextmanager
def _lease(catalog: Catalog, remote: Remote) -> Iterator[None]:
    """Let no pack be removed meanwhile, where this user may say so."""
    lease = None
    if may_write(catalog):
        lease = Lease(catalog.layout, catalog.index, f"push to {remote.name}")
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def _refuse_nesting(name: str, known: dict[str, RefRow], deleted: Sequence[str]) -> None:
    for other, row in known.items():
        if row.snapshot is None or other == name or other in deleted:
            continue
        if name.startswith(f"{other}/") or other.startswith(f"{name}/"):
            raise Conflict(
                f"the remote has the ref {other!r}: one would be below the other", where=name
            )
