"""passthrough: one expert as it is, or times a number."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Alone
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range
from mstore.merge.methods.selections.whole import Whole

METHOD: Final = Method(
    name="passthrough",
    summary="one expert, scaled",
    formula="scale * expert",
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(Parameter("scale", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE)),),
    select=Whole,
    combine=Alone(),
    experts=1,
    weighted=False,
    weight="scale",
)
