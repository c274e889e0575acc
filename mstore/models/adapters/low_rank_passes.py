"""Compiled passes of low-rank products: norms of rows, given to them and taken from factors.

Takes addresses and lengths and checks nothing.  Importing this module imports the compiler: only
the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import quieten_all


@entry("piip", floats)
def scale_rows(values_address: Any, rows: int, columns: int, magnitudes_address: Any) -> None:
    """Give each row of float32[rows, columns] the norm that `magnitudes`, float32[rows], says.

    The norm of a row is the root of a float64 sum in four lanes, rounded to float32.
    """
    values = carray(values_address, (rows, columns), np.float32)
    bits = carray(values_address, (rows, columns), np.uint32)
    magnitudes = carray(magnitudes_address, (rows,), np.float32)
    for i in range(rows):
        row = values[i]
        l0, l1, l2, l3 = 0.0, 0.0, 0.0, 0.0
        j = 0
        while j + 4 <= columns:
            l0 += np.float64(row[j]) * np.float64(row[j])
            l1 += np.float64(row[j + 1]) * np.float64(row[j + 1])
            l2 += np.float64(row[j + 2]) * np.float64(row[j + 2])
            l3 += np.float64(row[j + 3]) * np.float64(row[j + 3])
            j += 4
        while j < columns:
            l0 += np.float64(row[j]) * np.float64(row[j])
            j += 1
        factor = magnitudes[i] / np.float32(np.sqrt((l0 + l1) + (l2 + l3)))
        for k in range(columns):
            row[k] = factor * row[k]
        quieten_all(bits[i])


@compiled
def _dot(one: Any, other: Any) -> Any:
    """Return the inner product of two float32 rows: a float64 sum in eight lanes."""
    n = one.size
    l0, l1, l2, l3, l4, l5, l6, l7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    j = 0
    while j + 8 <= n:
        l0 += np.float64(one[j]) * np.float64(other[j])
        l1 += np.float64(one[j + 1]) * np.float64(other[j + 1])
        l2 += np.float64(one[j + 2]) * np.float64(other[j + 2])
        l3 += np.float64(one[j + 3]) * np.float64(other[j + 3])
        l4 += np.float64(one[j + 4]) * np.float64(other[j + 4])
        l5 += np.float64(one[j + 5]) * np.float64(other[j + 5])
        l6 += np.float64(one[j + 6]) * np.float64(other[j + 6])
        l7 += np.float64(one[j + 7]) * np.float64(other[j + 7])
        j += 8
    while j < n:
        l0 += np.float64(one[j]) * np.float64(other[j])
        j += 1
    return ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))


@entry("pipiipp")
def squares(
    left_address: Any,
    rows: int,
    right_address: Any,
    rank: int,
    columns: int,
    scratch_address: Any,
    out_address: Any,
) -> None:
    """Compute sums of squares of a product from its factors, in float64.

    left: float32[rows, rank]. right: float32[rank, columns]. scratch: float64[rank + 1, rank].
    out: float64[2 * rows + columns], of the rows of the product, those of `left`, and the columns
    of `right`.
    """
    left = carray(left_address, (rows * rank,), np.float32)
    right = carray(right_address, (rank * columns,), np.float32)
    gram = carray(scratch_address, ((rank + 1) * rank,), np.float64)
    out = carray(out_address, (2 * rows + columns,), np.float64)
    for r in range(rank):
        own = right[r * columns : (r + 1) * columns]
        for q in range(r + 1):
            found = _dot(own, right[q * columns : (q + 1) * columns])
            gram[r * rank + q] = found
            gram[q * rank + r] = found
    turned = gram[rank * rank :]
    for i in range(rows):
        own = left[i * rank : (i + 1) * rank]
        turned[:] = 0.0
        for q in range(rank):
            weight = np.float64(own[q])
            row = gram[q * rank : (q + 1) * rank]
            for r in range(rank):
                turned[r] += weight * row[r]
        product, alone = 0.0, 0.0
        for r in range(rank):
            product += turned[r] * np.float64(own[r])
            alone += np.float64(own[r]) * np.float64(own[r])
        out[i] = product
        out[rows + i] = alone
    of_columns = out[2 * rows :]
    of_columns[:] = 0.0
    for r in range(rank):
        own = right[r * columns : (r + 1) * columns]
        for j in range(columns):
            of_columns[j] += np.float64(own[j]) * np.float64(own[j])
