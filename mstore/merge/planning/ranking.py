"""Which units are worth their bytes: how they are ranked, and which are taken within a budget.

    norm      the part of the output's norm that reading a unit brings, per stored byte
    trimmed   as `norm`, of the part of the delta above the trim threshold
    conflict  as `trimmed` (or `norm`), less where the unit points against the heavier consensus,
              and more where it shares the divisor of heavier ones (`normalize`)
    random    a hash of the ids: the baseline that any other score has to beat

A score only orders what is read.  The certified bound is computed from what is left out, for any
order.

A unit is what one read decides about: a chunk of one expert, or a whole tensor of it.  Each has a
*root*, what it adds to the norm of the error in its chunk while it is left out.

If the errors of a chunk add up (`falling`), taking a unit of root r from a chunk whose left-out
roots sum to T removes T^2 - (T - r)^2 = r (2T - r) of the squared error: the more of its chunk was
taken before, the less.  Otherwise a unit has a fixed score, whatever else is taken.

**The order without a limit.** Gains only fall: r (2T - r) grows with T, and T only shrinks.  So
within a chunk, each unit gains no more per byte at its turn than the one before it did, and taking
units in one chunk changes no gain in another.  Hence each chunk's own sequence, computed chunk by
chunk, holds its units by falling gain, and one sort of all units by that gain is the greedy order
of the whole.  A running minimum keeps the sequence falling where float64 rounds the other way, by
an ulp; nothing else differs from a heap that holds the best unit of each chunk.

**A limit.** A unit that does not fit when its turn comes is given up for good.  Up to the first
such unit the order is as above.  There, all units that are too large for the remaining budget are
given up at once, since the budget only shrinks.  The rest is sorted again, because the given-up
roots now stay in T for ever.  This repeats until no remaining unit fits.  A heap would take exactly
the same units.

**A larger budget never leaves a larger error** (`falling`).  Let two budgets take the same units S
until the larger takes a unit u that the smaller cannot pay.  What the smaller takes from there on,
A, costs less than u does, and after S no unit of A gains more per byte than u (u was the best of
those that fit the larger budget, and all of A fit it).  Gains only fall, so gain(A) <= gain per
byte(u) cost(A) < gain(u).  A cap on each expert changes nothing in this, as long as both budgets
have the same one.

**An order that is not by gains** (`nested`; a lottery) has no such property: a larger budget may
take a large unit early that keeps many small ones out.  So there the first unit that does not fit
the budget ends the selection.  A smaller budget then takes a prefix of what a larger one takes, and
what is left out only shrinks.

Pure; ties by tensor, chunk, expert; only operations that IEEE 754 rounds correctly, in a fixed
order, so that every machine makes the same plan.  O(N (K + log N)) for N units of K experts: N log
N for the sort, N K for the sums of the chunks.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from mstore.merge.methods.method import Operation
from mstore.store.objects.plan import SCORES, Score
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def score_of(operation: Operation, asked: str | None) -> Score:
    """Return the score to rank by; `asked` None means the method's default.  Raises BadRequest."""
    if asked is None:
        return operation.selection.score
    score = next((name for name in SCORES if name == asked), None)
    if score is None:
        raise BadRequest(f"unknown score {asked!r}; scores: {', '.join(SCORES)}")
    why = operation.unscored(score)
    if why is not None:
        raise BadRequest(f"{operation.method.name} {why}", hint=Option("score", "norm"))
    return score


def seed(base: TensorId, expert: TensorId) -> int:
    """Return the 64-bit seed of `lottery` for the chunks of one tensor of one expert."""
    return int.from_bytes(base[:8], "big") ^ int.from_bytes(expert[8:16], "big")


def lottery(seeds: np.ndarray[Any, np.dtype[np.uint64]], chunk: Ints) -> Floats:
    """Return a number in [0, 1) per unit, from its seed and its chunk (-1: the whole tensor).

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = seeds + (chunk + 2).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    drawn: Floats = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


class Units(msgspec.Struct, frozen=True):
    """Parallel arrays, one element per unit.

    tensor, chunk, expert: int64; chunk -1 is a whole tensor of one expert. cost: int64, bytes, at
    least 1. root: float64, not NaN; infinite if unknown.
    """

    tensor: Ints
    chunk: Ints
    expert: Ints
    cost: Ints
    root: Floats

    def __len__(self) -> int:
        return len(self.cost)


class Ranking:
    """Units in order of error removed per byte.

    `order` is that of a merge without a limit.  It is computed once; `take` cuts it anywhere.
    """

    def __init__(self, units: Units, *, score: Floats | None = None, nested: bool = False) -> None:
        """Rank by `score` (float64, highest first, not NaN), or if None by falling gains.

        nested: take no unit after one that does not fit the budget.
        """
        self._units = units
        self._nested = nested
        self._score = score
        # Sort units by position, so that a stable sort breaks ties by tensor, chunk and expert.
        places = np.lexsort((units.expert, units.chunk, units.tensor))
        changes = np.ones(len(units), dtype=bool)
        for key in (units.tensor[places], units.chunk[places]):
            if len(units) > 1:
                changes[1:] &= key[1:] == key[:-1]
        changes[1:] = ~changes[1:]
        self._place = np.empty(len(units), dtype=np.int64)
        self._place[places] = np.arange(len(units))
        self._chunk = np.empty(len(units), dtype=np.int64)
        self._chunk[places] = np.cumsum(changes) - 1
        self._given_up = np.zeros(int(changes.sum()), dtype=np.float64)
        self.order = self._ordered(places, self._given_up)

    def take(self, budget: int | None, expert_budget: int | None = None) -> Ints:
        """Return the units to take, best first, within `budget` bytes and a limit per expert."""
        cost, expert = self._units.cost, self._units.expert
        whole = int(cost.sum())
        left = whole if budget is None else min(budget, whole)
        own = np.full(
            int(expert.max(initial=0)) + 1, whole if expert_budget is None else expert_budget
        )
        given_up = self._given_up.copy()
        order = self.order
        taken = []
        while len(order):
            fits = _fitting(cost[order], left, expert[order], own, capped=expert_budget is not None)
            now, later = order[:fits], order[fits:]
            taken.append(now)
            left -= int(cost[now].sum())
            np.subtract.at(own, expert[now], cost[now])
            if self._nested:
                if len(later) and cost[later[0]] > left:
                    break
                fit = cost[later] <= own[expert[later]]
            else:
                fit = (cost[later] <= left) & (cost[later] <= own[expert[later]])
            rest = later[fit]
            if len(rest) and self._score is None:
                gone = later[~fit]
                gone = gone[np.argsort(self._place[gone])]
                np.add.at(given_up, self._chunk[gone], self._units.root[gone])
                rest = self._ordered(rest[np.argsort(self._place[rest])], given_up)
            order = rest
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def _ordered(self, units: Ints, given_up: Floats) -> Ints:
        if self._score is not None:
            return units[np.argsort(-self._score[units], kind="stable")]
        chunk = self._chunk[units]
        starts = np.flatnonzero(np.diff(chunk, prepend=-1))
        column = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(units)))
        row = np.arange(len(units)) - starts[column]
        turn, gain = _sequences(
            self._units.root[units], self._units.cost[units], row, column, given_up[chunk[starts]]
        )
        return units[np.lexsort((turn, column, -gain))]


def _fitting(cost: Ints, left: int, expert: Ints, own: Ints, *, capped: bool) -> int:
    fits = int(np.searchsorted(np.cumsum(cost), left, side="right"))
    if not capped:
        return fits
    for k, room in enumerate(own.tolist()):
        mine = np.flatnonzero(expert[:fits] == k)
        fitting = int(np.searchsorted(np.cumsum(cost[mine]), room, side="right"))
        if fitting < len(mine):
            fits = int(mine[fitting])
    return fits


def _sequences(
    root: Floats, cost: Ints, row: Ints, column: Ints, given_up: Floats
) -> tuple[Ints, Floats]:
    """Return each unit's turn within its chunk (a column), and its gain per byte at that turn.

    given_up: float64[columns], the roots that stay out of each chunk.
    """
    width, height = len(given_up), int(row.max(initial=-1)) + 1
    roots = np.zeros((height, width))
    costs = np.ones((height, width))
    number = np.zeros((height, width), dtype=np.int64)
    live = np.zeros((height, width), dtype=bool)
    roots[row, column], costs[row, column] = root, cost
    number[row, column], live[row, column] = np.arange(len(root)), True
    fixed = (roots == 0) | np.isinf(roots)
    turn = np.zeros(len(root), dtype=np.int64)
    gain = np.zeros(len(root))
    ceiling = np.full(width, np.inf)
    columns = np.arange(width)
    for step in range(height):
        total = given_up.copy()
        # Sum anew in this order instead of subtracting: infinities would cancel, and the rounding
        # of a running sum depends on the path.
        for one, out in zip(roots, live, strict=True):
            total += np.where(out, one, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            now = np.where(fixed, roots, roots * (2 * total - roots)) / costs
        now[~live] = -1.0
        best = now.argmax(axis=0)
        there = live[best, columns]
        ceiling = np.minimum(ceiling, now[best, columns])
        chosen = number[best, columns][there]
        turn[chosen], gain[chosen] = step, ceiling[there]
        live[best, columns] = False
    return turn, gain
