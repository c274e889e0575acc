"""guarded: the expert's weights, or a reference's in the tensors where the expert left its way.

The reference is a second model of the same base that behaves as the result should, such as an
aligned one.  Its direction in a tensor is that from the base to it; each tensor is judged by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Range, Scalar
from mstore.merge.methods.selection import Whole
from mstore.store.objects.plan import Mixture


def _cosine(gram: Gram) -> float | None:
    expert, reference = math.sqrt(gram[1][1]), math.sqrt(gram[2][2])
    if reference == 0:
        # Where the reference moves nothing there is no direction to leave.
        return None
    return gram[1][2] / (expert * reference) if expert else 0.0


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    cosine = _cosine(gram)
    stays = cosine is None or cosine >= parameters["threshold"]
    share = 1.0 if stays else float(parameters["alpha"])
    return Mixture(0.0, (share, 1.0 - share), keeps_base=True)


GUARDED: Final = Method(
    name="guarded",
    summary="the first expert; a tensor that left the direction of the second, a reference, has "
    "the reference's weights",
    formula="expert_0 where cos(d_0, d_1) >= threshold, else alpha expert_0 + (1 - alpha) "
    "expert_1, the reference; each tensor by itself",
    source="mstore",
    parameters=(
        Parameter("threshold", "float", None, Range(-1.0, 1.0)),
        Parameter("alpha", "float", 0.0, Range(0.0, 1.0)),
    ),
    select=Whole,
    combine=Mixed(_mix, pairs=True, of_deltas=True, cosine=_cosine),
    experts=2,
    weighted=False,
    mind="what is left out is the base's, which is not the reference's",
    is_ours=True,
)
