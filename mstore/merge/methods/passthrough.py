"""passthrough: one expert as it is, or times a number."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.method import Combine, Method, Select
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range

METHOD: Final = Method(
    name="passthrough",
    summary="one expert, scaled",
    formula="scale * expert",
    source="mergekit, github.com/arcee-ai/mergekit",
    parameters=(Parameter("scale", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE)),),
    select=Select.WHOLE,
    combine=Combine.ALONE,
    experts=1,
    weighted=False,
    weight="scale",
)
