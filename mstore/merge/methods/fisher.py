"""fisher: each element is the average of the experts', weighted by their Fisher information.

The Fisher of an expert is a checkpoint of its own: for each of the model's tensors one of the same
name and shape, the diagonal of the expert's Fisher information matrix.
"""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.informed import FLOOR, Informed
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.delta import Delta

METHOD: Final = Method(
    name="fisher",
    summary="average of the experts, each element weighted by the expert's Fisher information",
    formula="sum w_k F_k expert_k / sum w_k F_k, F_k >= floor the expert's diagonal Fisher; the "
    "base where that is 0 / 0",
    source="Matena and Raffel 2022, arXiv 2111.09832",
    parameters=(FLOOR,),
    select=Delta,
    combine=Informed(),
    mind="what is left out of an expert has no part in the average: the others' elements weigh "
    "more there",
    is_ours=True,
)
