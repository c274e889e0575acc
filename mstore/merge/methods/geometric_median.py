"""geometric_median: the point with the least sum of distances to the experts, each tensor as one.

It is found by Weiszfeld's steps from the mean on: each is the mean of the experts, each weighed by
1 over its distance from the last point, which counts as `eps` if it is smaller.  All `max_iter`
steps are made: near the end the sum of distances hardly changes while the point still does, so to
stop by it would let rounding decide.  All points are weighted means of the experts, so distances
follow from those of the experts from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range, Scalar
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    own = [list(row[1:]) for row in gram[1:]]
    count = len(own)
    apart = [
        [max(0.0, own[i][i] + own[j][j] - 2.0 * own[i][j]) for j in range(count)]
        for i in range(count)
    ]
    shares = [1.0 / count] * count
    for _ in range(int(parameters["max_iter"])):
        pulls = [1.0 / max(one, parameters["eps"]) for one in _distances(apart, shares)]
        total = math.fsum(pulls)
        shares = [pull / total for pull in pulls]
    return Mixture(1.0, tuple(shares), keeps_base=True)


def _distances(apart: Sequence[Sequence[float]], shares: Sequence[float]) -> list[float]:
    """Return how far each expert is from the mean with these shares, which add up to 1.

    apart: the square of the distance of each two experts.
    """
    means = [math.fsum(s * square for s, square in zip(shares, row, strict=True)) for row in apart]
    half = math.fsum(s * mean for s, mean in zip(shares, means, strict=True)) / 2.0
    return [math.sqrt(max(0.0, mean - half)) for mean in means]


GEOMETRIC_MEDIAN: Final = Method(
    name="geometric_median",
    summary="the point with the least sum of distances to the experts: one that is far from the "
    "others counts little",
    formula="base + sum s_k d_k, s_k proportional to 1 / max(eps, the distance of expert k from "
    "the result), sum s_k = 1",
    source="Weiszfeld 1937; Pillutla et al. 2022, arXiv 1912.13445; as in sd-mecha",
    parameters=(
        Parameter("max_iter", "int", 100, Range(0, 10_000)),
        Parameter("eps", "float", 1e-6, Range(0.0, MAX_SINGLE, above_low=True)),
    ),
    select=Delta,
    combine=Mixed(_mix, pairs=True),
    weighted=False,
    is_ours=True,
)
