"""lines: the base plus the weighted sum of the deltas, scaled by depth (LiNeS).

As in the authors' code (github.com/wang-kee/LiNeS), alpha is the factor of the first layer and of
every tensor that is in no layer, heads and last norms among them, and alpha + beta that of the last
layer.  Theirs looks for `.l.` in names and is told how many layers there are.  Here each stack of
layers is scaled by itself, over as many as it has: an encoder and a decoder, and each model of a
pipeline.  Theirs takes alpha from the norms of a merge (1 / K for a sum of K experts) and tries
values of beta, or beta = 1 - alpha for one expert; here both are given.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.layered import ALPHA, BETA, Layered
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.delta import Delta

METHOD: Final = Method(
    name="lines",
    summary="base plus the weighted sum of the deltas, scaled by depth",
    formula="base + (alpha + beta * l / (L - 1)) * sum w_k d_k in layer l of L; base + alpha * sum "
    "w_k d_k in no layer",
    source="Wang et al. 2024, arXiv 2410.17146",
    parameters=(ALPHA, BETA),
    select=Delta,
    combine=Layered(),
    is_ours=True,
)
