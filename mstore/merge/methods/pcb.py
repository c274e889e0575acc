"""pcb: the base plus the deltas that win the competition for an element (PCB-Merging).

As in the authors' code (github.com/duguodong7/pcb-merging, `pcb-merging.py`), but each tensor
competes by itself, where theirs ranks all elements of a model together; the largest and smallest
0.01 % of deltas are not clipped; |d_k| is scaled to 1 by the largest, not from the smallest; and an
expert has no part in an element that it does not move.  Their `lams` are the weights of experts;
one of weight 0, which they never have, does not compete.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.balanced import Balanced
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.competing import RATIO, Competing

METHOD: Final = Method(
    name="pcb",
    summary="base plus the deltas with the best scores, shared out by size and agreement",
    formula="base + sum w_k c_k d_k / sum c_k, c_k from 0 to 1 by the score exp(K (d_k / max "
    "|d_k|)^2) tanh(d_k * sum d_j), 0 for all but the best",
    source="Du et al. 2024, arXiv 2410.02396",
    parameters=(RATIO,),
    select=Competing,
    combine=Balanced(),
    mind="what is left out of an expert has no part in the competition: the others win more there",
    is_ours=True,
)
