"""ties: the largest deltas of each expert, where they agree on a sign."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.elected import Elected
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, TRIM_DENSITY, normalize
from mstore.merge.methods.selections.trimmed import Trimmed

METHOD: Final = Method(
    name="ties",
    summary="base plus the trimmed deltas that agree on a sign",
    formula="base + lambda * consensus of the trimmed w_k d_k",
    source="Yadav et al. 2023, arXiv 2306.01708",
    parameters=(TRIM_DENSITY, LAMBDA, normalize(True)),
    select=Trimmed,
    combine=Elected(),
)
