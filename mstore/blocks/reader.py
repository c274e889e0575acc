"""Reading blocks: the only place that reads a payload, decodes it and checks the result.

Owns the order (check the length, read, decode, compare with the id) and the errors, which name the
block. Does not own where payloads come from (`PackSource`), where a block lies (the index, or a
pack's table), which base a delta has, nor what is counted against a budget. Records are stored
unencoded; `BlockReader.record` checks them against their ids as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, local
from typing import Final, Protocol

from blake3 import blake3

from mstore.blocks import codecs
from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PackEntry
from mstore.terms.errors import BudgetExceeded, Corrupt, Incompatible, MstoreError
from mstore.terms.ids import BlockId, Buffer, Id, PackId
from mstore.terms.phrases import call
from mstore.terms.sizes import exact_size, format_size

RECORD_LIMIT: Final = 512 << 20
"""Length of the longest record of any kind, in bytes."""

FSCK: Final = call("fsck", read_data=True)


class PackSource(Protocol):
    """The part of `blocks.pack_store.Packs` that a reader needs."""

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """See `Packs.read`."""

    def read_scattered(self, pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        """See `Packs.read_scattered`."""

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        """See `Packs.will_need`."""


def located(pack: PackId, entry: PackEntry) -> Location:
    """Return where an entry of a pack's own table says its payload lies."""
    return Location(
        pack,
        entry.offset,
        entry.stored_length,
        entry.raw_length,
        entry.codec,
        entry.width,
        entry.base,
    )


class BlockReader:
    """Reads blocks and records of one store. Safe for any number of threads.

    Raises Corrupt, which names the block, if bytes do not match the id; Incompatible for a codec of
    a newer version; and what the source raises.
    """

    def __init__(self, source: PackSource, block_size: int) -> None:
        self._source = source
        self._block_size = block_size

    def block(self, id: BlockId, at: Location, base: Buffer | None = None) -> Buffer:
        """Return the checked plain bytes of a block. base: the plain base block of a delta."""
        data = decoded(id, at, self.payload(id, at), base)
        verify(id, at, data, base)
        return data

    def block_into(
        self, id: BlockId, at: Location, target: memoryview, base: Buffer | None = None
    ) -> None:
        """Fill `target`, which is as long as the block, with its checked bytes."""
        self.unchecked_into(id, at, target, base)
        verify(id, at, target, base)

    def unchecked_into(
        self, id: BlockId, at: Location, target: memoryview, base: Buffer | None = None
    ) -> None:
        """Like `block_into`, without checking the id: for bases, where the result is checked."""
        self.check_lengths(id, at)
        if len(target) != at.raw_length:
            raise Corrupt(
                f"a block of {at.raw_length} bytes where {len(target)} were expected",
                where=f"block {id}",
                block=id,
            )
        if at.codec == Codec.RAW:
            # A raw payload must be as long as its block.
            if at.stored_length != at.raw_length:
                raise Corrupt(
                    "a raw block of two lengths", where=f"block {id}", hint=FSCK, block=id
                )
            self._source.read_scattered(at.pack, at.offset, [target])
            return
        payload = self._source.read(at.pack, at.offset, at.stored_length)
        decode_into(id, at, payload, target, base)

    def take_raw(self, run: Sequence[tuple[BlockId, Location, memoryview]]) -> bool:
        """Fill targets, as long as their blocks, with raw blocks that follow each other at rest.

        Returns False if one is encoded, is not there, or does not match its id: then targets have
        any contents, and reading each block alone tells why.  Raises StorageFailed.
        """
        places = [at for _, at, _ in run]
        if any(
            at.codec != Codec.RAW or not at.stored_length == at.raw_length <= self._block_size
            for at in places
        ):
            return False
        targets = [target for *_, target in run]
        try:
            self._source.read_scattered(places[0].pack, places[0].offset, targets)
        except Corrupt:
            return False
        return all(blake3(target).digest() == id for id, _, target in run)

    def payload(self, id: BlockId, at: Location) -> Buffer:
        """Return the stored bytes, after checking their length but not their content."""
        self.check_lengths(id, at)
        return self._source.read(at.pack, at.offset, at.stored_length)

    def record(self, id: Id, at: Location) -> bytes:
        """Return the checked canonical bytes of a record."""
        where = f"{type(id).__name__} {id}"
        if at.codec != Codec.RAW or max(at.stored_length, at.raw_length) > RECORD_LIMIT:
            raise Corrupt("not stored as a record", where=where, hint=FSCK)
        data = bytes(self._source.read(at.pack, at.offset, at.stored_length))
        if type(id).of(data) != id:
            raise Corrupt("the stored record does not match its id", where=where, hint=FSCK)
        return data

    def check_lengths(self, id: BlockId, at: Location) -> None:
        """Raise Corrupt if a block is longer than the block size."""
        # Before anything is allocated: neither a row nor a pack's table proves that a length is
        # sane.
        if max(at.raw_length, at.stored_length) > self._block_size:
            raise Corrupt("longer than the block size", where=f"block {id}", hint=FSCK, block=id)


def decoded(id: BlockId, at: Location, payload: Buffer, base: Buffer | None = None) -> Buffer:
    """Decode a payload of a sane length; does not check the id."""
    try:
        return codecs.decode(at.codec, payload, at.width, at.raw_length, base)
    except (Corrupt, Incompatible) as error:
        raise _named(error, id) from error


def decode_into(
    id: BlockId,
    at: Location,
    payload: Buffer,
    target: memoryview,
    base: Buffer | None = None,
) -> None:
    """Decode a payload into `target`, which is as long as the block; does not check the id."""
    try:
        codecs.decode_into(at.codec, payload, at.width, target, base)
    except (Corrupt, Incompatible) as error:
        raise _named(error, id) from error


def verify(id: BlockId, at: Location, data: Buffer, base: Buffer | None = None) -> None:
    """Raise Corrupt unless these are the plain bytes of the block.

    base: what it was decoded with; the error blames the base if that does not match its own id.
    """
    # As `BlockId.of` has it, without an object.
    if blake3(data).digest() == id:
        return
    if base is not None and BlockId.of(base) != at.base:
        raise Corrupt(
            f"its base {BlockId(at.base)} is not what its id says",
            where=f"block {id}",
            hint=FSCK,
            block=id,
        )
    raise Corrupt(
        f"the stored bytes do not match the id (pack {at.pack.short}, offset {at.offset})",
        where=f"block {id}",
        hint=FSCK,
        block=id,
    )


def _named(error: MstoreError, block: BlockId) -> MstoreError:
    """Return a codec's error as one about this block."""
    what, _, hint = error.texts
    named = type(error)(what, where=f"block {block}", hint=hint or FSCK)
    if isinstance(named, Corrupt):
        named.block = block
    return named


class ThreadBuffer:
    """Memory of `size` bytes that every thread has of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = local()

    def __call__(self, length: int) -> memoryview:
        """Return the calling thread's first `length` bytes: valid until it asks again."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = memoryview(bytearray(self._size))
        return buffer[:length]


class Meter:
    """Bytes read from packs for one purpose, over all threads.

    Invariant: `total` never exceeds `limit`. The charge precedes the `pread`, so no read beyond the
    limit happens.
    """

    def __init__(self, purpose: str, limit: int | None = None) -> None:
        self.purpose = purpose
        self.limit = limit
        self._total = 0
        self._lock = Lock()

    @property
    def total(self) -> int:
        """Bytes charged so far."""
        return self._total

    def charge(self, length: int) -> None:
        """Charge `length` bytes before they are read. Raises BudgetExceeded."""
        with self._lock:
            if self.limit is not None and self._total + length > self.limit:
                raise BudgetExceeded(
                    f"reading {format_size(length)} more from {self.purpose}s would make "
                    f"{exact_size(self._total + length)}; the plan allows {exact_size(self.limit)}"
                )
            self._total += length
