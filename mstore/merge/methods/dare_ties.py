"""dare_ties: deltas after dropping elements at random, where they agree on a sign."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.elected import Elected
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, MASK_DENSITY, RESCALE, SEED, normalize
from mstore.merge.methods.selections.drawn import Drawn

METHOD: Final = Method(
    name="dare_ties",
    summary="base plus the randomly dropped deltas that agree on a sign",
    formula="base + lambda * consensus of the w_k s_k",
    source="Yu et al. 2024, arXiv 2311.03099, with the consensus of arXiv 2306.01708",
    parameters=(MASK_DENSITY, LAMBDA, normalize(False), RESCALE, SEED),
    select=Drawn,
    combine=Elected(),
)
