"""arcee_fusion: the base, and the expert's elements that matter more than most."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.important import Important

METHOD: Final = Method(
    name="arcee_fusion",
    summary="base plus the deltas of one expert that are of unusual importance",
    formula="base + d where |d| KL >= median + 1.5 (third - first quartile) of |d| KL, KL the "
    "divergence of the softmax of the expert's row from that of the base's",
    source="Arcee Fusion; mergekit, github.com/arcee-ai/mergekit",
    parameters=(),
    select=Important,
    combine=Sum(),
    experts=1,
    weighted=False,
)
