"""nuslerp: spherical interpolation between two experts, each tensor as one vector.

Between their deltas, or between the experts themselves with around_base=false.  With
nuslerp_flatten=false each row is a vector (`arithmetic.turns`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.errors import BadRequest
from mstore.merge.methods.method import Combine, Gram, Method, Rows, Select
from mstore.merge.methods.parameters import AROUND_BASE, Parameter, Scalar, Value
from mstore.objects.plan import Mixture

SMALLEST_NORM: Final = 1e-7
_SMALLEST_TOTAL: Final = 1e-6
"""Weights whose sum is nearer to zero than this count as equal."""
COLINEAR: Final = 2.0**-25
"""Vectors with a cosine this near to 1 or -1, which float32 rounds to it, are interpolated
linearly."""


def share_of_second(first: float, second: float) -> float:
    """Return t, how far from the first expert to the second one these weights are."""
    total = first + second
    return 0.5 if abs(total) < _SMALLEST_TOTAL else second / total


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    first, second = weights
    if not (first and second):
        if not (first or second or parameters["around_base"]):
            raise BadRequest(
                "nuslerp of two experts of weight 0 is nothing", hint="give one of them a weight"
            )
        # The other one alone, at any angle.
        return Mixture(0.0, (float(first != 0), float(second != 0)), keeps_base=False)
    t = share_of_second(first, second)
    norms = [max(math.sqrt(gram[k][k]), SMALLEST_NORM) for k in (1, 2)]
    cosine = min(1.0, max(-1.0, gram[1][2] / (norms[0] * norms[1])))
    if 1.0 - abs(cosine) <= COLINEAR:
        return Mixture(0.0, (1.0 - t, t), keeps_base=False)
    angle = math.acos(cosine)
    side = math.sin(angle)
    factors = math.sin((1.0 - t) * angle) / side, math.sin(t * angle) / side
    return Mixture(0.0, factors, keeps_base=False)


_FLATTEN: Final = Parameter("nuslerp_flatten", "bool", True, of_rows=True)
_ROW_WISE: Final = Parameter("nuslerp_row_wise", "bool", False, of_rows=True)


def _rows(parameters: Mapping[str, Value]) -> Rows | None:
    """Return whether rows are turned, each by its own angle.

    As in mergekit 0.1.5, nuslerp_row_wise has no effect on whole tensors, and else turns columns.
    """
    if parameters.get(_FLATTEN.name, _FLATTEN.default):
        return None
    if parameters.get(_ROW_WISE.name, _ROW_WISE.default):
        raise BadRequest(
            "nuslerp_row_wise turns columns, which needs whole tensors in memory; a merge has no "
            "more than whole rows there",
            where="nuslerp",
            hint="leave out nuslerp_row_wise to turn rows",
        )
    return Rows.SLERP


METHOD: Final = Method(
    name="nuslerp",
    summary="spherical interpolation between two experts",
    formula=(
        "base + sin((1 - t) a) / sin(a) d_0 + sin(t a) / sin(a) d_1, a the angle between them, "
        "t = w_1 / (w_0 + w_1)"
    ),
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(AROUND_BASE, _FLATTEN, _ROW_WISE),
    select=Select.DELTA,
    combine=Combine.SUM,
    mix=_mix,
    pairs=True,
    rows=_rows,
    experts=2,
)
