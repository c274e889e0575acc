"""linear: the weighted average of the experts themselves."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import normalize
from mstore.merge.methods.selections.whole import Whole

METHOD: Final = Method(
    name="linear",
    summary="weighted average of the experts",
    formula="sum w_k expert_k / sum w_k",
    source="Wortsman et al. 2022, arXiv 2203.05482",
    parameters=(normalize(True),),
    select=Whole,
    combine=Sum(),
)
