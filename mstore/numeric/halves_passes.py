"""The compiled passes that count bits by halves.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric.compiling import entry

_BINS: Final = 1 << 16
_HALF: Final = np.uint32(16)
_LOW: Final = np.uint32(0xFFFF)
_TOGETHER: Final = 64


@entry("pip")
def upper(bits_at: Any, n: int, counts_at: Any) -> None:
    """Add to the counts of the upper halves of uint32[n]: int64[65536]."""
    bits = carray(bits_at, (n,), np.uint32)
    counts = carray(counts_at, (_BINS,), np.int64)
    for i in range(n):
        counts[np.uint64(bits[i] >> _HALF)] += 1


@entry("ppipp")
def upper_squares(bits_at: Any, values_at: Any, n: int, counts_at: Any, squares_at: Any) -> None:
    """Do `upper`, and add up the squares of float32[n] by the same halves: float64[65536]."""
    bits = carray(bits_at, (n,), np.uint32)
    values = carray(values_at, (n,), np.float32)
    counts = carray(counts_at, (_BINS,), np.int64)
    squares = carray(squares_at, (_BINS,), np.float64)
    for i in range(n):
        half, value = np.uint64(bits[i] >> _HALF), np.float64(values[i])
        counts[half] += 1
        squares[half] += value * value


@entry("piip")
def lower(bits_at: Any, n: int, half: int, counts_at: Any) -> None:
    """Add to the counts of the lower halves of those that have this upper half: int64[65536]."""
    bits = carray(bits_at, (n,), np.uint32)
    counts = carray(counts_at, (_BINS,), np.int64)
    wanted = np.uint32(half)
    for start in range(0, n, _TOGETHER):
        own = bits[start : min(start + _TOGETHER, n)]
        # A loop without branches is vectorised, and mostly there are none.
        have = np.uint32(0)
        for i in range(own.size):
            have = np.uint32(have + np.uint32(np.uint32(own[i] >> _HALF) == wanted))
        if have:
            for i in range(own.size):
                if np.uint32(own[i] >> _HALF) == wanted:
                    counts[np.uint64(own[i] & _LOW)] += 1
