"""ramplus_tl: ram, with more of what one expert alone moves, the more it shares with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mstore.merge.methods.combinations.averaged import Averaged
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import (
    LEAST_MOVE,
    MAX_SINGLE,
    Parameter,
    Range,
    Scalar,
    finite_single,
    single,
)
from mstore.merge.methods.selections.above import Above


def _lone(shared: int, alone: int, parameters: Mapping[str, Scalar]) -> float:
    """Return 1 + r * min(shared / alone, alpha), each step a float32."""
    r, alpha, least = (single(parameters[name]) for name in ("r", "alpha", "epsilon"))
    divisor = max(single(alone), least)
    # Without a divisor there is no element that the factor is for.
    share = single(min(single(shared) / divisor, alpha)) if divisor else alpha
    return 1.0 + finite_single("a factor of ramplus_tl", r * share)


METHOD: Final = Method(
    name="ramplus_tl",
    summary="ram with lone deltas made larger, by how much of a tensor experts share",
    formula="base + mean of the d_k above epsilon; a lone d_k times 1 + r * min(alpha, shared_k / "
    "alone_k)",
    source="Reinforced Agent Merging 2026, arXiv 2601.13572",
    parameters=(
        Parameter("r", "float", 0.1, Range(0.0, MAX_SINGLE)),
        Parameter("alpha", "float", 0.2, Range(0.0, MAX_SINGLE)),
        LEAST_MOVE,
    ),
    select=Above,
    combine=Averaged(_lone),
    weighted=False,
)
