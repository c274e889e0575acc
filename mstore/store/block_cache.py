"""Blocks for readers at any offset: checked once, decoded once for all who need them.

A cache is of one store and one session. A coded block is kept decoded, up to a limit in bytes. A
raw block is checked against its id once. The bytes that were checked stay for who asked for them,
up to a quarter of that limit; after that it is read from its pack, which the kernel caches. Safe
for any number of threads.

A block of a virtual tensor lies in no pack: the cache has it computed on first access by the
`Computing` that it was given, and keeps it like a coded one. This module does not own how blocks
are computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import Outdated
from mstore.store.catalog import Catalog
from mstore.store.payloads import LOOKS
from mstore.store.remembered import Recent
from mstore.terms.errors import BadRequest, Corrupt
from mstore.terms.ids import BlockId, Buffer, PackId, VirtualId
from mstore.terms.phrases import call

CACHE_BYTES = 64 << 20
"""The most bytes of decoded blocks that a cache keeps, unless it is told otherwise."""


class VirtualBlock(NamedTuple):
    """Block `number` of a virtual tensor; it has no BlockId until it is computed."""

    tensor: VirtualId
    number: int


class Extent(msgspec.Struct, frozen=True):
    """A piece of a file within one block: `length` bytes from `start` of the block."""

    block: BlockId | VirtualBlock
    start: int
    length: int


class Computing(Protocol):
    """Computes blocks of virtual tensors, in groups that cost as much as one.  Thread-safe."""

    @property
    def ahead(self) -> int:
        """How many groups a sequential reader should request ahead."""
        ...

    def place(self, block: VirtualBlock) -> BlockId | None:
        """Return the stored block that this one is known to equal, if any, without computing."""
        ...

    def group(self, block: VirtualBlock) -> range:
        """Return the numbers of the blocks that are computed together with this one."""
        ...

    def submit(self, tensor: VirtualId, group: range) -> Future[list[Buffer]]:
        """Start computing a group; the future gives its blocks in order."""
        ...


class VirtualGroup(msgspec.Struct, frozen=True):
    """Blocks of a virtual tensor that are being computed."""

    tensor: VirtualId
    numbers: range
    blocks: Future[list[Buffer]]

    def holds(self, block: VirtualBlock) -> bool:
        return block.tensor == self.tensor and block.number in self.numbers

    def block(self, block: VirtualBlock) -> Buffer:
        """Wait for a block and return it."""
        return self.blocks.result()[block.number - self.numbers.start]


class BlockCache:
    """Reads pieces of blocks, each block checked before a byte of it is given.

    A block that several threads ask for at once is read, decoded and checked by the first of them.
    `prepare` has other threads do it before anyone asks. `limit`: bytes of decoded blocks, those
    least recently used go first. `check_always`: check a raw block each time a piece of it is read,
    not once; then whole raw blocks are kept like coded ones. `computing` returns what computes
    virtual blocks; it is called when the first one is requested.
    """

    def __init__(
        self,
        catalog: Catalog,
        limit: int = CACHE_BYTES,
        computing: Callable[[], Computing] | None = None,
        *,
        check_always: bool = False,
    ) -> None:
        self._catalog = catalog
        self._limit = limit
        self._computing = computing
        self._check_always = check_always
        self._lock = threading.Lock()
        self._blocks: Recent[BlockId | VirtualBlock, Buffer] = Recent(limit)
        self._fresh: Recent[BlockId, Buffer] = Recent(limit // 4)
        self._checked: dict[BlockId, _Checked] = {}
        self._under_way: dict[VirtualBlock, VirtualGroup] = {}
        self._filling: dict[BlockId, Future[Buffer]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def computing(self) -> Computing:
        """What computes virtual blocks. Raises BadRequest if there is nothing that does."""
        if self._computing is None:
            raise BadRequest("a virtual tensor has no bytes here", hint=call("materialize", "REF"))
        return self._computing()

    def read(self, extent: Extent) -> Buffer:
        """Return the bytes of an extent. Raises Corrupt naming the block."""
        found = self._find(extent.block)
        if not isinstance(found, _Checked):
            return piece_of(found, extent)
        data = bytearray(extent.length)
        self._read_run(_RawRun.of(extent, found, memoryview(data)))
        return data

    def read_into(self, extents: Iterable[Extent], target: memoryview) -> None:
        """Fill `target` with the bytes of these extents, one after the other. Raises as `read`."""
        self.pieces(extents, target)

    def pieces(self, extents: Iterable[Extent], target: memoryview | None = None) -> list[Buffer]:
        """Return the bytes of these extents, a piece for each, not to be changed. Raises as `read`.

        Pieces of raw blocks that are neighbours in a pack are read at once. target: where they go,
        one after the other; without it those that are in memory are not copied.
        """
        pieces: list[Buffer] = []
        done = 0
        run: _RawRun | None = None
        for extent in extents:
            part = None if target is None else target[done : done + extent.length]
            done += extent.length
            found = self._find(extent.block)
            if not isinstance(found, _Checked):
                piece = piece_of(found, extent)
                if part is not None:
                    part[:] = piece
                pieces.append(piece if part is None else part)
                continue
            if part is None:
                part = memoryview(bytearray(extent.length))
            pieces.append(part)
            if run is None or not run.continues(extent, found):
                if run is not None:
                    self._read_run(run)
                run = _RawRun.of(extent, found, part)
            else:
                run.pieces.append((extent, part))
                run.length += extent.length
        if run is not None:
            self._read_run(run)
        return pieces

    def _read_run(self, run: _RawRun) -> None:
        targets = [part for _, part in run.pieces]
        try:
            self._catalog.packs.read_scattered(run.pack, run.offset, targets, run.version)
        except Outdated:
            # Its blocks have moved since they were checked: check and read each where it is now.
            for extent, part in run.pieces:
                self._read_again(extent, part)

    def _read_again(self, extent: Extent, part: memoryview) -> None:
        assert isinstance(extent.block, BlockId)
        for left in reversed(range(LOOKS)):
            with self._lock:
                self._checked.pop(extent.block, None)
            found = self._find(extent.block)
            if not isinstance(found, _Checked):
                part[:] = piece_of(found, extent)
                return
            run = _RawRun.of(extent, found, part)
            try:
                self._catalog.packs.read_scattered(run.pack, run.offset, [part], run.version)
            except Outdated:
                if not left:
                    raise
            else:
                return

    def _find(self, block: BlockId | VirtualBlock) -> Buffer | _Checked:
        """Return a decoded block, or the place of a raw one; it is checked."""
        with self._lock:
            data = self._blocks.get(block)
            if data is not None:
                return data
            if not isinstance(block, VirtualBlock):
                known = self._fresh.get(block) or self._checked.get(block)
                if known is not None:
                    return known
        if isinstance(block, VirtualBlock):
            begun = self.begin(block)
            return begun.block(block) if isinstance(begun, VirtualGroup) else begun
        return self._fill(block)

    def _fill(self, block: BlockId, location: Location | None = None) -> Buffer | _Checked:
        with self._lock:
            # Look again under the lock: it may have arrived since the reader missed it.
            known = self._blocks.get(block) or self._fresh.get(block) or self._checked.get(block)
            if known is not None:
                return known
            filling = self._filling.get(block)
            if filling is None:
                own = self._filling[block] = Future()
        if filling is not None:
            return filling.result()
        try:
            found = self._read(block, location or self._catalog.locate([block])[0])
        except BaseException as error:
            with self._lock:
                del self._filling[block]
            # Only current waiters see a failure; later readers retry.
            own.set_exception(error)
            raise
        with self._lock:
            if isinstance(found, _Fresh):
                self._checked[block] = found.place
                self._fresh.put(block, found.data, len(found.data))
                data = found.data
            else:
                data = found
                self._blocks.put(block, data, len(data))
            del self._filling[block]
        own.set_result(data)
        return data

    def _read(self, block: BlockId, location: Location) -> Buffer | _Fresh:
        if self._check_always:
            return self._catalog.read_block(block, location)
        return self._catalog.relocating(block, location, partial(self._read_at, block))

    def _read_at(self, block: BlockId, location: Location) -> Buffer | _Fresh:
        """Check a raw block at this very place; decode any other. Raises Outdated, Corrupt."""
        packs = self._catalog.packs
        if location.codec != Codec.RAW or packs.is_elsewhere(location.pack):
            # What is read elsewhere is checked each time.
            return self._catalog.read_block(block, location)
        # Before it is read: the bytes checked are then of this version or of a later one.
        version = packs.version(location.pack)
        data = self._catalog.read_block_at(block, location)
        return _Fresh(_Checked(location, version), data)

    def prepare(self, places: Iterable[tuple[BlockId, Location]]) -> None:
        """Have blocks read, decoded and checked by other threads; a hint that never raises.

        A block that none of them has begun is read by whoever needs it first. No more is decoded
        than an eighth of what the cache keeps: several readers would drop each other's blocks.
        """
        room = self._limit // 8
        with self._lock:
            known = (self._blocks, self._filling, self._checked)
            missing = [one for one in places if not any(one[0] in each for each in known)]
            if missing and self._pool is None:
                self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decode")
            pool = self._pool
        for block, location in missing:
            if location.codec != Codec.RAW:
                room -= location.raw_length
                if room < 0:
                    return
            # Where no thread can be started, nothing is prepared.
            with suppress(RuntimeError):
                assert pool is not None
                pool.submit(self._fill, block, location)

    def begin(self, block: VirtualBlock) -> VirtualGroup | Buffer:
        """Return a virtual block if it is cached; else the group that computes it.

        Starts computing the group unless that has begun.
        """
        computing = self.computing
        numbers = computing.group(block)
        key = VirtualBlock(block.tensor, numbers.start)
        with self._lock:
            # Look again under the lock: it may have arrived since the reader missed it.
            known = self._blocks.get(block) or self._under_way.get(key)
            if known is not None:
                return known
            group = self._under_way[key] = begin_group(computing, block)
        group.blocks.add_done_callback(lambda done: self._computed(key, numbers, done))
        return group

    def _computed(self, key: VirtualBlock, numbers: range, done: Future[list[Buffer]]) -> None:
        with self._lock:
            self._under_way.pop(key, None)
            # Only current waiters see a failure; later readers retry.
            if not done.cancelled() and done.exception() is None:
                for number, data in zip(numbers, done.result(), strict=True):
                    self._blocks.put(VirtualBlock(key.tensor, number), data, len(data))


class _Checked(NamedTuple):
    """Where a raw block was found right, and in which file of the pack's name."""

    location: Location
    version: int


class _Fresh(NamedTuple):
    """A raw block that was just found right at its place."""

    place: _Checked
    data: Buffer


@dataclass(slots=True)
class _RawRun:
    """Pieces of checked raw blocks that lie side by side in a pack, and where they go."""

    pack: PackId
    version: int
    offset: int
    length: int
    pieces: list[tuple[Extent, memoryview]]

    @classmethod
    def of(cls, extent: Extent, found: _Checked, target: memoryview) -> _RawRun:
        """Begin a run. Raises Corrupt if the block is too short for the extent."""
        place = found.location
        _require_fits(extent, place.raw_length)
        offset = place.offset + extent.start
        return cls(place.pack, found.version, offset, extent.length, [(extent, target)])

    def continues(self, extent: Extent, found: _Checked) -> bool:
        """Whether a piece at this place is the next of the run."""
        place = found.location
        _require_fits(extent, place.raw_length)
        here = (place.pack, found.version, place.offset + extent.start)
        return here == (self.pack, self.version, self.offset + self.length)


def begin_group(computing: Computing, block: VirtualBlock) -> VirtualGroup:
    """Start computing the group of a virtual block."""
    numbers = computing.group(block)
    return VirtualGroup(block.tensor, numbers, computing.submit(block.tensor, numbers))


def piece_of(data: Buffer, extent: Extent) -> Buffer:
    """Return the part of a block that an extent names. Raises Corrupt if the block is too short."""
    if extent.start == 0 and extent.length == len(data):
        return data
    _require_fits(extent, len(data))
    return memoryview(data)[extent.start : extent.start + extent.length]


def _require_fits(extent: Extent, length: int) -> None:
    if extent.start + extent.length > length:
        raise misplaced(extent.block)


def misplaced(block: BlockId | VirtualBlock) -> Corrupt:
    """Return the error for a block whose length is not that of its place in the file."""
    what = "the block is not as long as its place in the file"
    if isinstance(block, VirtualBlock):
        where = f"virtual tensor {block.tensor}, block {block.number}"
        return Corrupt(what, where=where)
    return Corrupt(what, where=f"block {block}", block=block)
