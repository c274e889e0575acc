"""Where the selection by spread of one tensor ends, and what is left of each expert.

Exactly k elements of a tensor are selected.  The threshold is found by the bits of the spreads,
which order as the numbers do: the upper half in a first pass over all experts, the lower half in a
second.  A third adds up squares, and finds the element with which the number of equal ones is
reached.  No pass keeps more than chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.blocks.meter import Meter
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.arithmetic.spread import Cut, spreads
from mstore.merge.methods.parameters import single
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_blocks, chunk_reader, tensor_chunk
from mstore.store.catalog import Catalog

_HALF = 1 << 16
_Counts = npt.NDArray[np.int64]


class Chunks:
    """The deltas of experts, chunk by chunk.  records: of the base and of each expert."""

    def __init__(self, catalog: Catalog, records: Sequence[Tensor], meter: Meter) -> None:
        self._catalog = catalog
        self._base, *self._experts = records
        self.elements = math.prod(self._base.shape)
        self.length = tensor_chunk(catalog.block_size, self._base, self._experts)
        self._read_base = chunk_reader(catalog, self._base, self.length, None)
        # What is equal in two of them is read once.
        alike = {(one.dtype, one.blocks): one for one in self._experts}
        self._readers = {
            key: chunk_reader(catalog, one, self.length, meter) for key, one in alike.items()
        }
        self.numbers = range(-(-self.elements // self.length))
        self.experts = len(self._experts)

    def deltas(self, number: int) -> list[Singles]:
        """Read a chunk of base and experts, equal blocks once; return each expert's float32[n]."""
        n = min(self.length, self.elements - number * self.length)
        base = self._read_base(number)
        seen = {self._blocks(self._base, number): np.zeros(n, dtype=np.float32)}
        for expert in self._experts:
            own = self._blocks(expert, number)
            if own not in seen:
                side = self._readers[expert.dtype, expert.blocks](number)
                seen[own] = masks.deltas(base, self._base.dtype, side, expert.dtype, n)
        return [seen[self._blocks(expert, number)] for expert in self._experts]

    def _blocks(self, record: Tensor, number: int) -> tuple[Any, ...]:
        blocks = chunk_blocks(record, self.length, number, self._catalog.block_size)
        return record.dtype, *blocks


class _Sums(NamedTuple):
    """Of a chunk: elements at the threshold, and each expert's squares above it and at it."""

    equal: int
    above: list[float]
    at: list[float]


def select(chunks: Chunks, share: float, pool: ThreadPoolExecutor) -> tuple[Cut, list[float]]:
    """Return where the selection of this share ends, and the sum of squares that it leaves.

    The share is of the elements with a spread; their number is rounded down, as mergekit does.
    """

    def upper(number: int) -> _Counts:
        bits = _bits(chunks.deltas(number))
        return np.bincount(bits[bits > 0] >> 16, minlength=_HALF)

    def lower(number: int) -> _Counts:
        bits = _bits(chunks.deltas(number))
        return np.bincount(bits[bits >> 16 == top] & (_HALF - 1), minlength=_HALF)

    def sums(number: int) -> _Sums:
        deltas = chunks.deltas(number)
        bits = _bits(deltas)
        equal = bits == last
        return _Sums(int(equal.sum()), _squares(deltas, bits > last), _squares(deltas, equal))

    high = _total(pool.map(upper, chunks.numbers))
    # In float32: mergekit multiplies so.
    count = int(single(single(int(high.sum())) * single(share)))
    if not count:
        return Cut(math.inf, 0), [0.0] * chunks.experts
    top, left = _place(high, count)
    low = _total(pool.map(lower, chunks.numbers))
    bottom, left = _place(low, left)
    last = (top << 16) + bottom
    value = float(np.uint32(last).view(np.float32))
    parts = list(pool.map(sums, chunks.numbers))
    kept = [part.above for part in parts]
    if left == low[bottom]:
        return Cut(value, -1), _added([*kept, *(part.at for part in parts)])
    through = np.cumsum([part.equal for part in parts])
    end = int(np.searchsorted(through, left))
    deltas = chunks.deltas(end)
    places = np.flatnonzero(_bits(deltas) == last)[: left - int(through[end]) + parts[end].equal]
    mask = np.zeros(len(deltas[0]), dtype=bool)
    mask[places] = True
    kept += [part.at for part in parts[:end]]
    before = end * chunks.length + int(places[-1]) + 1
    return Cut(value, before), _added([*kept, _squares(deltas, mask)])


def _bits(deltas: Sequence[Singles]) -> npt.NDArray[np.uint32]:
    """Return the spreads' bits."""
    return spreads(deltas, len(deltas[0])).view(np.uint32)


def _total(counts: Iterable[_Counts]) -> _Counts:
    total = np.zeros(_HALF, dtype=np.int64)
    for one in counts:
        total += one
    return total


def _place(counts: _Counts, rank: int) -> tuple[int, int]:
    """Return where the element of this rank from the top is, and its rank there."""
    through = np.cumsum(counts[::-1])
    place = int(np.searchsorted(through, rank))
    found = _HALF - 1 - place
    return found, rank - int(through[place] - counts[found])


def _squares(deltas: Sequence[Singles], mask: Bools) -> list[float]:
    """Return the sum of squares that a mask leaves of each expert."""
    with np.errstate(invalid="ignore"):
        kept = (one[mask].astype(np.float64) for one in deltas)
        return [float((one * one).sum()) for one in kept]


def _added(sums: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(own) for own in zip(*sums, strict=True)]
