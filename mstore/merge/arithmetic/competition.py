"""Competition: how much each expert counts in an element, by how large it moves it and who agrees.

Of K experts with deltas d_k, the score of expert k in an element is

    s_k = exp(K (u_k^2 - 1)) tanh(d_k * sum of all d_j),     u_k = |d_k| / the largest |d_k|

in float64, rounded to float32; the factor exp(-K), which has no effect on what follows, keeps it in
range.  With the least and the largest score of those that are not dropped, both of the whole
tensor, its scale is (s_k - least) / (largest - least), from 0 to 1, or 1 if all of these are equal;
it is 0 where d_k is 0.  The factor of d_k is w_k times its scale over the sum of all scales, which
is at least 1e-12.

exp and tanh are computed here, in plain float64 steps: those of a C library differ from machine to
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from mstore.merge.arithmetic import pieces
from mstore.merge.arithmetic.angles import Doubles
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.turns import Turn

if TYPE_CHECKING:
    from mstore.merge.arithmetic.arguments import Chunk

LIMITS: Final = 3
"""Numbers of each expert: its largest |d_k|, the least score, and the largest."""
_LOG2E: Final = 1.4426950408889634
# ln 2 in two parts; the first has so many zeros that its product with an exponent is exact.
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_LOWEST: Final = -708.0
_EXP: Final = (
    *(1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040),
    *(1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0),
)
_SMALL: Final = 0.0625
_TANH: Final = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
_LEAST_SUM: Final = 1e-12


def _exp(x: Doubles) -> Doubles:
    """Return exp of numbers up to 0, 0 where that is not a normal float64."""
    x = np.maximum(x, _LOWEST - 1)
    whole = np.rint(x * _LOG2E)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    y = _polynomial(_EXP, r)
    found: Doubles = np.where(x < _LOWEST, 0.0, np.ldexp(y, whole.astype(np.int32)))
    return found


def _tanh(x: Doubles) -> Doubles:
    """Return tanh."""
    size = np.abs(x)
    rest = _exp(-2.0 * size)
    large = np.copysign((1.0 - rest) / (1.0 + rest), x)
    found: Doubles = np.where(size < _SMALL, x * _polynomial(_TANH, x * x), large)
    return found


def _polynomial(factors: Sequence[float], x: Doubles) -> Doubles:
    found = np.full_like(x, factors[0])
    for factor in factors[1:]:
        found = found * x + factor
    return found


def scores(deltas: Sequence[Singles | None], largest: Sequence[float]) -> list[Singles]:
    """Return the score of each expert in n elements, float32[n]; a delta of None is zero.

    largest: of each expert's |d_k| in the tensor.
    """
    wide = [None if one is None else one.astype(np.float64) for one in deltas]
    n = next(one.size for one in deltas if one is not None)
    total = np.zeros(n)
    for one in wide:
        if one is not None:
            total += one
    found = []
    for one, most in zip(wide, largest, strict=True):
        if one is None or most == 0:
            found.append(np.zeros(n, dtype=np.float32))
            continue
        share = np.abs(one) / most
        intra = _exp(len(wide) * (share * share - 1.0))
        # Adding zero leaves no -0: the bits of scores order as they do.
        found.append((intra * _tanh(one * total)).astype(np.float32) + np.float32(0))
    return found


class Competition(Turn):
    """Factors of single elements; a chunk's thresholds are LIMITS numbers of each expert."""

    code: ClassVar[int] = 7

    def room(self, experts: int) -> int:
        """Return that of a float32 factor of each."""
        return 4 * experts

    def weights(
        self, chunk: Chunk, row_length: int, weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factor of each element of each expert, float32[n, K]."""
        experts = len(chunk.row_of)
        largest, least, most = chunk.thresholds.reshape(LIMITS, experts).astype(np.float64).tolist()
        found = np.zeros((chunk.n, experts), dtype=np.float32)
        for start, end, moved in pieces.of_chunk(chunk):
            if all(one is None for one in moved):
                continue
            scales = []
            for k, score in enumerate(scores(moved, largest)):
                own, d = score.astype(np.float64), moved[k]
                if d is None:
                    scales.append(np.zeros(end - start))
                    continue
                if most[k] > least[k]:
                    scale = (np.minimum(own, most[k]) - least[k]) / (most[k] - least[k])
                else:
                    scale = np.ones_like(own)
                scales.append(np.where((own >= least[k]) & (d != 0), scale, 0.0))
            total = np.zeros(end - start)
            for scale in scales:
                total += scale
            total = np.maximum(total, _LEAST_SUM)
            for k, (scale, weight) in enumerate(zip(scales, weights, strict=True)):
                found[start:end, k] = weight * scale / total
        return found
