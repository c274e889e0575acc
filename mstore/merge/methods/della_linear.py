"""della_linear: deltas drawn at random, larger ones more often."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import (
    EPSILON,
    LAMBDA,
    MASK_DENSITY,
    RESCALE_NORM,
    SEED,
    normalize,
)
from mstore.merge.methods.selections.ranked import Ranked

METHOD: Final = Method(
    name="della_linear",
    summary="base plus the deltas drawn by rank",
    formula="base + lambda * sum w_k r_k",
    source="Deep et al. 2024, arXiv 2406.11617",
    parameters=(MASK_DENSITY, EPSILON, LAMBDA, normalize(False), RESCALE_NORM, SEED),
    select=Ranked,
    combine=Sum(),
)
