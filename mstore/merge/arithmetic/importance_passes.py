"""The compiled pass of importance: how far the softmax of one row is from that of another.

exp and log are computed here, by argument reduction and a polynomial, in plain float64 steps: those
of a C library differ from machine to machine.  Both are within 2 units in the last place.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric.compiling import compiled, entry, inlined

_LOG2E: Final = 1.4426950408889634
# ln 2 in two parts; the first has so many zeros that its product with an exponent is exact.
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_LN2: Final = 0.6931471805599453
_ROUNDER: Final = float.fromhex("0x1.8p52")
"""Added to a small number, it leaves the nearest whole one in the low bits."""
_ROUNDER_BITS: Final = np.int64(0x4338000000000000)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)
_BIAS: Final = np.int64(1023)
_MANTISSA: Final = np.int64(52)
_LOWEST: Final = -708.0
"""exp of less is not a normal float64, and counts as 0."""
_EPSILON: Final = 1e-8


# Loops without sums, so that LLVM vectorises them.


@inlined
def _exp(x: Any) -> Any:
    """Return exp of a number up to 0, a NaN for a NaN."""
    rounded = x * _LOG2E + _ROUNDER
    exponent = np.float64(rounded).view(np.int64) - _ROUNDER_BITS
    whole = rounded - _ROUNDER
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    y = 1.0 / 6227020800.0
    y = y * r + 1.0 / 479001600.0
    y = y * r + 1.0 / 39916800.0
    y = y * r + 1.0 / 3628800.0
    y = y * r + 1.0 / 362880.0
    y = y * r + 1.0 / 40320.0
    y = y * r + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    power = np.int64((exponent + _BIAS) << _MANTISSA).view(np.float64)
    return 0.0 if x < _LOWEST else y * power


@inlined
def _log(x: Any) -> Any:
    """Return log of a normal number above 0; not of infinity or a NaN."""
    bits = np.float64(x).view(np.int64)
    # The bias makes it positive, and the shift a logical one.
    biased = np.int64(bits - _SQRT_HALF_BITS + (_BIAS << _MANTISSA)) >> _MANTISSA
    exponent = np.int64(biased + _ROUNDER_BITS).view(np.float64) - (_ROUNDER + 1023.0)
    m = np.int64(bits - ((biased - _BIAS) << _MANTISSA)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = 1.0 / 21.0
    y = y * z + 1.0 / 19.0
    y = y * z + 1.0 / 17.0
    y = y * z + 1.0 / 15.0
    y = y * z + 1.0 / 13.0
    y = y * z + 1.0 / 11.0
    y = y * z + 1.0 / 9.0
    y = y * z + 1.0 / 7.0
    y = y * z + 1.0 / 5.0
    y = y * z + 1.0 / 3.0
    y = y * z + 1.0
    return exponent * _LN2 + 2.0 * s * y


@compiled
def _exponentials(values: Any, length: int, found: Any) -> float:
    """Write exp(value - the largest) of float32[length] to float64[length]; return their sum."""
    largest = values[0]
    for i in range(1, length):
        largest = values[i] if values[i] > largest else largest
    top = np.float64(largest)
    for i in range(length):
        found[i] = _exp(np.float64(values[i]) - top)
    return _sum(found, length)


@compiled
def _sum(values: Any, length: int) -> float:
    """Return the sum of float64[length]: four sums, of every fourth, then theirs."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = length - length % 4
    for i in range(0, whole, 4):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
    for i in range(whole, length):
        a += values[i]
    return (a + b) + (c + d)


@compiled
def _divergence(
    mine: Any, mine_total: float, theirs: Any, theirs_total: float, length: int
) -> float:
    """Return sum p log(p / q), p and q the shares of the totals, each plus 1e-8.

    Both add up to the same, so sum p log(p / q) - p + q is that, too; it does not lose the small
    divergence of similar rows to the rounding of the totals.  Overwrites `mine`.
    """
    for i in range(length):
        p = mine[i] / mine_total + _EPSILON
        q = theirs[i] / theirs_total + _EPSILON
        ratio = p / q
        # The difference is a NaN where the logarithm would be one, and else 0.
        mine[i] = p * _log(ratio) - (p - q) + (ratio - ratio)
    return _sum(mine, length)


@entry("ppiipp")
def divergences(
    base_at: Any, expert_at: Any, rows: int, length: int, scratch_at: Any, found_at: Any
) -> None:
    """Do `arcee_fusion.divergences`; scratch: float64[2, length]."""
    bases = carray(base_at, (rows, length), np.float32)
    experts = carray(expert_at, (rows, length), np.float32)
    scratch = carray(scratch_at, (2, length), np.float64)
    found = carray(found_at, (rows,), np.float32)
    for row in range(rows):
        mine = _exponentials(experts[row], length, scratch[0])
        theirs = _exponentials(bases[row], length, scratch[1])
        total = _divergence(scratch[0], mine, scratch[1], theirs, length)
        # Rounding may leave less than nothing.
        found[row] = np.float32(0.0) if total < 0.0 else np.float32(total)
