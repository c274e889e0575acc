"""Counting numbers by the halves of their bits, to find the n-th largest of more than memory holds.

The bits of float32 without a sign order as the numbers do.  A first pass counts their upper halves,
and tells which upper half the n-th largest has; a second counts the lower halves of those that have
it.  Counts of parts are added up, in any order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.numeric.passes import Pass

_BITS: Final = 16
_BINS: Final = 1 << _BITS
_SOURCES: Final = ("numeric/halves_passes.py",)
_MODULE: Final = "mstore.numeric.halves_passes"
_upper: Final = Pass(_MODULE, "upper", "pip", _SOURCES)
_upper_squares: Final = Pass(_MODULE, "upper_squares", "ppipp", _SOURCES)
_lower: Final = Pass(_MODULE, "lower", "piip", _SOURCES)

Bits = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.int64]


def level() -> str:
    """Return for which level of processors the code is that runs here.  Raises Unavailable."""
    return _upper.level()


def no_counts() -> Counts:
    """Return counts of no numbers: int64[65536]."""
    return np.zeros(_BINS, dtype=np.int64)


def count_upper(bits: Bits, counts: Counts) -> None:
    """Add uint32[n], contiguous, to the counts of their upper halves."""
    _upper(bits.ctypes.data, bits.size, counts.ctypes.data)


def count_upper_squares(
    bits: Bits, values: npt.NDArray[np.float32], counts: Counts, squares: npt.NDArray[np.float64]
) -> None:
    """Do `count_upper`, and add the squares of the values, in order, to those of their halves.

    values: float32[n], contiguous. squares: float64[65536].
    """
    at = (values.ctypes.data, bits.size, counts.ctypes.data, squares.ctypes.data)
    _upper_squares(bits.ctypes.data, *at)


def count_lower(bits: Bits, half: int, counts: Counts) -> None:
    """Add the lower halves of those of uint32[n] that have this upper half to the counts."""
    _lower(bits.ctypes.data, bits.size, half, counts.ctypes.data)


def place(counts: Counts, rank: int) -> tuple[int, int]:
    """Return the half of the number of this rank from the largest, 1, and its rank there."""
    through = np.cumsum(counts[::-1])
    at = int(np.searchsorted(through, rank))
    half = _BINS - 1 - at
    return half, rank - int(through[at] - counts[half])


def half_of(value: np.float32) -> int:
    """Return the upper half of a number's bits."""
    return int(np.float32(value).view(np.uint32)) >> _BITS


def joined(high: int, low: int) -> int:
    """Return the bits of two halves."""
    return high << _BITS | low
