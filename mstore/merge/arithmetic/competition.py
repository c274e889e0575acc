"""Competition: how much each expert counts in an element, by how large it moves it and who agrees.

Of K experts with deltas d_k, the score of expert k in an element is

    s_k = exp(K (u_k^2 - 1)) tanh(d_k * sum of all d_j),     u_k = |d_k| / the largest |d_k|

in float64, rounded to float32; the factor exp(-K), which has no effect on what follows, keeps it in
range.  With the least and the largest score of those that are not dropped, both of the whole
tensor, its scale is (s_k - least) / (largest - least), from 0 to 1, or 1 if all of these are equal;
it is 0 where d_k is 0.  The factor of d_k is w_k times its scale over the sum of all scales, which
is at least 1e-12, in float64, rounded to float32.  Products with these, and their sum in the order
of experts, are float32.

An expert of weight 0 does not compete: it is none of the K.  One that is not read does, and moves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, pack
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.mix import Mix
from mstore.merge.arithmetic.tiles import TILE, address
from mstore.numeric.halves import Bits
from mstore.numeric.passes import Pass

LIMITS: Final = 3
"""Thresholds of each expert: its largest |d_k|, the least score, and the largest."""
_SOURCES: Final = (
    *("numeric/codes.py", "numeric/floats.py"),
    *("merge/arithmetic/tiles.py", "merge/arithmetic/arguments.py", "merge/arithmetic/stages.py"),
    "merge/arithmetic/competition_passes.py",
)
_MODULE: Final = "mstore.merge.arithmetic.competition_passes"
_scores: Final = Pass(_MODULE, "scores", "piippp", _SOURCES)
_balance: Final = Pass(_MODULE, "balance", "pp", _SOURCES)
_SIGN: Final = np.uint32(1 << 31)


def scores(deltas: Sequence[Singles], largest: Sequence[float]) -> Bits:
    """Return the score of each expert in n elements, as numbers that order so: uint32[K, n].

    deltas: float32[n] of each, contiguous; largest: of each expert's |d_k| in the tensor.
    """
    n = deltas[0].size
    found, scratch = np.empty((len(deltas), n), dtype=np.uint32), np.empty((2, TILE))
    sides = np.array(list(map(address, deltas)), dtype=np.int64)
    most = np.array(largest, dtype=np.float64)
    places = address(sides), len(deltas), n, address(most), address(scratch), address(found)
    _scores(*places)
    return found


def singles_of(ordered: Bits) -> Singles:
    """Return the scores that these numbers stand for, float32."""
    bits = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)
    found: Singles = bits.view(np.float32)
    return found


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    row_weights: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Merge a chunk into `out`, as `kernels.run`; its thresholds are LIMITS of each expert."""
    packed = pack(mix, chunk, out, out_dtype)
    room = np.empty((mix.weights.size + 2, TILE))
    _balance(packed.at, address(room))
    return ()
