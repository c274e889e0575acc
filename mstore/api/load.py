"""Tensors of a snapshot as arrays in memory: loaded by several threads, or opened one by one.

A tensor whose blocks lie raw and side by side in one pack is not copied: its array is that part of
the pack, mapped.  Its blocks are checked first, like those that are read.  All others are decoded
into memory of their own.  Does not own what a snapshot has (`view`).

    with snapshot.safe_open("pt") as file:
        file.get_tensor("model.norm.weight")
        file.get_slice("model.embed_tokens.weight")[:1000]

That has the interface of `safetensors.safe_open` (huggingface.co/docs/safetensors): programs that
take what safetensors opens take it, and need no file and no mount.  A slice reads the blocks of its
rows only.
"""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PackGone
from mstore.blocks.reader import verify
from mstore.checkpoint.dtypes import DTYPES
from mstore.store import contents
from mstore.store.ahead import in_order, read_ahead
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.view import SnapshotView, array_form, will_need
from mstore.terms.errors import BadRequest, Unavailable
from mstore.terms.ids import BlockId, PackId, TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter

Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES: Final = 4 << 20
"""What one thread reads at a time."""
_LEAST_MAPPED: Final = 1 << 16
"""Smaller tensors are copied: each would keep a page of the pack, and they are the most."""


def load(
    catalog: Catalog,
    view: SnapshotView,
    names: Sequence[str],
    *,
    threads: int,
    for_torch: bool,
    progress: ProgressCallback | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return tensors by name, each an array of its shape.

    for_torch: arrays to make tensors of torch of (`view.array_form`), which may be changed, each by
    itself: nothing of the store changes.  Otherwise they are read-only, and tensors of equal bytes
    may be one array.

    Raises NotFound, Corrupt, Conflict (collected meanwhile), StorageFailed, and Incompatible for an
    element type that numpy or torch cannot hold; then nothing is kept.
    """
    with contents.held(catalog, [view.id]):
        return _Load(catalog, view, for_torch, progress).run(names, threads)


def load_one(
    catalog: Catalog, view: SnapshotView, name: str, *, threads: int, for_torch: bool
) -> npt.NDArray[Any]:
    """Return one tensor as `load` does, without holding the snapshot.

    A hold costs a file each time.

    Raises as `load`.
    """
    with contents.or_collected(catalog, [view.id]):
        return _Load(catalog, view, for_torch, None).run([name], threads)[name]


class _Work(NamedTuple):
    """What fills or checks a piece of a tensor, and where its blocks lie; returns its bytes."""

    do: Callable[[], int]
    places: Sequence[Location] = ()

    def plain_bytes(self) -> int:
        return sum([at.raw_length for at in self.places])


@dataclass(slots=True)
class _Load:
    catalog: Catalog
    view: SnapshotView
    for_torch: bool
    progress: ProgressCallback | None
    maps: dict[PackId, mmap.mmap] = field(default_factory=dict)
    mapped: set[BlockId] = field(default_factory=set)

    def run(self, names: Sequence[str], threads: int) -> dict[str, npt.NDArray[Any]]:
        records = {name: self.view.record(name) for name in names}
        forms = {
            name: array_form(name, record, for_torch=self.for_torch)
            for name, record in records.items()
        }
        found: dict[str, Bytes] = {}
        known: dict[TensorId, Bytes] = {}
        work: list[_Work] = []
        for name, record in records.items():
            id = self.view.tensors[name]
            if not self.for_torch and id in known:
                found[name] = known[id]
                continue
            if isinstance(record, VirtualTensor):
                raw = np.empty(record.nbytes, dtype=np.uint8)
                work.append(_Work(partial(self._compute, name, raw)))
            else:
                raw, more = self._planned(record)
                work += more
            found[name] = known[id] = raw
        self._do(work, sum(record.nbytes for record in records.values()), threads)
        return {name: self._shaped(raw, *forms[name]) for name, raw in found.items()}

    def _do(self, work: Sequence[_Work], total: int, threads: int) -> None:
        tick = ProgressCounter("load", total, self.progress)
        others = min(threads, len(work)) - 1
        with ThreadPoolExecutor(max(1, others), "load") as pool:
            # What no other thread begins is done by this one.
            for _, length in in_order(
                lambda one: pool.submit(one.do) if others > 0 else Future(),
                read_ahead(work, _Work.plain_bytes, self._will_need),
                ahead=2 * threads,
                helping=lambda one: one.do(),
            ):
                tick(length)

    def _will_need(self, work: Sequence[_Work]) -> None:
        will_need(self.catalog, [place for one in work for place in one.places])

    def _shaped(self, raw: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = raw.view(dtype).reshape(shape)
        array.flags.writeable = self.for_torch
        return array

    # -- stored tensors ------------------------------------------------------------------------

    def _planned(self, record: Tensor) -> tuple[Bytes, list[_Work]]:
        """Return a tensor's bytes, and what fills or checks them."""
        blocks = list(record.block_ids())
        places = self.catalog.locate(blocks)
        raw = self._mapped(record, blocks, places)
        is_mapped = raw is not None
        if raw is None:
            raw = np.empty(record.nbytes, dtype=np.uint8)
        step = max(1, _PIECE_BYTES // self.catalog.block_size)
        do, size, work = self._check if is_mapped else self._fill, self.catalog.block_size, []
        for first in range(0, len(blocks), step):
            some = places[first : first + step]
            piece = raw[first * size : (first + step) * size]
            work.append(_Work(partial(do, blocks[first : first + step], some, piece), some))
        return raw, work

    def _mapped(
        self, record: Tensor, blocks: Sequence[BlockId], places: Sequence[Location]
    ) -> Bytes | None:
        """Return a tensor's place in a mapped pack, None if it has none of its own."""
        if record.nbytes < _LEAST_MAPPED or not _is_one_run(
            record, places, self.catalog.block_size
        ):
            return None
        # What may be changed must not be part of another tensor, too.
        if self.for_torch and not self.mapped.isdisjoint(blocks):
            return None
        first = places[0]
        pack = self._map(first.pack)
        if pack is None or first.offset + record.nbytes > len(pack):
            return None
        self.mapped.update(blocks)
        return np.frombuffer(pack, np.uint8, record.nbytes, first.offset)

    def _map(self, pack: PackId) -> mmap.mmap | None:
        found = self.maps.get(pack)
        if found is None:
            try:
                found = self.catalog.packs.mapped(pack, self.for_torch)
            except (PackGone, OSError):
                # Reading looks up where the blocks went, and says what is wrong with a file.
                return None
            if found is not None:
                self.maps[pack] = found
        return found

    def _check(self, blocks: Sequence[BlockId], places: Sequence[Location], raw: Bytes) -> int:
        for block, place, piece in self._pieces(blocks, places, raw):
            verify(block, place, piece)
        return raw.size

    def _fill(self, blocks: Sequence[BlockId], places: Sequence[Location], raw: Bytes) -> int:
        for block, place, piece in self._pieces(blocks, places, raw):
            # Raises if the block's length differs from the piece's.
            self.catalog.read_block_into(block, place, piece)
        return raw.size

    def _pieces(
        self, blocks: Sequence[BlockId], places: Sequence[Location], raw: Bytes
    ) -> Iterator[tuple[BlockId, Location, memoryview]]:
        for number, (block, place) in enumerate(zip(blocks, places, strict=True)):
            start = number * self.catalog.block_size
            yield block, place, raw[start : start + self.catalog.block_size].data

    # -- virtual tensors -----------------------------------------------------------------------

    def _compute(self, name: str, raw: Bytes) -> int:
        """Fill a tensor of a virtual merge: its blocks are computed by a pool of their own."""
        self.view.fill(name, raw.data)
        return raw.size


def _is_one_run(record: Tensor, places: Sequence[Location], block_size: int) -> bool:
    """Return whether a tensor lies raw and in one piece in a pack, aligned for its elements."""
    first = places[0]
    offset = first.offset
    if offset % max(1, DTYPES[record.dtype].bits // 8):
        return False
    for number, place in enumerate(places):
        length = record.block_length(number, block_size)
        if (place.pack, place.offset, place.codec) != (first.pack, offset, Codec.RAW):
            return False
        if (place.raw_length, place.stored_length) != (length, length):
            return False
        offset += length
    return True


_NUMPY: Final = ("np", "numpy")
_TORCH: Final = ("pt", "torch", "pytorch")

_LEAST_LOADED: Final = 1 << 20
"""Smaller tensors are read by the caller's thread: starting others would take longer."""


class LoadSource(Protocol):
    """What `SafeOpen` reads from: a `Snapshot`."""

    def _view(self, file: str | None) -> SnapshotView: ...

    def _load_one(
        self, view: SnapshotView, name: str, *, for_torch: bool
    ) -> np.ndarray[Any, Any]: ...


class SafeOpen:
    """The tensors of a snapshot, read when they are asked for.

    framework: "np" or "numpy" for read-only arrays, "pt", "torch" or "pytorch" for torch tensors.
    device: where torch puts them.  file: whose tensors and metadata; None: those of all files.

    It may travel to other processes, as its snapshot may.
    """

    def __init__(self, snapshot: LoadSource, framework: str, device: Any, file: str | None) -> None:
        if framework not in (*_NUMPY, *_TORCH):
            raise BadRequest(f"framework is np or pt, not {framework!r}")
        self._snapshot = snapshot
        self._device = device if framework in _TORCH else None
        self._is_torch = framework in _TORCH
        self._file = file
        self._kept: tuple[SnapshotView, list[str], dict[str, str] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}

    def _opened(self) -> tuple[SnapshotView, list[str], dict[str, str] | None]:
        """Return the view, the names of the tensors and the metadata.

        Raises NotFound (no such file).
        """
        if self._kept is None:
            view, file = self._snapshot._view(self._file), self._file
            if file is None and len(files := view.tensor_files()) == 1:
                (file,) = files
            self._kept = view, *((list(view.tensors), None) if file is None else view.header(file))
        return self._kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: the store that it reads from stays open."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._opened()[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._opened()[1]

    def offset_keys(self) -> list[str]:
        """Return the names in the order in which the tensors lie."""
        return list(self._opened()[1])

    def metadata(self) -> dict[str, str] | None:
        """Return the header's metadata, None if there is none."""
        metadata = self._opened()[2]
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.  Raises NotFound, Corrupt, Incompatible, Unavailable (no torch)."""
        view = self._opened()[0]
        record = view.record(name)
        if record.nbytes < _LEAST_LOADED:
            return self._given(name, view.tensor(name, for_torch=self._is_torch), record.dtype)
        array = self._snapshot._load_one(view, name, for_torch=self._is_torch)
        return to_torch(name, array, record.dtype, self._device) if self._is_torch else array

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor that is read when it is indexed.  Raises NotFound."""
        return TensorSlice(self, self._opened()[0].record(name), name)

    def _given(self, name: str, array: np.ndarray[Any, Any], dtype: str) -> Any:
        return to_torch(name, array.copy(), dtype, self._device) if self._is_torch else array


class TensorSlice:
    """A tensor that is read when it is indexed, and only the rows that the index names."""

    def __init__(self, file: SafeOpen, record: Tensor | VirtualTensor, name: str) -> None:
        self._file = file
        self._name = name
        self._record = record

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._record.shape)

    def get_dtype(self) -> str:
        """Return the element type, as safetensors spells it: BF16."""
        return self._record.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return what the index names, as numpy would: whole numbers, slices, `...`.

        Of pairs of F4 in torch it names pairs.

        Raises IndexError for a row that is not there, Corrupt, Incompatible, Unavailable.
        """
        if index is Ellipsis:
            return self._file.get_tensor(self._name)
        view, kind = self._file._opened()[0], self._record.dtype
        for_torch = self._file._is_torch
        dtype, shape = array_form(self._name, self._record, for_torch=for_torch)
        whole = index if isinstance(index, tuple) else (index,)
        if not shape or not whole or whole[0] is Ellipsis:
            array = view.tensor(self._name, for_torch=for_torch)
            return self._file._given(self._name, array[index], kind)
        first, rest = whole[0], whole[1:]
        start, stop, own = _rows(first, shape[0])
        row = math.prod(shape[1:]) * dtype.itemsize
        data = view.tensor_bytes(self._name, start * row, stop * row)
        rows = np.frombuffer(data, dtype=dtype).reshape(stop - start, *shape[1:])
        return self._file._given(self._name, rows[(own, *rest)], kind)


def _rows(index: Any, count: int) -> tuple[int, int, Any]:
    """Return the range of rows (first, end) that an index needs, and the index within it."""
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        named = range(start, stop, step)
        if not named:
            return 0, 0, slice(None)
        low, high = min(named[0], named[-1]), max(named[0], named[-1]) + 1
        return low, high, slice(None, None, step)
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"row {number} of {count}")
    number += count if number < 0 else 0
    return number, number + 1, 0


def torch_module() -> Any:
    """Return torch.  Raises Unavailable if it is not installed."""
    try:
        # Imported by name: the library needs no framework, and a test checks that.
        return import_module("torch")
    except ImportError as error:
        raise Unavailable("torch is not installed", hint="pip install torch") from error


def to_torch(name: str, array: np.ndarray[Any, Any], dtype: str, device: Any = None) -> Any:
    """Return a writable array as a torch tensor that shares its memory; moved to `device`, if any.

    Keeps bfloat16 and float8; an array of bytes whose dtype (as safetensors names it) is F4 becomes
    pairs.  name: for errors.  Raises BadRequest for an element type that torch lacks, Unavailable.
    """
    torch = torch_module()
    known = "float4_e2m1fn_x2" if dtype == "F4" else array.dtype.name
    kind = getattr(torch, known, None)
    if not isinstance(kind, torch.dtype):
        raise BadRequest(f"torch has no {known}", where=f"tensor {name}")
    if not array.size:
        tensor = torch.empty(array.shape, dtype=kind)
    else:
        # Goes through plain bytes: torch does not take ml_dtypes arrays.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor = torch.from_numpy(raw).view(kind).reshape(array.shape)
    return tensor if device is None else tensor.to(device)
