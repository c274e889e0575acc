"""consensus: task arithmetic on the elements that several experts need.

Whether an expert needs an element is its TALL mask: whether it moves it further than the sum of all
deltas, without its own, moves it.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA
from mstore.merge.methods.selections.agreed import LEAST, RATIO, Agreed

METHOD: Final = Method(
    name="consensus",
    summary="base plus the weighted deltas of the elements that several experts need",
    formula="base + lambda * sum w_k d_k where at least k experts have |w_j d_j| > "
    "tall_mask_lambda |sum of the other w_i d_i|",
    source="Wang et al. 2024, arXiv 2405.07813",
    parameters=(LEAST, RATIO, LAMBDA),
    select=Agreed,
    combine=Sum(),
    is_ours=True,
)
