"""karcher: the mean direction of experts on the sphere, with the mean of their norms.

The Karcher mean is the point of the sphere with the least sum of squared angles.  It is found by
steps: the mean of the vectors as seen from the last point, and then as far along the sphere.  All
points are sums of the experts, so inner products of experts are all that the steps need.

The steps end where one is shorter than `tol`, or changes nothing, or after `max_iter`.  They also
end once 1,000 steps have not halved the length of a step: rounding, or vectors without one mean,
then decide what becomes of further ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations.mixed import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Range, Scalar
from mstore.merge.methods.selection import Whole
from mstore.store.objects.plan import Mixture

_Point = list[float]
"""A sum of unit vectors, by their factors."""
_LOST: Final = 2.0**-24
"""A sum of unit vectors that is shorter than this is their rounding error; so is an angle to the
opposite point."""
_PATIENCE: Final = 1000
"""So many steps go on without halving their length."""


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
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
    """Return the Karcher mean of unit vectors with these cosines."""
    count = len(cosines)
    mean = [1.0 / count] * count
    size = _size(cosines, mean)
    # Vectors that balance out have no mean: begin at the first.
    balance = size < max(tolerance, _LOST)
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
        if angle == 0 or angle < tolerance or math.pi - angle < max(tolerance, _LOST):
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
    combine=Mixed(_mix, pairs=True),
    weighted=False,
)
