"""multislerp: the direction of the weighted mean of unit vectors, with the mean of their norms.

The published formula goes on in the tangent space at that mean: it maps each vector there, adds
them, and goes back.  The sum is the part of the weighted mean at right angles to itself, which is
zero, so nothing is left of these steps but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.combinations.mixed import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import AROUND_BASE, Parameter, Range, Scalar
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, phrase

_LOST: Final = 2.0**-48
"""A square this much smaller than the terms that it is the sum of is their rounding error."""


def _mix(gram: Gram, parameters: Mapping[str, Scalar], given: Sequence[float]) -> Mixture:
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
    if square <= max(eps * eps, _LOST * math.fsum(map(abs, terms))):
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
    combine=Mixed(_mix, pairs=True),
)
