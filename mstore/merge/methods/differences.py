"""Methods with roles: what makes B of C is added to the base A.  B and C are the two experts.

train_difference adds alpha times B - C, each element the more the further B is from A beside how
far it is from C: times 1.8 |B - A| / (|B - A| + |B - C|), the scale of supermerger.  What B shares
with A is not added again.

add_perpendicular adds alpha times the part of B - C at right angles to A - C, each tensor as one
vector.  That is d_B without its part along d_C, and so follows from inner products of deltas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.element_factors import ElementFactors
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.methods.combinations import Factored, Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range, Scalar
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture

ALPHA: Final = Parameter("alpha", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))
_STRENGTH: Final = np.float32(1.8)
"""Of a difference that is wholly added, in supermerger."""


class _Trained(ElementFactors):
    """A factor of B, and the same one with the other sign of C; weights: alpha of each."""

    code = 7
    likely = 0.75
    """Of independent deltas of one size, roughly."""

    def factors(self, base: Singles, sides: Sequence[Singles], weights: Sequence[float]) -> Singles:
        moved, made = np.abs(sides[0] - base), np.abs(sides[0] - sides[1])
        share = moved / (moved + made)
        # Nothing over nothing, and what is not finite, is not added.
        share = np.where(np.isnan(share), np.float32(0), share)
        factor = np.float32(weights[0]) * _STRENGTH * share
        return np.stack([factor, -factor])


TRAIN_DIFFERENCE: Final = Method(
    name="train_difference",
    summary="base plus the difference of two experts, as if it had been trained there: each "
    "element the more the further the first expert moves it from the base",
    formula="base + 1.8 alpha s (expert_0 - expert_1), s = |d_0| / (|d_0| + |expert_0 - expert_1|)",
    source="supermerger, github.com/hako-mikan/sd-webui-supermerger; as in sd-mecha",
    parameters=(ALPHA,),
    select=Delta,
    combine=Factored(lambda _: _Trained()),
    experts=2,
    weighted=False,
    weight="alpha",
    mind="what is left out of an expert counts as the base's",
    is_ours=True,
)


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
