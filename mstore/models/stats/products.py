"""Statistics of low-rank products, from their factors: upper bounds, without an element of them.

The product of two factors has as many elements as a tensor of the model; its norm follows from the
factors alone, for each row: |l_i R|^2 = l_i (R R^T) l_i^T.  What float32 may add is bounded, so a
certified bound on a merge's error may rest on these rows as on measured ones.  Owns that arithmetic
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).  Pure: the same bits
on every machine.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mstore.models.adapters.low_rank import Factors
from mstore.models.stats.chunk import CHUNK, Rows

_UNIT: Final = 2.0**-24
"""The largest relative error of one float32 operation."""
_DOUBLE: Final = 2.0**-52
_TINY: Final = 2.0**-148
"""More than one float32 operation may lose below the normal numbers."""
_LARGEST: Final = float(np.finfo(np.float32).max)
_MORE: Final = 1 + 2.0**-20
"""More than the rounding of a delta, and of the few float64 operations here, can add."""


def product_rows(factors: Factors, base_squares: float, elements: int, chunk: int) -> Rows:
    """Return a row for each chunk of expert - base, where the expert is base + scale * product.

    CHUNK[chunks], of numbers that are not exceeded: a chunk counts the rows of the matrix that it
    has a part of, `base_squares` (of the whole tensor) stand for each chunk's own, and every
    element as one that moves, unless none can.  The sketch is zero.  Factors without magnitudes.
    A row is infinite if a factor, the scale or the base is not finite, or if the product, or its
    sum with the base, may overflow.
    """
    assert factors.magnitude is None
    products, lefts, rights = (one.tolist() for one in factors.squares())
    rank, columns = factors.right.shape
    scale = abs(float(factors.scale[0]))
    base = math.sqrt(base_squares) if base_squares >= 0 else math.nan
    right, widest = math.sqrt(math.fsum(rights)), math.sqrt(max(rights, default=0.0))
    # Of the sum of |l_ir r_rj|, by its norm: what float32 adds to a sum, then what float64 adds to
    # the products above.
    added = (2 * rank + 8) * _UNIT + math.sqrt((columns + 3 * rank + 16) * _DOUBLE)
    # An expert's element is rounded to float32, too: by a share of itself.
    rounded = 2 * _UNIT * base
    rows = np.zeros(-(-elements // chunk), dtype=CHUNK)
    for number, row in enumerate(rows):
        first, end = number * chunk, min(elements, (number + 1) * chunk)
        part = slice(first // columns, (end - 1) // columns + 1)
        row["base_squares"] = base_squares
        left, longest = math.sqrt(math.fsum(lefts[part])), math.sqrt(max(lefts[part]))
        is_sane = math.isfinite(left * right) and math.isfinite(scale)
        if is_sane and (left == 0 or right == 0):
            continue
        row["nonzeros"] = end - first
        sums = most = norm = math.inf
        if is_sane:
            lost = (2 * rank + 4) * _TINY * (1 + scale)
            sums = longest * widest * (1 + added)
            most = (scale * sums + rounded) * _MORE + lost
            moved = math.sqrt(max(0.0, math.fsum(products[part]))) + added * left * right
            norm = (scale * moved + rounded) * _MORE + math.sqrt(end - first) * lost
        # An element of the expert may overflow, too.
        largest = (base + most) * _MORE
        if not (sums < _LARGEST and largest < _LARGEST and norm < _LARGEST):
            most = norm = math.inf
        row["sum_squares"] = norm * norm * _MORE
        row["sum_abs"] = norm * math.sqrt(end - first) * _MORE
        row["max_abs"] = most
    return rows
