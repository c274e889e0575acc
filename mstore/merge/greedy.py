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
from dataclasses import dataclass
from itertools import pairwise
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
    """As `take`, for gains that fall as other units of the same chunk are taken.

    The heap holds the best unit of each chunk; what is done in one chunk changes no other.
    """
    order = np.lexsort((units.expert, units.chunk, units.tensor))
    costs, roots = units.cost[order].tolist(), units.root[order].tolist()
    places = np.stack([units.tensor[order], units.chunk[order]])
    starts = np.flatnonzero((places[:, 1:] != places[:, :-1]).any(axis=0)) + 1
    ends = [*starts.tolist(), len(order)] if len(order) else []
    chunks = [_Chunk(roots, costs, start, end) for start, end in pairwise([0, *ends])]
    heap = [(*chunk.best(), number) for number, chunk in enumerate(chunks)]
    heapq.heapify(heap)
    taken: list[int] = []
    left = math.inf if budget is None else budget
    smallest = min(costs, default=0)
    while heap and left >= smallest:
        _, place, number = heap[0]
        fits = costs[place] <= left
        if fits:
            taken.append(int(order[place]))
            left -= costs[place]
        if chunks[number].settle(place, taken=fits):
            heapq.heapreplace(heap, (*chunks[number].best(), number))
        else:
            heapq.heappop(heap)
    return taken


class _Chunk:
    """The units of one chunk, by place in the order of ties; `open` ones may still be taken."""

    __slots__ = ("_costs", "_open", "_out", "_roots")

    def __init__(self, roots: list[float], costs: list[int], start: int, end: int) -> None:
        self._roots = roots
        self._costs = costs
        self._open = list(range(start, end))
        self._out = list(self._open)

    def best(self) -> tuple[float, int]:
        """(minus the error removed per byte, place) of the best open unit."""
        # Summed anew, not counted down: infinities would cancel, and the rounding of a running
        # sum depends on the way taken.
        total = math.fsum([self._roots[place] for place in self._out])
        return min((-self._gain(place, total) / self._costs[place], place) for place in self._open)

    def _gain(self, place: int, total: float) -> float:
        root = self._roots[place]
        if root == 0 or math.isinf(root):
            return root
        return root * (2 * total - root)

    def settle(self, place: int, *, taken: bool) -> bool:
        """A unit is taken, or given up for good; whether any other is open."""
        self._open.remove(place)
        if taken:
            self._out.remove(place)
        return bool(self._open)
