"""The compiled pass of spreads.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import tiles
from mstore.merge.arithmetic.tiles import TILE
from mstore.numeric.compiling import compiled, entry, pointer


@compiled
def _add(own: Any, number: int, mean: Any, squares: Any) -> None:
    """Take the next expert's deltas into account; number: how many there are with it."""
    if number & (number - 1):
        for i in range(own.size):
            value = np.float64(own[i])
            gap = value - mean[i]
            moved = mean[i] + gap / number
            mean[i] = moved
            squares[i] += gap * (value - moved)
        return
    # The inverse of a power of two is exact, and a product takes less time.
    share = 1.0 / number
    for i in range(own.size):
        value = np.float64(own[i])
        gap = value - mean[i]
        moved = mean[i] + gap * share
        mean[i] = moved
        squares[i] += gap * (value - moved)


@entry("piipp", tiles)
def spreads(sides_at: Any, experts: int, n: int, scratch_at: Any, found_at: Any) -> None:
    """Do `sce.spreads`; sides: addresses, 0 for zeros: int64[experts].

    scratch: float64[3, TILE].
    """
    sides = carray(sides_at, (experts,), np.int64)
    scratch = carray(scratch_at, (3, TILE), np.float64)
    found = carray(found_at, (n,), np.float32)
    nothing = scratch[2].view(np.float32)
    nothing[:] = np.float32(0.0)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        mean, squares = scratch[0, :count], scratch[1, :count]
        mean[:] = 0.0
        squares[:] = 0.0
        for k in range(experts):
            if sides[k]:
                side = carray(pointer(sides[k]), (n,), np.float32)
                _add(side[start : start + count], k + 1, mean, squares)
            else:
                _add(nothing[:count], k + 1, mean, squares)
        for i in range(count):
            found[start + i] = np.float32(squares[i] / experts)
