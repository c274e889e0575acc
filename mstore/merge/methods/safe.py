"""safe: the expert's weights, or the safe model's where the expert left the safe direction.

The safe direction of a tensor is that from the base to the safe model.  Layers are told apart by
tensor: each is its own layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.method import Combine, Gram, Method, Select
from mstore.merge.methods.parameters import Parameter, Range, Scalar
from mstore.objects.plan import Mixture


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    expert, safe = math.sqrt(gram[1][1]), math.sqrt(gram[2][2])
    # Where the safe model moves nothing there is no direction to leave.
    cosine = 1.0 if safe == 0 else gram[1][2] / (expert * safe) if expert else 0.0
    share = 1.0 if cosine >= parameters["threshold"] else float(parameters["alpha"])
    return Mixture(0.0, (share, 1.0 - share), keeps_base=True)


METHOD: Final = Method(
    name="safe",
    summary="the first expert, with the second's weights, a safe model's, where it leaves those",
    formula="expert_0 where cos(d_0, d_1) >= threshold, else alpha expert_0 + (1 - alpha) "
    "expert_1, the safe model; each tensor by itself",
    source="Djuhera et al. 2025, arXiv 2503.17239",
    parameters=(
        Parameter("threshold", "float", None, Range(-1.0, 1.0)),
        Parameter("alpha", "float", 0.0, Range(0.0, 1.0)),
    ),
    select=Select.WHOLE,
    combine=Combine.SUM,
    mix=_mix,
    of_deltas=True,
    pairs=True,
    experts=2,
    weighted=False,
    mind="what is left out is the base's, which is not the safe model's",
)
