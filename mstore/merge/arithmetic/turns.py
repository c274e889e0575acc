"""Turns: the factors of each row, where a method mixes rows by the angles between them.

A row is the last dimension of a tensor; a tensor with fewer than two dimensions is one row.  The
inner products of a row's parts are float64 sums in an order of their own (`turn_passes`), and what
follows from them is computed without the functions of a C library (`angles`): the same factors for
any chunks, threads and machines.  The formulas are mergekit 0.1.5's:

    SLERP   sin((1 - t) a) / sin(a) and sin(t a) / sin(a), a the angle between both parts, t the
            second weight over the sum; 1 - t and t where the parts have one direction, or opposite
            ones
    STOCK   c / (1 + (K - 1) c) for each of K parts, c the mean cosine of two of them; 0 where that
            divides by nothing

A part of zeros is at right angles to any other.  A part that is not finite makes its row's factors
NaN, which is all that then becomes of what the row's parts move.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from mstore.merge.arithmetic.angles import Doubles, arc_cosine, sine
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import LANES, address
from mstore.merge.methods.method import Rows
from mstore.merge.methods.model_stock import SINGULAR, SMALLEST_NORMS
from mstore.merge.methods.nuslerp import COLINEAR, SMALLEST_NORM, share_of_second
from mstore.numeric.passes import Pass

_HERE: Final = Path(__file__)
_products: Final = Pass(
    "mstore.merge.arithmetic.turn_passes",
    "products",
    "piiipp",
    (_HERE.with_name("tiles.py"), _HERE.with_name("turn_passes.py")),
)


def products(parts: Singles) -> Doubles:
    """Return the inner products of each row's parts, float64[K, K, R]; parts: float32[K, R, N]."""
    parts = np.ascontiguousarray(parts)
    sides, rows, length = parts.shape
    found = np.empty((sides, sides, rows), dtype=np.float64)
    lanes = np.empty(LANES, dtype=np.float64)
    _products(address(parts), sides, rows, length, address(lanes), address(found))
    return found


def factors(kind: Rows, parts: Singles, weights: Sequence[float]) -> Singles:
    """Return the factor of each row of each expert, float32[R, K].

    parts: float32[K, R, N], zeros for one that moves nothing; deltas, or whole experts if those are
    mixed.
    """
    with np.errstate(all="ignore"):
        found = _slerp(parts, weights) if kind is Rows.SLERP else _stock(products(parts))
        return np.ascontiguousarray(found.T, dtype=np.float32)


def _slerp(parts: Singles, weights: Sequence[float]) -> Doubles:
    first, second = weights
    if not (first and second):
        # The other one alone, at any angle.
        alone = np.array([first != 0, second != 0], dtype=np.float64)
        return np.repeat(alone[:, None], parts.shape[1], axis=1)
    t = share_of_second(first, second)
    gram = products(parts)
    one, other = (_least(np.sqrt(gram[k, k]), SMALLEST_NORM) for k in range(2))
    cosine = _clipped(gram[0, 1] / (one * other))
    straight = 1.0 - np.abs(cosine) <= COLINEAR
    angle = arc_cosine(np.where(straight, 0.0, cosine))
    side = sine(angle)
    turned = np.stack([sine((1.0 - t) * angle) / side, sine(t * angle) / side])
    return np.where(straight, np.array([[1.0 - t], [t]]), turned)


def _stock(gram: Doubles) -> Doubles:
    count = len(gram)
    norms = np.sqrt(np.stack([gram[k, k] for k in range(count)]))
    total = np.zeros(gram.shape[2])
    pairs = list(itertools.combinations(range(count), 2))
    for i, j in pairs:
        total = total + _clipped(gram[i, j] / _least(norms[i] * norms[j], SMALLEST_NORMS))
    cosine = total / len(pairs)
    divisor = 1.0 + (count - 1) * cosine
    share = np.where(np.abs(divisor) < SINGULAR, 0.0, cosine / divisor)
    return np.repeat(share[None], count, axis=0)


def _clipped(cosine: Doubles) -> Doubles:
    """Return cosines that rounding has left above 1 or below -1 as these; a NaN stays one."""
    return np.where(cosine > 1.0, 1.0, np.where(cosine < -1.0, -1.0, cosine))


def _least(values: Doubles, least: float) -> Doubles:
    """Return values, `least` where they are smaller; a NaN stays one."""
    return np.where(values < least, least, values)
