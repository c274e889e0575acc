"""Fetch: what a remote's refs need comes here, then the refs below remotes/NAME/ move.

    the remote's root -> tables of packs that are new there -> records, from the refs down
    -> packs of which much is needed, whole; ranges of others, into a new pack
    -> every payload checked against its id -> one transaction: packs, snapshots, notes, refs

Only what snapshots need gets rows, so a pack that came whole may have dead bytes: gc frees them.
What was downloaded whole stays in remotes/NAME/incoming/ until it is published, so that a fetch
that was killed goes on there. A pull also moves branches, if that is a fast-forward.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.codecs import Elements, encode
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, SealedPack, read_footer
from mstore.blocks.reader import BlockReader, decoded, located, verify
from mstore.blocks.schema import NOTES, PRUNED
from mstore.remotes.layout import pack_name
from mstore.remotes.needs import LocalRecords, Needs, gather, is_ancestor
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import PackSpan, RemoteRecords, lacks, spans
from mstore.remotes.state import Remote, RemoteState
from mstore.remotes.tracking import MovedRef, remote_moves
from mstore.store import refs
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog, now_ns
from mstore.store.publishing import NewPacks
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, Transaction
from mstore.terms.errors import Corrupt, Incompatible, NotFound, did_you_mean
from mstore.terms.ids import BlockId, Buffer, Id, PackId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.upkeep.check.findings import typed_id

_WHOLE: Final = 0.5
"""A pack of which this share is needed is downloaded whole."""
PIECE_BYTES: Final = 4 << 20
"""Bytes of one request for a part of a pack; a job may have two such in memory."""
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
    blocks: int
    """blocks that are new here"""
    bytes_received: int
    """bytes of packs and ranges that were downloaded"""
    generation: int
    """number of changes that the remote has seen"""
    seconds: float
    """how long it took"""


class Fetch:
    """One fetch, or one pull."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        names: Sequence[str],
        *,
        pulls: bool,
        jobs: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self._names = names
        self._pulls = pulls
        self._jobs = min(jobs, _MOST_THREADS)
        self._progress = progress
        self._received = 0
        self._blocks = 0
        self._snapshots = 0

    def run(self) -> FetchReport:
        """Fetch. Raises Corrupt for what does not match its id, Unavailable; then nothing moved."""
        began = time.monotonic()
        self._remote.make_directory()
        state = self._remote.state()
        if state.root.block_size != self._catalog.block_size:
            raise Incompatible(
                f"the remote has blocks of {state.root.block_size} bytes, this store of "
                f"{self._catalog.block_size}",
                where=self._remote.where,
                hint=call("clone", self._remote.where, "DIRECTORY"),
            )
        wanted = self._wanted(state)
        fetched, moved, diverged = self._bring(state, wanted)
        self._remote.remember(state)
        return FetchReport(
            remote=self._remote.name,
            url=self._remote.where,
            fetched=tuple(fetched),
            moved=tuple(moved),
            diverged=tuple(diverged),
            snapshots=self._snapshots,
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
        if self._names:
            chosen = refs.chosen(there, self._names)
            for name in chosen:
                if name not in there:
                    raise NotFound(
                        f"{self._remote.name} has no such ref",
                        where=name,
                        hint=did_you_mean(name, there, call("remote", "show", self._remote.name)),
                    )
            return {name: there[name] for name in chosen}
        begin = refs.directory_of(refs.REMOTE, self._remote.name)
        with self._catalog.index.env.read() as transaction:
            known = [
                one.removeprefix(begin)
                for one in refs_in(self._catalog.index, transaction).names(begin)
            ]
        gone: dict[str, tuple[str, SnapshotId | None]] = {
            name: ("", None) for name in known if name not in there
        }
        return there | gone

    def _bring(
        self, state: RemoteState, wanted: dict[str, tuple[str, SnapshotId | None]]
    ) -> tuple[list[MovedRef], list[MovedRef], list[str]]:
        heads = [id for _, id in wanted.values() if id is not None]
        local = LocalRecords(self._catalog)
        if all(local.is_known(id) and local.has_contents(id) for id in heads):
            source: RemoteRecords | LocalRecords = local
            needs = Needs()
        else:
            places = RemotePlaces(self._remote, state)
            source = RemoteRecords(self._catalog, self._remote, places, state)
            needs = gather(source, heads, set(heads).__contains__)
        with Transaction(self._catalog, f"fetch from {self._remote.name}") as transaction:
            if isinstance(source, RemoteRecords):
                _Arrival(self, transaction, needs, places, state).run()
                self._received += source.received
            moves, diverged = self._moves(source, wanted)
            if not (transaction.has_news or moves or needs.snapshots):
                return [], [], diverged
            self._commit(transaction, needs, moves)
        begin = refs.directory_of(refs.REMOTE, self._remote.name)
        told = [
            MovedRef(
                move.name.removeprefix(begin),
                None if move.expect is None else move.expect.snapshot_id(),
                None if move.new is None else move.new.snapshot_id(),
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
            moves = remote_moves(self._catalog, transaction, self._remote.name, ids, "fetch")
            diverged = []
            known = refs_in(self._catalog.index, transaction)
            if self._pulls:
                for name, (kind, id) in wanted.items():
                    if id is None:
                        continue
                    own, new = known.get(name), refs.Ref(kind, bytes(id))
                    if own == new or (
                        own is not None and is_ancestor(source, id, [own.snapshot_id()])
                    ):
                        continue
                    if own is None or (
                        own.kind == kind == refs.BRANCH
                        and is_ancestor(source, own.snapshot_id(), [id])
                    ):
                        action = f"pull {self._remote.name}"
                        moves.append(RefMove(name, own, new, action))
                    else:
                        diverged.append(name)
        return moves, diverged

    def _commit(self, transaction: Transaction, needs: Needs, moves: Sequence[RefMove]) -> None:
        index = self._catalog.index
        new = [id for id in needs.snapshots if not LocalRecords(self._catalog).is_known(id)]
        self._snapshots = len(new)
        named = {move.new.snapshot for move in moves if move.new is not None}

        def also(rows: IndexTransaction) -> None:
            for id in new:
                if id not in needs.whole and id not in named:
                    index.put(rows, PRUNED, id, now_ns())
            for snapshot, note in needs.notes:
                index.put(rows, NOTES, (snapshot, note), None)

        transaction.commit(snapshots=[needs.snapshots[id] for id in new], moves=moves, also=also)

    # -- for `_Arrival` ----------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    @property
    def remote(self) -> Remote:
        return self._remote

    @property
    def jobs(self) -> int:
        return self._jobs

    def ticker(self, total: int) -> ProgressCounter:
        return ProgressCounter("fetch", total, self._progress)

    def arrived(self, blocks: int, received: int) -> None:
        self._blocks += blocks
        self._received += received


class _Coming:
    """A pack that is being downloaded, as a file beside its place."""

    def __init__(self, pack: PackId, path: Path) -> None:
        self.pack = pack
        self.path = path
        part = path.with_suffix(".part")
        fs.unlink(part, missing_ok=True)
        self.file = fs.NewFile(part)
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        """Write a part; from any thread."""
        # The kernel lets one thread write to a file, and those that wait for it spin.
        with self._lock:
            self.file.write_at(offset, data)
            self.file.begin_writing_back(offset, len(data))

    def land(self) -> None:
        """Sync it and give it its name. Raises StorageFailed; then it is gone."""
        try:
            self.file.protect()
            self.file.sync()
            self.file.close()
            fs.rename(self.file.path, self.path)
        except BaseException:
            self.file.abandon()
            raise


class _Arrival:
    """What is downloaded for one transaction: packs, and parts of packs."""

    def __init__(
        self,
        fetch: Fetch,
        transaction: Transaction,
        needs: Needs,
        places: RemotePlaces,
        state: RemoteState,
    ) -> None:
        self._fetch = fetch
        self._catalog = fetch.catalog
        self._remote = fetch.remote
        self._transaction = transaction
        self._needs = needs
        self._places = places
        self._state = state
        self._restate: set[bytes] = set()
        self._files: dict[PackId, Path] = {}
        self._rows: dict[Key, Location] = {}
        self._proved: set[Key] = set()

    def run(self) -> None:
        """Download, prove, hand to the transaction. Raises Corrupt, Unavailable."""
        lacking = self._lacking()
        by_pack: dict[PackId, list[tuple[Key, Location]]] = defaultdict(list)
        for key, at in lacking.items():
            by_pack[at.pack].append((key, at))
        rows = self._state.packs()
        index = self._catalog.index
        whole: list[PackId] = []
        ranged: list[PackId] = []
        with index.env.read() as transaction:
            for pack, entries in by_pack.items():
                size = rows[pack].size
                is_much = sum(at.stored_length for _, at in entries) >= _WHOLE * size
                is_here = index.pack_number(transaction, pack) is not None
                (whole if is_much and not is_here else ranged).append(pack)
        total = sum(rows[pack].size for pack in whole) + sum(
            at.stored_length for pack in ranged for _, at in by_pack[pack]
        )
        tick = self._fetch.ticker(total)
        sealed: list[SealedPack] = []
        with ThreadPoolExecutor(self._fetch.jobs, "fetch") as pool:
            if whole:
                sealed += self._wholes(pool, {pack: by_pack[pack] for pack in whole}, tick)
            if ranged:
                sealed += self._parts(pool, {pack: by_pack[pack] for pack in ranged}, tick)
        try:
            self._prove(sealed)
        except Corrupt:
            # Or the next fetch would find the same bytes here, whatever the remote has by then.
            for pack in whole:
                fs.unlink(self._files[pack], missing_ok=True)
            raise
        for one in sealed:
            kept = tuple(e for e in one.entries if (e.kind, e.id) not in self._restated_keys())
            self._transaction.receive(msgspec.structs.replace(one, entries=kept))
        self._restate_blocks()
        blocks = sum(key[0] == Kind.BLOCK for key in lacking)
        self._fetch.arrived(blocks, tick.done)

    def _restated_keys(self) -> set[tuple[int, bytes]]:
        return {(int(Kind.BLOCK), id) for id in self._restate}

    def _lacking(self) -> dict[Key, Location]:
        """Return what is needed and not here, with where the remote has it."""
        catalog, index = self._catalog, self._catalog.index
        lacking: dict[Key, Location] = {}
        by_kind: dict[Kind, list[bytes]] = defaultdict(list)
        for kind, id in self._needs.records:
            by_kind[kind].append(id)
        blocks = list(self._needs.blocks)
        here = catalog.has_blocks([BlockId(id) for id in blocks])
        by_kind[Kind.BLOCK] = [id for id, is_here in zip(blocks, here, strict=True) if not is_here]
        for kind, wanted in by_kind.items():
            ids = wanted
            if kind != Kind.BLOCK:
                with index.env.read() as transaction:
                    ids = [id for id in wanted if index.row(transaction, (kind, id)) is None]
            for id, at in zip(ids, self._places.locate(kind, ids), strict=True):
                if at is None:
                    raise lacks(self._remote, kind, id)
                lacking[kind, id] = at
        bases = {at.base for (kind, _), at in lacking.items() if at.base != NO_BASE}
        with index.env.read() as transaction:
            own = {base: index.block(transaction, BlockId(base)) for base in sorted(bases)}
        for base, place in own.items():
            if place is None:
                alone = self._places.alone(base)
                if alone is None:
                    raise lacks(self._remote, Kind.BLOCK, base)
                lacking[Kind.BLOCK, base] = alone
            elif place.base != NO_BASE:
                # Here it is a difference itself, and that cannot be a base.
                self._restate.update(id for (_, id), at in lacking.items() if at.base == base)
        return lacking

    # -- downloading -------------------------------------------------------------------------

    def _wholes(
        self,
        pool: ThreadPoolExecutor,
        by_pack: dict[PackId, list[tuple[Key, Location]]],
        tick: ProgressCounter,
    ) -> list[SealedPack]:
        """Download packs, unless an earlier fetch did: the pieces of all in one row."""
        directory = self._remote.directory / "incoming"
        fs.make_directories(directory)
        sizes = {pack: self._state.packs()[pack].size for pack in by_pack}
        self._files |= {pack: directory / f"{pack.hex()}.pack" for pack in by_pack}
        lacking = [pack for pack in by_pack if not _is_pack(self._files[pack], pack)]
        coming: dict[PackId, _Coming] = {}

        def asked() -> Iterator[tuple[_Coming, PackSpan]]:
            for pack in lacking:
                one = coming[pack] = _Coming(pack, self._files[pack])
                for span in pieces(sizes[pack], by_pack[pack]):
                    yield one, span

        jobs = self._fetch.jobs
        try:
            with closing(
                in_order(lambda one: pool.submit(self._piece, *one), asked(), ahead=jobs)
            ) as done:
                for (one, span), sound in done:
                    self._proved.update(sound)
                    tick(span.end - span.start)
                    if span.end == sizes[one.pack]:
                        del coming[one.pack]
                        one.land()
                        self._require_pack(one.path, one.pack)
        except BaseException:
            for one in coming.values():
                one.file.abandon()
            raise
        return [self._sealed(pack, sizes[pack], needed) for pack, needed in by_pack.items()]

    def _piece(self, one: _Coming, span: PackSpan) -> list[Key]:
        """Bring a part of a pack; return which blocks in it need no look any more."""
        name = pack_name(one.pack)
        [data] = self._remote.objects.read_each(name, [(span.start, span.end - span.start)])
        view, most = memoryview(data), self._catalog.block_size
        sound = []
        for key, at in span.entries:
            # The others are proved later: a base may come later, too.
            if key[0] == Kind.BLOCK and at.base == NO_BASE and at.raw_length <= most:
                start = at.offset - span.start
                id = BlockId(key[1])
                verify(id, at, decoded(id, at, view[start : start + at.stored_length]))
                sound.append(key)
        # At once, while the processor's cache has it.
        one.write(span.start, view)
        return sound

    def _require_pack(self, path: Path, pack: PackId) -> None:
        if not _is_pack(path, pack):
            fs.unlink(path, missing_ok=True)
            raise Corrupt(
                "the pack does not match its name",
                where=f"{self._remote.where}/{pack_name(pack)}",
            )

    def _sealed(
        self, pack: PackId, size: int, needed: Sequence[tuple[Key, Location]]
    ) -> SealedPack:
        path = self._files[pack]
        wanted = {(int(kind), id) for (kind, id), _ in needed}
        entries = tuple(e for e in read_footer(path).entries if (e.kind, e.id) in wanted)
        if len(entries) != len(wanted):
            raise Corrupt("the pack lacks what its table has", where=self._remote.where)
        return SealedPack(pack, path, size, entries)

    def _parts(
        self,
        pool: ThreadPoolExecutor,
        by_pack: dict[PackId, list[tuple[Key, Location]]],
        tick: ProgressCounter,
    ) -> list[SealedPack]:
        """Download parts of packs, into new ones."""
        packs = self._transaction.new_packs("f")
        asked = [(pack, span) for pack, some in by_pack.items() for span in spans(some)]

        def bring(one: tuple[PackId, PackSpan]) -> Buffer:
            pack, span = one
            length = span.end - span.start
            return self._remote.objects.read_each(pack_name(pack), [(span.start, length)])[0]

        try:
            jobs = self._fetch.jobs
            for (_, span), data in in_order(lambda one: pool.submit(bring, one), asked, ahead=jobs):
                _take(packs, span, data)
                tick(len(data))
            packs.seal()
        except BaseException:
            packs.abandon()
            raise
        for one in packs.sealed:
            self._files[one.id] = one.path
        return packs.sealed

    # -- proving -----------------------------------------------------------------------------

    def _prove(self, sealed: Sequence[SealedPack]) -> None:
        """Read, decode and hash what came, but for what was looked at on its way."""
        waiting: list[PackEntry] = []
        for one in sealed:
            for entry in one.entries:
                key = Kind(entry.kind), entry.id
                self._rows[key] = located(one.id, entry)
                if key not in self._proved:
                    waiting.append(entry)
        with (
            closing(PackFiles(self._catalog.layout.packs, elsewhere=self._files)) as files,
            ThreadPoolExecutor(_threads(), "prove") as pool,
        ):
            reader = BlockReader(files, self._catalog.block_size)

            def check(some: Sequence[PackEntry]) -> None:
                for entry in some:
                    self._checked(reader, typed_id(Kind(entry.kind), entry.id))

            groups = (waiting[start : start + 16] for start in range(0, len(waiting), 16))
            for _ in in_order(lambda some: pool.submit(check, some), groups, ahead=2 * _threads()):
                pass

    def _checked(self, reader: BlockReader, id: Id) -> Buffer:
        if not isinstance(id, BlockId):
            at = self._rows[_kind_of(id), bytes(id)]
            return reader.record(id, at)
        at = self._rows[Kind.BLOCK, bytes(id)]
        base: Buffer | None = None
        if at.base != NO_BASE:
            under = BlockId(at.base)
            if (Kind.BLOCK, bytes(under)) in self._rows:
                lies = self._rows[Kind.BLOCK, bytes(under)]
                base = reader.block(under, lies) if lies.base == NO_BASE else None
            else:
                base = self._catalog.read_block(under)
        return reader.block(id, at, base)

    def _restate_blocks(self) -> None:
        """Store blocks without their base, which is a difference itself here."""
        if not self._restate:
            return
        with closing(PackFiles(self._catalog.layout.packs, elsewhere=self._files)) as files:
            reader = BlockReader(files, self._catalog.block_size)
            for id in sorted(self._restate):
                at = self._rows[Kind.BLOCK, id]
                data = self._checked(reader, BlockId(id))
                how = Elements(at.width, False)
                encoded = encode(data, how, self._catalog.config.codec)
                self._transaction.put_block(BlockId(id), encoded, "", 0)


def _kind_of(id: Id) -> Kind:
    return _KINDS[type(id)]


def _kinds() -> dict[type[Id], Kind]:
    return {type(typed_id(kind, bytes(32))): kind for kind in Kind}


_KINDS: Final = _kinds()


def _is_pack(path: Path, pack: PackId) -> bool:
    try:
        return read_footer(path).id == pack
    except Corrupt:
        return False


def pieces(size: int, needed: Sequence[tuple[Key, Location]]) -> Iterator[PackSpan]:
    """Cut a pack into pieces of at most `PIECE_BYTES`, where that cuts no payload if it can.

    Each has those of the needed payloads that lie in it whole.
    """
    entries = sorted(needed, key=lambda one: one[1].offset)
    ends = [at.offset + at.stored_length for _, at in entries]
    start = first = 0
    while start < size:
        stop = min(start + PIECE_BYTES, size)
        last = bisect_right(ends, stop, first)
        if last < len(entries) and start < entries[last][1].offset < stop:
            stop = entries[last][1].offset
        inside = tuple(one for one in entries[first:last] if one[1].offset >= start)
        yield PackSpan(start, stop, inside)
        start, first = stop, last


def _threads() -> int:
    return min(4, os.cpu_count() or 1)


def _take(packs: NewPacks, span: PackSpan, data: Buffer) -> None:
    view = memoryview(data)
    for key, at in span.entries:
        start = at.offset - span.start
        packs.copy(key, at, view[start : start + at.stored_length])
