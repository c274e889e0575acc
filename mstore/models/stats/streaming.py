"""Statistics of one pair of tensors, computed chunk by chunk from any number of threads.

Owns the bookkeeping between the compiled passes (`deltas`) and the stored table (`table`): the
position of a chunk's row, and the histogram that counts its deltas.  A pure function of the two
tensors' bytes: the order in which chunks arrive does not change the result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from threading import Lock, get_ident, local
from typing import Any, Self

import numpy as np

from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE
from mstore.models.stats import deltas
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.chunks import chunk_elements
from mstore.models.stats.digests import digest
from mstore.models.stats.histogram import BINS
from mstore.models.stats.table import MeasuredPair, encoded
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import BlockId, TensorId


class BaseBlocks:
    """Blocks of the base, read into a buffer that each thread reuses: new memory is slow."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._own = local()

    def locate(self, blocks: Sequence[BlockId | None]) -> list[Location | None]:
        """Locate all blocks in one lookup; None for None.  Raises Corrupt."""
        wanted = [block for block in blocks if block is not None]
        found = iter(self._catalog.locate(wanted) if wanted else ())
        return [None if block is None else next(found) for block in blocks]

    def locate_stored(self, blocks: Sequence[BlockId | None]) -> list[Location | None]:
        """Do the same, with None also for each block that is not stored."""
        wanted = [block for block in blocks if block is not None]
        stored = dict(zip(wanted, self._catalog.has_blocks(wanted), strict=True)) if wanted else {}
        return self.locate([block if block and stored[block] else None for block in blocks])

    def read(self, block: BlockId, location: Location) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read plain bytes, checked; valid until this thread's next call."""
        return self._read(0, block, location)

    def delta_base(
        self, block: BlockId, location: Location, data: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> tuple[BlockId, memoryview]:
        """Return the base for a delta against this block; `data` was read from it.

        That is this block, or, if this block is itself a delta, its base.  The bytes are valid
        until this thread's next call.
        """
        if location.base == NO_BASE:
            return block, data.data
        base = BlockId(location.base)
        return base, self._read(1, base, self._catalog.locate([base])[0]).data

    def _read(
        self, room: int, block: BlockId, location: Location
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rooms = getattr(self._own, "rooms", None)
        if rooms is None:
            rooms = self._own.rooms = np.empty((2, self._catalog.block_size), dtype=np.uint8)
        data: np.ndarray[Any, np.dtype[np.uint8]] = rooms[room, : location.raw_length]
        self._catalog.read_block_into(block, location, data.data)
        return data


class PairMeasure:
    """The growing statistics of (base tensor, expert tensor).

    Each chunk is added once.  The thread that adds the last one encodes the table and releases the
    dense histograms, so they take half a MiB per tensor in progress, not per tensor of a file.
    """

    def __init__(self, base_dtype: str, expert_dtype: str, elements: int, chunk: int) -> None:
        self.base_dtype = base_dtype
        self.expert_dtype = expert_dtype
        self.elements = elements
        self.chunk = chunk
        self.changed = False
        self._rows = np.zeros(-(-elements // chunk), dtype=CHUNK)
        # One histogram per thread: counting needs no lock, and their sum is exact in any order.
        self._counts: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._lock = Lock()
        self._left = len(self._rows)
        self._table: bytes | None = None
        self._digest: bytes | None = None

    @classmethod
    def begin(
        cls, base: Tensor | None, dtype: str, shape: tuple[int, ...], block_size: int
    ) -> Self | None:
        """Start for a tensor that arrives in blocks; None if a block is not a chunk.

        That is the case without a base, for another dtype or shape than the base's, without
        elements, or for a dtype whose deltas are not measured.
        """
        if base is None or base.dtype != dtype or base.shape != shape or base.nbytes == 0:
            return None
        if dtype not in ITEMSIZES:
            return None
        return cls(dtype, dtype, math.prod(shape), chunk_elements(block_size, dtype))

    def _length(self, number: int) -> int:
        return min(self.chunk, self.elements - number * self.chunk)

    def take_equal(self, number: int, base: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Add chunk `number`, which is equal on both sides."""
        squares = deltas.base_squares(base, self.base_dtype, self._length(number))
        self._rows[number] = deltas.unchanged(squares)[0]
        self._count_down()

    def take_chunk(
        self,
        number: int,
        base: np.ndarray[Any, np.dtype[np.uint8]],
        expert: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> None:
        """Add chunk `number`, which differs or may differ; both sides as stored bytes."""
        counts = self._counts.get(get_ident())
        if counts is None:
            counts = self._counts[get_ident()] = _no_counts()
        row = deltas.measure(
            base,
            self.base_dtype,
            expert,
            self.expert_dtype,
            self._length(number),
            number * self.chunk,
            counts,
        )
        self._rows[number] = row[0]
        self.changed = True
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left or not self.changed:
                return
        # A NaN is the largest of all, both for np.max and by its bit pattern.
        largest = float(self._rows["max_abs"].max())
        whole, *others = self._counts.values()
        for part in others:
            whole += part
            part.fill(0)
        self._table = encoded(self._rows, self.elements, self.chunk, deltas.collect(whole, largest))
        self._digest = digest(self._rows, self.elements, self.chunk)
        _spare.extend(self._counts.values())
        self._counts.clear()

    def base_squares(self) -> float:
        """Sum of squares of the base tensor."""
        return math.fsum(self._rows["base_squares"].tolist())

    def is_finite(self) -> bool:
        """Return whether every difference is; unknown, and so true, where the base is not."""
        known = math.isfinite(self.base_squares())
        return not known or bool(np.isfinite(self._rows["max_abs"]).all())

    def finish(self, base: TensorId, expert: TensorId) -> MeasuredPair:
        """Return the finished statistics; every chunk must have been added."""
        assert not self._left, "a chunk of this tensor was not taken"
        return MeasuredPair(base, expert, self._table, self.base_squares(), self._digest)


# Zeroed histograms for reuse: allocating and scanning half a MiB per tensor would take longer than
# measuring most tensors.  Races between threads only cost time.
_spare: deque[np.ndarray[Any, np.dtype[np.int64]]] = deque(maxlen=16)


def _no_counts() -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return _spare.pop()
    except IndexError:
        return np.zeros((BINS, 2), dtype=np.int64)
