"""model_stock: the base plus a share of the mean delta, the larger the more the deltas agree.

The share of K experts is t = K c / (1 + (K - 1) c), c the mean cosine of two deltas, whole tensors,
or with filter_wise=true each row by itself (`arithmetic.turns`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from mstore.merge.methods.method import Combine, Gram, Method, Rows, Select
from mstore.merge.methods.parameters import Parameter, Scalar, Value
from mstore.objects.plan import Mixture

SMALLEST_NORMS: Final = 1e-6
"""A product of two norms below this is replaced by it."""
SINGULAR: Final = 1e-6
"""A denominator nearer to zero than this gives the base."""


def _mix(gram: Gram, _: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    count = len(weights)
    norms = [math.sqrt(row[k]) for k, row in enumerate(gram)]
    cosines = [
        min(1.0, max(-1.0, gram[i][j] / max(norms[i] * norms[j], SMALLEST_NORMS)))
        for i, j in itertools.combinations(range(1, count + 1), 2)
    ]
    cosine = math.fsum(cosines) / len(cosines)
    denominator = 1.0 + (count - 1) * cosine
    share = 0.0 if abs(denominator) < SINGULAR else cosine / denominator
    return Mixture(1.0, (share,) * count, keeps_base=True)


_FILTER_WISE: Final = Parameter("filter_wise", "bool", False, of_rows=True)


def _rows(parameters: Mapping[str, Value]) -> Rows | None:
    return Rows.STOCK if parameters.get(_FILTER_WISE.name, False) else None


METHOD: Final = Method(
    name="model_stock",
    summary="base plus a share of the mean delta, which their angles decide",
    formula="base + t * mean of the d_k, t = K c / (1 + (K - 1) c), c the mean cosine of two d_k",
    source="Jang et al. 2024, arXiv 2403.19522",
    parameters=(_FILTER_WISE,),
    select=Select.DELTA,
    combine=Combine.SUM,
    mix=_mix,
    pairs=True,
    rows=_rows,
    weighted=False,
    least=2,
)
