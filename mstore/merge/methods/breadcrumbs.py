"""breadcrumbs: deltas without their smallest and without their largest elements."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import GAMMA, LAMBDA, TRIM_DENSITY, normalize
from mstore.merge.methods.selections.band import Band

METHOD: Final = Method(
    name="breadcrumbs",
    summary="base plus the deltas without their outliers and small elements",
    formula="base + lambda * sum w_k band(d_k)",
    source="Davari and Belilovsky 2023, arXiv 2312.06795",
    parameters=(TRIM_DENSITY, GAMMA, LAMBDA, normalize(False)),
    select=Band,
    combine=Sum(),
)
