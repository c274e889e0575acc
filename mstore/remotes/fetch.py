"""Fetch: what a remote's refs need comes here, then the refs below remotes/NAME/ move.

    the remote's root -> tables of packs that are new there -> records, from the refs down
    -> packs, and parts of packs -> every payload checked against its id
    -> one transaction: packs, snapshots, notes, refs

A pull also moves branches, if that is a fast-forward. One fetch of a remote runs at a time in a
store; others wait. Where the store's settings say `require_signed`, nothing is downloaded but
records and notes if a ref would move to a snapshot that no trusted key signed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mstore import fs
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.blocks.schema import NOTES, PLANS, PRUNED
from mstore.models.stats.store import StatsStore
from mstore.remotes.arrival import Arrival, Incoming
from mstore.remotes.layout import NoteRow
from mstore.remotes.needs import LocalRecords, Needs, gather, is_ancestor, whole
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import RemoteRecords
from mstore.remotes.state import Remote, RemoteState
from mstore.remotes.statistics import IncomingStatistics
from mstore.remotes.tracking import MovedRef, moved_ref, remote_moves
from mstore.snapshots.notes import BAD_SIGNATURE, GOOD_SIGNATURE, SignatureReport
from mstore.store import gates, plans, refs
from mstore.store import layout as layouts
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.note import Note
from mstore.store.refs import RefStore, refs_in
from mstore.store.transaction import RefMove, Transaction
from mstore.terms.errors import Conflict, Corrupt, Incompatible, NotFound, did_you_mean
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.phrases import Option, Phrase, Text, call, few, phrase
from mstore.terms.report import ProgressCallback, Report

_MOST_THREADS: Final = 16


class FetchReport(Report, frozen=True):
    """What a fetch or a pull brought."""

    remote: str
    """the remote's name"""
    url: str
    """its address"""
    fetched: tuple[MovedRef, ...]
    """refs below remotes/NAME/ that moved, without that beginning"""
    moved: tuple[MovedRef, ...]
    """branches and tags of this store that a pull moved"""
    diverged: tuple[str, ...]
    """branches that a pull left, because both sides have commits that the other has not"""
    snapshots: int
    """snapshots that are new here"""
    without_contents: tuple[SnapshotId, ...]
    """those of which only records came: ancestors, whose contents were left out"""
    blocks: int
    """blocks that are new here"""
    bytes_received: int
    """bytes of packs and ranges that were downloaded"""
    generation: int
    """number of changes that the remote has seen"""
    seconds: float
    """how long it took"""


def _worth(signatures: Sequence[SignatureReport]) -> str:
    """Return what signatures are worth none of which is a trusted key's."""
    if not signatures:
        return "not signed"
    keys = [one.key for one in signatures if one.state != BAD_SIGNATURE]
    return f"signed by {few(keys)}" if keys else "the signature is bad"


def _is_nested(name: str, others: Iterable[str]) -> bool:
    """Return whether a name is below or above one of others."""
    return any(name.startswith(f"{o}/") or o.startswith(f"{name}/") for o in others)


def _nests(known: RefStore, name: str) -> bool:
    """Return whether a new name would be below or above a ref."""
    try:
        known.refuse_nesting(name)
    except Conflict:
        return True
    return False


class Fetch:
    """One fetch, or one pull.

    tracks: whether refs below remotes/ say what is there. signers: names of trusted public keys.
    statistics: takes those of the remote. lazy: bring records, and no weights.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        names: Sequence[str],
        *,
        pulls: bool,
        tracks: bool = True,
        contents_of_ancestors: bool = False,
        signers: Mapping[bytes, str] | None = None,
        statistics: StatsStore | None = None,
        lazy: bool = False,
        jobs: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._statistics = statistics
        self._lazy = lazy
        self._catalog = catalog
        self._remote = remote
        self._names = names
        self.needs = Needs()
        self._pulls = pulls
        self._tracks = tracks
        self._with_contents = contents_of_ancestors
        self._signers = signers or {}
        self._jobs = min(jobs, _MOST_THREADS)
        self._progress = progress
        self._received = 0
        self._blocks = 0
        self._new: list[SnapshotId] = []

    def run(self) -> FetchReport:
        """Fetch. Raises Corrupt for what does not match its id, Unavailable; then nothing moved.

        Raises Conflict if the store requires signatures, and a ref would move to a snapshot without
        one.
        """
        began = time.monotonic()
        layouts.require_writable(self._catalog.layout)
        self._remote.make_directory()
        # Another fetch would download the same, to the same place.
        with fs.locked(self._remote.directory / "fetch.lock"):
            return self._run(began)

    def _run(self, began: float) -> FetchReport:
        incoming = Incoming(self._remote.directory)
        incoming.remove_parts()
        return self._remote.with_state(lambda state: self._fetched(state, incoming, began))

    def _fetched(self, state: RemoteState, incoming: Incoming, began: float) -> FetchReport:
        if state.root.block_size != self._catalog.block_size:
            raise Incompatible(
                f"the remote has blocks of {state.root.block_size} bytes, this store of "
                f"{self._catalog.block_size}",
                where=self._remote.where,
                hint=call("clone", self._remote.where, "DIRECTORY"),
            )
        wanted = self._wanted(state)
        self._take_statistics(state, wanted)
        fetched, moved, diverged = self._bring(state, wanted, incoming)
        self._remote.remember(state)
        # Another fetch of only some refs may go on with what it left.
        incoming.keep(state.packs() if self._names else ())
        return FetchReport(
            remote=self._remote.name,
            url=self._remote.where,
            fetched=tuple(fetched),
            moved=tuple(moved),
            diverged=tuple(diverged),
            snapshots=len(self._new),
            without_contents=tuple(id for id in self._new if id not in self.needs.whole),
            blocks=self._blocks,
            bytes_received=self._received,
            generation=state.root.generation,
            seconds=time.monotonic() - began,
        )

    def _wanted(self, state: RemoteState) -> dict[str, tuple[str, SnapshotId | None]]:
        """Return kind and snapshot of the refs to fetch; None for one that the remote removed."""
        there = {
            name: (row.kind, SnapshotId(row.snapshot))
            for name, row in state.refs().items()
            if row.snapshot is not None
        }
        for name, (kind, _) in there.items():
            # The names come from elsewhere.
            refs.check_name(name)
            if kind not in (refs.BRANCH, refs.TAG):
                raise Corrupt(f"the remote has a {kind!r}", where=f"{self._remote.where}: {name!r}")
        shown = call("remote_contents", self._remote.name)
        try:
            chosen = refs.chosen(there, self._names) if self._names else list(there)
        except NotFound as error:
            error.advise(shown)
            raise
        for name in chosen:
            if name not in there:
                raise NotFound(
                    f"{self._remote.name} has no such ref",
                    where=name,
                    hint=did_you_mean(name, there, shown),
                )
        begin = refs.directory_of(refs.REMOTE, self._remote.name)
        with self._catalog.index.env.read() as transaction:
            known = [
                one.removeprefix(begin)
                for one in refs_in(self._catalog.index, transaction).names(begin)
            ]
        gone: dict[str, tuple[str, SnapshotId | None]] = {
            name: ("", None)
            for name in known
            if name not in there and (not self._names or _is_nested(name, chosen))
        }
        return {name: there[name] for name in chosen} | gone

    def _take_statistics(
        self, state: RemoteState, wanted: dict[str, tuple[str, SnapshotId | None]]
    ) -> None:
        """Take the statistics of what refs name, but where only signed things are believed."""
        if self._statistics is not None and not self._catalog.config.require_signed:
            incoming = IncomingStatistics(self._remote, self._statistics)
            incoming.take(state, (id for _, id in wanted.values() if id is not None))
            self._received += incoming.received

    def _bring(
        self,
        state: RemoteState,
        wanted: dict[str, tuple[str, SnapshotId | None]],
        incoming: Incoming,
    ) -> tuple[list[MovedRef], list[MovedRef], list[str]]:
        heads = [id for _, id in wanted.values() if id is not None]
        local = LocalRecords(self._catalog)
        source: RemoteRecords | LocalRecords = local
        notes = self._lacking_notes(state)
        is_about_known = any(local.is_known(row.snapshot_id()) for row in notes)
        is_all_here = all(local.is_known(id) and local.has_contents(id) for id in heads)
        if is_about_known or self._with_contents or not is_all_here or self._lazy:
            # What is read later is found by the tables of this state.
            places = RemotePlaces(self._remote, state)
            source = RemoteRecords(self._catalog, self._remote, places, state)
            source.looks_beyond = self._with_contents
        with Transaction(self._catalog, f"fetch from {self._remote.name}") as transaction:
            needs = self.needs
            if isinstance(source, RemoteRecords):
                taken = whole(source, heads, ancestors=self._with_contents)
                needs = self.needs = gather(source, heads, taken, weights=not self._lazy)
                transaction.rely_on(source.passed)
                self._add_notes(source, needs, notes)
                config = self._catalog.config
                if config.require_signed or config.required_gates:
                    # Before the download. Below again: refs of this store may move meanwhile.
                    self._moves(source, wanted)
                arrival = Arrival(
                    self._catalog,
                    self._remote,
                    transaction,
                    needs,
                    places,
                    state,
                    incoming,
                    jobs=self._jobs,
                    progress=self._progress,
                )
                arrival.run()
                self._blocks = arrival.blocks
                self._received += arrival.received + source.received
            moves, diverged = self._moves(source, wanted)
            if not (transaction.has_news or moves or needs.snapshots or needs.notes):
                return [], [], diverged
            self._commit(transaction, needs, moves, source, wanted)
        begin = refs.directory_of(refs.REMOTE, self._remote.name)
        told = [
            moved_ref(
                move.name.removeprefix(begin),
                None if move.expect is None else move.expect.snapshot,
                None if move.new is None else move.new.snapshot,
            )
            for move in moves
        ]
        is_remote = [move.name.startswith(begin) for move in moves]
        fetched = [one for one, flag in zip(told, is_remote, strict=True) if flag]
        moved = [one for one, flag in zip(told, is_remote, strict=True) if not flag]
        return fetched, moved, diverged

    def _moves(
        self,
        source: RemoteRecords | LocalRecords,
        wanted: dict[str, tuple[str, SnapshotId | None]],
    ) -> tuple[list[RefMove], list[str]]:
        ids = {name: id for name, (_, id) in wanted.items()}
        with self._catalog.index.env.read() as transaction:
            moves = []
            if self._tracks:
                moves += remote_moves(self._catalog, transaction, self._remote.name, ids, "fetch")
            diverged = []
            known = refs_in(self._catalog.index, transaction)
            for name, (kind, id) in wanted.items() if self._pulls else ():
                if id is None:
                    continue
                own, new = known.get(name), refs.Ref(kind, bytes(id))
                if own == new:
                    continue
                if own is None:
                    moves_there = not _nests(known, name)
                elif own.kind != kind or kind != refs.BRANCH:
                    moves_there = False
                elif is_ancestor(source, id, [own.snapshot_id()]):
                    # What the remote has is in this branch already.
                    continue
                else:
                    moves_there = is_ancestor(source, own.snapshot_id(), [id])
                if moves_there:
                    action = f"pull {self._remote.name}" if self._tracks else "copy"
                    moves.append(RefMove(name, own, new, action))
                else:
                    diverged.append(name)
            self._require_passed(transaction, moves)
        if self._catalog.config.require_signed:
            self._require_signed(source, wanted, moves)
        return moves, diverged

    def _require_passed(self, transaction: IndexTransaction, moves: Sequence[RefMove]) -> None:
        """Raise GateFailed as the commit would: it keeps nothing, so the hint is another one."""

        def hint(name: str, snapshot: SnapshotId, gate: str) -> Text:
            remote = self._remote.name
            if not self._tracks:
                return "copy it to a name that no gate guards there, and judge it there"
            return phrase(
                "{fetch}, then {judge}, then {pull}",
                fetch=call("fetch", remote),
                judge=call("judge", f"{remote}/{name}", gates=(gate,)),
                pull=call("pull", remote, refs=(name,)),
            )

        new = {move.name: move.new.snapshot_id() for move in moves if move.new is not None}
        gates.require_passed(self._catalog, transaction, new, hint)

    # -- signatures --------------------------------------------------------------------------

    def _require_signed(
        self,
        source: RemoteRecords | LocalRecords,
        wanted: dict[str, tuple[str, SnapshotId | None]],
        moves: Sequence[RefMove],
    ) -> None:
        """Raise Conflict if a ref moves to a snapshot without a good signature of a trusted key.

        Raises Unavailable if signatures cannot be checked here.
        """
        ids = dict.fromkeys(SnapshotId(one.new.snapshot) for one in moves if one.new is not None)
        if not ids:
            return
        found = self._signatures(source, ids)
        refused = {
            name: (id, found[id])
            for name, (_, id) in wanted.items()
            if id in found and all(one.state != GOOD_SIGNATURE for one in found[id])
        }
        if not refused:
            return
        told = few([f"{name} {id.short} ({_worth(made)})" for name, (id, made) in refused.items()])
        raise Conflict(
            f"require_signed is set, and no trusted key signed what refs would move to: {told}",
            where=self._remote.where,
            hint=self._how_to_sign(next(iter(refused)), any(made for _, made in refused.values())),
        )

    def _how_to_sign(self, name: str, has_signature: bool) -> Phrase:
        if not self._tracks:
            theirs = phrase("sign them: {sign}", sign=call("sign", name, "..."))
        else:
            theirs = phrase(
                "where they were made, sign them, {sign}, and push again",
                sign=call("sign", name, "...", store="STORE"),
            )
        if not has_signature:
            return theirs
        return phrase(
            "if you know whose a key is, trust it ({signers}); else {theirs}",
            signers=Option("signers"),
            theirs=theirs,
        )

    def _signatures(
        self, source: RemoteRecords | LocalRecords, ids: Iterable[SnapshotId]
    ) -> dict[SnapshotId, tuple[SignatureReport, ...]]:
        """Return the checked signatures of snapshots: those that are here, and those that come."""
        from mstore.snapshots.signing import by_subject, require_library

        require_library()
        coming: dict[SnapshotId, list[NoteId]] = defaultdict(list)
        for snapshot, note in self.needs.notes:
            coming[snapshot].append(note)
        found = {}
        for id in ids:
            here = [note for _, note in LocalRecords(self._catalog).notes([id])]
            named = list(dict.fromkeys((*here, *coming[id])))
            records = zip(named, source.load(Note, named), strict=True)
            own = {note: one for note, one in records if one.snapshot_id() == id and not one.notes}
            found[id] = by_subject(own, self._signers).get(None, ())
        return found

    def _called(self, wanted: dict[str, tuple[str, SnapshotId | None]]) -> dict[SnapshotId, str]:
        """Return names of snapshots, for people: this store's own, else the remote's."""
        begin = "" if self._pulls else f"{self._remote.name}/"
        called = {id: begin + name for name, (_, id) in wanted.items() if id is not None}
        own = self._catalog.refs().items()
        return called | {ref.snapshot_id(): name for name, ref in own if ref.kind == refs.BRANCH}

    def _lacking_notes(self, state: RemoteState) -> list[NoteRow]:
        """Return the remote's notes that are not here, whatever they are about."""
        index = self._catalog.index
        with index.env.read() as transaction:
            return [
                row
                for row in state.notes()
                if not index.has(transaction, NOTES, (row.snapshot_id(), NoteId(row.note)))
            ]

    def _add_notes(self, source: RemoteRecords, needs: Needs, rows: Iterable[NoteRow]) -> None:
        """Need the notes about what comes and what is here. Raises Corrupt for another's note."""
        local = LocalRecords(self._catalog)
        rows = [
            row
            for row in rows
            if row.snapshot_id() in needs.snapshots or local.is_known(row.snapshot_id())
        ]
        notes = source.load(Note, [row.note for row in rows])
        for row, note in zip(rows, notes, strict=True):
            if note.snapshot != row.snapshot:
                raise Corrupt(
                    f"note {row.note.hex()[:12]} is not about snapshot {row.snapshot_id().short}",
                    where=self._remote.where,
                )
            needs.notes.append((row.snapshot_id(), NoteId(row.note)))
            needs.records[Kind.NOTE, row.note] = None

    def _commit(
        self,
        transaction: Transaction,
        needs: Needs,
        moves: Sequence[RefMove],
        source: RemoteRecords | LocalRecords,
        wanted: dict[str, tuple[str, SnapshotId | None]],
    ) -> None:
        index = self._catalog.index
        new = [id for id in needs.snapshots if not LocalRecords(self._catalog).is_known(id)]
        parents = {p.snapshot_id() for id in new for p in needs.snapshots[id].parents}
        lost = {id for id in parents if not source.is_known(id)}
        self._new = new
        named = {move.new.snapshot for move in moves if move.new is not None}

        called = self._called(wanted)

        def also(rows: IndexTransaction) -> None:
            for id in new:
                record = needs.snapshots[id]
                plan, sources = record.plan_id(), plans.named(record, called)
                if plan is not None and sources is not None and not index.has(rows, PLANS, plan):
                    plans.put_sources(self._catalog, rows, plan, sources)
            for id in new:
                if id not in needs.whole and id not in named:
                    index.put(rows, PRUNED, id, now_ns())
            for id in needs.whole:
                index.delete(rows, PRUNED, id)
            for snapshot, note in needs.notes:
                index.put(rows, NOTES, (snapshot, note), None)

        snapshots = [needs.snapshots[id] for id in new]
        transaction.commit(snapshots=snapshots, moves=moves, lost_parents=lost, also=also)
