"""task_arithmetic: the base plus the weighted sum of the deltas."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, normalize
from mstore.merge.methods.selections.delta import Delta

METHOD: Final = Method(
    name="task_arithmetic",
    summary="base plus the weighted sum of the deltas",
    formula="base + lambda * sum w_k d_k",
    source="Ilharco et al. 2023, arXiv 2212.04089",
    parameters=(LAMBDA, normalize(False)),
    select=Delta,
    combine=Sum(),
)
