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
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.codecs import Elements, encode
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, SealedPack, read_footer
from mstore.blocks.reader import BlockReader, located
from mstore.blocks.schema import NOTES, PRUNED
from mstore.remotes.needs import LocalRecords, Needs, R, gather, is_ancestor
from mstore.remotes.objects import PIECE_BYTES
from mstore.remotes.places import RemotePlaces
from mstore.remotes.state import Remote, RemoteState, pack_name
from mstore.remotes.tracking import MovedRef, remote_moves
from mstore.store import refs
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.canonical import Record, decode
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.publishing import NewPacks, PackReturned
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, Transaction
from mstore.terms.errors import Corrupt, Incompatible, NotFound, did_you_mean
from mstore.terms.ids import BlockId, Buffer, Id, NoteId, PackId, SnapshotId, TensorId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.upkeep.check.findings import typed_id

_WHOLE: Final = 0.5
"""A pack of which this share is needed is downloaded whole."""
_GAP: Final = 64 << 10
"""Bytes between two ranges that are downloaded rather than asked around."""
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


class PackSpan(msgspec.Struct, frozen=True):
    """Neighbouring payloads of one pack: from `start` to `end`."""

    start: int
    end: int
    entries: tuple[tuple[Key, Location], ...]


def spans(entries: Iterable[tuple[Key, Location]], most: int = PIECE_BYTES) -> Iterator[PackSpan]:
    """Join payloads of one pack that lie near each other, up to `most` bytes."""
    some: list[tuple[Key, Location]] = []
    start = end = 0
    for key, at in sorted(entries, key=lambda one: one[1].offset):
        stop = at.offset + at.stored_length
        if some and (at.offset > end + _GAP or stop - start > most):
            yield PackSpan(start, end, tuple(some))
            some = []
        if not some:
            start = at.offset
        some.append((key, at))
        end = max(stop, end) if len(some) > 1 else stop
    if some:
        yield PackSpan(start, end, tuple(some))


class RemoteRecords:
    """Records of a remote, and of this store where it has them, for `gather`."""

    def __init__(self, catalog: Catalog, remote: Remote, places: RemotePlaces, state: RemoteState):
        self._catalog = catalog
        self._remote = remote
        self._places = places
        self._state = state
        self._local = LocalRecords(catalog)
        self._records: dict[Key, Record] = {}
        self.received = 0

    def load(self, kind: type[R], ids: Sequence[bytes]) -> list[R]:
        self._bring(kind, ids)
        found = []
        for id in ids:
            record = self._records.get((kind.kind, bytes(id)))
            if record is None:
                record = self._catalog.record(kind, kind.id_type(id))
            assert isinstance(record, kind)
            found.append(record)
        return found

    def _bring(self, kind: type[Record], ids: Sequence[bytes], *, may_lack: bool = False) -> None:
        """Read those records from the remote that are neither here nor were read before."""
        wanted = [bytes(id) for id in ids if (kind.kind, bytes(id)) not in self._records]
        index = self._catalog.index
        with index.env.read() as transaction:
            wanted = [id for id in wanted if not index.has_record(transaction, kind.kind, id)]
        by_pack: dict[PackId, list[tuple[Key, Location]]] = defaultdict(list)
        for id, at in zip(wanted, self._places.locate(kind.kind, wanted), strict=True):
            if at is not None:
                by_pack[at.pack].append(((kind.kind, id), at))
            elif not may_lack:
                raise _lacks(self._remote, kind.kind, id)
        for pack, entries in by_pack.items():
            joined = list(spans(entries))
            asked = [(one.start, one.end - one.start) for one in joined]
            data = self._remote.objects.read_each(pack_name(pack), asked)
            for span, part in zip(joined, data, strict=True):
                self.received += len(part)
                for (_, id), at in span.entries:
                    start = at.offset - span.start
                    self._records[kind.kind, id] = self._checked(
                        kind, id, bytes(part[start : start + at.stored_length]), pack
                    )

    def _checked(self, kind: type[Record], id: bytes, data: bytes, pack: PackId) -> Record:
        where = f"{self._remote.where}/{pack_name(pack)}"
        if kind.id_type.of(data) != id:
            raise Corrupt(f"{kind.__name__} {id.hex()[:12]} does not match its id", where=where)
        return decode(kind, data, where)

    def contents(self, ids: Sequence[TensorId]) -> list[Tensor | VirtualTensor]:
        self._bring(Tensor, ids, may_lack=True)
        found: list[Tensor | VirtualTensor] = []
        for id in ids:
            record = self._records.get((Kind.TENSOR, bytes(id)))
            if isinstance(record, Tensor):
                record.check(self._catalog.block_size, f"tensor {id}")
                found.append(record)
                continue
            with suppress(NotFound):
                found.append(self._catalog.content(id))
                continue
            found += self.load(VirtualTensor, [id])
        return found

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[tuple[SnapshotId, NoteId]]:
        wanted = set(snapshots)
        there = [(row.snapshot_id(), NoteId(row.note)) for row in self._state.notes()]
        return [one for one in there if one[0] in wanted]

    def is_known(self, snapshot: SnapshotId) -> bool:
        return self._state.snapshot(snapshot) is not None or self._local.is_known(snapshot)

    def has_contents(self, snapshot: SnapshotId) -> bool:
        row = self._state.snapshot(snapshot)
        return row is not None and row.is_whole

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        index = self._catalog.index
        if kind != Kind.SNAPSHOT:
            # A stored tensor has all its blocks.
            with index.env.read() as transaction:
                return [index.row(transaction, (kind, bytes(id))) is not None for id in ids]
        return [self._is_whole(SnapshotId(id)) for id in ids]

    def _is_whole(self, id: SnapshotId) -> bool:
        return self._local.is_known(id) and self._local.has_contents(id)


def _lacks(remote: Remote, kind: Kind, id: bytes) -> Corrupt:
    return Corrupt(
        f"{remote.name} lacks this {kind.name.lower()}, which its refs need",
        where=f"{remote.where}, {id.hex()}",
        hint=phrase("push again from a store that has it: {push}", push=call("push", remote.name)),
    )


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
        for last in (False, False, True):
            try:
                fetched, moved, diverged = self._bring(state, wanted)
                break
            except PackReturned:
                # Another fetch of this store was first: look again at what is here.
                if last:
                    raise
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
            needs = gather(source, heads)
        with (
            Transaction(self._catalog, f"fetch from {self._remote.name}") as transaction,
            _incoming(self._remote, transaction) as incoming,
        ):
            if isinstance(source, RemoteRecords):
                _Arrival(self, transaction, needs, places, state, incoming).run()
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


@contextmanager
def _incoming(remote: Remote, transaction: Transaction) -> Iterator[Path]:
    """Yield where packs lie that came whole, until the block publishes them.

    That is the directory that outlives a fetch that is killed, unless another one runs just now.
    """
    lock = fs.LockFile(remote.directory / "incoming.lock")
    try:
        if not lock.acquire(blocking=False):
            yield transaction.directory
            return
        directory = remote.directory / "incoming"
        fs.make_directories(directory)
        yield directory
        # What an earlier fetch left, and refs no longer need.
        with fs.translated(directory):
            names = fs.listed(directory)
        for name in names:
            fs.unlink(directory / name, missing_ok=True)
    finally:
        lock.release()


class _Arrival:
    """What is downloaded for one transaction: packs, and parts of packs."""

    def __init__(
        self,
        fetch: Fetch,
        transaction: Transaction,
        needs: Needs,
        places: RemotePlaces,
        state: RemoteState,
        incoming: Path,
    ) -> None:
        self._incoming = incoming
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
            # A name that the index has is not used again.
            taken = index.taken(transaction, by_pack)
            for pack, entries in by_pack.items():
                size = rows[pack].size
                is_much = sum(at.stored_length for _, at in entries) >= _WHOLE * size
                (whole if is_much and pack not in taken else ranged).append(pack)
        total = sum(rows[pack].size for pack in whole) + sum(
            at.stored_length for pack in ranged for _, at in by_pack[pack]
        )
        tick = self._fetch.ticker(total)
        sealed: list[SealedPack] = []
        with ThreadPoolExecutor(self._fetch.jobs, "fetch") as pool:
            sealed += [
                self._whole(pool, pack, rows[pack].size, by_pack[pack], tick) for pack in whole
            ]
            if ranged:
                sealed += self._parts(pool, {pack: by_pack[pack] for pack in ranged}, tick)
        self._prove(sealed)
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
                    raise _lacks(self._remote, kind, id)
                lacking[kind, id] = at
        bases = {at.base for (kind, _), at in lacking.items() if at.base != NO_BASE}
        with index.env.read() as transaction:
            own = {base: index.block(transaction, BlockId(base)) for base in sorted(bases)}
        for base, place in own.items():
            if place is None:
                alone = self._places.alone(base)
                if alone is None:
                    raise _lacks(self._remote, Kind.BLOCK, base)
                lacking[Kind.BLOCK, base] = alone
            elif place.base != NO_BASE:
                # Here it is a difference itself, and that cannot be a base.
                self._restate.update(id for (_, id), at in lacking.items() if at.base == base)
        return lacking

    # -- downloading -------------------------------------------------------------------------

    def _whole(
        self,
        pool: ThreadPoolExecutor,
        pack: PackId,
        size: int,
        needed: Sequence[tuple[Key, Location]],
        tick: ProgressCounter,
    ) -> SealedPack:
        """Download a pack, unless an earlier fetch did."""
        path = self._incoming / f"{pack.hex()}.pack"
        if not self._is_pack(path, pack):
            self._download(pool, pack, size, path, tick)
            if not self._is_pack(path, pack):
                fs.unlink(path, missing_ok=True)
                raise Corrupt(
                    "the pack does not match its name",
                    where=f"{self._remote.where}/{pack_name(pack)}",
                )
        self._files[pack] = path
        wanted = {(int(kind), id) for (kind, id), _ in needed}
        entries = tuple(e for e in read_footer(path).entries if (e.kind, e.id) in wanted)
        if len(entries) != len(wanted):
            raise Corrupt("the pack lacks what its table has", where=self._remote.where)
        return SealedPack(pack, path, size, entries)

    @staticmethod
    def _is_pack(path: Path, pack: PackId) -> bool:
        try:
            return read_footer(path).id == pack
        except Corrupt:
            return False

    def _download(
        self, pool: ThreadPoolExecutor, pack: PackId, size: int, path: Path, tick: ProgressCounter
    ) -> None:
        part = path.with_suffix(".part")
        fs.unlink(part, missing_ok=True)
        file = fs.NewFile(part)
        name = pack_name(pack)

        def bring(at: int) -> int:
            length = min(PIECE_BYTES, size - at)
            [data] = self._remote.objects.read_each(name, [(at, length)])
            file.write_at(at, data)
            file.begin_writing_back(at, length)
            return length

        try:
            offsets = range(0, size, PIECE_BYTES)
            jobs = self._fetch.jobs
            for _, length in in_order(lambda at: pool.submit(bring, at), offsets, ahead=jobs):
                tick(length)
            file.protect()
            file.sync()
            file.close()
            fs.rename(part, path)
        except BaseException:
            file.abandon()
            raise

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
        """Read, decode and hash everything that came."""
        for one in sealed:
            for entry in one.entries:
                self._rows[Kind(entry.kind), entry.id] = located(one.id, entry)
        with (
            closing(PackFiles(self._catalog.layout.packs, elsewhere=self._files)) as files,
            ThreadPoolExecutor(_threads(), "prove") as pool,
        ):
            reader = BlockReader(files, self._catalog.block_size)

            def check(some: Sequence[PackEntry]) -> None:
                for entry in some:
                    self._checked(reader, typed_id(Kind(entry.kind), entry.id))

            groups = (
                one.entries[start : start + 16]
                for one in sealed
                for start in range(0, len(one.entries), 16)
            )
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


def _threads() -> int:
    return min(4, os.cpu_count() or 1)


def _take(packs: NewPacks, span: PackSpan, data: Buffer) -> None:
    view = memoryview(data)
    for key, at in span.entries:
        start = at.offset - span.start
        packs.copy(key, at, view[start : start + at.stored_length])
