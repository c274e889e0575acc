"""slerp: spherical interpolation between the base and one expert, each tensor as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations.mixed import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Range, Scalar, single
from mstore.merge.methods.selections.whole import Whole
from mstore.store.objects.plan import Mixture

_SMALLEST_NORM: Final = 1e-8
_PARALLEL: Final = 0.9995
"""Vectors with a cosine beyond this, either sign, are interpolated linearly."""


def _mix(gram: Gram, parameters: Mapping[str, Scalar], _: Sequence[float]) -> Mixture:
    t = single(parameters["t"])
    if t == 0:
        return Mixture(1.0, (0.0,), keeps_base=True)
    a, b = (math.sqrt(gram[k][k]) for k in range(2))
    scale = (a if a > _SMALLEST_NORM else 1.0) * (b if b > _SMALLEST_NORM else 1.0)
    cosine = min(1.0, max(-1.0, gram[0][1] / scale))
    if abs(cosine) > _PARALLEL:
        return Mixture(1.0 - t, (t,), keeps_base=True)
    angle = math.acos(cosine)
    side = math.sin(angle)
    return Mixture(
        math.sin((1.0 - t) * angle) / side, (math.sin(t * angle) / side,), keeps_base=False
    )


METHOD: Final = Method(
    name="slerp",
    summary="spherical interpolation between the base and one expert",
    formula="sin((1 - t) a) / sin(a) base + sin(t a) / sin(a) expert, a the angle between them",
    source="Shoemake 1985, doi 10.1145/325334.325242",
    parameters=(Parameter("t", "float", None, Range(0.0, 1.0)),),
    select=Whole,
    combine=Mixed(_mix),
    experts=1,
    weighted=False,
)
