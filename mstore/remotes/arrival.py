"""What is downloaded of a remote's packs: whole packs, and parts of others; proved, then published.

A pack of which much is needed comes whole. It lies in remotes/NAME/incoming/ until it is published,
so that a fetch that was killed goes on there. Parts of packs go into new ones. Only what snapshots
need gets rows, so a pack that came whole may have dead bytes: gc frees them.

A block that is a difference to one that is a difference here itself is stored anew, without a base.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.codecs import Elements, encode
from mstore.blocks.location import Key, Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, SealedPack, read_footer
from mstore.blocks.reader import BlockReader, decoded, located, verify
from mstore.remotes.layout import pack_name
from mstore.remotes.needs import Needs
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import PackSpan, lacks, read_span, spans
from mstore.remotes.state import Remote, RemoteState
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import decode
from mstore.store.publishing import NewPacks
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, Buffer, Id, PackId
from mstore.terms.report import ProgressCallback, ProgressCounter
from mstore.upkeep.check.findings import RECORDS, typed_id

PIECE_BYTES: Final = 4 << 20
"""Bytes of one request for a part of a pack; a job may have two such in memory."""
_WHOLE: Final = 0.5
"""A pack of which this share is needed is downloaded whole."""
_PACK: Final = ".pack"
_PART: Final = ".part"


class Incoming:
    """Packs that were downloaded whole and are not published yet: `remotes/NAME/incoming/`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "incoming"
        fs.make_directories(self._directory)

    def path(self, pack: PackId) -> Path:
        """Return the path of a pack."""
        return self._directory / f"{pack.hex()}{_PACK}"

    def remove_parts(self) -> None:
        """Remove what killed fetches had not downloaded to its end."""
        for name in self._names():
            if name.endswith(_PART):
                fs.unlink(self._directory / name, missing_ok=True)

    def keep(self, packs: Container[bytes]) -> None:
        """Remove all but these packs."""
        for name in self._names():
            if bytes.fromhex(name.removesuffix(_PACK)) not in packs:
                fs.unlink(self._directory / name, missing_ok=True)

    def _names(self) -> list[str]:
        with fs.translated(self._directory):
            return fs.listed(self._directory)


class ComingPack:
    """A pack that is being downloaded, as a file beside its place."""

    def __init__(self, pack: PackId, path: Path) -> None:
        self.pack = pack
        self.path = path
        self.file = fs.NewFile(path.with_suffix(_PART))
        self._lock = Lock()

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


class Arrival:
    """What is downloaded for one transaction: packs, and parts of packs.

    whole: the share of a pack that must be needed for it to come whole.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        transaction: Transaction,
        needs: Needs,
        places: RemotePlaces,
        state: RemoteState,
        incoming: Incoming,
        *,
        jobs: int,
        progress: ProgressCallback | None,
        whole: float = _WHOLE,
    ) -> None:
        self._whole = whole
        self.blocks = 0
        self.received = 0
        self._incoming = incoming
        self._jobs = jobs
        self._progress = progress
        self._catalog = catalog
        self._remote = remote
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
        with index.env.read() as transaction:
            # Names that this store has, or is about to remove.
            here = index.taken(transaction, by_pack)
        whole: list[PackId] = []
        ranged: list[PackId] = []
        for pack, entries in by_pack.items():
            is_much = sum(at.stored_length for _, at in entries) >= self._whole * rows[pack].size
            (whole if is_much and pack not in here else ranged).append(pack)
        total = sum(rows[pack].size for pack in whole) + sum(
            at.stored_length for pack in ranged for _, at in by_pack[pack]
        )
        tick = ProgressCounter("fetch", total, self._progress)
        sealed: list[SealedPack] = []
        with ThreadPoolExecutor(self._jobs, "fetch") as pool:
            if whole:
                sealed += self._wholes(pool, {pack: by_pack[pack] for pack in whole}, tick)
            if ranged:
                sealed += self._parts(pool, {pack: by_pack[pack] for pack in ranged}, tick)
        try:
            self._prove(sealed)
        except Corrupt as error:
            # The next fetch downloads it again.
            for pack in whole:
                fs.unlink(self._incoming.path(pack), missing_ok=True)
            raise Corrupt(
                f"{self._remote.name} has damaged data: {error.what}",
                where=f"{self._remote.where}, {error.where}",
                hint="run it again: if the remote itself is damaged, push to another address",
            ) from error
        for one in sealed:
            kept = tuple(e for e in one.entries if (e.kind, e.id) not in self._restated_keys())
            self._transaction.receive(msgspec.structs.replace(one, entries=kept))
        self._restate_blocks()
        self.blocks = sum(key[0] == Kind.BLOCK for key in lacking)
        self.received = tick.done

    def _restated_keys(self) -> set[tuple[int, bytes]]:
        return {(int(Kind.BLOCK), id) for id in self._restate}

    def _lacking(self) -> dict[Key, Location]:
        """Return what is needed and not here, with where the remote has it."""
        index = self._catalog.index
        lacking: dict[Key, Location] = {}
        for kind, wanted in self._needs.by_kind().items():
            with index.env.read() as transaction:
                ids = [id for id in wanted if index.row(transaction, (kind, id)) is None]
            # gc may remove what no ref names yet.
            missing = set(ids)
            self._transaction.rely_on((kind, id) for id in wanted if id not in missing)
            for id, at in zip(ids, self._places.locate(kind, ids), strict=True):
                if at is None:
                    raise lacks(self._remote, kind, id)
                lacking[kind, id] = at
        bases = {at.base for (kind, _), at in lacking.items() if at.base != NO_BASE}
        with index.env.read() as transaction:
            own = {base: index.block(transaction, BlockId(base)) for base in sorted(bases)}
        for base, place in own.items():
            if place is None:
                [alone] = self._places.alone([base])
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
        by_pack: Mapping[PackId, Sequence[tuple[Key, Location]]],
        tick: ProgressCounter,
    ) -> list[SealedPack]:
        """Download packs, unless an earlier fetch did: the pieces of all in one row."""
        sizes = {pack: self._state.packs()[pack].size for pack in by_pack}
        self._files |= {pack: self._incoming.path(pack) for pack in by_pack}
        lacking = [pack for pack in by_pack if not is_pack(self._files[pack], pack, sizes[pack])]
        coming: dict[PackId, ComingPack] = {}

        def asked() -> Iterator[tuple[ComingPack, PackSpan]]:
            for pack in lacking:
                one = coming[pack] = ComingPack(pack, self._files[pack])
                for span in pieces(sizes[pack], by_pack[pack]):
                    yield one, span

        def bring(asked: tuple[ComingPack, PackSpan]) -> list[Key]:
            return self._piece(*asked)

        brought = in_order(
            lambda one: pool.submit(bring, one), asked(), ahead=self._jobs, stopping=self._stop
        )
        try:
            with closing(brought) as done:
                for (one, span), sound in done:
                    self._proved.update(sound)
                    tick(span.end - span.start)
                    if span.end == sizes[one.pack]:
                        del coming[one.pack]
                        one.land()
                        self._require_pack(one.path, one.pack, span.end)
        except BaseException:
            for one in coming.values():
                one.file.abandon()
            raise
        return [self._sealed(pack, sizes[pack], needed) for pack, needed in by_pack.items()]

    def _piece(self, one: ComingPack, span: PackSpan) -> list[Key]:
        """Bring a part of a pack; return which blocks in it need no look any more."""
        data = read_span(self._remote, one.pack, span)
        view, most = memoryview(data), self._catalog.block_size
        sound = []
        for key, at in span.entries:
            # The others are proved later: a base may come later, too; and so may what is wrong.
            if key[0] == Kind.BLOCK and at.base == NO_BASE and at.raw_length <= most:
                start = at.offset - span.start
                id = BlockId(key[1])
                with suppress(Corrupt):
                    verify(id, at, decoded(id, at, view[start : start + at.stored_length]))
                    sound.append(key)
        # At once, while the processor's cache has it.
        one.write(span.start, view)
        return sound

    def _require_pack(self, path: Path, pack: PackId, size: int) -> None:
        if not is_pack(path, pack, size):
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
            return read_span(self._remote, *one)

        try:
            brought = in_order(
                lambda one: pool.submit(bring, one), asked, ahead=self._jobs, stopping=self._stop
            )
            for (_, span), data in brought:
                _take(packs, span, data)
                tick(len(data))
            packs.seal()
        except BaseException:
            packs.abandon()
            raise
        for one in packs.sealed:
            self._files[one.id] = one.path
        return packs.sealed

    def _stop(self, left: Sequence[object]) -> None:
        """Let threads that wait for their turn end, where work is left: it has failed."""
        if left:
            self._remote.objects.wake()

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
            closing(PackFiles(self._catalog.layout.packs, staged=self._files)) as files,
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
            kind = _kind_of(id)
            data = reader.record(id, self._rows[kind, bytes(id)])
            decode(RECORDS[kind], data, f"{self._remote.where}, {kind.name.lower()} {id}")
            return data
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
        with closing(PackFiles(self._catalog.layout.packs, staged=self._files)) as files:
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


def is_pack(path: Path, pack: PackId, size: int) -> bool:
    """Return whether a file is this pack, by its size, header and footer."""
    try:
        found = read_footer(path)
    except Corrupt:
        return False
    return found.id == pack and found.size == size


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
