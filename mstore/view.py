"""The snapshot view: one snapshot as read-only files and as tensors.

A file is arithmetic over the manifest: offset -> part -> block.  Blocks are checked against
their ids when first read and kept decoded in a bounded cache, so neighbouring small reads cost
one block read.  Nothing is ever written.  Safe for any number of threads.

A block of a virtual tensor has no place in a pack: it is computed when it is first asked for, by
whoever the cache was given for that (`Computing`), and kept like any other.  How blocks are
computed is no affair of this module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.index import Location
from mstore.blocks.packs import NO_BASE, PackGone
from mstore.errors import BadRequest, Corrupt, Incompatible, NotFound
from mstore.ids import BlockId, Buffer, ManifestId, SnapshotId, TensorId, VirtualId
from mstore.objects.manifest import File, Manifest
from mstore.objects.tensor import Tensor
from mstore.objects.virtual import VirtualTensor
from mstore.store import contents
from mstore.store.catalog import Catalog

CACHE_BYTES = 64 << 20


class VirtualBlock(NamedTuple):
    """Block `number` of a virtual tensor, which has no BlockId before it is computed."""

    tensor: VirtualId
    number: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file that lies in one block: `length` bytes from `start` of the block."""

    block: BlockId | VirtualBlock
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PhysicalExtent:
    """Where a piece of a file lies at rest: `length` bytes from `offset` of the file are those from
    `start` of a block that lies at `location` (pack, offset there, lengths, codec, base).

    Of a block with codec RAW they are the bytes at `location.offset + start` of the pack.  No
    location: the block is virtual.
    """

    offset: int
    length: int
    start: int
    location: Location | None


class Computing(Protocol):
    """Computes blocks of virtual tensors.  Thread-safe.

    Blocks come in groups that cost as much together as one of them alone.
    """

    @property
    def ahead(self) -> int:
        """How many groups a sequential reader should have under way."""
        ...

    def place(self, block: VirtualBlock) -> BlockId | None:
        """The stored block that this one is known to be, without any computing."""
        ...

    def group(self, block: VirtualBlock) -> range:
        """The numbers of the blocks that are computed with this one."""
        ...

    def submit(self, tensor: VirtualId, group: range) -> Future[list[Buffer]]:
        """Begin with a group: its blocks in order, or Corrupt, BudgetExceeded, StorageFailed."""
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks of a virtual tensor on their way."""

    tensor: VirtualId
    numbers: range
    blocks: Future[list[Buffer]]

    def holds(self, block: VirtualBlock) -> bool:
        return block.tensor == self.tensor and block.number in self.numbers

    def block(self, block: VirtualBlock) -> Buffer:
        """Waits for it."""
        return self.blocks.result()[block.number - self.numbers.start]


class BlockCache:
    """Decoded blocks, least recently used out first, bounded in bytes.

    A raw block that was checked once is remembered, so that after its eviction a part of it can
    be read from its pack without reading and hashing the whole again (once a session).

    `computing` gives what computes virtual blocks; it is called when the first one is asked for.
    """

    def __init__(
        self,
        catalog: Catalog,
        limit: int = CACHE_BYTES,
        computing: Callable[[], Computing] | None = None,
    ) -> None:
        self._catalog = catalog
        self._limit = limit
        self._computing = computing
        self._lock = Lock()
        self._blocks: OrderedDict[BlockId | VirtualBlock, Buffer] = OrderedDict()
        self._bytes = 0
        self._checked: dict[BlockId, Location] = {}
        self._under_way: dict[VirtualBlock, _Group] = {}

    @property
    def computing(self) -> Computing:
        """What computes virtual blocks.  Raises BadRequest where nothing does."""
        if self._computing is None:
            raise BadRequest("a virtual tensor has no bytes here", hint="mstore materialize REF")
        return self._computing()

    def read(self, extent: Extent) -> Buffer:
        """The bytes of an extent.  Raises Corrupt naming the block."""
        block = extent.block
        with self._lock:
            data = self._blocks.get(block)
            if data is not None:
                self._blocks.move_to_end(block)
            checked = None if isinstance(block, VirtualBlock) else self._checked.get(block)
        if data is None and checked is not None and not isinstance(block, VirtualBlock):
            offset = checked.offset + extent.start
            try:
                return self._catalog.packs.read(checked.pack, offset, extent.length)
            except PackGone:
                with self._lock:
                    self._checked.pop(block, None)
        if data is None and isinstance(block, VirtualBlock):
            begun = self.begin(block)
            data = begun.block(block) if isinstance(begun, _Group) else begun
        elif data is None:
            assert not isinstance(block, VirtualBlock)
            data = self._fill(block)
        return piece_of(data, extent)

    def _fill(self, block: BlockId) -> Buffer:
        location = self._catalog.locate([block])[0]
        data = self._catalog.read_block(block, location)
        with self._lock:
            self._keep(block, data)
            if location.codec == Codec.RAW:
                self._checked[block] = location
        return data

    def _keep(self, block: BlockId | VirtualBlock, data: Buffer) -> None:
        if block not in self._blocks:
            self._blocks[block] = data
            self._bytes += len(data)
        while self._bytes > self._limit and len(self._blocks) > 1:
            _, old = self._blocks.popitem(last=False)
            self._bytes -= len(old)

    def begin(self, block: VirtualBlock) -> _Group | Buffer:
        """Have a virtual block computed and kept, unless that is under way or it is here."""
        computing = self.computing
        numbers = computing.group(block)
        key = VirtualBlock(block.tensor, numbers.start)
        with self._lock:
            # Looked for again: it may have come since the reader did not find it.
            known = self._blocks.get(block) or self._under_way.get(key)
            if known is not None:
                return known
            group = self._under_way[key] = _begin(computing, block)
        group.blocks.add_done_callback(lambda done: self._computed(key, numbers, done))
        return group

    def _computed(self, key: VirtualBlock, numbers: range, done: Future[list[Buffer]]) -> None:
        with self._lock:
            self._under_way.pop(key, None)
            # A failure is for those who wait; who comes later tries again.
            if not done.cancelled() and done.exception() is None:
                for number, data in zip(numbers, done.result(), strict=True):
                    self._keep(VirtualBlock(key.tensor, number), data)


def piece_of(data: Buffer, extent: Extent) -> Buffer:
    """The part of a block that an extent names.  Raises Corrupt where the block is too short."""
    if extent.start == 0 and extent.length == len(data):
        return data
    if extent.start + extent.length > len(data):
        raise _misplaced(extent.block)
    return memoryview(data)[extent.start : extent.start + extent.length]


def _misplaced(block: BlockId | VirtualBlock) -> Corrupt:
    where = f"block {block}"
    if isinstance(block, VirtualBlock):
        where = f"virtual tensor {block.tensor}, block {block.number}"
    return Corrupt("the block is not as long as its place in the file", where=where)


def tensor_blocks(catalog: Catalog, cache: BlockCache, id: TensorId) -> Iterator[Buffer]:
    """The blocks of a tensor, stored or virtual, one after the other and past the cache."""
    nbytes = catalog.content(id).nbytes
    return _whole_blocks(catalog, cache, _extents(catalog, cache, id, 0, nbytes))


def _extents(
    catalog: Catalog, cache: BlockCache, id: TensorId, offset: int, stop: int
) -> Iterator[Extent]:
    """The pieces of a tensor's bytes from `offset` to `stop`."""
    content = catalog.content(id)
    while offset < stop:
        number, inside = divmod(offset, catalog.block_size)
        length = min(catalog.block_size - inside, stop - offset)
        block: BlockId | VirtualBlock
        if isinstance(content, Tensor):
            block = content.block(number)
        else:
            block = VirtualBlock(VirtualId(id), number)
            block = cache.computing.place(block) or block
        yield Extent(block, inside, length)
        offset += length


def _whole_blocks(
    catalog: Catalog, cache: BlockCache, extents: Iterator[Extent]
) -> Iterator[Buffer]:
    """The bytes of extents that are whole blocks; virtual ones are begun a few ahead."""
    ahead = 0
    waiting: deque[tuple[Extent, _Group | None]] = deque()
    last: _Group | None = None
    try:
        for extent in extents:
            group = None
            if isinstance(extent.block, VirtualBlock):
                if last is None or not last.holds(extent.block):
                    last = _begin(cache.computing, extent.block)
                    ahead = cache.computing.ahead
                group = last
            waiting.append((extent, group))
            if len(waiting) > ahead:
                yield _whole(catalog, *waiting.popleft())
        while waiting:
            yield _whole(catalog, *waiting.popleft())
    finally:
        for _, group in waiting:
            if group is not None:
                group.blocks.cancel()


def _begin(computing: Computing, block: VirtualBlock) -> _Group:
    numbers = computing.group(block)
    return _Group(block.tensor, numbers, computing.submit(block.tensor, numbers))


def _whole(catalog: Catalog, extent: Extent, group: _Group | None) -> Buffer:
    if isinstance(extent.block, VirtualBlock):
        assert group is not None
        data = group.block(extent.block)
    else:
        data = catalog.read_block(extent.block)
    if len(data) != extent.length:
        raise _misplaced(extent.block)
    return data


class _OpenFile:
    """Part offsets of one file, computed once."""

    __slots__ = ("file", "starts")

    def __init__(self, file: File) -> None:
        self.file = file
        self.starts = [0]
        for part in file.parts:
            self.starts.append(self.starts[-1] + part.nbytes)


class SnapshotView:
    """The files and tensors of one snapshot.

    `files` maps each relative POSIX path to its size in bytes, in manifest order.  Of a virtual
    snapshot, names, headers and sizes are at hand like any other's.
    """

    def __init__(
        self, catalog: Catalog, snapshot: SnapshotId, cache: BlockCache | None = None
    ) -> None:
        record = catalog.snapshot(snapshot)
        self.id = snapshot
        self.manifest_id: ManifestId = record.manifest_id()
        self.manifest: Manifest = catalog.manifest(self.manifest_id)
        self.time_ns = record.time_ns
        self.is_virtual = record.is_virtual
        self._catalog = catalog
        self._cache = cache or BlockCache(catalog)
        self._files = {file.path: _OpenFile(file) for file in self.manifest.files}
        self._tensors = self.manifest.tensors()

    @property
    def files(self) -> Mapping[str, int]:
        """Path -> size in bytes."""
        return {path: opened.file.size for path, opened in self._files.items()}

    @property
    def tensors(self) -> Mapping[str, TensorId]:
        """Tensor name -> TensorId, in file and data order."""
        return self._tensors

    def _opened(self, path: str) -> _OpenFile:
        opened = self._files.get(path)
        if opened is None:
            raise NotFound(
                "no such file in the snapshot", where=path, hint=f"mstore ls {self.id.short}"
            )
        return opened

    def require(self, path: str) -> None:
        """Raise NotFound unless the snapshot has this file."""
        self._opened(path)

    def extents(self, path: str, offset: int, size: int) -> Iterator[Extent]:
        """The pieces that make up `size` bytes of a file from `offset`, up to its end."""
        opened = self._opened(path)
        end = min(offset + size, opened.file.size)
        number = bisect_right(opened.starts, offset) - 1
        while offset < end:
            start = opened.starts[number]
            stop = min(end, start + opened.file.parts[number].nbytes)
            if offset < stop:
                id = opened.file.parts[number].tensor_id()
                yield from _extents(self._catalog, self._cache, id, offset - start, stop - start)
                offset = stop
            number += 1

    def physical_extents(
        self, path: str, offset: int = 0, size: int | None = None
    ) -> list[PhysicalExtent]:
        """Where the pieces of `extents` lie, all of the file's unless `size` is given.

        True as long as the packs are not collected: whoever reads them there holds a lease, or a
        pin.  Raises NotFound, Corrupt for a block that is not stored.
        """
        length = self._opened(path).file.size if size is None else size
        found = list(self.extents(path, offset, length))
        stored = [e.block for e in found if not isinstance(e.block, VirtualBlock)]
        places = iter(self._catalog.locate(stored))
        extents = []
        for extent in found:
            place = None if isinstance(extent.block, VirtualBlock) else next(places)
            extents.append(PhysicalExtent(offset, extent.length, extent.start, place))
            offset += extent.length
        return extents

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer at the end of the file, b'' beyond it.

        Raises NotFound, Corrupt (naming the block), Conflict (collected meanwhile), StorageFailed.
        """
        with contents.or_collected(self._catalog, [self.id]):
            pieces = [self._cache.read(extent) for extent in self.extents(path, offset, size)]
        if len(pieces) == 1:
            return bytes(pieces[0])
        return b"".join(pieces)

    def stream(self, path: str) -> Iterator[Buffer]:
        """The file from end to end, block by block, past the cache; virtual blocks are computed a
        few ahead of the one that is yielded."""
        extents = self.extents(path, 0, self._opened(path).file.size)
        return self._told_if_collected(_whole_blocks(self._catalog, self._cache, extents))

    def _told_if_collected(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        with contents.or_collected(self._catalog, [self.id]):
            yield from blocks

    def prefetch(self, path: str, offset: int, size: int) -> None:
        """Ask for these bytes ahead of their reader; advice only, never an error.

        What lies in packs is the kernel's to read ahead, what is virtual begins to be computed.
        """
        if path not in self._files:
            return
        for logical in self.extents(path, offset, size):
            if isinstance(logical.block, VirtualBlock):
                self._cache.begin(logical.block)
        bases = []
        for extent in self.physical_extents(path, offset, size):
            location = extent.location
            if location is None:
                continue
            if location.codec == Codec.RAW:
                start = location.offset + extent.start
                self._catalog.packs.will_need(location.pack, start, extent.length)
            else:
                self._will_need(location)
            if location.base != NO_BASE:
                bases.append(BlockId(location.base))
        for location in self._catalog.locate(bases):
            self._will_need(location)

    def _will_need(self, location: Location) -> None:
        packs = self._catalog.packs
        packs.will_need(location.pack, location.offset, location.stored_length)

    def record(self, name: str) -> Tensor | VirtualTensor:
        """The record of a tensor.  Raises NotFound."""
        return self._catalog.content(self._tensor_id(name))

    def _tensor_id(self, name: str) -> TensorId:
        id = self._tensors.get(name)
        if id is None:
            raise NotFound(
                "no such tensor", where=name, hint=f"mstore ls --tensors {self.id.short}"
            )
        return id

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only array of its shape; bfloat16 and float8 through ml_dtypes.

        Raises NotFound, Corrupt, and Incompatible for dtypes that numpy cannot hold (sub-byte).
        """
        tensor = self.record(name)
        dtype = array_dtype(tensor.dtype)
        data = bytearray(tensor.nbytes)
        target = memoryview(data)
        done = 0
        if isinstance(tensor, VirtualTensor):
            for piece in tensor_blocks(self._catalog, self._cache, self._tensor_id(name)):
                target[done : done + len(piece)] = piece
                done += len(piece)
        else:
            blocks = list(tensor.block_ids())
            for number, location in enumerate(self._catalog.locate(blocks)):
                length = tensor.block_length(number, self._catalog.block_size)
                # Raises where the block is not as long as its place.
                self._catalog.read_block_into(
                    blocks[number], location, target[done : done + length]
                )
                done += length
        array = np.frombuffer(data, dtype=dtype).reshape(tensor.shape)
        array.flags.writeable = False
        return array


_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64",
    "F64": "float64", "C64": "complex64",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def array_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype (little-endian) of a safetensors dtype.  Raises Incompatible."""
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype]).newbyteorder("<")
    if dtype in _ML_DTYPES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
        return found
    raise Incompatible(
        f"numpy has no dtype for {dtype}", hint="mstore cat REF:PATH gives the bytes"
    )
