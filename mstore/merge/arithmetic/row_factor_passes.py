"""The compiled pass of row factors: inner products of rows.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import tiles
from mstore.merge.arithmetic.tiles import LANES
from mstore.numeric.compiling import compiled, entry


@compiled
def _product(one: Any, other: Any, lanes: Any) -> float:
    """Return the sum of products: of every 64th element, then of both halves of those sums."""
    lanes[:] = 0.0
    for start in range(0, one.size, LANES):
        count = min(LANES, one.size - start)
        left, right = one[start : start + count], other[start : start + count]
        for i in range(count):
            # Exact: two float32 have 48 bits together.
            lanes[i] += np.float64(left[i]) * np.float64(right[i])
    half = lanes.size // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return float(lanes[0])


@entry("piiipp", tiles)
def products(
    values_at: Any, sides: int, rows: int, length: int, lanes_at: Any, found_at: Any
) -> None:
    """Do `row_factors.products`; values: float32[sides, rows, length], lanes: float64[LANES]."""
    values = carray(values_at, (sides * rows * length,), np.float32)
    lanes = carray(lanes_at, (LANES,), np.float64)
    found = carray(found_at, (sides * sides * rows,), np.float64)
    for row in range(rows):
        for i in range(sides):
            at = (i * rows + row) * length
            one = values[at : at + length]
            for j in range(i, sides):
                at = (j * rows + row) * length
                product = _product(one, values[at : at + length], lanes)
                found[(i * sides + j) * rows + row] = product
                found[(j * sides + i) * rows + row] = product
