"""The planner: which expert blocks are worth their bytes.

A pure function of a survey and a request.  What block ids and statistics decide costs nothing:
blocks equal to the base, blocks that two experts share, blocks in which nothing reaches the trim
threshold.  The rest are *units*, ranked (`ranking`) and taken while the budget lasts.

Error of what is left out, for methods that are additive with fixed coefficients c_k: in chunk i the
merge is off by at most sum_k |c_k| ||d_ki|| over the omitted experts k, and chunks are orthogonal,
so

    ||merged - full|| <= sqrt(sum_i (sum_k |c_k| ||d_ki||)^2).

That, over ||base||, is the certified `error_bound`, for any ranking of the units.  It includes what
float32 arithmetic may add on either side (`model.Rounding` has the proof), and does not exist if a
step of it might overflow, or if the base or a difference from it is infinite or NaN anywhere.
Methods that elect signs have no such bound; `error_estimate` assumes that the sparsified deltas of
different experts are orthogonal.

With top_p, chunks are dropped first: those with the smallest error of the kind above, if left out
whole.  The budget is spent only on the remaining chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from mstore.merge.measures.grid import Bools, Floats, Grid, Ints, added
from mstore.merge.methods.model import CostModel, States
from mstore.merge.planning.ranking import Ranking, Units, lottery, seed
from mstore.merge.planning.request import Request
from mstore.merge.planning.survey import Survey, SurveyedTensor, grid_of
from mstore.numeric.codes import ITEMSIZES, LARGEST, can_overflow
from mstore.store.objects.plan import BELOW, DROPPED, OMITTED, READ, SHARED
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, few, phrase
from mstore.terms.sizes import exact_size

# Sums of squares and their roots are off by less than this: 2^-53 per step, in at most 2^28 steps.
_FLOAT64_ERROR = 2.0**-24
# Tensors with numbers that are not finite are damaged weights, so more of them are named.
_NAMED = 20


class ChosenChunks(msgspec.Struct, frozen=True):
    """The outcome of planning.

    states: uint8[experts, chunks] per tensor. full: nothing was left out, neither for the budget
    nor for top_p. budget, expert_budget: bytes, None for no limit. omitted: per tensor and expert
    the norm of what was left out (-1: unknown). full_expert_bytes, planned_expert_bytes: at rest;
    plain_bytes: the same two as plain bytes, which are equal in every store.
    """

    states: tuple[States, ...]
    omitted: tuple[tuple[float, ...], ...]
    full: bool
    budget: int | None
    expert_budget: int | None
    full_expert_bytes: int
    planned_expert_bytes: int
    plain_bytes: tuple[int, int]
    error_bound: float | None
    error_estimate: float | None
    remarks: tuple[str, ...]


class _Part(msgspec.Struct, frozen=True):
    """The tensors of one operation: its model, and their columns of the grid (C of them)."""

    model: CostModel
    tensors: Sequence[SurveyedTensor]
    columns: Any

    def overflow(
        self, dtype: str | None, squares: Mapping[str, float]
    ) -> Iterator[tuple[float, str, int]]:
        """Yield tensors that may overflow the output's type: (-worst, name, elements).

        Uses the norm of the base's tensor, which no element of it exceeds. dtype: of the output,
        None for the base's. squares: of each tensor of the base.
        """
        scale, moved = self.model.reach()
        for tensor, delta in zip(self.tensors, moved.tolist(), strict=True):
            own, out = tensor.record.dtype, tensor.dtype or dtype or tensor.record.dtype
            source = tensor.sources[0] if tensor.sources else tensor.name
            reach = max(1.0, scale) * math.sqrt(squares.get(source, 0.0)) + delta
            if can_overflow(own, out) and not reach <= LARGEST[out]:
                worst = math.inf if math.isnan(reach) else reach
                yield -worst, tensor.name, tensor.elements


def _parts(survey: Survey, grid: Grid, request: Request) -> list[_Part]:
    """Return a part for each operation; a request for no tensor has one without columns."""
    numbers: dict[int, list[int]] = {}
    for number, tensor in enumerate(survey.tensors):
        numbers.setdefault(id(tensor.operation), []).append(number)
    if len(numbers) <= 1:
        operation = survey.tensors[0].operation if survey.tensors else request.operation
        model = operation.method.combine.model(operation, grid)
        return [_Part(model, survey.tensors, slice(None))]
    parts = []
    for members in numbers.values():
        tensors = [survey.tensors[number] for number in members]
        columns = np.flatnonzero(np.isin(grid.tensor, members))
        operation = tensors[0].operation
        model = operation.method.combine.model(operation, grid.part(members))
        parts.append(_Part(model, tensors, columns))
    return parts


class Planner:
    """Plans one merge.  Ranks once, if anything limits it; `select` cuts the ranking at any budget.

    `full_expert_bytes` is the cost of reading all that matters, without budget and top_p.
    """

    def __init__(self, survey: Survey, request: Request) -> None:
        self._survey = survey
        self._request = request
        self._grid = grid_of(survey)
        self._parts = _parts(survey, self._grid, request)
        self._own = np.arange(self._grid.shape[0])[:, None]
        self._applied = self._in_applied_tensors()
        self._free_states = self._joined(np.uint8, lambda part: part.model.free())
        leaders = self._led(self._free_states)
        cost, plain = self._costs(leaders)
        self.full_expert_bytes = int(cost[leaders == self._own].sum())
        self._full_plain = int(plain[leaders == self._own].sum())
        self._squares = self._joined(np.float64, lambda part: part.model.squares)
        self._roots = self._joined(np.float64, lambda part: part.model.roots)
        self._certain = self._joined(np.float64, lambda part: part.model.certain)
        dropped = self._outside_top_p()
        self._free_states[:, dropped] = np.where(
            self._free_states[:, dropped] == READ, DROPPED, self._free_states[:, dropped]
        )
        self._leaders = np.where(dropped, -1, leaders)
        self._cost, self._plain = self._costs(self._leaders)
        self._rounding = self._float32_error()
        self._units = self._list_units()

    @cached_property
    def _ranking(self) -> Ranking:
        is_random = self._request.score == "random"
        return Ranking(self._units, score=self._scores(), nested=is_random)

    @property
    def _has_bound(self) -> bool:
        """Whether every operation is, so that there is a bound."""
        return all(part.model.operation.has_bound for part in self._parts)

    def _joined(self, dtype: Any, own: Callable[[_Part], np.ndarray[Any, Any]]) -> Any:
        """Return [K, C] from the [K, columns] of each part."""
        whole = np.zeros(self._grid.shape, dtype=dtype)
        for part in self._parts:
            whole[:, part.columns] = own(part)
        return whole

    def _row(self, own: Callable[[_Part], Floats]) -> Floats:
        """Return float64[C] from the float64[columns] of each part."""
        whole = np.zeros(self._grid.shape[1])
        for part in self._parts:
            whole[part.columns] = own(part)
        return whole

    def select(self) -> ChosenChunks:
        """Select as requested.  Raises BadRequest if budget and max-error exclude each other."""
        return self.cut(self._bytes(self._request.budget), self._request.max_error)

    def cut(self, budget: int | None, max_error: float | None = None) -> ChosenChunks:
        """Select within `budget` bytes: the best units, or as few as keep `max_error`."""
        cap = self._bytes(self._request.expert_budget)
        chosen = np.ones(len(self._units), dtype=bool)
        # Without a limit all units are taken, in any order.
        if not (budget is cap is max_error is None):
            taken = self._ranking.take(budget, cap)
            if max_error is not None:
                taken = self._shortest(taken, max_error, budget)
            chosen[:] = False
            chosen[taken] = True
        states = self._apply(chosen)
        bound, estimate = self._told(*self._errors(states))
        left_out = (states == OMITTED) | (states == DROPPED)
        return ChosenChunks(
            states=tuple(self._grid.split(self._listed(states))),
            omitted=self._omitted(left_out),
            full=not left_out.any(),
            budget=budget,
            expert_budget=cap,
            full_expert_bytes=self.full_expert_bytes,
            planned_expert_bytes=int(self._units.cost[chosen].sum()),
            plain_bytes=(self._full_plain, int(self._plain[states == READ].sum())),
            error_bound=bound,
            error_estimate=estimate,
            remarks=self._remarks(left_out, chosen),
        )

    def _listed(self, states: States) -> States:
        """Return the states of all that a plan lists: companions come after experts."""
        together = self._grid.together
        asked = self._request.operation.method.companions
        if not asked:
            return states
        read = iter([states] if together is None else together.split(states, self._grid.equal))
        listed, columns = [next(read)], states.shape[1]
        for one in asked:
            count = len(one.places(len(states)))
            listed.append(next(read) if one.is_read else np.full((count, columns), BELOW, np.uint8))
        return np.concatenate(listed)

    def _bytes(self, budget: int | float | None) -> int | None:
        return int(budget * self.full_expert_bytes) if isinstance(budget, float) else budget

    def _itemsizes(self) -> Floats:
        sizes = [[ITEMSIZES[e.record.dtype] for e in t.experts] for t in self._survey.tensors]
        shape = len(sizes), self._grid.shape[0]
        return np.array(sizes, dtype=np.float64).reshape(shape).T[:, self._grid.tensor]

    def _in_applied_tensors(self) -> Bools:
        found = [[e.is_applied for e in t.experts] for t in self._survey.tensors]
        shape = len(found), self._grid.shape[0]
        return np.array(found, dtype=bool).reshape(shape).T

    def _costs(self, leaders: Ints) -> tuple[Ints, Floats]:
        """Return the bytes of each expert's chunks, at rest and plain: [K, C].

        An adapter's tensors are read for all chunks at once: their bytes are at the first one that
        leads.  With companions, what leads pays for all that it brings.
        """
        grid, plain = self._grid, self._grid.elements * self._itemsizes()
        if grid.together is not None:
            return grid.together.costs(grid.equal, grid.cost, plain, grid.elements, leaders)
        if not self._applied.any():
            return grid.cost, plain
        cost = grid.cost.copy()
        for k, tensor in zip(*np.nonzero(self._applied), strict=True):
            start, end = grid.starts[tensor : tensor + 2]
            first = start + np.flatnonzero(leaders[k, start:end] == k)[:1]
            whole = int(cost[k, start:end].sum())
            cost[k, start:end], plain[k, start:end] = 0, 0.0
            cost[k, first] = whole
            plain[k, first] = self._survey.tensors[tensor].experts[k].plain_bytes
        return cost, plain

    # -- what is free ------------------------------------------------------------------------

    def _led(self, states: States) -> Ints:
        """Return int64[K, C]: the first expert with these blocks whose state is READ; else -1."""
        columns = np.arange(states.shape[1])
        first = np.full(states.shape, -1, dtype=np.int64)
        leaders = np.full(states.shape, -1, dtype=np.int64)
        for k, twin in enumerate(self._grid.twin):
            reads = states[k] == READ
            news = reads & (first[twin, columns] < 0)
            first[twin[news], columns[news]] = k
            leaders[k] = np.where(reads, first[twin, columns], -1)
        return leaders

    def _outside_top_p(self) -> Bools:
        """Return bool[C]: chunks that would change but are not among the top_p largest deltas."""
        dropped = np.zeros(self._grid.shape[1], dtype=bool)
        share = self._request.top_p
        if share is None:
            return dropped
        changing = np.flatnonzero((self._free_states == READ).any(axis=0))
        left = np.where(self._free_states == READ, self._roots, 0.0)
        error = self._row(lambda part: part.model.largest(left[:, part.columns]))[changing]
        keep = max(1, int(share * len(changing)))
        dropped[changing[np.argsort(-error, kind="stable")[keep:]]] = True
        return dropped

    # -- units -------------------------------------------------------------------------------

    def _list_units(self) -> Units:
        """List one unit per leader and chunk.

        In tensors with unknown norms, and where an adapter makes them, one per leader.
        """
        grid, leaders = self._grid, self._leaders
        whole = self._in_whole_tensors()
        leads = leaders == self._own
        # Transposed, so that units are ordered by chunk and then by expert.
        chunk, expert = np.nonzero((leads & ~whole[:, grid.tensor]).T)
        roots = self._summed(self._roots)
        large, tensors = np.nonzero(whole)
        costs = [
            int(np.where(leads[k, a:b], self._cost[k, a:b], 0).sum())
            for k, a, b in zip(large, grid.starts[tensors], grid.starts[tensors + 1], strict=True)
        ]
        return Units(
            tensor=np.concatenate([tensors, grid.tensor[chunk]]),
            chunk=np.concatenate(
                [np.full(len(large), -1), chunk - grid.starts[grid.tensor[chunk]]]
            ),
            expert=np.concatenate([large, expert]),
            cost=np.concatenate([np.array(costs, dtype=np.int64), self._cost[expert, chunk]]),
            root=np.concatenate([self._whole_roots(roots, large, tensors), roots[expert, chunk]]),
        )

    def _in_whole_tensors(self) -> Bools:
        """Return bool[K, T]: leaders that read all of a tensor, or nothing of it.

        They read for an expert with unknown norms, or what they read makes all of its chunks.
        """
        grid = self._grid
        whole = np.zeros((grid.shape[0], len(grid.starts) - 1), dtype=bool)
        for leader, known in zip(self._leaders, grid.known, strict=True):
            unknown = np.flatnonzero(~known & (leader >= 0))
            whole[leader[unknown], grid.tensor[unknown]] = True
        for k, tensor in zip(*np.nonzero(self._applied), strict=True):
            start, end = grid.starts[tensor : tensor + 2]
            whole[k, tensor] = bool((self._leaders[k, start:end] == k).any())
        return whole

    def _whole_roots(self, roots: Floats, experts: Ints, tensors: Ints) -> Floats:
        """Return the roots of whole tensors; infinite where norms are not known.

        roots: float64[K, C], of each leader and chunk.
        """
        found = np.full(len(experts), np.inf)
        starts = self._grid.starts
        for unit, (k, tensor) in enumerate(zip(experts, tensors, strict=True)):
            if self._applied[k, tensor]:
                own = roots[k, starts[tensor] : starts[tensor + 1]]
                with np.errstate(over="ignore"):
                    # One after the other: the same bits on every machine.
                    found[unit] = math.sqrt(float(np.cumsum(own * own)[-1]))
        return found

    def _summed(self, roots: Floats) -> Floats:
        """Sum, per leader and chunk, all roots that reading it brings: float64[K, C]."""
        total = np.zeros(self._grid.shape)
        for leader, root in zip(self._leaders, roots, strict=True):
            led = np.flatnonzero(leader >= 0)
            total[leader[led], led] += root[led]
        return total

    def _scores(self) -> Floats | None:
        """Return float64[units] to rank by; None if gains fall as units are taken."""
        units, grid = self._units, self._grid
        if self._request.score == "random":
            seeds = np.array(
                [[seed(*e.pair) for e in t.experts] for t in self._survey.tensors], dtype=np.uint64
            ).reshape(-1, grid.shape[0])
            return lottery(seeds[units.tensor, units.expert], units.chunk)
        if self._has_bound:
            return None
        score = self._request.score
        roots = self._joined(np.float64, lambda part: part.model.ranked(score))
        scored = units.root.copy()
        single = units.chunk >= 0
        places = units.expert[single], (grid.starts[units.tensor] + units.chunk)[single]
        summed = self._summed(roots)
        scored[single] = summed[places]
        scored[~single] = self._whole_roots(summed, units.expert[~single], units.tensor[~single])
        with np.errstate(over="ignore"):
            return scored * scored / units.cost

    def _shortest(self, taken: Ints, goal: float, budget: int | None) -> Ints:
        """Return the shortest prefix of `taken` that keeps the error, found by bisection.

        No shorter prefix does if the error falls with every unit, as a bound does.
        """

        def error(count: int) -> float:
            chosen = np.zeros(len(self._units), dtype=bool)
            chosen[taken[:count]] = True
            bound, estimate = self._errors(self._apply(chosen))
            number = bound if self._has_bound else estimate
            return math.inf if number is None else number

        kept = error(len(taken))
        if kept > goal:
            limit = "what may be read" if budget is None else f"a budget of {exact_size(budget)}"
            raise BadRequest(
                f"{limit} keeps the error only to {kept:.3g}, not to {goal:g}",
                hint=phrase(
                    "raise {budget} or {limit}", budget=Option("budget"), limit=Option("max_error")
                ),
            )
        low, high = 0, len(taken)
        while low < high:
            middle = (low + high) // 2
            if error(middle) <= goal:
                high = middle
            else:
                low = middle + 1
        return taken[:low]

    def _apply(self, chosen: Bools) -> States:
        """Return the states after the choice: leaders READ or OMITTED, the others with them."""
        grid, leaders, units = self._grid, self._leaders, self._units
        left = np.zeros(grid.shape, dtype=bool)
        single = ~chosen & (units.chunk >= 0)
        left[units.expert[single], (grid.starts[units.tensor] + units.chunk)[single]] = True
        for unit in np.flatnonzero(~chosen & (units.chunk < 0)):
            start, end = grid.starts[units.tensor[unit] :][:2]
            left[units.expert[unit], start:end] = True
        states: States = self._free_states.copy()
        led = leaders >= 0
        states[led & left[leaders, np.arange(grid.shape[1])]] = OMITTED
        states[(states == READ) & (leaders != self._own)] = SHARED
        return states

    # -- errors ------------------------------------------------------------------------------

    def _errors(self, states: States) -> tuple[float | None, float | None]:
        """Return bound (additive methods only) and estimate; None if a norm is unknown."""
        left_out = (states == OMITTED) | (states == DROPPED)
        surplus = np.concatenate(
            [
                part.model.surplus(states[:, part.columns], left_out[:, part.columns]).ravel()
                for part in self._parts
            ]
        )
        if not left_out.any() and not surplus.any():
            return (0.0 if self._has_bound else None), 0.0
        base, known = self._survey.base_squares, self._grid.known
        # Where nothing is left out, norms do not matter, known or not.
        if not base or (left_out & ~known).any():
            return None, None
        with np.errstate(over="ignore"):
            certain = np.where(left_out, self._certain, 0.0)
            worst = math.fsum((added(certain) ** 2).tolist())
            likely = self._likely(left_out, (states == READ) | (states == SHARED))
            typical = math.fsum([*likely.tolist(), *surplus.tolist()])
            everything = float(added(np.where(known, self._roots, 0.0) ** 2).sum())
        # If something read is not finite, a distance means nothing.
        if not all(map(math.isfinite, (worst, typical, everything))):
            return None, None
        norm = math.sqrt(base)
        estimate = math.sqrt(typical) / norm
        # For chunks read without statistics, the rounding error is unknown.
        in_dark = ((states == READ) | (states == SHARED)) & ~known & left_out.any(axis=0)
        is_sure = self._has_bound and not in_dark.any() and not surplus.any()
        if not is_sure or not math.isfinite(self._rounding):
            return None, estimate
        bound = (math.sqrt(worst) + self._rounding) / norm * (1 + _FLOAT64_ERROR)
        return math.nextafter(bound, math.inf), estimate

    def _told(
        self, bound: float | None, estimate: float | None
    ) -> tuple[float | None, float | None]:
        """Return what a plan tells of these: nothing beside elements that are not finite.

        A sum of NaN is NaN; where signs are elected, a NaN takes no part.
        """
        if self._survey.base_not_finite or (self._survey.unreliable and self._has_bound):
            return None, None
        return bound, estimate

    def _likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return the mean squared error of leaving these out, per chunk: float64[C]."""
        return self._row(
            lambda part: part.model.likely(left_out[:, part.columns], taken[:, part.columns])
        )

    def _float32_error(self) -> float:
        """Return what float32 may add to the distance of two merges; infinite on overflow."""
        return math.hypot(
            *(part.model.float32_error(self._free_states[:, part.columns]) for part in self._parts)
        )

    @cached_property
    def change(self) -> float | None:
        """Estimate ||full - base|| / ||base||; None if a norm, or what is selected, is unknown.

        Computed like error_estimate, so that leaving out everything is estimated as all of it.
        """
        base = self._survey.base_squares
        operations = [part.model.operation for part in self._parts]
        # A sum that scales the base changes more than the experts' deltas show, and one of what
        # several experts need less.
        if not base or not all(
            one.keeps_base and one.selection.sized_by_norms for one in operations
        ):
            return None
        with np.errstate(over="ignore"):
            if not np.isfinite(added(self._roots**2)).all():
                return None
            everything = (self._free_states == READ) | (self._free_states == DROPPED)
            squares = math.fsum(self._likely(everything, np.zeros_like(everything)).tolist())
        return math.sqrt(squares) / math.sqrt(base) if math.isfinite(squares) else None

    def overflow(self) -> list[tuple[str, int]]:
        """Return tensors, and their elements, that may overflow the output's type, worst first.

        If all statistics exist, a tensor not named here cannot overflow.
        """
        if not self._survey.tensors:
            return []
        found = [
            one
            for part in self._parts
            for one in part.overflow(self._request.dtype, self._survey.squares)
        ]
        return [(name, elements) for _, name, elements in sorted(found)]

    def _omitted(self, left_out: Bools) -> tuple[tuple[float, ...], ...]:
        """Return the norms of what is left out, per tensor and expert; -1 if unknown.

        A companion has no delta.
        """
        squares, starts = self._squares, self._grid.starts
        # A tensor of one chunk needs no sum: all of these together.
        only = starts[:-1][np.diff(starts) == 1]
        of_one = squares[:, only]
        with np.errstate(invalid="ignore"):
            roots = np.where(np.isfinite(of_one), np.sqrt(of_one), -1.0)
        alone = map(tuple, np.where(left_out[:, only], roots, 0.0).T.tolist())
        of_companions = (0.0,) * self._survey.listed
        return tuple(
            next(alone) + of_companions
            if end - start == 1
            else tuple(
                _norm(own[mask]) if mask.any() else 0.0
                for own, mask in zip(squares[:, start:end], left_out[:, start:end], strict=True)
            )
            + of_companions
            for start, end in itertools.pairwise(starts.tolist())
        )

    # -- remarks -------------------------------------------------------------------------------

    def _remarks(self, left_out: Bools, chosen: Bools) -> tuple[str, ...]:
        survey, request = self._survey, self._request
        remarks = []
        if len(chosen) and not chosen.any():
            remarks.append("no block of an expert fits the budget: the merge is the base")
        if not survey.tensors and (request.only or request.skip):
            remarks.append("no tensor that an expert changed is left: the merge is the base")
        causes: dict[str, list[str]] = {}
        for name, cause in survey.missing:
            causes.setdefault(cause, []).append(name)
        for cause, names in causes.items():
            remarks.append(f"{cause}, chosen by whole tensors: {few(names)}")
        remarks += [
            f"no tensor follows the rule for {one}: earlier rules or patterns take all it names"
            for one in survey.idle_rules
        ]
        if survey.base_not_finite:
            remarks.append(
                "infinite or NaN elements in the base, so errors have nothing to be relative to: "
                + few(survey.base_not_finite, _NAMED)
            )
        if request.top_p is not None and request.dtype is not None:
            remarks.append(
                "with an output dtype of its own every block is written; those outside the top-p "
                "share are the base's, converted"
            )
        return tuple(remarks)


def _norm(squares: Floats) -> float:
    total = math.fsum(squares.tolist())
    return math.sqrt(total) if math.isfinite(total) else -1.0
