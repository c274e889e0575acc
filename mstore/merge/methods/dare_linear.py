"""dare_linear: the sum of deltas after dropping elements at random and rescaling."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, MASK_DENSITY, RESCALE, SEED, normalize
from mstore.merge.methods.selections.drawn import Drawn

METHOD: Final = Method(
    name="dare_linear",
    summary="base plus the sum of the deltas, with elements dropped at random",
    formula="base + lambda * sum w_k s_k",
    source="Yu et al. 2024, arXiv 2311.03099",
    parameters=(MASK_DENSITY, LAMBDA, normalize(False), RESCALE, SEED),
    select=Drawn,
    combine=Sum(),
)
