"""The compiled passes of low-rank products: base + scale * (left @ right), for a run of elements.

Takes addresses and lengths and checks nothing.  Importing this module imports the compiler;
`low_rank` does so only if no machine code is cached on disk (`mstore.numeric.code_cache`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.adapters.low_rank import TILE
from mstore.numeric import floats
from mstore.numeric.codes import F32
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import load_bits, quieten


@compiled
def _add_four(sums: Any, weights: Any, rows: Any) -> None:
    """Add four products to each sum, one after the other."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    r0, r1, r2, r3 = rows[0], rows[1], rows[2], rows[3]
    for j in range(sums.size):
        sums[j] = (((sums[j] + w0 * r0[j]) + w1 * r1[j]) + w2 * r2[j]) + w3 * r3[j]


@compiled
def _add_one(sums: Any, weight: Any, row: Any) -> None:
    for j in range(sums.size):
        sums[j] = sums[j] + weight * row[j]


@compiled
def _finish(sums: Any, scale: Any, bits: Any) -> None:
    """Turn sums into base + scale * sum; bits: the base's, and the result's."""
    base = bits.view(np.float32)
    for j in range(sums.size):
        base[j] = base[j] + scale * sums[j]
    for j in range(sums.size):
        bits[j] = quieten(bits[j])


@entry("ipiippiippp", floats)
def apply(
    code: int,
    base_address: Any,
    first: int,
    n: int,
    left_address: Any,
    right_address: Any,
    rank: int,
    columns: int,
    scale_address: Any,
    sums_address: Any,
    out_address: Any,
) -> None:
    """Write elements [first, first + n) of a matrix: float32[n].

    base: the stored bytes of these elements. left: float32 from the row of the first of them on,
    [rows, rank]. right: float32[rank, columns]. scale: float32[1]. sums: float32[TILE], scratch.
    """
    itemsize = 4 if code == F32 else 2
    stored = carray(base_address, (n * itemsize,), np.uint8)
    start = first // columns
    rows = (first + n - 1) // columns + 1 - start
    left = carray(left_address, (rows, rank), np.float32)
    right = carray(right_address, (rank, columns), np.float32)
    scale = carray(scale_address, (1,), np.float32)[0]
    out = carray(out_address, (n,), np.uint32)
    sums_of = carray(sums_address, (TILE,), np.float32)
    for tile in range(0, columns, TILE):
        for i in range(rows):
            # Flat positions of this row's part of the tile, within the run.
            row = (start + i) * columns - first
            a = max(row + tile, 0)
            b = min(row + min(tile + TILE, columns), n)
            if a >= b:
                continue
            sums = sums_of[: b - a]
            sums[:] = np.float32(0)
            part = right[:, a - row : b - row]
            r = 0
            while r + 4 <= rank:
                _add_four(sums, left[i, r : r + 4], part[r : r + 4])
                r += 4
            while r < rank:
                _add_one(sums, left[i, r], part[r])
                r += 1
            load_bits(code, stored, a, b - a, out, a)
            _finish(sums, scale, out[a:b])


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
        for k in range(columns):
            bits[i, k] = quieten(bits[i, k])
