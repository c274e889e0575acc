"""Payloads: the blocks and records of an open store, looked up and read with their ids checked.

Owns the open packs' reader; what an open store remembers is `store.remembered`. Safe for any number
of threads. Readers never wait for writers: a lookup is one short index transaction, and packs do
not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mstore.blocks.codecs import Codec
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Location, Row, base_of, in_runs, stored_lengths
from mstore.blocks.pack_store import HERE, Packs, Places
from mstore.blocks.packs import Outdated, PackGone
from mstore.blocks.reader import (
    FSCK,
    RECORD_LIMIT,
    BlockReader,
    Meter,
    ThreadBuffer,
    decoded,
    verify,
)
from mstore.blocks.schema import BLOCKS
from mstore.store.layout import Layout
from mstore.store.objects.canonical import Record, decode
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.remembered import Key, RecordCache, StoredLengths
from mstore.terms.errors import BadRequest, Corrupt, NotFound, StorageFailed
from mstore.terms.ids import (
    ID_BYTES,
    BlockId,
    Buffer,
    Id,
    ManifestId,
    PackId,
    SnapshotId,
    TensorId,
    VirtualId,
    split_ids,
)
from mstore.terms.phrases import call

if TYPE_CHECKING:
    import numpy as np

    from mstore.blocks.elsewhere import PartReader, RemoteBlocks

    Lengths = np.ndarray[Any, np.dtype[np.int64]]


R = TypeVar("R", bound=Record)
T = TypeVar("T")

_IDS_TOGETHER: Final = 1 << 16
"""Blocks that are looked up together: an id as an object takes twice its bytes."""

_MANY: Final = 1 << 12
_SCANNED: Final = 8
"""Looking up a block takes about as long as reading eight rows one after the other."""

Span = tuple[PackId, int, int, int, bytes]
"""A record's place: pack, offset, stored length, codec; and its id."""
LOOKS = 4
"""How often a block is looked up that moves while it is read."""


class Payloads:
    """The blocks and records that an index has in packs."""

    def __init__(self, layout: Layout, index: Index, packs: Packs) -> None:
        self.layout = layout
        self.index = index
        self.packs = packs
        """The packs of this directory, the only place to which packs are written; reads of them go
        elsewhere, too, once `lean_on` was called."""
        self.places = Places({HERE: packs})
        index.places = self.places
        self._reader = BlockReader(packs, layout.block_size)
        self._records = RecordCache()
        self._room = ThreadBuffer(layout.block_size)
        self.lengths = StoredLengths(index, self.stored_lengths)

    def lean_on(self, elsewhere: RemoteBlocks) -> None:
        """Look for blocks that are not stored elsewhere. Call it before anything is read."""
        self.index.elsewhere = elsewhere
        from mstore.blocks.elsewhere import PacksAndRemotes

        self.packs = PacksAndRemotes(self.packs, elsewhere)
        self.places[HERE] = self.packs
        self._reader = BlockReader(self.packs, self.block_size)

    def read_elsewhere(self, reader: PartReader | None) -> None:
        """Let this reader read what lies elsewhere; who made it closes it."""
        if self.index.elsewhere is not None:
            self.index.elsewhere.reader = reader

    @property
    def block_size(self) -> int:
        """Bytes of a full block in this store."""
        return self.layout.block_size

    def follow(self) -> bool:
        """Read the index as it is now, also if its files were replaced; return whether it changed.

        Raises Unavailable if they are another store's.
        """
        if self.index.env.is_replaced():
            self.layout.follow()
        return self.index.env.follow()

    # -- blocks ------------------------------------------------------------------------------

    def locate(self, blocks: Iterable[BlockId]) -> list[Location]:
        """Locate each block.  Raises Corrupt naming the first that is not stored."""
        return self.rows_of(list(blocks))[1]

    def locate_with_bases(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        """Locate blocks, and those that they are differences to, as of one moment."""
        with self.index.env.read() as transaction:
            places = dict(zip(blocks, self._rows_of(transaction, blocks)[1], strict=True))
            bases = dict.fromkeys(BlockId(at.base) for at in places.values() if _is_delta(at))
            others = [base for base in bases if base not in places]
            places |= dict(zip(others, self._rows_of(transaction, others)[1], strict=True))
            if self.index.elsewhere is not None:
                rows = zip(bases, self.index.base_rows(transaction, list(bases)), strict=True)
                alone = {base: row for base, row in rows if row is not None}
                places |= dict(
                    zip(alone, self.index.locations(transaction, alone.values()), strict=True)
                )
            return places

    def rows_of(self, blocks: Sequence[BlockId]) -> tuple[list[Row], list[Location]]:
        """Return the row of each block, and where it lies.  Raises as `locate`."""
        with self.index.env.read() as transaction:
            return self._rows_of(transaction, blocks)

    def _rows_of(
        self, transaction: IndexTransaction, blocks: Sequence[BlockId]
    ) -> tuple[list[Row], list[Location]]:
        rows = _all_stored(blocks, self.index.readable_rows(transaction, blocks))
        return rows, self.index.locations(transaction, rows)

    def stored_lengths(self, blocks: Buffer) -> Lengths:
        """Return bytes at rest of each block, int64[blocks]: a cheaper `locate` for counting.

        blocks: the bytes of their ids, one behind the other.
        """
        import numpy as np  # late: most commands open a store and never need it

        ids = np.frombuffer(blocks, np.dtype((np.void, ID_BYTES)))
        with self.index.env.read() as transaction:
            lengths = np.full(len(ids), -1, np.int64)
            stored = self.index.count(transaction, BLOCKS.name)
            if len(ids) >= _MANY and stored <= _SCANNED * len(ids):
                from mstore.blocks import location_arrays  # late: most lookups are small

                location_arrays.fill_lengths(self.index, transaction, ids, lengths)
            left = np.flatnonzero(lengths < 0)
            # In the order of the index: neighbours are found without another descent.
            left = left[np.ascontiguousarray(ids[left]).view(">u8")[::4].argsort()]
            for start in range(0, len(left), _IDS_TOGETHER):
                places = left[start : start + _IDS_TOGETHER]
                some = split_ids(ids[places].tobytes())
                rows = self.index.readable_rows(transaction, some)
                lengths[places] = stored_lengths(_all_stored(some, rows))
        return lengths

    def stored_alone(self, blocks: Iterable[bytes]) -> set[bytes]:
        """Return those of these blocks that are stored in a form that needs no base."""
        wanted = list(blocks)
        with self.index.env.read() as transaction:
            rows = self.index.block_rows(transaction, wanted)
        pairs = zip(wanted, rows, strict=True)
        return {block for block, row in pairs if row is not None and base_of(row) is None}

    def has_blocks(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return whether each block is stored."""
        with self.index.env.read() as transaction:
            return self.index.has_blocks(transaction, blocks)

    def can_read(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return whether each block is stored, or can be read elsewhere."""
        with self.index.env.read() as transaction:
            return [row is not None for row in self.index.readable_rows(transaction, blocks)]

    def out_of_place(self, blocks: Collection[BlockId]) -> list[BlockId]:
        """Return stored blocks whose bytes, or those of their delta base, are in a missing pack."""
        lost = self._in_missing_packs(blocks)
        # Look up again: gc may have moved some of them meanwhile.
        return self._in_missing_packs(lost) if lost else []

    def _in_missing_packs(self, blocks: Collection[BlockId]) -> list[BlockId]:
        packs: dict[bytes, bool] = {}

        def is_there(place: Location) -> bool:
            if place.pack not in packs:
                packs[place.pack] = self.packs.is_there(place.pack)
            return packs[place.pack]

        lost = []
        with self.index.env.read() as transaction:
            for block in blocks:
                place = self.index.block(transaction, block)
                if place is None:
                    continue
                base = None
                if _is_delta(place):
                    base = self.index.block(transaction, BlockId(place.base))
                    if base is None:
                        lost.append(block)
                        continue
                if not is_there(place) or (base is not None and not is_there(base)):
                    lost.append(block)
        return lost

    def read_block(
        self, block: BlockId, location: Location | None = None, meter: Meter | None = None
    ) -> Buffer:
        """Read the plain bytes of a block, checked against its id.  Raises Corrupt naming it.

        The location may be outdated: if its pack is gone, the block is looked up again.  The meter
        counts the block's own bytes at rest, not those of the base of a delta.
        """
        if location is None:
            location = self.locate([block])[0]
        if meter is not None:
            meter.charge(location.stored_length)
        return self.relocating(
            block, location, lambda at: self._reader.block(block, at, self._base(block, at))
        )

    def relocating(self, block: BlockId, location: Location, read: Callable[[Location], T]) -> T:
        """Return what `read` makes of a block's place, which is looked up again if it is outdated.

        Raises what `read` raises, and Outdated only if the index has no other place for the block.
        """
        for _ in range(LOOKS - 1):
            try:
                return self._trying_again(location, read)
            except Outdated as gone:
                fresh = self.locate([block])[0]
                if fresh == location:
                    # Or the index itself was replaced, and its packs have moved since.
                    if not self.follow():
                        gone.block = block
                        raise
                    fresh = self.locate([block])[0]
                location = fresh
        return read(location)

    def _trying_again(self, location: Location, read: Callable[[Location], T]) -> T:
        """Read; once more, without kept copies, if what came from elsewhere was damaged."""
        try:
            return read(location)
        except Outdated:
            raise
        except Corrupt:
            places = [location]
            if _is_delta(location):
                with self.index.env.read() as transaction:
                    base = self.index.base(transaction, BlockId(location.base))
                places += [] if base is None else [base]
            # Each of them: which is damaged is not known.
            if True not in [
                self.packs.forget(at.pack, at.offset, at.stored_length) for at in places
            ]:
                raise
            return read(location)

    def _base(self, block: BlockId, location: Location) -> Buffer | None:
        """Read the base of a delta, not checked: the decoded block itself is."""
        if not _is_delta(location):
            return None
        # Before a base is read for it.
        self._reader.check_lengths(block, location)
        base = BlockId(location.base)
        with self.index.env.read() as transaction:
            place = self.index.base(transaction, base)
        if place is None:
            raise Outdated(
                f"its base {base} is not stored", where=f"block {block}", hint=FSCK, block=block
            )
        if _is_delta(place) or place.raw_length != location.raw_length:
            raise Outdated(
                f"block {base} cannot be its base", where=f"block {block}", hint=FSCK, block=block
            )
        return self.relocating(base, place, lambda fresh: self._stand_alone(base, fresh))

    def _stand_alone(self, block: BlockId, location: Location) -> Buffer:
        # After a new lookup the location may be of any kind.
        if _is_delta(location):
            raise Outdated(
                "a delta cannot be a base", where=f"block {block}", hint=FSCK, block=block
            )
        found = self._room(location.raw_length)
        self._reader.unchecked_into(block, location, found)
        return found

    def read_block_into(
        self, block: BlockId, location: Location, target: memoryview, meter: Meter | None = None
    ) -> None:
        """Fill `target` (exactly the block's plain length) with checked bytes."""
        if meter is not None:
            meter.charge(location.stored_length)

        def read(place: Location) -> None:
            self._reader.block_into(block, place, target, self._base(block, place))

        self.relocating(block, location, read)

    def read_blocks(
        self, blocks: Sequence[BlockId], meter: Meter | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read the plain bytes of blocks, one after the other, each checked; raises as `locate`.

        Raw blocks that follow each other at rest are read with one call.
        """
        import numpy as np  # late, as above

        locations = self.locate(blocks)
        data = np.empty(sum(location.raw_length for location in locations), dtype=np.uint8)
        ends = itertools.accumulate(location.raw_length for location in locations)
        wanted = [
            (block, at, data.data[end - at.raw_length : end])
            for block, at, end in zip(blocks, locations, ends, strict=True)
        ]
        wanted.sort(key=lambda one: (one[1].pack, one[1].offset))
        for run in in_runs(wanted, itemgetter(1)):
            if meter is not None:
                meter.charge(sum([at.stored_length for _, at, _ in run]))
            if not self._reader.take_raw(run):
                # Encoded, moved or damaged: each of them is looked after.
                for block, at, target in run:
                    self.read_block_into(block, at, target)
        return data

    def read_parts(self, parts: Iterable[Part]) -> bytes:
        """Read the plain bytes of parts of files; raises as `tensor` and `locate`."""
        records = (self.tensor(part.tensor_id()) for part in parts)
        return self.read_blocks([id for one in records for id in one.block_ids()]).tobytes()

    def read_small(self, file: File | None, limit: int) -> bytes | None:
        """Read a file that has no tensors; None if there is none, or it has more than `limit`."""
        if file is None or file.form != OPAQUE or file.size > limit:
            return None
        return self.read_parts(file.parts)

    def stored(self, id: Id, location: Location) -> Buffer:
        """Return the stored bytes of a block or record, whose plain bytes match its id.

        Raises Corrupt, and Outdated if it is no longer there.
        """
        if not isinstance(id, BlockId):
            return self._reader.record(id, location)
        payload = self._reader.payload(id, location)
        base: Buffer | None = None
        if _is_delta(location):
            base = memoryview(bytearray(location.raw_length))
            [lies] = self.locate([BlockId(location.base)])
            self.read_block_into(BlockId(location.base), lies, base)
        verify(id, location, decoded(id, location, payload, base), base)
        return payload

    def read_block_at(self, block: BlockId, location: Location) -> Buffer:
        """Read from this very place.  Raises Outdated if the block is no longer there."""
        return self._reader.block(block, location, self._base(block, location))

    # -- records -----------------------------------------------------------------------------

    def record(self, kind: type[R], id: Id) -> R:
        """Return a decoded record, its bytes checked against its id.  Raises NotFound, Corrupt."""
        key = bytes([kind.kind]) + id
        cached = self._records.get(key)
        if cached is not None:
            assert isinstance(cached, kind)
            return cached
        with self.index.env.read() as transaction:
            location = self.index.record(transaction, kind.kind, id)
        if location is None:
            raise NotFound(f"no such {kind.kind.name.lower()}", where=str(id))
        try:
            data = self.record_bytes(kind.id_type(id), location)
        except PackGone:
            self.follow()
            with self.index.env.read() as transaction:
                fresh = self.index.record(transaction, kind.kind, id)
            if fresh is None or fresh == location:
                raise
            data = self.record_bytes(kind.id_type(id), fresh)
        record = decode(kind, data, f"{id}")
        self._records.put([(key, record, len(data))])
        return record

    def record_bytes(self, id: Id, location: Location) -> bytes:
        """Return the canonical bytes of a record, checked against its id."""
        return self._reader.record(id, location)

    def tensor(self, id: TensorId) -> Tensor:
        """Return a stored tensor.  Raises NotFound, Corrupt, BadRequest for a virtual one."""
        content = self.content(id)
        if isinstance(content, VirtualTensor):
            raise BadRequest(
                "is virtual: planned, and not computed yet",
                where=f"tensor {content.tensor}",
                hint=call("materialize", "REF"),
            )
        return content

    def tensors(self, ids: Sequence[TensorId]) -> list[Tensor]:
        """Return many tensor records, read together where they lie so; raises as `tensor`."""
        keys = [_TENSOR + id for id in ids]
        found = self._found_tensors(keys)
        size = self.block_size
        tensors = []
        for id, key in zip(ids, keys, strict=True):
            record = found.get(key)
            if isinstance(record, Tensor) and record.fits(size):
                tensors.append(record)
            else:
                # Missing, virtual, damaged or moved: `tensor` handles each case.
                tensors.append(self.tensor(id))
        return tensors

    def preload_tensors(self, ids: Sequence[TensorId]) -> None:
        """Preload what `content` will soon be asked for, which then reports what is wrong."""
        found = self._found_tensors([_TENSOR + id for id in ids])
        left = [_VIRTUAL + id for id in ids if _TENSOR + id not in found]
        known = self._records.get_many(left)
        self._read_together(VirtualTensor, [key for key in left if key not in known])

    def _found_tensors(self, keys: Sequence[Key]) -> dict[Key, Record]:
        """Return the records that are cached or can be read; `record` handles the others."""
        found = self._records.get_many(keys)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            found |= self._read_together(Tensor, missing)
        return found

    def _read_together(self, kind: type[Record], keys: Sequence[Key]) -> dict[Key, Record]:
        """Return the records that are where the index says and match their ids."""
        if not keys:
            return {}
        with self.index.env.read() as transaction:
            ids = [key[1:] for key in keys]
            places = self.index.record_spans(transaction, kind.kind, ids)
        news: list[tuple[Key, Record, int]] = []
        for run in _neighbours(places):
            pack, begin, *_ = run[0]
            _, last, length, *_ = run[-1]
            with suppress(Corrupt, StorageFailed):
                data = self.packs.read(pack, begin, last + length - begin)
                for _, offset, stored, _, id in run:
                    one = bytes(data[offset - begin : offset - begin + stored])
                    with suppress(Corrupt):
                        if kind.id_type.of(one) == id:
                            news.append((bytes([kind.kind]) + id, decode(kind, one, ""), stored))
        self._records.put(news)
        return {key: record for key, record, _ in news}

    def sound_records(self, kind: type[R], places: Iterable[Span]) -> Iterator[tuple[bytes, R]]:
        """Yield (id, record) of those records that are where these places say and match their ids.

        Reads pack by pack, in stored order, past the cache.  Leaves the others to `record`, which
        tells what is wrong with each; raises nothing itself.
        """
        for pack, some in itertools.groupby(sorted(places), key=itemgetter(0)):
            readable = [one for one in some if one[3] == Codec.RAW and one[2] <= RECORD_LIMIT]
            spans = [(offset, stored) for _, offset, stored, _, _ in readable]
            with suppress(Corrupt, StorageFailed):
                for one, data in zip(readable, self.packs.read_each(pack, spans), strict=True):
                    id = one[4]
                    with suppress(Corrupt):
                        if kind.id_type.of(data) == id:
                            yield id, decode(kind, data, "")

    def content(self, id: TensorId | VirtualId) -> Tensor | VirtualTensor:
        """Return the record that a part of a manifest names: a tensor or a virtual tensor.

        The only place that distinguishes the two.  Raises NotFound, Corrupt.
        """
        # One in memory needs no look into the index, where it is no tensor.
        known = self._records.get(_VIRTUAL + id)
        if isinstance(known, VirtualTensor):
            known.check(f"virtual tensor {id}")
            return known
        try:
            tensor = self.record(Tensor, id)
        except NotFound as missing:
            try:
                virtual = self.record(VirtualTensor, VirtualId(id))
            except NotFound:
                raise missing from None
            virtual.check(f"virtual tensor {id}")
            return virtual
        if not tensor.fits(self.block_size):
            tensor.check(self.block_size, f"tensor {id}")
        return tensor

    def manifest(self, id: ManifestId) -> Manifest:
        """Return a manifest."""
        return self.record(Manifest, id)

    def manifest_if_there(self, id: ManifestId) -> Manifest | None:
        """Return a manifest; None if it is missing, damaged, or in a lost pack."""
        with suppress(NotFound, Corrupt):
            return self.manifest(id)
        return None

    def manifest_of(self, snapshot: SnapshotId) -> Manifest:
        """Return the manifest of a snapshot."""
        return self.manifest(self.snapshot(snapshot).manifest_id())

    def snapshot(self, id: SnapshotId) -> SnapshotRecord:
        """Return a snapshot record."""
        return self.record(SnapshotRecord, id)

    def snapshot_if_there(self, id: SnapshotId) -> SnapshotRecord | None:
        """Return a snapshot record; None if it is missing, damaged, or in a lost pack."""
        with suppress(NotFound, Corrupt):
            return self.snapshot(id)
        return None

    def require_real(self, id: SnapshotId, called: str) -> None:
        """Raise BadRequest if a snapshot is virtual, because its bytes do not exist yet."""
        if self.snapshot(id).is_virtual:
            raise BadRequest(
                "is a virtual merge: its bytes are computed when they are read, and not stored",
                where=called,
                hint=call("materialize", called),
            )


def _is_delta(location: Location) -> bool:
    # The decoder refuses a codec of a newer version.
    return location.codec == Codec.DELTA


def _all_stored(blocks: Sequence[bytes], rows: Sequence[Row | None]) -> list[Row]:
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        missing = BlockId(blocks[rows.index(None)])
        raise Corrupt(
            "the store does not have this block", where=f"block {missing}", hint=FSCK, block=missing
        )
    return found


def _neighbours(places: list[Span]) -> Iterator[list[Span]]:
    """Group records in stored order, those close together in one group."""
    run: list[Span] = []
    start = end = 0
    last: PackId | None = None
    for place in sorted(places):
        pack, offset, stored, codec, _ = place
        if codec != Codec.RAW or stored > RECORD_LIMIT:
            continue
        far = offset > end + _GAP or offset - start > _TOGETHER
        if run and (far or pack != last):
            yield run
            run = []
        if not run:
            start = end = offset
            last = pack
        run.append(place)
        end = max(end, offset + stored)
    if run:
        yield run


_TENSOR = bytes([Tensor.kind])
_VIRTUAL = bytes([VirtualTensor.kind])
_GAP = 4096
"""A gap between two records up to this size is read rather than skipped."""
_TOGETHER = 1 << 20
"""The most bytes from the first record of a read to the end of its last."""
