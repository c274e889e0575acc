"""Sums of adapters: a chunk of base and factors in, a chunk of output out.

Experts that are adapters need not be in memory: where a merge only adds up weighted deltas, a pass
computes some rows and columns of each product and adds them while they are in the cache.  The bits
are those of `kernels.mix_chunk` for what `Factors.apply` makes of the base.  Does not own the
products (`models.adapters.low_rank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Mix
from mstore.merge.arithmetic.tiles import ADDITIVE, ALL
from mstore.models.adapters.low_rank import PRODUCTS, Factors, operands
from mstore.numeric.codes import ITEMSIZES, dtype_code
from mstore.numeric.passes import Pass

_sum: Final = Pass("mstore.merge.arithmetic.adapters", "sum", "ipiiiiipppip", PRODUCTS)

Bytes = npt.NDArray[np.uint8]


def adds(mix: Mix) -> bool:
    """Return whether a method adds up whole deltas: it trims, draws and elects nothing.

    Weights are finite: zero times infinity is not left out of a sum.
    """
    kind, _, cuts, masked = mix.flags.tolist()
    return (
        (kind, cuts, masked) == (ADDITIVE, 0, 0)
        and min(mix.mask_limits) >= ALL
        and bool((mix.rescales == 1).all() and np.isfinite(mix.weights).all())
    )


def add_up(
    mix: Mix,
    experts: Sequence[Factors | None],
    base: Bytes,
    base_dtype: str,
    first: int,
    n: int,
    out: Bytes,
    out_dtype: str,
) -> None:
    """Merge `n` elements of one tensor, from flat index `first` on, into `out`.

    experts: the factors of each expert of `mix`, which `adds`; None for one that is absent. base,
    out: uint8[>= n * itemsize], contiguous.
    """
    assert out.size >= n * ITEMSIZES[out_dtype]
    own = [one for one in experts if one is not None]
    weights = [w for one, w in zip(experts, mix.weights.tolist(), strict=True) if one is not None]
    run, products, block = operands(own, weights, base, base_dtype, first, n)
    factors = mix.factors.copy()
    if not mix.flags[1]:
        factors[0] = 1
    _sum(
        *run,
        len(own),
        *(products.ctypes.data, factors.ctypes.data, block.ctypes.data),
        *(dtype_code(out_dtype), out.ctypes.data),
    )
