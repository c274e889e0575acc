"""nearswap: the expert where it is near the base, else the base, moved towards it by t."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.method import Combine, Method, Select
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range

METHOD: Final = Method(
    name="nearswap",
    summary="one expert where it is near the base, else the base moved towards it by t",
    formula="w expert + (1 - w) base, w = min(1, t / max(|d|, 1e-6))",
    source="alchemonaut, huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001; as in mergekit",
    parameters=(Parameter("t", "float", None, Range(0.0, MAX_SINGLE)),),
    select=Select.NEAR,
    combine=Combine.ALONE,
    experts=1,
    weighted=False,
)
