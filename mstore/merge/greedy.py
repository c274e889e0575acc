"""Which units are worth their bytes: most error removed per byte first, while a budget lasts.

A unit is what one read decides about: a chunk of one expert, or a whole tensor of it.  Each has a
*root*, what it adds to the norm of the error in its chunk while it is left out.

Where the errors of a chunk add up (`additive`), taking a unit of root r from a chunk whose left-out
roots sum to T removes T^2 - (T - r)^2 of the squared error: less, the more of its chunk was
taken before.  Because gains only fall, and a unit that does not fit is given up for good, a larger
budget never leaves a larger error: where two budgets part, the larger one takes a unit that the
smaller cannot pay, and nothing left is worth more per byte.  Elsewhere the gain is r^2.

Pure; ties by tensor, chunk, expert; O(N log N).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Units:
    """Parallel arrays, one element a unit.

    tensor, chunk, expert: int64; chunk -1 is a whole tensor of one expert.  cost: int64, bytes,
    at least 1.  root: float64, not NaN; infinite where it is not known.
    """

    tensor: np.ndarray[Any, np.dtype[np.int64]]
    chunk: np.ndarray[Any, np.dtype[np.int64]]
    expert: np.ndarray[Any, np.dtype[np.int64]]
    cost: np.ndarray[Any, np.dtype[np.int64]]
    root: np.ndarray[Any, np.dtype[np.float64]]

    def __len__(self) -> int:
        return len(self.cost)


def take(units: Units, budget: int | None, *, additive: bool) -> list[int]:
    """The units to take, best first; all of them where `budget` (bytes) is None."""
    if additive:
        return _falling(units, budget)
    with np.errstate(over="ignore"):
        score = units.root * units.root / units.cost
    taken, left = [], math.inf if budget is None else budget
    costs = units.cost.tolist()
    for unit in np.lexsort((units.expert, units.chunk, units.tensor, -score)).tolist():
        if costs[unit] <= left:
            taken.append(unit)
            left -= costs[unit]
    return taken


def _falling(units: Units, budget: int | None) -> list[int]:
    """As `take`, for gains that fall as other units of the same chunk are taken."""
    places = list(zip(units.tensor.tolist(), units.chunk.tolist(), strict=True))
    experts, costs, roots = units.expert.tolist(), units.cost.tolist(), units.root.tolist()
    out: dict[tuple[int, int], list[int]] = defaultdict(list)
    for unit, place in enumerate(places):
        out[place].append(unit)

    def score(unit: int) -> float:
        """Error removed per byte, as things stand."""
        root = roots[unit]
        # Summed anew, not counted down: infinities cancel to NaN, and rounding would depend on
        # the way taken.
        others = math.fsum(roots[other] for other in out[places[unit]] if other != unit)
        return root * (root + 2 * others) / costs[unit] if root else 0.0

    heap = [(-score(unit), *places[unit], experts[unit], unit) for unit in range(len(units))]
    heapq.heapify(heap)
    taken, left = [], math.inf if budget is None else budget
    while heap:
        negative, *_, unit = heap[0]
        if costs[unit] > left:
            heapq.heappop(heap)
            continue
        now = score(unit)
        if now < -negative:
            heapq.heapreplace(heap, (-now, *places[unit], experts[unit], unit))
            continue
        heapq.heappop(heap)
        taken.append(unit)
        left -= costs[unit]
        out[places[unit]].remove(unit)
    return taken
