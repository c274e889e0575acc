"""The compiled passes that count bits by halves.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric.compiling import compiled, entry

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


@compiled
def count_lower(bits: Any, half: Any, counts: Any) -> None:
    """Add to the counts of the lower halves of those of uint32[n] that have this upper half.

    half: uint32. counts: int64[65536].
    """
    for start in range(0, bits.size, _TOGETHER):
        own = bits[start : min(start + _TOGETHER, bits.size)]
        # A loop without branches is vectorised, and mostly there are none.
        have = np.uint32(0)
        for i in range(own.size):
            have = np.uint32(have + np.uint32(np.uint32(own[i] >> _HALF) == half))
        if have:
            for i in range(own.size):
                if np.uint32(own[i] >> _HALF) == half:
                    counts[np.uint64(own[i] & _LOW)] += 1


@entry("piip")
def lower(bits_at: Any, n: int, half: int, counts_at: Any) -> None:
    """Do `count_lower`."""
    bits = carray(bits_at, (n,), np.uint32)
    count_lower(bits, np.uint32(half), carray(counts_at, (_BINS,), np.int64))
