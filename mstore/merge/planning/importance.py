"""Where the selection by importance of one tensor begins, and how much of the expert it takes.

An element is selected if its importance is the median or more by one and a half interquartile
ranges.  The three quartiles are exact: elements of rank int(q (n - 1)) from the smallest.  They are
found by the bits of the importances, which order as the numbers do: the upper half in a first pass,
the lower half in a second.  No pass keeps more than chunks, and the divergences of all rows.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.blocks.meter import Meter
from mstore.merge.arithmetic.importance import divergences, importances
from mstore.merge.arithmetic.masks import Singles
from mstore.numeric.singles import singles
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_reader, row_length, tensor_chunk
from mstore.store.catalog import Catalog

_HALF: Final = 1 << 16
_QUARTERS: Final = (1, 2, 3)
_REACH: Final = np.float32(1.5)
_Counts = npt.NDArray[np.int64]


class _Look(NamedTuple):
    """Of a chunk: the divergence of each row; elements with each upper half, and their squares."""

    divergence: Singles
    counts: _Counts
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

    def read(self, number: int) -> tuple[Singles, Singles]:
        """Return a chunk of both, float32[n]."""
        n = min(self._chunk, self.elements - number * self._chunk)
        base, expert = (
            singles(read(number), dtype, n)
            for read, dtype in zip(self._readers, self._dtypes, strict=True)
        )
        return base, expert


def select(
    catalog: Catalog, base: Tensor, expert: Tensor, meter: Meter, pool: ThreadPoolExecutor
) -> tuple[float, float]:
    """Return the least importance that is selected, and at most the sum of squares of the deltas.

    meter: counts reads of the expert, of which there are two.  NaN for tensors that are not finite.
    """
    rows = _Rows(catalog, base, expert, meter)

    def look(number: int) -> _Look:
        mine, theirs = rows.read(number)
        with np.errstate(invalid="ignore", over="ignore"):
            divergence = divergences(mine, theirs, rows.length)
            bits = importances(mine, theirs, divergence).view(np.uint32) >> 16
            squares = np.square((theirs - mine).astype(np.float64))
            return _Look(
                divergence,
                np.bincount(bits, minlength=_HALF),
                np.bincount(bits, weights=squares, minlength=_HALF).astype(np.float64),
            )

    looks = list(pool.map(look, rows.numbers))
    counts, squares = np.zeros(_HALF, dtype=np.int64), np.zeros(_HALF)
    for one in looks:
        counts += one.counts
        squares += one.squares
    # Of infinity and of NaN, with either sign.
    if counts[_upper(np.float32(np.inf)) :].any() or not np.isfinite(squares).all():
        return math.nan, math.nan
    ranks = [(rows.elements - 1) * quarter // 4 for quarter in _QUARTERS]
    through = np.cumsum(counts)
    tops = np.searchsorted(through, ranks, side="right")
    wanted = sorted({*tops.tolist()})

    def lower(number: int) -> _Counts:
        mine, theirs = rows.read(number)
        bits = importances(mine, theirs, looks[number].divergence).view(np.uint32)
        return np.array([_below(bits, top) for top in wanted])

    found = np.zeros((len(wanted), _HALF), dtype=np.int64)
    for some in pool.map(lower, rows.numbers):
        found += some
    below = dict(zip(wanted, found, strict=True))
    first, median, third = (
        _value(top, below[top], rank - int(through[top] - counts[top]))
        for top, rank in zip(tops.tolist(), ranks, strict=True)
    )
    least = np.float32(median + _REACH * np.float32(third - first))
    # All elements that share the threshold's upper half are counted.
    return float(least), math.fsum(squares[_upper(least) :].tolist())


def _upper(value: np.float32) -> int:
    """Return the upper half of a number's bits."""
    return int(np.float32(value).view(np.uint32)) >> 16


def _below(bits: npt.NDArray[np.uint32], top: int) -> _Counts:
    """Count the lower halves of those that have this upper half: int64[65536]."""
    return np.bincount(bits[bits >> 16 == top] & (_HALF - 1), minlength=_HALF)


def _value(top: int, counts: _Counts, rank: int) -> np.float32:
    """Return the number of this rank, from 0 for the smallest, among those of an upper half."""
    place = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
    return np.uint32((top << 16) + place).view(np.float32)
