"""The snapshot view: one snapshot as read-only files and as tensors.

A read is arithmetic over the manifest: offset -> part -> block. Blocks are checked against their
ids when first read and kept decoded in a bounded cache, so neighbouring small reads cost one block
read. Nothing is ever written. Safe for any number of threads.

A block of a virtual tensor lies in no pack: the cache has it computed on first access by the
`Computing` that it was given, and keeps it like any other. This module does not own how blocks are
computed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE, PackGone
from mstore.checkpoint.header import parse_header
from mstore.errors import BadRequest, Corrupt, Incompatible, NotFound
from mstore.ids import BlockId, Buffer, ManifestId, SnapshotId, TensorId, VirtualId
from mstore.objects.manifest import SAFETENSORS, File, Manifest
from mstore.objects.tensor import Tensor
from mstore.objects.virtual import VirtualTensor
from mstore.phrases import call, phrase
from mstore.store import contents
from mstore.store.catalog import Catalog

CACHE_BYTES = 64 << 20


class VirtualBlock(NamedTuple):
    """Block `number` of a virtual tensor; it has no BlockId until it is computed."""

    tensor: VirtualId
    number: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file within one block: `length` bytes from `start` of the block."""

    block: BlockId | VirtualBlock
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PhysicalExtent:
    """Where a piece of a file lies at rest.

    The `length` bytes from `offset` of the file are those from `start` of the block at `location`
    (pack, offset there, lengths, codec, base). With codec RAW they are the bytes at
    `location.offset + start` of the pack. A location of None means that the block is virtual.
    """

    offset: int
    length: int
    start: int
    location: Location | None


class Computing(Protocol):
    """Computes blocks of virtual tensors. Thread-safe.

    Blocks come in groups: a whole group costs as much as one of its blocks.
    """

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
        """Start computing a group.

        The future gives its blocks in order, or raises Corrupt, BudgetExceeded, StorageFailed.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Group:
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
    """A cache of decoded blocks with LRU eviction, bounded in bytes.

    A block that several threads ask for at once is read and decoded by the first of them.
    `prepare` has blocks read and decoded by other threads, before they are asked for.
    Remembers which raw blocks were checked. After such a block is evicted, a part of it can be read
    from its pack without reading and hashing the whole block again (once a session). `computing`
    returns what computes virtual blocks; it is called when the first one is requested.
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
        with self._lock:
            # Look again under the lock: it may have arrived since the reader missed it.
            data = self._blocks.get(block)
            if data is not None:
                return data
            filling = self._filling.get(block)
            if filling is None:
                own = self._filling[block] = Future()
        if filling is not None:
            return filling.result()
        try:
            location = self._catalog.locate([block])[0]
            data = self._catalog.read_block(block, location)
        except BaseException as error:
            with self._lock:
                del self._filling[block]
            # Only current waiters see a failure; later readers retry.
            own.set_exception(error)
            raise
        with self._lock:
            self._keep(block, data)
            if location.codec == Codec.RAW:
                self._checked[block] = location
            del self._filling[block]
        own.set_result(data)
        return data

    def prepare(self, blocks: Iterable[BlockId]) -> None:
        """Have blocks read, decoded and checked by other threads; a hint that never raises.

        A block that none of them has begun is read by whoever needs it first.
        """
        with self._lock:
            # Those that were checked and evicted are read in parts, which is cheap.
            known = (self._blocks, self._filling, self._checked)
            missing = [one for one in blocks if not any(one in each for each in known)]
            if missing and self._pool is None:
                self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decode")
            pool = self._pool
        if pool is not None:
            for block in missing:
                pool.submit(self._fill, block)

    def _keep(self, block: BlockId | VirtualBlock, data: Buffer) -> None:
        if block not in self._blocks:
            self._blocks[block] = data
            self._bytes += len(data)
        while self._bytes > self._limit and len(self._blocks) > 1:
            _, old = self._blocks.popitem(last=False)
            self._bytes -= len(old)

    def begin(self, block: VirtualBlock) -> _Group | Buffer:
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
            group = self._under_way[key] = _begin(computing, block)
        group.blocks.add_done_callback(lambda done: self._computed(key, numbers, done))
        return group

    def _computed(self, key: VirtualBlock, numbers: range, done: Future[list[Buffer]]) -> None:
        with self._lock:
            self._under_way.pop(key, None)
            # Only current waiters see a failure; later readers retry.
            if not done.cancelled() and done.exception() is None:
                for number, data in zip(numbers, done.result(), strict=True):
                    self._keep(VirtualBlock(key.tensor, number), data)


def piece_of(data: Buffer, extent: Extent) -> Buffer:
    """Return the part of a block that an extent names. Raises Corrupt if the block is too short."""
    if extent.start == 0 and extent.length == len(data):
        return data
    if extent.start + extent.length > len(data):
        raise _misplaced(extent.block)
    return memoryview(data)[extent.start : extent.start + extent.length]


def _misplaced(block: BlockId | VirtualBlock) -> Corrupt:
    what = "the block is not as long as its place in the file"
    if isinstance(block, VirtualBlock):
        where = f"virtual tensor {block.tensor}, block {block.number}"
        return Corrupt(what, where=where)
    return Corrupt(what, where=f"block {block}", block=block)


def tensor_blocks(catalog: Catalog, cache: BlockCache, id: TensorId) -> Iterator[Buffer]:
    """Yield the blocks of a tensor, stored or virtual, in order, bypassing the cache."""
    nbytes = catalog.content(id).nbytes
    return _whole_blocks(catalog, cache, _extents(catalog, cache, id, 0, nbytes))


def _extents(
    catalog: Catalog, cache: BlockCache, id: TensorId, offset: int, stop: int
) -> Iterator[Extent]:
    """Yield the pieces of a tensor's bytes from `offset` to `stop`."""
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
    """Yield the bytes of whole-block extents; starts virtual blocks a few ahead."""
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
    """A file and the offsets of its parts, computed once."""

    __slots__ = ("file", "starts")

    def __init__(self, file: File) -> None:
        self.file = file
        self.starts = [0]
        for part in file.parts:
            self.starts.append(self.starts[-1] + part.nbytes)


class SnapshotView:
    """The files and tensors of one snapshot.

    `files` maps each relative POSIX path to its size in bytes, in manifest order. Names, headers
    and sizes of a virtual snapshot need no computing.
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
        """Maps path to size in bytes."""
        return {path: opened.file.size for path, opened in self._files.items()}

    @property
    def tensors(self) -> Mapping[str, TensorId]:
        """Maps tensor name to TensorId, in file and data order."""
        return self._tensors

    def _opened(self, path: str) -> _OpenFile:
        opened = self._files.get(path)
        if opened is None:
            raise NotFound(
                "no such file in the snapshot", where=path, hint=call("files", self.id.short)
            )
        return opened

    def require(self, path: str) -> None:
        """Raise NotFound unless the snapshot has this file."""
        self._opened(path)

    def extents(self, path: str, offset: int, size: int) -> Iterator[Extent]:
        """Yield the pieces of `size` bytes of a file from `offset`, clipped at the file's end."""
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
        """Return where the pieces of `extents` lie; without `size`, up to the end of the file.

        Valid until the packs are collected: take a lease, or hold the snapshot, while you read
        there. Raises NotFound, and Corrupt for a block that is not stored.
        """
        length = self._opened(path).file.size if size is None else size
        return self._located(list(self.extents(path, offset, length)), offset)

    def _located(self, found: list[Extent], offset: int) -> list[PhysicalExtent]:
        """Look up where these extents, the first of them at `offset` of the file, lie."""
        stored = [e.block for e in found if not isinstance(e.block, VirtualBlock)]
        places = iter(self._catalog.locate(stored))
        extents = []
        for extent in found:
            place = None if isinstance(extent.block, VirtualBlock) else next(places)
            extents.append(PhysicalExtent(offset, extent.length, extent.start, place))
            offset += extent.length
        return extents

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer at the end of the file, b'' beyond it.

        Raises NotFound, Corrupt (naming the block), Conflict (collected meanwhile), StorageFailed.
        """
        with contents.or_collected(self._catalog, [self.id]):
            pieces = [self._cache.read(extent) for extent in self.extents(path, offset, size)]
        if len(pieces) == 1:
            return bytes(pieces[0])
        return b"".join(pieces)

    def stream(self, path: str) -> Iterator[Buffer]:
        """Yield the whole file block by block, bypassing the cache.

        Virtual blocks are computed a few ahead of the one that is yielded.
        """
        extents = self.extents(path, 0, self._opened(path).file.size)
        return self._told_if_collected(_whole_blocks(self._catalog, self._cache, extents))

    def _told_if_collected(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        with contents.or_collected(self._catalog, [self.id]):
            yield from blocks

    def prefetch(self, path: str, offset: int, size: int) -> None:
        """Read ahead of the reader; a hint that never raises.

        The kernel reads ahead in packs, and other threads decode; virtual blocks start being
        computed.
        """
        if path not in self._files:
            return
        found = list(self.extents(path, offset, size))
        stored = [one.block for one in found if isinstance(one.block, BlockId)]
        for logical in found:
            if isinstance(logical.block, VirtualBlock):
                self._cache.begin(logical.block)
        bases = []
        for extent in self._located(found, offset):
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
        self._cache.prepare(stored)

    def _will_need(self, location: Location) -> None:
        packs = self._catalog.packs
        packs.will_need(location.pack, location.offset, location.stored_length)

    def tensor_files(self) -> list[str]:
        """Return the paths of the safetensors files."""
        return [file.path for file in self.manifest.files if file.form == SAFETENSORS]

    def header(self, path: str) -> tuple[list[str], dict[str, str] | None]:
        """Return the tensors of a safetensors file, and the metadata of its header.

        Raises NotFound if there is no such file, or if it is of another form, and Corrupt.
        """
        file = self._opened(path).file
        if file.form != SAFETENSORS:
            raise NotFound("not a safetensors file", where=path)
        with contents.or_collected(self._catalog, [self.id]):
            raw = self._catalog.read_parts(file.parts[:1])
        header = parse_header(raw, file_size=file.size, where=path)
        return [slot.name for slot in header.tensors], header.metadata or None

    def record(self, name: str) -> Tensor | VirtualTensor:
        """Return the record of a tensor. Raises NotFound."""
        return self._catalog.content(self._tensor_id(name))

    def _tensor_id(self, name: str) -> TensorId:
        id = self._tensors.get(name)
        if id is None:
            raise NotFound("no such tensor", where=name, hint=call("tensors", self.id.short))
        return id

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor as a read-only array of its shape; bfloat16 and float8 through ml_dtypes.

        Raises NotFound, Corrupt, and Incompatible for dtypes that numpy lacks (sub-byte).
        """
        tensor = self.record(name)
        dtype = array_dtype(tensor.dtype)
        data = bytearray(tensor.nbytes)
        self.fill(name, memoryview(data))
        array = np.frombuffer(data, dtype=dtype).reshape(tensor.shape)
        array.flags.writeable = False
        return array

    def fill(self, name: str, target: memoryview) -> None:
        """Fill `target`, which is as long as the tensor, with its bytes.  Raises as `tensor`."""
        record = self.record(name)
        with contents.or_collected(self._catalog, [self.id]):
            self._fill(self._tensor_id(name), record, target)

    def tensor_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a tensor from `start` to before `stop`; reads only their blocks.

        Raises NotFound, Corrupt, Conflict (collected meanwhile), StorageFailed.
        """
        id = self._tensor_id(name)
        with contents.or_collected(self._catalog, [self.id]):
            found = _extents(self._catalog, self._cache, id, start, stop)
            return b"".join([self._cache.read(extent) for extent in found])

    def _fill(self, id: TensorId, tensor: Tensor | VirtualTensor, target: memoryview) -> None:
        """Fill `target`, which is as long as the tensor, with its bytes."""
        done = 0
        if isinstance(tensor, VirtualTensor):
            for piece in tensor_blocks(self._catalog, self._cache, id):
                target[done : done + len(piece)] = piece
                done += len(piece)
        else:
            blocks = list(tensor.block_ids())
            for number, location in enumerate(self._catalog.locate(blocks)):
                length = tensor.block_length(number, self._catalog.block_size)
                # Raises if the block's length differs from the target's.
                self._catalog.read_block_into(
                    blocks[number], location, target[done : done + length]
                )
                done += length


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
    """Return the numpy dtype (little-endian) of a safetensors dtype. Raises Incompatible."""
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype]).newbyteorder("<")
    if dtype in _ML_DTYPES:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
        return found
    raise Incompatible(
        f"numpy has no dtype for {dtype}",
        hint=phrase("{read} gives the bytes", read=call("read_file", "REF", "PATH")),
    )
