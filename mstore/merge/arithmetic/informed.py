"""Informed averages: a chunk of base, experts and their Fishers in, a chunk of output out.

For a base element b, and the experts k whose Fishers F_k are there, in their order and in float64:

    output = b + scale * sum of w_k F_k (e_k - b) / sum of w_k F_k

F_k is at least the floor; an expert that is not there is equal to the base, and one whose bits are
the base's adds nothing to the first sum.  Where either sum is 0, the output has the base's bits.
The sum of base and quotient is rounded to float32, and that to the output's type.  In float64 no
product of these underflows or overflows, so Fishers as small as float32 holds count in full, and an
average of one expert, with scale 1, is that expert, bit for bit, unless it is 2^26 times smaller
than the base.

A Fisher that is negative, infinite or NaN counts as 0, and is reported.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, pack
from mstore.merge.arithmetic.mix import Mix
from mstore.merge.arithmetic.tiles import TOGETHER
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.terms.errors import Incompatible

_informed: Final = Pass(
    "mstore.merge.arithmetic.informed_passes",
    "informed",
    "p",
    (
        *("numeric/codes.py", "numeric/floats.py"),
        *("merge/arithmetic/tiles.py", "merge/arithmetic/arguments.py"),
        "merge/arithmetic/informed_passes.py",
    ),
)


def sums_of(data: npt.NDArray[np.uint8], dtype: str, n: int) -> tuple[float, float]:
    """Return the sum of n elements of a Fisher and that of their squares, the same on any machine.

    NaN if one of them is no information.
    """
    total = squares = 0.0
    wide = np.zeros(TOGETHER)
    for start in range(0, n, TOGETHER):
        count = min(TOGETHER, n - start)
        part = singles(data[start * ITEMSIZES[dtype] :], dtype, count)
        # Of a NaN both comparisons are false.
        if not (part.min() >= 0 and part.max() < np.inf):
            return math.nan, math.nan
        wide[:count], wide[count:] = part, 0.0
        total += _halved(wide)
        squares += _halved(wide * wide)
    return total, squares


def _halved(values: npt.NDArray[np.float64]) -> float:
    """Return the sum of 2^k values: of their halves, element by element, again and again."""
    while values.size > 1:
        half = values.size // 2
        values = values[:half] + values[half:]
    return float(values[0])


def unsound_fisher(where: str | None) -> Incompatible:
    """Return the error for a Fisher that has other elements than information of 0 or more."""
    return Incompatible(
        "a Fisher has elements that are negative, infinite or NaN",
        where=where,
        hint="a Fisher is a mean of squared gradients: is this one, and does its type hold it?",
    )


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    row_weights: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Average a chunk into `out`.  As `kernels.run`; the Fishers come after the experts.

    Raises Incompatible for a Fisher that is negative or not finite.
    """
    packed = pack(mix, chunk, out, out_dtype)
    _informed(packed.at)
    if packed.read_ties()[0]:
        raise unsound_fisher(None)
    return ()
