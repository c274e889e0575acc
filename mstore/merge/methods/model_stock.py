"""model_stock: the base plus a share of the mean delta, the larger the more the deltas agree.

The share of K experts is t = K c / (1 + (K - 1) c), c the mean cosine of two deltas, whole tensors,
or with filter_wise=true each row by itself (`arithmetic.row_factors`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.row_factors import Doubles, RowFactors, at_least, clipped, products
from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Scalar, Value
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture

_SMALLEST_NORMS: Final = 1e-6
"""A product of two norms below this is replaced by it."""
_SINGULAR: Final = 1e-6
"""A denominator nearer to zero than this gives the base."""


def _mix(gram: Gram, _: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    count = len(weights)
    norms = [math.sqrt(row[k]) for k, row in enumerate(gram)]
    cosines = [
        min(1.0, max(-1.0, gram[i][j] / max(norms[i] * norms[j], _SMALLEST_NORMS)))
        for i, j in itertools.combinations(range(1, count + 1), 2)
    ]
    cosine = math.fsum(cosines) / len(cosines)
    denominator = 1.0 + (count - 1) * cosine
    share = 0.0 if abs(denominator) < _SINGULAR else cosine / denominator
    return Mixture(1.0, (share,) * count, keeps_base=True)


_FILTER_WISE: Final = Parameter("filter_wise", "bool", False, is_late=True, of_rows=True)


class _Stock(RowFactors):
    """A share for each row."""

    code = 6

    def factors(self, parts: Singles, weights: Sequence[float]) -> Doubles:
        """Return c / (1 + (K - 1) c) for each of K parts, c the mean cosine of two of them.

        0 where that divides by nothing.
        """
        gram = products(parts)
        count = len(gram)
        norms = np.sqrt(np.stack([gram[k, k] for k in range(count)]))
        total = np.zeros(gram.shape[2])
        pairs = list(itertools.combinations(range(count), 2))
        for i, j in pairs:
            total = total + clipped(gram[i, j] / at_least(norms[i] * norms[j], _SMALLEST_NORMS))
        cosine = total / len(pairs)
        divisor = 1.0 + (count - 1) * cosine
        share = np.where(np.abs(divisor) < _SINGULAR, 0.0, cosine / divisor)
        return np.repeat(share[None], count, axis=0)


def _row_factors(parameters: Mapping[str, Value]) -> RowFactors | None:
    return _Stock() if parameters.get(_FILTER_WISE.name, False) else None


MODEL_STOCK: Final = Method(
    name="model_stock",
    summary="base plus a share of the mean delta, which their angles decide",
    formula="base + t * mean of the d_k, t = K c / (1 + (K - 1) c), c the mean cosine of two d_k",
    source="Jang et al. 2024, arXiv 2403.19522",
    parameters=(_FILTER_WISE,),
    select=Delta,
    combine=Mixed(_mix, pairs=True, row_factors=_row_factors),
    weighted=False,
    least=2,
)
