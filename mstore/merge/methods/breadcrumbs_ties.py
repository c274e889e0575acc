"""breadcrumbs_ties: deltas without smallest and largest elements, where they agree on a sign."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.elected import Elected
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import GAMMA, LAMBDA, TRIM_DENSITY, normalize
from mstore.merge.methods.selections.band import Band

METHOD: Final = Method(
    name="breadcrumbs_ties",
    summary="base plus the deltas without outliers and small elements that agree on a sign",
    formula="base + lambda * consensus of the w_k band(d_k)",
    source="Davari and Belilovsky 2023, arXiv 2312.06795, with the consensus of arXiv 2306.01708",
    parameters=(TRIM_DENSITY, GAMMA, LAMBDA, normalize(False)),
    select=Band,
    combine=Elected(),
)
