"""nuslerp: spherical interpolation between two experts, each tensor as one vector.

Between their deltas, or between the experts themselves with around_base=false.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.errors import BadRequest
from mstore.merge.methods.method import Combine, Gram, Method, Select
from mstore.merge.methods.parameters import AROUND_BASE, Scalar
from mstore.objects.plan import Mixture

_SMALLEST_NORM: Final = 1e-7
_SMALLEST_TOTAL: Final = 1e-6
"""Weights whose sum is nearer to zero than this count as equal."""
_COLINEAR: Final = 2.0**-25
"""Vectors with a cosine this near to 1 or -1, which float32 rounds to it, are interpolated
linearly."""


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    first, second = weights
    if not (first and second):
        if not (first or second or parameters["around_base"]):
            raise BadRequest(
                "nuslerp of two experts of weight 0 is nothing", hint="give one of them a weight"
            )
        # The other one alone, at any angle.
        return Mixture(0.0, (float(first != 0), float(second != 0)), keeps_base=False)
    total = first + second
    t = 0.5 if abs(total) < _SMALLEST_TOTAL else second / total
    norms = [max(math.sqrt(gram[k][k]), _SMALLEST_NORM) for k in (1, 2)]
    cosine = min(1.0, max(-1.0, gram[1][2] / (norms[0] * norms[1])))
    if 1.0 - abs(cosine) <= _COLINEAR:
        return Mixture(0.0, (1.0 - t, t), keeps_base=False)
    angle = math.acos(cosine)
    side = math.sin(angle)
    factors = math.sin((1.0 - t) * angle) / side, math.sin(t * angle) / side
    return Mixture(0.0, factors, keeps_base=False)


_WHOLE: Final = "whole tensors are turned, not rows or columns"

METHOD: Final = Method(
    name="nuslerp",
    summary="spherical interpolation between two experts",
    formula=(
        "base + sin((1 - t) a) / sin(a) d_0 + sin(t a) / sin(a) d_1, a the angle between them, "
        "t = w_1 / (w_0 + w_1)"
    ),
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(AROUND_BASE,),
    select=Select.DELTA,
    combine=Combine.SUM,
    mix=_mix,
    pairs=True,
    experts=2,
    refuses=(("nuslerp_row_wise", False, _WHOLE), ("nuslerp_flatten", True, _WHOLE)),
)
