"""The snapshot view: one snapshot as read-only files and as tensors.

A file is arithmetic over the manifest: offset -> part -> block.  Blocks are checked against
their ids when first read and kept decoded in a bounded cache, so neighbouring small reads cost
one block read.  Nothing is ever written.  Safe for any number of threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.index import Location
from mstore.errors import Corrupt, Incompatible, NotFound
from mstore.ids import BlockId, ManifestId, SnapshotId, TensorId
from mstore.objects.manifest import File, Manifest
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file that lies in one block: `length` bytes from `start` of the block."""

    block: BlockId
    start: int
    length: int


class BlockCache:
    """Decoded blocks, least recently used out first, bounded in bytes.

    A raw block that was checked once is remembered, so that after its eviction a part of it can
    be read from its pack without reading and hashing the whole again (once a session).
    """

    def __init__(self, catalog: Catalog, limit: int = CACHE_BYTES) -> None:
        self._catalog = catalog
        self._limit = limit
        self._lock = Lock()
        self._blocks: OrderedDict[BlockId, bytes] = OrderedDict()
        self._bytes = 0
        self._checked: dict[BlockId, Location] = {}

    def read(self, extent: Extent) -> bytes | memoryview:
        """The bytes of an extent.  Raises Corrupt naming the block."""
        with self._lock:
            data = self._blocks.get(extent.block)
            if data is not None:
                self._blocks.move_to_end(extent.block)
            checked = self._checked.get(extent.block)
        if data is None and checked is not None:
            offset = checked.offset + extent.start
            return self._catalog.packs.read(checked.pack, offset, extent.length)
        if data is None:
            data = self._fill(extent.block)
        if extent.start == 0 and extent.length == len(data):
            return data
        if extent.start + extent.length > len(data):
            raise _misplaced(extent.block)
        return memoryview(data)[extent.start : extent.start + extent.length]

    def _fill(self, block: BlockId) -> bytes:
        location = self._catalog.locate([block])[0]
        data = self._catalog.read_block(block, location)
        with self._lock:
            if block not in self._blocks:
                self._blocks[block] = data
                self._bytes += len(data)
            if location.codec == Codec.RAW:
                self._checked[block] = location
            while self._bytes > self._limit and len(self._blocks) > 1:
                _, old = self._blocks.popitem(last=False)
                self._bytes -= len(old)
        return data


def _misplaced(block: BlockId) -> Corrupt:
    return Corrupt("the block is not as long as its place in the file", where=f"block {block}")


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

    `files` maps each relative POSIX path to its size in bytes, in manifest order.
    """

    def __init__(
        self, catalog: Catalog, snapshot: SnapshotId, cache: BlockCache | None = None
    ) -> None:
        record = catalog.snapshot(snapshot)
        self.id = snapshot
        self.manifest_id: ManifestId = record.manifest_id()
        self.manifest: Manifest = catalog.manifest(self.manifest_id)
        self.time_ns = record.time_ns
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
        block_size = self._catalog.block_size
        while offset < end:
            start = opened.starts[number]
            part = opened.file.parts[number]
            stop = min(end, start + part.nbytes)
            if offset < stop:
                tensor = self._catalog.tensor(part.tensor_id())
                while offset < stop:
                    index, inside = divmod(offset - start, block_size)
                    length = min(block_size - inside, stop - offset)
                    yield Extent(tensor.block(index), inside, length)
                    offset += length
            number += 1

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer at the end of the file, b'' beyond it.

        Raises NotFound, Corrupt (naming the block), StorageFailed.
        """
        pieces = [self._cache.read(extent) for extent in self.extents(path, offset, size)]
        if len(pieces) == 1:
            return bytes(pieces[0])
        return b"".join(pieces)

    def stream(self, path: str) -> Iterator[bytes]:
        """The file from end to end, block by block, past the cache."""
        for extent in self.extents(path, 0, self._opened(path).file.size):
            data = self._catalog.read_block(extent.block)
            if len(data) != extent.length:
                raise _misplaced(extent.block)
            yield data

    def prefetch(self, path: str, offset: int, size: int) -> None:
        """Ask the kernel to read these bytes' packs ahead; advice only, never an error."""
        if path not in self._files:
            return
        extents = list(self.extents(path, offset, size))
        locations = self._catalog.locate(extent.block for extent in extents)
        for extent, location in zip(extents, locations, strict=True):
            if location.codec == Codec.RAW:
                start = location.offset + extent.start
                self._catalog.packs.will_need(location.pack, start, extent.length)

    def record(self, name: str) -> Tensor:
        """The record of a tensor.  Raises NotFound."""
        id = self._tensors.get(name)
        if id is None:
            raise NotFound(
                "no such tensor", where=name, hint=f"mstore ls --tensors {self.id.short}"
            )
        return self._catalog.tensor(id)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only array of its shape; bfloat16 and float8 through ml_dtypes.

        Raises NotFound, Corrupt, and Incompatible for dtypes that numpy cannot hold (sub-byte).
        """
        tensor = self.record(name)
        dtype = array_dtype(tensor.dtype)
        data = bytearray(tensor.nbytes)
        target = memoryview(data)
        blocks = list(tensor.block_ids())
        done = 0
        for number, location in enumerate(self._catalog.locate(blocks)):
            length = tensor.block_length(number, self._catalog.block_size)
            # Raises where the block is not as long as its place.
            self._catalog.read_block_into(blocks[number], location, target[done : done + length])
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
