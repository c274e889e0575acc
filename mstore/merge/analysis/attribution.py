"""Attribution: how much each expert contributed to a chunk's merged delta, in float64.

Owns the split of the merged delta m (what a merge adds to the base, after consensus, lambda and
scale, before rounding to the output) into contributions: m = m_0 + sum of m_k, with

    m_k = lambda * w_k s_k / divisor              s_k the sparsified delta, 0 where expert k lost
                                                  the election of the sign
    m_k = w_k (e_k - b) / sum of w                for methods that mix whole experts
                                                  (w_k: of the row, where rows have their own)
    m_k = v (e_k - b)                             for `nearswap`, v e_k + (1 - v) b in float32
    m_k = s_k / n, w_k s_k if n = 1               for means of the n experts that move an element
    m_k = f_k d_k                                 for competitions, f_k the float32 factor
    m_k = w_k F_k d_k / sum of w F                for averages by Fishers, whose own m_k are 0
    m_0 = (sum of w - 1) b                        for whole experts without normalize, else 0

times the parameter scale, if there is one.

Sparsification, draws and elections are those of `merge.arithmetic`, in the same float32 and the
same order of experts, so their results are bit-identical. From there on, products, quotients and
sums are float64. Elements whose m is not finite are counted and left out of every sum.
`attribution_passes` implements these steps again in a plain form; there they are fused for speed.

Deterministic: a chunk's sums are made of 64 partial ones by index, in order. `attribute` releases
the GIL, keeps nothing between calls and may run on any number of threads.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import pack
from mstore.merge.arithmetic.tiles import LANES, TILE, address
from mstore.merge.running.compute import chunk_of, masks_of, row_weights_of
from mstore.merge.running.loading import Loaded
from mstore.numeric.passes import Pass

_attribute: Final = Pass(
    "mstore.merge.analysis.attribution_passes",
    "attribute",
    "ppppppp",
    (
        *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/philox.py"),
        *("merge/arithmetic/tiles.py", "merge/arithmetic/arguments.py"),
        *("merge/arithmetic/stages.py", "merge/arithmetic/competition_passes.py"),
        "merge/analysis/attribution_passes.py",
    ),
)


class Attribution(msgspec.Struct, frozen=True):
    """Sums over some elements. Add them up in a fixed order.

    square      ||m||^2
    base        <m_0, m>
    products    float64[K]: <m_k, m>; with `base` they add up to `square`
    squares     float64[K]: ||m_k||^2
    moved       int64[K]: elements with m_k not 0
    changed     elements with m not 0
    not_finite  elements left out because m is NaN or infinite there
    """

    square: float
    base: float
    products: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    moved: npt.NDArray[np.int64]
    changed: int
    not_finite: int

    @classmethod
    def nothing(cls, experts: int) -> Attribution:
        """Return the sums over no elements."""
        zeros = np.zeros(experts)
        return cls(0.0, 0.0, zeros, zeros, zeros.astype(np.int64), 0, 0)

    def __add__(self, other: Attribution) -> Attribution:
        return Attribution(
            self.square + other.square,
            self.base + other.base,
            self.products + other.products,
            self.squares + other.squares,
            self.moved + other.moved,
            self.changed + other.changed,
            self.not_finite + other.not_finite,
        )


def attribute(loaded: Loaded, quotas: npt.NDArray[np.int64], count: int) -> Attribution:
    """Split one chunk's merged delta among so many experts, the first of its sides.

    quotas: as in `mix_chunk`, the ties that THIS chunk keeps.
    """
    tensor = loaded.task.tensor
    mix = tensor.mix
    experts = mix.weights.size
    sums = np.zeros((2, experts + 2))
    counts = np.zeros(experts + 3, dtype=np.int64)
    # Keep these alive until the pass is done: it gets their addresses.
    room = (
        np.empty((experts + 3, TILE), dtype=np.float32),
        np.empty((experts + 4, TILE)),
        np.zeros((2, experts + 2, LANES)),
        np.empty(TILE, dtype=np.uint8),
    )
    chunk = chunk_of(loaded, quotas)
    masks, rows = masks_of(tensor, chunk), row_weights_of(tensor, chunk)
    packed = pack(mix, chunk, None, tensor.out_dtype, masks, row_weights=rows)
    _attribute(packed.at, *[address(array) for array in (sums, counts, *room)])
    # Companions, which come last, change nothing by themselves.
    own = slice(int(mix.has_base), int(mix.has_base) + count)
    return Attribution(
        square=float(sums[1, experts + 1]),
        base=float(sums[0, experts]),
        products=sums[0, own],
        squares=sums[1, own],
        moved=counts[own],
        changed=int(counts[experts + 1]),
        not_finite=int(counts[experts + 2]),
    )
