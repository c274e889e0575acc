"""consensus: task arithmetic on the elements that several experts need.

Whether an expert needs an element is its TALL mask: whether it moves it further than the sum of all
deltas, without its own, moves it.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.method import Combine, Method, Select
from mstore.merge.methods.parameters import LAMBDA, MAX_SINGLE, Parameter, Range

METHOD: Final = Method(
    name="consensus",
    summary="base plus the weighted deltas of the elements that several experts need",
    formula="base + lambda * sum w_k d_k where at least k experts have |w_j d_j| > "
    "tall_mask_lambda |sum of the other w_i d_i|",
    source="Wang et al. 2024, arXiv 2405.07813",
    parameters=(
        Parameter("k", "int", 2, Range(1, 2**31)),
        Parameter("tall_mask_lambda", "float", 1.0, Range(0.0, MAX_SINGLE), each=True),
        LAMBDA,
    ),
    select=Select.AGREED,
    combine=Combine.SUM,
)
