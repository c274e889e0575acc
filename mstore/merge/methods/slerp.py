"""Spherical interpolation, each tensor as one vector: slerp and nuslerp.

slerp goes from the base to one expert; nuslerp from one expert to another, by their deltas, or with
around_base=false by the experts themselves.  With nuslerp_flatten=false each row is a vector
(`arithmetic.row_factors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.row_factors import (
    Doubles,
    RowFactors,
    arc_cosine,
    at_least,
    clipped,
    products,
    sine,
)
from mstore.merge.methods.combinations.mixed import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import AROUND_BASE, Parameter, Range, Scalar, Value, single
from mstore.merge.methods.selection import Delta, Whole
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest

_SMALLEST_OF_BASE: Final = 1e-8
_PARALLEL: Final = 0.9995
"""Vectors with a cosine beyond this, either sign, are interpolated linearly."""


def _mix_base(gram: Gram, parameters: Mapping[str, Scalar], _: Sequence[float]) -> Mixture:
    t = single(parameters["t"])
    if t == 0:
        return Mixture(1.0, (0.0,), keeps_base=True)
    a, b = (math.sqrt(gram[k][k]) for k in range(2))
    scale = (a if a > _SMALLEST_OF_BASE else 1.0) * (b if b > _SMALLEST_OF_BASE else 1.0)
    cosine = min(1.0, max(-1.0, gram[0][1] / scale))
    if abs(cosine) > _PARALLEL:
        return Mixture(1.0 - t, (t,), keeps_base=True)
    angle = math.acos(cosine)
    side = math.sin(angle)
    return Mixture(
        math.sin((1.0 - t) * angle) / side, (math.sin(t * angle) / side,), keeps_base=False
    )


SLERP: Final = Method(
    name="slerp",
    summary="spherical interpolation between the base and one expert",
    formula="sin((1 - t) a) / sin(a) base + sin(t a) / sin(a) expert, a the angle between them",
    source="Shoemake 1985, doi 10.1145/325334.325242",
    parameters=(Parameter("t", "float", None, Range(0.0, 1.0)),),
    select=Whole,
    combine=Mixed(_mix_base),
    experts=1,
    weighted=False,
)


_SMALLEST_NORM: Final = 1e-7
_SMALLEST_TOTAL: Final = 1e-6
"""Weights whose sum is nearer to zero than this count as equal."""
_COLINEAR: Final = 2.0**-25
"""Vectors with a cosine this near to 1 or -1, which float32 rounds to it, are interpolated
linearly."""


def _share_of_second(first: float, second: float) -> float:
    """Return t, how far from the first expert to the second one these weights are."""
    total = first + second
    return 0.5 if abs(total) < _SMALLEST_TOTAL else second / total


def _mix_experts(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    first, second = weights
    if not (first and second):
        if not (first or second or parameters["around_base"]):
            raise BadRequest(
                "nuslerp of two experts of weight 0 is nothing", hint="give one of them a weight"
            )
        # The other one alone, at any angle.
        return Mixture(0.0, (float(first != 0), float(second != 0)), keeps_base=False)
    t = _share_of_second(first, second)
    norms = [max(math.sqrt(gram[k][k]), _SMALLEST_NORM) for k in (1, 2)]
    cosine = min(1.0, max(-1.0, gram[1][2] / (norms[0] * norms[1])))
    if 1.0 - abs(cosine) <= _COLINEAR:
        return Mixture(0.0, (1.0 - t, t), keeps_base=False)
    angle = math.acos(cosine)
    side = math.sin(angle)
    factors = math.sin((1.0 - t) * angle) / side, math.sin(t * angle) / side
    return Mixture(0.0, factors, keeps_base=False)


_FLATTEN: Final = Parameter("nuslerp_flatten", "bool", True, of_rows=True)
_ROW_WISE: Final = Parameter("nuslerp_row_wise", "bool", False, of_rows=True)


class _Slerp(RowFactors):
    """Rows turned each by its own angle."""

    code = 5

    def factors(self, parts: Singles, weights: Sequence[float]) -> Doubles:
        """Return sin((1 - t) a) / sin(a) and sin(t a) / sin(a), a the angle between both parts.

        t is the second weight over the sum.  1 - t and t where the parts have one direction, or
        opposite ones.
        """
        first, second = weights
        if not (first and second):
            # The other one alone, at any angle.
            alone = np.array([first != 0, second != 0], dtype=np.float64)
            return np.repeat(alone[:, None], parts.shape[1], axis=1)
        t = _share_of_second(first, second)
        gram = products(parts)
        one, other = (at_least(np.sqrt(gram[k, k]), _SMALLEST_NORM) for k in range(2))
        cosine = clipped(gram[0, 1] / (one * other))
        straight = 1.0 - np.abs(cosine) <= _COLINEAR
        angle = arc_cosine(np.where(straight, 0.0, cosine))
        side = sine(angle)
        turned = np.stack([sine((1.0 - t) * angle) / side, sine(t * angle) / side])
        return np.where(straight, np.array([[1.0 - t], [t]]), turned)


def _row_factors(parameters: Mapping[str, Value]) -> RowFactors | None:
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
    return _Slerp()


NUSLERP: Final = Method(
    name="nuslerp",
    summary="spherical interpolation between two experts",
    formula=(
        "base + sin((1 - t) a) / sin(a) d_0 + sin(t a) / sin(a) d_1, a the angle between them, "
        "t = w_1 / (w_0 + w_1)"
    ),
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(AROUND_BASE, _FLATTEN, _ROW_WISE),
    select=Delta,
    combine=Mixed(_mix_experts, pairs=True, row_factors=_row_factors),
    experts=2,
)
