"""Angles: arc cosine and sine of float64, the same bits on every machine.

Those of C libraries, and of numpy, differ from machine to machine in the last place.  Here they are
made of sums, products, quotients and roots, each of which IEEE 754 rounds in one way, and which
numpy does one by one.  Both are within 2^-49 of their result.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_HALF_PI: Final = float.fromhex("0x1.921fb54442d18p+0")
# pi / 2 in three parts; the first two have so many zeros that their products with a number of
# quarter turns up to 2^20 are exact.
_PARTS: Final = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
_ARC_TERMS: Final = tuple((-1) ** k / (2 * k + 1) for k in range(14))
_SINE_TERMS: Final = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(10))
_COSINE_TERMS: Final = tuple((-1) ** k / math.factorial(2 * k) for k in range(11))


def arc_cosine(cosine: Doubles) -> Doubles:
    """Return the angle from 0 to pi of each cosine, from -1 to 1; float64[n]."""
    below, above = 1.0 - cosine, 1.0 + cosine
    acute = below <= above
    with np.errstate(invalid="ignore", divide="ignore"):
        tangent = np.sqrt(np.where(acute, below / above, above / below))
    half = _arc_tangent(tangent)
    return np.where(acute, 2.0 * half, 2.0 * (_HALF_PI - half))


def _arc_tangent(tangent: Doubles) -> Doubles:
    """Return the angle of each tangent, from 0 to 1."""
    # tan(a / 2) = tan(a) / (1 + sqrt(1 + tan(a)^2)), twice: then a is pi / 16 at most.
    for _ in range(2):
        tangent = tangent / (1.0 + np.sqrt(1.0 + tangent * tangent))
    return 4.0 * (tangent * _series(_ARC_TERMS, tangent * tangent))


def sine(angle: Doubles) -> Doubles:
    """Return the sine of each angle, of up to 2^20 quarter turns; float64[n]."""
    turns = np.rint(angle / _HALF_PI)
    rest = angle
    for part in _PARTS:
        rest = rest - turns * part
    square = rest * rest
    # Exact: both are whole numbers.
    quarter = turns - 4.0 * np.floor(turns / 4.0)
    odd = (quarter == 1.0) | (quarter == 3.0)
    found = np.where(odd, _series(_COSINE_TERMS, square), rest * _series(_SINE_TERMS, square))
    return np.where(quarter >= 2.0, -found, found)


def _series(terms: tuple[float, ...], x: Doubles) -> Doubles:
    """Return the sum of terms times powers of x, from the smallest term on."""
    found: Doubles = np.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        found = found * x + term
    return found
