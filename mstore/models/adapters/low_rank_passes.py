"""The compiled passes of low-rank products: base + scale * (left @ right), for a run of elements.

Takes addresses and lengths and checks nothing.  Importing this module imports the compiler: only
the build does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.models.adapters import low_rank
from mstore.models.adapters.low_rank import ROWS, TILE
from mstore.numeric import floats
from mstore.numeric.codes import F32
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import load_bits, quieten_all

# The rows of a factor are slices of one flat array: of a part of a matrix, the compiler would not
# know that elements are neighbours, and the loops would not be vectorised.


@compiled
def _add_four(sums: Any, weights: Any, rows: Any, stride: int) -> None:
    """Add four products to each sum, one after the other; rows are `stride` elements apart."""
    n = sums.size
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    r0, r1 = rows[:n], rows[stride : stride + n]
    r2, r3 = rows[2 * stride : 2 * stride + n], rows[3 * stride : 3 * stride + n]
    for j in range(n):
        sums[j] = (((sums[j] + w0 * r0[j]) + w1 * r1[j]) + w2 * r2[j]) + w3 * r3[j]


@compiled
def _add_four_to_four(
    sums: Any, n: int, left: Any, rank: int, r: int, rows: Any, stride: int
) -> None:
    """Do `_add_four` for four rows of the left factor at once, with its columns from `r` on.

    sums: of n elements each, TILE apart. left: flat, from the first row on.
    """
    s0, s1 = sums[:n], sums[TILE : TILE + n]
    s2, s3 = sums[2 * TILE : 2 * TILE + n], sums[3 * TILE : 3 * TILE + n]
    t, u, v, w = left[r:], left[rank + r :], left[2 * rank + r :], left[3 * rank + r :]
    t0, t1, t2, t3 = t[0], t[1], t[2], t[3]
    u0, u1, u2, u3 = u[0], u[1], u[2], u[3]
    v0, v1, v2, v3 = v[0], v[1], v[2], v[3]
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    r0, r1 = rows[:n], rows[stride : stride + n]
    r2, r3 = rows[2 * stride : 2 * stride + n], rows[3 * stride : 3 * stride + n]
    for j in range(n):
        a, b, c, d = r0[j], r1[j], r2[j], r3[j]
        s0[j] = (((s0[j] + t0 * a) + t1 * b) + t2 * c) + t3 * d
        s1[j] = (((s1[j] + u0 * a) + u1 * b) + u2 * c) + u3 * d
        s2[j] = (((s2[j] + v0 * a) + v1 * b) + v2 * c) + v3 * d
        s3[j] = (((s3[j] + w0 * a) + w1 * b) + w2 * c) + w3 * d


@compiled
def _add_one(sums: Any, weight: Any, row: Any) -> None:
    for j in range(sums.size):
        sums[j] = sums[j] + weight * row[j]


@compiled
def _sums_of_row(sums: Any, left: Any, right: Any, stride: int) -> None:
    """Compute the sums of one row; right: flat, from the first of their columns on."""
    rank, n = left.size, sums.size
    sums[:] = np.float32(0)
    r = 0
    while r + 4 <= rank:
        _add_four(sums, left[r : r + 4], right[r * stride :], stride)
        r += 4
    while r < rank:
        _add_one(sums, left[r], right[r * stride : r * stride + n])
        r += 1


@compiled
def _sums_of_four_rows(sums: Any, n: int, left: Any, rank: int, right: Any, stride: int) -> None:
    """Do `_sums_of_row` for four rows, which read the right factor once (`_add_four_to_four`)."""
    sums[:] = np.float32(0)
    r = 0
    while r + 4 <= rank:
        _add_four_to_four(sums, n, left, rank, r, right[r * stride :], stride)
        r += 4
    while r < rank:
        part = right[r * stride : r * stride + n]
        for row in range(4):
            _add_one(sums[row * TILE : row * TILE + n], left[row * rank + r], part)
        r += 1


@compiled
def _finish(sums: Any, scale: Any, bits: Any) -> None:
    """Turn sums into base + scale * sum; bits: the base's, and the result's."""
    base = bits.view(np.float32)
    for j in range(sums.size):
        base[j] = base[j] + scale * sums[j]
    quieten_all(bits)


@entry("ipiippiippp", floats, low_rank)
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
    [rows, rank]. right: float32[rank, columns]. scale: float32[1]. sums: float32[ROWS *
    TILE], scratch.
    """
    itemsize = 4 if code == F32 else 2
    stored = carray(base_address, (n * itemsize,), np.uint8)
    start = first // columns
    rows = (first + n - 1) // columns + 1 - start
    left = carray(left_address, (rows * rank,), np.float32)
    right = carray(right_address, (rank * columns,), np.float32)
    scale = carray(scale_address, (1,), np.float32)[0]
    out = carray(out_address, (n,), np.uint32)
    sums = carray(sums_address, (ROWS * TILE,), np.float32)
    for tile in range(0, columns, TILE):
        width = min(TILE, columns - tile)
        i = 0
        while i < rows:
            # Flat positions of this row's part of the tile, within the run.
            begin = (start + i) * columns + tile - first
            a, b = max(begin, 0), min(begin + width, n)
            if a >= b:
                i += 1
                continue
            part = right[tile + a - begin :]
            own = left[i * rank :]
            at_once = 1
            if i + ROWS <= rows and a == begin and begin + (ROWS - 1) * columns + width <= n:
                at_once = ROWS
                _sums_of_four_rows(sums, width, own, rank, part, columns)
            else:
                _sums_of_row(sums[: b - a], own[:rank], part, columns)
            for row in range(at_once):
                load_bits(code, stored, a, b - a, out, a)
                _finish(sums[row * TILE : row * TILE + b - a], scale, out[a:b])
                a, b = a + columns, b + columns
            i += at_once


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
