"""Loading: tensors of a snapshot as arrays in memory, read by several threads.

A tensor whose blocks lie raw and side by side in one pack is not copied: its array is that part of
the pack, mapped.  Its blocks are checked first, like those that are read.  All others are decoded
into memory of their own.  Does not own what a snapshot has (`view`), nor how one part of a tensor
is read (`safe_open`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PackGone
from mstore.blocks.reader import verify
from mstore.checkpoint.dtypes import DTYPES
from mstore.store import contents
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.view import SnapshotView, array_form
from mstore.terms.ahead import in_order
from mstore.terms.ids import BlockId, PackId, TensorId
from mstore.terms.progress import Progress, ProgressCallback

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
    """Return one tensor as `load` does, without holding the snapshot: that costs a file each time.

    Raises as `load`.
    """
    with contents.or_collected(catalog, [view.id]):
        return _Load(catalog, view, for_torch, None).run([name], threads)[name]


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
        work: list[Callable[[], int]] = []
        for name, record in records.items():
            id = self.view.tensors[name]
            if not self.for_torch and id in known:
                found[name] = known[id]
                continue
            if isinstance(record, VirtualTensor):
                raw = np.empty(record.nbytes, dtype=np.uint8)
                work.append(partial(self._compute, name, raw))
            else:
                raw, more = self._planned(record)
                work += more
            found[name] = known[id] = raw
        self._do(work, sum(record.nbytes for record in records.values()), threads)
        return {name: self._shaped(raw, *forms[name]) for name, raw in found.items()}

    def _do(self, work: Sequence[Callable[[], int]], total: int, threads: int) -> None:
        done = 0
        others = min(threads, len(work)) - 1
        with ThreadPoolExecutor(max(1, others), "load") as pool:
            # What no other thread begins is done by this one.
            submit = pool.submit if others > 0 else lambda do: Future()
            for _, length in in_order(submit, work, ahead=4 * threads, helping=lambda do: do()):
                done += length
                if self.progress is not None:
                    self.progress(Progress("load", done, total))

    def _shaped(self, raw: Bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = raw.view(dtype).reshape(shape)
        array.flags.writeable = self.for_torch
        return array

    # -- stored tensors ------------------------------------------------------------------------

    def _planned(self, record: Tensor) -> tuple[Bytes, list[Callable[[], int]]]:
        """Return a tensor's bytes, and what fills or checks them."""
        blocks = list(record.block_ids())
        places = self.catalog.locate(blocks)
        raw = self._mapped(record, blocks, places)
        is_mapped = raw is not None
        if raw is None:
            raw = np.empty(record.nbytes, dtype=np.uint8)
        step = max(1, _PIECE_BYTES // self.catalog.block_size)
        return raw, [
            partial(
                self._check if is_mapped else self._fill,
                blocks[first : first + step],
                places[first : first + step],
                raw[first * self.catalog.block_size : (first + step) * self.catalog.block_size],
            )
            for first in range(0, len(blocks), step)
        ]

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
    """Return whether a tensor's bytes are a part of one pack, at a place that fits its elements."""
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
