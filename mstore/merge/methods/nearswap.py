"""nearswap: the expert where it is near the base, else the base, moved towards it by t.

An element is v e_k + (1 - v) b, v = t / max(|d_k|, 1e-6), at most 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.tiles import NEAR
from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.combinations.sum import Alone
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range, Value, single
from mstore.merge.methods.selection import Selection, Whole, common

REACH: Final = Parameter("t", "float", None, Range(0.0, MAX_SINGLE))
_REACHED: Final = 1.0 + 2.0**-20


class Near(Whole, frozen=True):
    """The experts, moved back to within reach of the base; reach: t, as a float32."""

    reach: float

    lists_base = False
    by_norms = False
    leaves_base = True
    steps = 1
    code = NEAR

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter t."""
        return cls(experts, single(common(parameters, REACH)))

    def weightless(self, weights: Sequence[float]) -> tuple[bool, ...]:
        """Return True for all if nothing is within reach."""
        return tuple([weight == 0 or self.reach == 0 for weight in weights])

    def squares(self, grid: Grid) -> Floats:
        """Return a bound on what of the deltas is within reach.

        With q = `_REACHED` reaches, the sum of min(|d|, q)^2 is at most q sum |d| and q^2 times the
        number of elements that move; see `methods.bounds`.
        """
        whole = grid.whole
        with np.errstate(over="ignore", invalid="ignore"):
            reach = self.reach * _REACHED + grid.column("max_abs") * 2.0**-149
            near = np.fmin(grid.column("sum_abs") * reach, grid.column("nonzeros") * reach * reach)
        # Where the row is not finite, nothing is known.
        return np.where(np.isfinite(whole), np.fmin(whole, near), whole)

    def factor(self, factor: float) -> float:
        """Return the reach: whole experts have no factor."""
        return self.reach


NEARSWAP: Final = Method(
    name="nearswap",
    summary="one expert where it is near the base, else the base moved towards it by t",
    formula="w expert + (1 - w) base, w = min(1, t / max(|d|, 1e-6))",
    source="alchemonaut, huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001; as in mergekit",
    parameters=(REACH,),
    select=Near,
    combine=Alone(),
    experts=1,
    weighted=False,
)
