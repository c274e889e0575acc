"""Methods on the sphere, each tensor as one vector: slerp, nuslerp, multislerp and karcher.

slerp goes from the base to one expert; nuslerp from one expert to another, by their deltas, or with
around_base=false by the experts themselves.  With nuslerp_flatten=false each row is a vector
(`arithmetic.row_factors`).

multislerp makes the direction of the weighted mean of unit vectors, with the mean of their norms.
The published formula goes on in the tangent space at that mean: it maps each vector there, adds
them, and goes back.  The sum is the part of the weighted mean at right angles to itself, which is
zero, so nothing is left of these steps but rounding.

karcher makes the mean direction of experts on the sphere, with the mean of their norms.  The
Karcher mean is the point of the sphere with the least sum of squared angles.  It is found by steps:
the mean of the vectors as seen from the last point, and then as far along the sphere.  All points
are sums of the experts, so inner products of experts are all that the steps need.

The steps end where one is shorter than `tol`, or changes nothing, or after `max_iter`.  They also
end once 1,000 steps have not halved the length of a step: rounding, or vectors without one mean,
then decide what becomes of further ones.
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
from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import AROUND_BASE, Parameter, Range, Scalar, Value, single
from mstore.merge.methods.selection import Delta, Whole
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, phrase

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


_FLATTEN: Final = Parameter("nuslerp_flatten", "bool", True, is_late=True, of_rows=True)
_ROW_WISE: Final = Parameter("nuslerp_row_wise", "bool", False, is_late=True, of_rows=True)


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


_LOST_SQUARE: Final = 2.0**-48
"""A square this much smaller than the terms that it is the sum of is their rounding error."""


def _mix_directions(
    gram: Gram, parameters: Mapping[str, Scalar], given: Sequence[float]
) -> Mixture:
    if len(given) == 1:
        return Mixture(0.0, (float(given[0] != 0),), keeps_base=False)
    # An expert of weight 0 has no part in any sum, and no norm.
    taken = [k for k, weight in enumerate(given) if weight]
    norms = {k: math.sqrt(gram[k + 1][k + 1]) for k in taken}
    total = math.fsum(given) if parameters["normalize_weights"] else 1.0
    if total == 0:
        raise BadRequest(
            "the weights of multislerp add up to zero, and normalize_weights divides by their sum",
            hint=phrase(
                "change a weight, or {plain}",
                plain=Option("parameters", {"normalize_weights": False}),
            ),
        )
    weights = {k: given[k] / total for k in taken}
    eps = float(parameters["eps"])
    # A vector of zeros has no direction, and no part in the sum.
    shares = {k: weights[k] / (norms[k] + eps) if norms[k] else 0.0 for k in taken}
    terms = [shares[i] * shares[j] * gram[i + 1][j + 1] for i in taken for j in taken]
    square = math.fsum(terms)
    if square <= max(eps * eps, _LOST_SQUARE * math.fsum(map(abs, terms))):
        factors = _balanced(weights, norms)
    else:
        size = math.fsum(weights[k] * norms[k] for k in taken) / math.sqrt(square)
        factors = {k: shares[k] * size for k in taken}
    return Mixture(0.0, tuple(factors.get(k, 0.0) for k in range(len(given))), keeps_base=False)


def _balanced(weights: Mapping[int, float], norms: Mapping[int, float]) -> Mapping[int, float]:
    """Return the factors of vectors whose mean has no direction: two are interpolated linearly."""
    if len(weights) <= 2 or not any(norms.values()):
        return weights
    raise BadRequest(
        "the weighted directions of the experts balance out, so their mean has none",
        hint="change a weight",
    )


MULTISLERP: Final = Method(
    name="multislerp",
    summary="the mean direction of experts, with the mean of their norms",
    formula=(
        "base + (sum w_k norm(d_k)) m / norm(m), m = sum w_k d_k / norm(d_k), the w_k divided by "
        "their sum"
    ),
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(
        AROUND_BASE,
        Parameter("normalize_weights", "bool", True),
        Parameter("eps", "float", 1e-8, Range(0.0, 1.0)),
    ),
    select=Delta,
    combine=Mixed(_mix_directions, pairs=True),
)


_Point = list[float]
"""A sum of unit vectors, by their factors."""
_LOST_ANGLE: Final = 2.0**-24
"""A sum of unit vectors that is shorter than this is their rounding error; so is an angle to the
opposite point."""
_PATIENCE: Final = 1000
"""So many steps go on without halving their length."""


def _mix_on_sphere(
    gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]
) -> Mixture:
    count = len(weights)
    if count == 1:
        return Mixture(0.0, (1.0,), keeps_base=True)
    tolerance = float(parameters["tol"])
    norms = [math.sqrt(gram[k + 1][k + 1]) for k in range(count)]
    valid = [k for k in range(count) if norms[k] > tolerance]
    factors = [0.0] * count
    if valid:
        cosines = [[gram[i + 1][j + 1] / (norms[i] * norms[j]) for j in valid] for i in valid]
        mean = _mean(cosines, int(parameters["max_iter"]), tolerance)
        size = math.fsum(norms) / count
        for k, factor in zip(valid, mean, strict=True):
            factors[k] = size * factor / norms[k]
    return Mixture(0.0, tuple(factors), keeps_base=False)


def _mean(cosines: Sequence[Sequence[float]], steps: int, tolerance: float) -> _Point:
    count = len(cosines)
    mean = [1.0 / count] * count
    size = _size(cosines, mean)
    # Vectors that balance out have no mean: begin at the first.
    balance = size < max(tolerance, _LOST_ANGLE)
    mean = [1.0] + [0.0] * (count - 1) if balance else [one / size for one in mean]
    shortest, since = math.inf, 0
    for step in range(steps):
        tangent = _tangent(cosines, mean, tolerance)
        length = _size(cosines, tangent)
        if length == 0 or length < tolerance:
            break
        if length < shortest / 2:
            shortest, since = length, step
        elif step - since >= _PATIENCE:
            break
        turn, go = math.cos(length), math.sin(length) / length
        last = mean
        mean = [turn * own + go * along for own, along in zip(mean, tangent, strict=True)]
        size = _size(cosines, mean)
        if size > tolerance:
            mean = [one / size for one in mean]
        if mean == last:
            break
    return mean


def _tangent(cosines: Sequence[Sequence[float]], mean: _Point, tolerance: float) -> _Point:
    """Return the mean of the ways from `mean` to each vector, along the sphere."""
    count = len(cosines)
    tangent = [0.0] * count
    for k, row in enumerate(cosines):
        cosine = math.fsum(a * b for a, b in zip(row, mean, strict=True))
        angle = math.acos(min(1.0, max(-1.0, cosine)))
        # All ways to the opposite point are equally long: none is taken.
        if angle == 0 or angle < tolerance or math.pi - angle < max(tolerance, _LOST_ANGLE):
            continue
        share = angle / math.sin(angle) / count
        tangent[k] += share
        for j in range(count):
            tangent[j] -= share * cosine * mean[j]
    return tangent


def _size(cosines: Sequence[Sequence[float]], point: _Point) -> float:
    square = math.fsum(
        a * b * cosine
        for a, row in zip(point, cosines, strict=True)
        for b, cosine in zip(point, row, strict=True)
    )
    return math.sqrt(max(0.0, square))


KARCHER: Final = Method(
    name="karcher",
    summary="the mean of experts on the sphere, with the mean of their norms",
    formula="mean of the norms * Karcher mean of the directions",
    source="Karcher 1977, doi 10.1002/cpa.3160300502; as in arXiv 2603.04972",
    parameters=(
        Parameter("max_iter", "int", 10, Range(0, 2**63 - 1)),
        Parameter("tol", "float", 1e-5, Range(0.0, 1.0)),
    ),
    select=Whole,
    combine=Mixed(_mix_on_sphere, pairs=True),
    weighted=False,
)
