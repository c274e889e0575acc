"""The snapshot view: one snapshot as read-only files and as tensors.

A read is arithmetic over the manifest: offset -> part -> block. The bytes of blocks come from
`block_cache`, which checks them. Nothing is ever written. Safe for any number of threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

from mstore.blocks.location import Location, in_runs, run_of
from mstore.blocks.packs import NO_BASE
from mstore.checkpoint.header import parse_header
from mstore.store import contents
from mstore.store.ahead import READ_AHEAD, read_ahead
from mstore.store.block_cache import (
    BlockCache,
    Extent,
    VirtualBlock,
    VirtualGroup,
    begin_group,
    misplaced,
)
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.manifest import SAFETENSORS, File, Manifest
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.terms.errors import BadRequest, Incompatible, MstoreError, NotFound, did_you_mean
from mstore.terms.ids import BlockId, Buffer, ManifestId, SnapshotId, TensorId, VirtualId
from mstore.terms.phrases import call, phrase

_READ_AHEAD_ON_DISK: Final = 8 << 20
"""Bytes that are asked for ahead where the kernel has them soon."""


class PhysicalExtent(msgspec.Struct, frozen=True):
    """Where a piece of a file lies at rest.

    The `length` bytes from `offset` of the file are those from `start` of the block at `location`
    (pack, offset there, lengths, codec, base). With codec RAW they are the bytes at
    `location.offset + start` of the pack. A location of None means that `block` is virtual.
    """

    offset: int
    length: int
    start: int
    location: Location | None
    block: BlockId | VirtualBlock


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
    """Yield the bytes of whole-block extents; reads ahead, starts virtual blocks a few ahead."""
    ahead = 0
    waiting: deque[tuple[Extent, VirtualGroup | None]] = deque()
    last: VirtualGroup | None = None
    try:
        for extent in read_ahead(extents, lambda one: one.length, partial(will_read, catalog)):
            group = None
            if isinstance(extent.block, VirtualBlock):
                if last is None or not last.holds(extent.block):
                    last = begin_group(cache.computing, extent.block)
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


def will_need(catalog: Catalog, places: Sequence[Location]) -> None:
    """Have payloads, and what they are differences to, read ahead; a hint, never an error."""
    # What is missing is an error for whoever reads it, not for who reads what comes before.
    with suppress(MstoreError):
        bases = dict.fromkeys(BlockId(one.base) for one in places if one.base != NO_BASE)
        others = catalog.locate(bases) if bases else []
        for run in in_runs([*places, *others], lambda at: at):
            catalog.packs.will_need(*run_of(run))


def will_read(catalog: Catalog, extents: Sequence[Extent]) -> None:
    """Have the stored blocks of these pieces read ahead, as `will_need`."""
    with suppress(MstoreError):
        stored = [one.block for one in extents if isinstance(one.block, BlockId)]
        will_need(catalog, catalog.locate(stored))


def _whole(catalog: Catalog, extent: Extent, group: VirtualGroup | None) -> Buffer:
    if isinstance(extent.block, VirtualBlock):
        assert group is not None
        data = group.block(extent.block)
    else:
        data = catalog.read_block(extent.block)
    if len(data) != extent.length:
        raise misplaced(extent.block)
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
    """The files and tensors of one snapshot, or of one of its models (`Models.alone`).

    `files` maps each relative POSIX path to its size in bytes, in manifest order. Names, headers
    and sizes of a virtual snapshot need no computing.
    """

    def __init__(
        self,
        catalog: Catalog,
        snapshot: SnapshotId,
        cache: BlockCache | None = None,
        *,
        model: str | None = None,
    ) -> None:
        record = catalog.snapshot(snapshot)
        self.id = snapshot
        self.manifest_id: ManifestId = record.manifest_id()
        self.manifest: Manifest = catalog.manifest(self.manifest_id)
        if model is not None:
            self.manifest = models_in(catalog, self.manifest).alone(model)
        self.time_ns = record.time_ns
        self.is_virtual = record.is_virtual
        self._catalog = catalog
        self._cache = cache or BlockCache(catalog)
        self._files = {file.path: _OpenFile(file) for file in self.manifest.files}
        self.models = models_in(catalog, self.manifest)
        self._tensors: Mapping[str, TensorId] = self.models.tensors

    @property
    def files(self) -> Mapping[str, int]:
        """Maps path to size in bytes."""
        return {path: opened.file.size for path, opened in self._files.items()}

    @property
    def tensors(self) -> Mapping[str, TensorId]:
        """Maps what a tensor is called to its TensorId, model by model, in file and data order."""
        return self._tensors

    def _opened(self, path: str) -> _OpenFile:
        opened = self._files.get(path)
        if opened is None:
            raise NotFound(
                "no such file in the snapshot",
                where=path,
                hint=did_you_mean(path, self._files, call("files", self.id.short)),
            )
        return opened

    def require(self, path: str) -> None:
        """Raise NotFound unless the snapshot has this file."""
        self._opened(path)

    def stored_bytes(self, path: str) -> int:
        """Return the bytes at rest of the file's blocks, each counted once.

        A block that other files share counts in full, and a base of differences does not; blocks
        of virtual tensors take none. Raises NotFound and Corrupt.
        """
        blocks: set[bytes] = set()
        parts = [part for part in self._opened(path).file.parts if part.nbytes]
        self._catalog.preload_tensors([part.tensor_id() for part in parts])
        for part in parts:
            content = self._catalog.content(part.tensor_id())
            if isinstance(content, Tensor):
                blocks.update(content.block_ids())
        return int(self._catalog.stored_lengths(b"".join(blocks)).sum())

    def content_id(self, path: str) -> bytes:
        """Return 32 bytes that name the content: BLAKE3 of the ids of the file's parts."""
        parts = self._opened(path).file.parts
        return blake3(b"".join(bytes(part.tensor_id()) for part in parts)).digest()

    def extents(self, path: str, offset: int, size: int) -> Iterator[Extent]:
        """Yield the pieces of `size` bytes of a file from `offset`, clipped at the file's end.

        Raises NotFound, and BadRequest for numbers below 0.
        """
        if offset < 0 or size < 0:
            raise BadRequest("offset and size are at least 0", where=path)
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
            extents.append(PhysicalExtent(offset, extent.length, extent.start, place, extent.block))
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

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on; return how many bytes the file had.  Raises as `read`."""
        size = max(0, min(len(target), self._opened(path).file.size - offset))
        with contents.or_collected(self._catalog, [self.id]):
            self._cache.read_into(self.extents(path, offset, size), target)
        return size

    def pieces(self, path: str, offset: int, size: int) -> list[Buffer]:
        """Return what `read` does, in pieces that nobody may change.  Raises as `read`."""
        with contents.or_collected(self._catalog, [self.id]):
            return self._cache.pieces(self.extents(path, offset, size))

    def stream(self, path: str, start: int = 0) -> Iterator[Buffer]:
        """Yield a file block by block from `start` on, bypassing the cache."""
        extents = self.extents(path, start, self._opened(path).file.size - start)
        return self._told_if_collected(_whole_blocks(self._catalog, self._cache, extents))

    def _told_if_collected(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        with contents.or_collected(self._catalog, [self.id]):
            yield from blocks

    def continues_to(self, path: str, offset: int, size: int) -> int:
        """Return where the tensor ends that begins in these bytes and goes on after them.

        The end of these bytes if there is none. A tensor is mostly read from its begin to its end.
        """
        starts = self._opened(path).starts
        end = offset + size
        number = bisect_right(starts, end - 1) - 1
        if starts[number] < offset or number + 1 == len(starts):
            return end
        return max(end, starts[number + 1])

    @property
    def read_ahead(self) -> int:
        """How many bytes to prefetch for a reader who reads one after the other."""
        is_lazy = self._catalog.index.elsewhere is not None
        return READ_AHEAD if is_lazy else _READ_AHEAD_ON_DISK

    def prefetch(self, path: str, offset: int, size: int) -> None:
        """Have the kernel read, and other threads decode or compute, what a reader needs next.

        What a tensor file has not of these bytes are the first ones of the next in its directory.
        """
        # What is missing is an error for whoever reads it, not for who reads what comes before.
        with suppress(MstoreError):
            found = list(self.extents(path, offset, size))
            behind = offset - self._opened(path).file.size
            following = self._following(path) if behind + size > 0 else None
            if following is not None:
                found += self.extents(following, max(0, behind), min(size, behind + size))
            self._prefetch(found)

    def _following(self, path: str) -> str | None:
        """Return the tensor file that follows one in its directory, by name."""
        if self._opened(path).file.form != SAFETENSORS:
            return None
        directory = PurePosixPath(path).parent
        near = (one for one in self.tensor_files() if PurePosixPath(one).parent == directory)
        return next((one for one in near if one > path), None)

    def _prefetch(self, extents: Sequence[Extent]) -> None:
        stored = {one.block: None for one in extents if not isinstance(one.block, VirtualBlock)}
        for one in extents:
            if isinstance(one.block, VirtualBlock):
                self._cache.begin(one.block)
        places = self._catalog.locate(stored)
        will_need(self._catalog, places)
        self._cache.prepare(zip(stored, places, strict=True))

    def tensor_files(self) -> list[str]:
        """Return the paths of the safetensors files."""
        return [file.path for file in self.manifest.files if file.form == SAFETENSORS]

    def of_file(self, path: str) -> SnapshotView:
        """Return this view with the tensors of one safetensors file only.  Raises NotFound."""
        file = self._opened(path).file
        if file.form != SAFETENSORS:
            raise NotFound("not a safetensors file", where=path)
        view = copy(self)
        view._tensors = {str(part.name): part.tensor_id() for part in file.tensors()}
        return view

    def of_model(self, model: str | None, where: str) -> SnapshotView:
        """Return this view with the tensors of one model only, by their names in it.

        model: None for the one that is meant where none is named.  Raises NotFound, Incompatible.
        """
        try:
            name = (
                self.models.meant(where) if model is None else self.models.model(model, where).name
            )
        except Incompatible as error:
            error.advise(f"load(model={next(iter(self.models.named))!r})")
            raise
        view = copy(self)
        view._tensors = self.models.in_model(name)
        return view

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
            hint = did_you_mean(name, self._tensors, call("tensors", self.id.short))
            raise NotFound("no such tensor", where=name, hint=hint)
        return id

    def tensor(self, name: str, *, for_torch: bool = False) -> np.ndarray[Any, Any]:
        """Return a tensor as a read-only array, in the form that `array_form` says.

        Raises NotFound, Corrupt, and Incompatible as `array_form`.
        """
        tensor = self.record(name)
        dtype, shape = array_form(name, tensor, for_torch=for_torch)
        data = bytearray(tensor.nbytes)
        self.fill(name, memoryview(data))
        array = np.frombuffer(data, dtype=dtype).reshape(shape)
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
_PAIRS = "F4"
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def array_form(
    name: str, record: Tensor | VirtualTensor, *, for_torch: bool = False
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of the array of a tensor; bfloat16 and float8 are those of ml_dtypes.

    for_torch: the array only carries bytes to torch, which has a type for pairs of F4
    (float4_e2m1fn_x2): they are bytes here, half as many as the last dimension says.

    Raises Incompatible, which names the tensor, for a type that numpy, or torch, lacks (sub-byte).
    """
    shape = record.shape
    if for_torch and record.dtype == _PAIRS and shape and shape[-1] % 2 == 0:
        return np.dtype(np.uint8), (*shape[:-1], shape[-1] // 2)
    try:
        return array_dtype(record.dtype), shape
    except Incompatible as error:
        what = f"torch has no type for {record.dtype} {list(shape)}" if for_torch else error.what
        raise Incompatible(what, where=f"tensor {name}", hint=error.texts[2]) from None


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
        hint=phrase(
            "load the other tensors by their names; {read} gives the bytes of this one",
            read=call("read_file", "REF", "PATH"),
        ),
    )
