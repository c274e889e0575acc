"""even: the base plus the deltas of all experts, each scaled to their mean norm."""

import math

from mstore.merge.methods.combinations.mixed import Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture


def mix(gram, parameters, weights):
    """Return the factors of one tensor from the inner products of the experts' deltas."""
    norms = [math.sqrt(gram[k + 1][k + 1]) if weight else 0.0 for k, weight in enumerate(weights)]
    moved = [norm for norm in norms if norm] or [0.0]
    mean = math.fsum(moved) / len(moved)
    factors = (w * mean / norm if norm else 0.0 for w, norm in zip(weights, norms, strict=True))
    return Mixture(1.0, tuple(factors), keeps_base=True)


METHOD = Method(
    name="even",
    summary="base plus deltas of equal norms",
    formula="base + sum of w_k d_k m / |d_k|, m the mean of the |d_k|",
    source="an example",
    parameters=(),
    select=Delta,
    combine=Mixed(mix),
)
