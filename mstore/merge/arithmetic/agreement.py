"""Agreement: which elements several experts need, by their TALL masks (arXiv 2405.07813), or move.

Float32, in the order of experts; an expert that is not read moves nothing, and needs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstore.merge.arithmetic.masks import Bools, Singles


def agreed(
    sides: Sequence[Singles | None], weights: Sequence[float], ratios: Sequence[float], least: int
) -> Bools | None:
    """Return bool[n]: the elements that at least `least` experts need; None if all are unread.

    sides: deltas of each expert, float32[n], None for one that is not read. An expert needs an
    element if its weighted delta is larger than its ratio times the sum of all the others'.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        moved: list[Singles | None] = [
            None if side is None else side * np.float32(weight)
            for side, weight in zip(sides, weights, strict=True)
        ]
        there = [one for one in moved if one is not None]
        if not there:
            return None
        total = there[0].copy()
        for side in there[1:]:
            total += side
        count = np.zeros(total.size, dtype=np.int32)
        for own, ratio in zip(moved, ratios, strict=True):
            if own is not None:
                count += np.abs(own) > np.float32(ratio) * np.abs(total - own)
    found: Bools = count >= least
    return found


def shared_counts(kept: Sequence[Bools]) -> list[tuple[int, int]]:
    """Return how many elements each expert moves that others move, too, and how many it alone does.

    kept: bool[n] of each expert, those that it moves.
    """
    # There may be thousands of experts.
    numbers = np.sum(kept, axis=0, dtype=np.uint16)
    many, lone = numbers > 1, numbers == 1
    return [(int(np.count_nonzero(own & many)), int(np.count_nonzero(own & lone))) for own in kept]
