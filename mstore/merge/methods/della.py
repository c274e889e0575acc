"""della: deltas drawn at random, larger ones more often, where they agree on a sign."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.elected import Elected
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
    name="della",
    summary="base plus the deltas drawn by rank that agree on a sign",
    formula="base + lambda * consensus of the w_k r_k",
    source="Deep et al. 2024, arXiv 2406.11617",
    parameters=(MASK_DENSITY, EPSILON, LAMBDA, normalize(True), RESCALE_NORM, SEED),
    select=Ranked,
    combine=Elected(),
)
