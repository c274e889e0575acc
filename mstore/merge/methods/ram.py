"""ram: the mean of the deltas of those experts that move an element."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.averaged import Averaged
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LEAST_MOVE
from mstore.merge.methods.selections.above import Above

METHOD: Final = Method(
    name="ram",
    summary="base plus the mean of the deltas of those experts that move an element",
    formula="base + mean of the d_k above epsilon",
    source="Reinforced Agent Merging 2026, arXiv 2601.13572",
    parameters=(LEAST_MOVE,),
    select=Above,
    combine=Averaged(),
    weighted=False,
)
