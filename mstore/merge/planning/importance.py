"""Where the selection by importance of one tensor begins, and how much of the expert it takes.

An element is selected if its importance is the median or more by one and a half interquartile
ranges.  The three quartiles are exact: elements of rank int(q (n - 1)) from the smallest.  They are
found by the bits of the importances, which order as the numbers do: the upper half in a first pass,
the lower half in a second.  No pass keeps more than chunks, and the divergences of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.blocks.meter import Meter
from mstore.merge.arithmetic import pieces
from mstore.merge.arithmetic.importance import divergences, importances
from mstore.merge.arithmetic.masks import Singles
from mstore.numeric import halves
from mstore.numeric.halves import Counts
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_reader, row_length, tensor_chunk
from mstore.store.catalog import Catalog

_QUARTERS: Final = (1, 2, 3)
_REACH: Final = np.float32(1.5)


class _Look(NamedTuple):
    """Of a chunk: the divergences of rows, by piece; elements by upper half, and their squares."""

    divergence: list[Singles]
    counts: Counts
    squares: npt.NDArray[np.float64]


class _Rows:
    """A base and an expert, read in chunks of whole rows."""

    def __init__(self, catalog: Catalog, base: Tensor, expert: Tensor, meter: Meter) -> None:
        self._dtypes = base.dtype, expert.dtype
        self._chunk = tensor_chunk(catalog.block_size, base, [expert], whole=True)
        self._readers = (
            chunk_reader(catalog, base, self._chunk, None),
            chunk_reader(catalog, expert, self._chunk, meter),
        )
        self.elements = math.prod(base.shape)
        self.length = row_length(base.shape)
        self.numbers = range(-(-self.elements // self._chunk))

    def read(self, number: int) -> Iterator[list[Singles]]:
        """Yield a chunk of base and expert in pieces of whole rows, float32[n]."""
        elements = min(self._chunk, self.elements - number * self._chunk)
        data = [read(number) for read in self._readers]
        sides = list(zip(data, self._dtypes, strict=True))
        for _, _, both in pieces.rows(sides, self.length, elements):
            yield both


def select(
    catalog: Catalog, base: Tensor, expert: Tensor, meter: Meter, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """Return the least importance that is selected, and at most the sum of squares of the deltas.

    meter: counts reads of the expert, of which there are two.  NaN for tensors that are not finite.
    """
    rows = _Rows(catalog, base, expert, meter)

    def look(number: int) -> _Look:
        counts, divergence = halves.no_counts(), []
        squares = np.zeros(counts.size)
        with np.errstate(invalid="ignore", over="ignore"):
            for mine, theirs in rows.read(number):
                divergence.append(divergences(mine, theirs, rows.length))
                bits = importances(mine, theirs, divergence[-1]).view(np.uint32)
                halves.count_upper_squares(bits, theirs - mine, counts, squares)
        return _Look(divergence, counts, squares)

    looks = list(pool.map(look, rows.numbers))
    counts = halves.no_counts()
    squares = np.zeros(counts.size)
    for one in looks:
        counts += one.counts
        squares += one.squares
    # Of infinity and of NaN, with either sign.
    if counts[halves.half_of(np.float32(np.inf)) :].any() or not np.isfinite(squares).all():
        return math.nan, math.nan
    # Of the rank int(q (n - 1)) from the smallest, 0; here from the largest, 1.
    places = [
        halves.place(counts, rows.elements - (rows.elements - 1) * quarter // 4)
        for quarter in _QUARTERS
    ]
    wanted = sorted({top for top, _ in places})

    def lower(number: int) -> list[Counts]:
        found = [halves.no_counts() for _ in wanted]
        for (mine, theirs), own in zip(rows.read(number), looks[number].divergence, strict=True):
            bits = importances(mine, theirs, own).view(np.uint32)
            for top, counted in zip(wanted, found, strict=True):
                halves.count_lower(bits, top, counted)
        return found

    below = {top: halves.no_counts() for top in wanted}
    for some in pool.map(lower, rows.numbers):
        for top, counted in zip(wanted, some, strict=True):
            below[top] += counted
    first, median, third = (
        np.uint32(halves.joined(top, halves.place(below[top], rank)[0])).view(np.float32)
        for top, rank in places
    )
    least = np.float32(median + _REACH * np.float32(third - first))
    # All elements that share the threshold's upper half are counted.
    return float(least), math.fsum(squares[halves.half_of(least) :].tolist())
