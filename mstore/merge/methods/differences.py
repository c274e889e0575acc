"""Methods with roles: what makes B of C is added to the base A.  B and C are the two experts.

add_perpendicular adds alpha times the part of B - C at right angles to A - C, each tensor as one
vector.  That is d_B without its part along d_C, and so follows from inner products of deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range, Scalar
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture

ALPHA: Final = Parameter("alpha", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    alpha, square = float(parameters["alpha"]), gram[2][2]
    if square == 0:
        # A is C: nothing is at right angles to no direction.
        return Mixture(1.0, (0.0, 0.0), keeps_base=True)
    return Mixture(1.0, (alpha, -alpha * (gram[1][2] / square)), keeps_base=True)


ADD_PERPENDICULAR: Final = Method(
    name="add_perpendicular",
    summary="base plus the part of what makes the first expert of the second that is at right "
    "angles to what makes the base of it",
    formula="base + alpha (d_0 - c d_1), c = <d_0, d_1> / <d_1, d_1>: the part of expert_0 - "
    "expert_1 at right angles to base - expert_1",
    source="sd-mecha, github.com/ljleb/sd-mecha",
    parameters=(ALPHA,),
    select=Delta,
    combine=Mixed(_mix, pairs=True),
    experts=2,
    weighted=False,
    mind="what is left out of an expert counts as the base's",
    is_ours=True,
)
