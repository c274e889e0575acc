"""nearswap: the expert where it is near the base, else the base, moved towards it by t."""

from __future__ import annotations

from typing import Final

from mstore.merge.methods.combinations.sum import Alone
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.near import REACH, Near

METHOD: Final = Method(
    name="nearswap",
    summary="one expert where it is near the base, else the base moved towards it by t",
    formula="w expert + (1 - w) base, w = min(1, t / max(|d|, 1e-6))",
    source="alchemonaut, huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001; as in mergekit",
    parameters=(REACH,),
    select=Near,
    combine=Alone(),
    experts=1,
    weighted=False,
)
