"""sce: the deltas where experts differ most, fused by their energy where they agree on a sign."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mstore.merge.methods.combinations.fused import Fused
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.varied import SHARE, Varied

_SMALLEST_ENERGY: Final = 1e-6
"""If the mean squares of all experts add up to less, all weigh the same."""


def _weigh(squares: Sequence[float], elements: int) -> tuple[float, ...]:
    means = [one / elements for one in squares]
    total = math.fsum(means)
    if total < _SMALLEST_ENERGY:
        return (1.0 / len(means),) * len(means)
    return tuple(one / total for one in means)


METHOD: Final = Method(
    name="sce",
    summary="base plus the deltas that agree on a sign, weighed by their mean squares",
    formula="base + consensus of the selected d_k, w_k their share of all squares",
    source="Wan et al. 2024, arXiv 2408.07990",
    parameters=(SHARE,),
    select=Varied,
    combine=Fused(_weigh),
    weighted=False,
)
