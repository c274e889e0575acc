"""arcee_fusion: the base, and the expert's elements that matter more than most."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.method import Combine, Method, Select

METHOD: Final = Method(
    name="arcee_fusion",
    summary="base plus the deltas of one expert that are of unusual importance",
    formula="base + d where |d| KL >= median + 1.5 (third - first quartile) of |d| KL, KL the "
    "divergence of the softmax of the expert's row from that of the base's",
    source="Arcee Fusion; mergekit, github.com/arcee-ai/mergekit",
    parameters=(),
    select=Select.IMPORTANT,
    combine=Combine.SUM,
    experts=1,
    weighted=False,
)
