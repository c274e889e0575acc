"""Counting numbers by the halves of their bits, to find the n-th largest of more than memory holds.

The bits of float32 without a sign order as the numbers do.  A first pass counts their upper halves,
and tells which upper half the n-th largest has; a second counts the lower halves of those that have
it.  Counts of parts are added up, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.numeric.passes import Pass

_BITS: Final = 16
BINS: Final = 1 << _BITS
"""How many halves there are."""
_SOURCES: Final = ("numeric/halves_passes.py",)
_MODULE: Final = "mstore.numeric.halves_passes"
_upper: Final = Pass(_MODULE, "upper", "pip", _SOURCES)
_lower: Final = Pass(_MODULE, "lower", "piip", _SOURCES)

Bits = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]


def level() -> str:
    """Return for which level of processors the code is that runs here.  Raises Unavailable."""
    return _upper.level()


def no_counts(*shape: int) -> Counts:
    """Return counts of no numbers: int64[..., 65536]."""
    return np.zeros((*shape, BINS), dtype=np.int64)


def added(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts of parts, one at least."""
    parts = iter(counts)
    total = next(parts).copy()
    for one in parts:
        total += one
    return total


def count_upper(bits: Bits, counts: Counts) -> None:
    """Add uint32[n], contiguous, to the counts of their upper halves."""
    _upper(bits.ctypes.data, bits.size, counts.ctypes.data)


def count_lower(bits: Bits, half: int, counts: Counts) -> None:
    """Add the lower halves of those of uint32[n] that have this upper half to the counts."""
    _lower(bits.ctypes.data, bits.size, half, counts.ctypes.data)


def uppers(parts: Iterable[Bits]) -> Counts:
    """Return the counts of the upper halves of all parts."""
    counts = no_counts()
    for bits in parts:
        count_upper(bits, counts)
    return counts


def lowers(parts: Iterable[Bits], half: int) -> Counts:
    """Return the counts of the lower halves of what has this upper half in all parts."""
    counts = no_counts()
    for bits in parts:
        count_lower(bits, half, counts)
    return counts


def place(counts: Counts, rank: int) -> tuple[int, int]:
    """Return the half of the number of this rank from the largest, 1, and its rank there."""
    through = np.cumsum(counts[::-1])
    at = int(np.searchsorted(through, rank))
    half = BINS - 1 - at
    return half, rank - int(through[at] - counts[half])


def half_of(value: np.float32) -> int:
    """Return the upper half of a number's bits."""
    return int(np.float32(value).view(np.uint32)) >> _BITS


def joined(high: int, low: int) -> int:
    """Return the bits of two halves."""
    return high << _BITS | low
