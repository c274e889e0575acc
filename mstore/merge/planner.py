"""The planner: which expert blocks are worth their bytes.

A pure function of a survey and a request.  What can be told from block ids and statistics costs
nothing: blocks equal to the base, blocks that two experts share, blocks in which nothing reaches
the trim threshold.  The rest are *units*, taken by error removed per stored byte while the budget
lasts (`mstore.merge.greedy`).

Error of what is left out, for operators that are additive with fixed coefficients c_k: in chunk
i the merge is off by at most sum_k |c_k| ||d_ki|| over the omitted experts k, and chunks are
orthogonal, so

    ||merged - full|| <= sqrt(sum_i (sum_k |c_k| ||d_ki||)^2).

That, over ||base||, is the certified `error_bound`.  It includes what float32 arithmetic may add
on either side.  For operators that elect signs there is no such bound; `error_estimate` takes
the sparsified deltas of different experts as orthogonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstore.errors import BadRequest
from mstore.merge.greedy import Units, take
from mstore.merge.operators import OPERATORS, coefficients, needs_thresholds
from mstore.merge.request import Request
from mstore.merge.survey import ExpertTensor, Survey, SurveyedTensor
from mstore.objects.plan import BELOW, EQUAL, OMITTED, READ, SHARED
from mstore.stats.histogram import tail_squares

Floats = np.ndarray[Any, np.dtype[np.float64]]
States = np.ndarray[Any, np.dtype[np.uint8]]
# Relative error that float32 arithmetic adds to one element, a rounding and an expert.
_FLOAT32_UNIT = 2.0**-24


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of planning.

    states: uint8[experts, chunks] per tensor.  full: nothing was left out for the budget.
    omitted: per tensor and expert the norm of what was left out (-1: not known).
    """

    states: tuple[States, ...]
    omitted: tuple[tuple[float, ...], ...]
    full: bool
    budget: int | None
    full_expert_bytes: int
    planned_expert_bytes: int
    error_bound: float | None
    error_estimate: float | None
    notes: tuple[str, ...]


class Planner:
    """Plans one merge."""

    def __init__(self, survey: Survey, request: Request) -> None:
        self._survey = survey
        self._request = request
        self._operator = OPERATORS[request.method]
        self._trims = needs_thresholds(request.method, request.parameters)
        self._coefficients = _coefficients(request)
        self._states = [self._free(tensor) for tensor in survey.tensors]
        self._roots = [self._root(tensor) for tensor in survey.tensors]
        self._leaders = [
            _leaders(tensor, states)
            for tensor, states in zip(survey.tensors, self._states, strict=True)
        ]

    def select(self) -> Selection:
        """Choose.  Raises BadRequest where budget and max-error cannot both be kept."""
        units = self._units()
        full = int(units.cost.sum())
        budget = self._budget(full)
        if self._request.max_error is not None:
            taken = self._cheapest(units, budget)
        elif budget is None or budget >= full:
            taken = list(range(len(units)))
        else:
            taken = take(units, budget, additive=self._operator.additive)
        chosen = np.zeros(len(units), dtype=bool)
        chosen[taken] = True
        states = self._apply(units, chosen)
        bound, estimate = self._errors(states)
        return Selection(
            states=tuple(states),
            omitted=tuple(self._omitted(number, state) for number, state in enumerate(states)),
            full=len(taken) == len(units),
            budget=budget,
            full_expert_bytes=full,
            planned_expert_bytes=int(units.cost[chosen].sum()),
            error_bound=bound,
            error_estimate=estimate,
            notes=self._notes(bool(chosen.all()), nothing=bool(len(units)) and not chosen.any()),
        )

    # -- what is free ------------------------------------------------------------------------

    def _free(self, tensor: SurveyedTensor) -> States:
        states = np.full((len(tensor.experts), tensor.chunks), READ, dtype=np.uint8)
        for number, expert in enumerate(tensor.experts):
            if self._trims and expert.threshold is not None and expert.rows is not None:
                # `not >=` and not `<`: a NaN is larger than everything, and must be read.
                low = expert.rows["max_abs"] < expert.threshold.value
                nothing = expert.rows["nonzeros"] == 0
                states[number, low | nothing] = BELOW
            elif expert.rows is not None and not self._operator.direct:
                states[number, expert.rows["nonzeros"] == 0] = BELOW
            states[number, expert.equal] = EQUAL
        return states

    def _root(self, tensor: SurveyedTensor) -> list[Floats | None]:
        """|c_k| ||sparsified d_k|| per chunk: exact for additive operators, else an estimate.

        Over all names of the tensor.  Of an expert without weight nothing is lost.
        """
        roots: list[Floats | None] = []
        for coefficient, expert in zip(self._coefficients, tensor.experts, strict=True):
            squares = self._squares(expert)
            if squares is not None and not coefficient:
                squares = np.zeros_like(squares)
            scale = coefficient * math.sqrt(tensor.copies)
            roots.append(None if squares is None else scale * np.sqrt(squares))
        return roots

    def _squares(self, expert: ExpertTensor) -> Floats | None:
        if expert.rows is None:
            return None
        if self._trims and expert.threshold is not None:
            value = expert.threshold.value
            if not math.isfinite(value):
                return np.full(len(expert.rows), math.inf)
            return tail_squares(expert.rows, value)
        squares: Floats = expert.rows["sum_squares"].astype(np.float64)
        # NaN would make every comparison false; such a chunk is read first.
        return np.where(np.isnan(squares), math.inf, squares)

    # -- units -------------------------------------------------------------------------------

    def _units(self) -> Units:
        rows: list[tuple[Any, ...]] = []
        for number, tensor in enumerate(self._survey.tensors):
            leaders, roots = self._leaders[number], self._roots[number]
            totals = _unit_roots(leaders, roots, tensor.chunks)
            for k, expert in enumerate(tensor.experts):
                chunks = np.flatnonzero(leaders[k] == k)
                if not len(chunks):
                    continue
                if totals[k] is None:
                    cost = np.array([expert.cost[chunks].sum()])
                    rows.append((number, np.array([-1]), k, cost, np.array([math.inf])))
                else:
                    rows.append((number, chunks, k, expert.cost[chunks], totals[k][chunks]))
        if not rows:
            none = np.zeros(0, dtype=np.int64)
            return Units(none, none, none, none, np.zeros(0))
        return Units(
            tensor=np.concatenate([np.full(len(r[1]), r[0], dtype=np.int64) for r in rows]),
            chunk=np.concatenate([r[1] for r in rows]),
            expert=np.concatenate([np.full(len(r[1]), r[2], dtype=np.int64) for r in rows]),
            cost=np.concatenate([r[3] for r in rows]),
            root=np.concatenate([r[4] for r in rows]),
        )

    def _budget(self, full: int) -> int | None:
        budget = self._request.budget
        return int(budget * full) if isinstance(budget, float) else budget

    def _cheapest(self, units: Units, budget: int | None) -> list[int]:
        """The shortest prefix of what the budget allows that keeps the error."""
        affordable = take(units, budget, additive=self._operator.additive)
        goal = self._request.max_error
        assert goal is not None

        def error(taken: list[int]) -> float:
            chosen = np.zeros(len(units), dtype=bool)
            chosen[taken] = True
            bound, estimate = self._errors(self._apply(units, chosen))
            number = bound if self._operator.additive else estimate
            return math.inf if number is None else number

        if error(affordable) > goal:
            raise BadRequest(
                f"a budget of {budget} bytes keeps the error only to {error(affordable):.3g}, "
                f"not to {goal:g}",
                hint="raise --budget or --max-error",
            )
        low, high = 0, len(affordable)
        while low < high:
            middle = (low + high) // 2
            if error(affordable[:middle]) <= goal:
                high = middle
            else:
                low = middle + 1
        return affordable[:low]

    def _apply(self, units: Units, chosen: Any) -> list[States]:
        """States after the choice: leaders READ or OMITTED, the others with them."""
        states = [state.copy() for state in self._states]
        for unit in np.flatnonzero(~chosen):
            number, k, chunk = units.tensor[unit], units.expert[unit], units.chunk[unit]
            leaders = self._leaders[number]
            if chunk < 0:
                states[number][leaders == k] = OMITTED
            else:
                states[number][leaders[:, chunk] == k, chunk] = OMITTED
        for state, leaders in zip(states, self._leaders, strict=True):
            own = np.arange(len(leaders))[:, None]
            state[(state == READ) & (leaders != own)] = SHARED
        return states

    # -- errors ------------------------------------------------------------------------------

    def _errors(self, states: list[States]) -> tuple[float | None, float | None]:
        omitted = [state == OMITTED for state in states]
        if not any(mask.any() for mask in omitted):
            return (0.0 if self._operator.additive else None), 0.0
        base = self._survey.base_squares
        worst: list[float] = []
        typical: list[float] = []
        everything = 0.0
        for mask, roots in zip(omitted, self._roots, strict=True):
            # Where nothing is left out the norms are of no interest, known or not.
            if any(root is None and m.any() for m, root in zip(mask, roots, strict=True)):
                return None, None
            known = [np.zeros(mask.shape[1]) if root is None else root for root in roots]
            table = np.array(known)
            left = np.where(mask, table, 0.0)
            worst += (left.sum(axis=0) ** 2).tolist()
            typical += (left**2).sum(axis=0).tolist()
            everything += math.fsum((table**2).ravel().tolist())
        if not base or not all(map(math.isfinite, [*worst, everything])):
            return None, None
        norm = math.sqrt(base)
        estimate = math.sqrt(math.fsum(typical)) / norm
        if not self._operator.additive:
            return None, estimate
        # Both merges round: at most experts + 4 float32 roundings of everything that is summed.
        sums = 1.0 + math.sqrt(len(self._coefficients) * everything) / norm
        rounding = 2 * (len(self._coefficients) + 4) * _FLOAT32_UNIT * sums
        return math.sqrt(math.fsum(worst)) / norm * (1 + 1e-9) + rounding, estimate

    def _omitted(self, number: int, states: States) -> tuple[float, ...]:
        norms = []
        for k, expert in enumerate(self._survey.tensors[number].experts):
            mask = states[k] == OMITTED
            if not mask.any():
                norms.append(0.0)
                continue
            squares = self._squares(expert)
            if squares is None:
                norms.append(-1.0)
            else:
                total = math.fsum(squares[mask].tolist())
                norms.append(math.sqrt(total) if math.isfinite(total) else -1.0)
        return tuple(norms)

    def _notes(self, full: bool, *, nothing: bool) -> tuple[str, ...]:
        notes = []
        if nothing:
            notes.append("no block of an expert fits the budget: the merge is the base")
        if self._trims and not full:
            notes.append(
                "trim thresholds are bin edges of the magnitude histograms: "
                "exactly k are kept only at full budget"
            )
        if self._survey.missing:
            names = ", ".join(self._survey.missing[:3])
            more = len(self._survey.missing) - 3
            notes.append(
                f"no statistics, chosen by whole tensors: {names}"
                + (f" and {more} more" if more > 0 else "")
            )
        return tuple(notes)


def _coefficients(request: Request) -> list[float]:
    """|c_k|, certified for additive operators; the weights' size, roughly, for the others."""
    if OPERATORS[request.method].additive:
        return coefficients(request.method, request.parameters, request.weights)
    total = math.fsum(abs(weight) for weight in request.weights)
    share = total if request.parameters.get("normalize") and total else 1.0
    scale = abs(float(request.parameters.get("lambda", 1.0))) / share
    if OPERATORS[request.method].random and request.parameters.get("rescale"):
        # E[(m d / p)^2] = d^2 / p for a mask m that keeps with probability p.
        scale /= math.sqrt(float(request.parameters["density"]))
    return [abs(weight) * scale for weight in request.weights]


def _leaders(tensor: SurveyedTensor, states: States) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[experts, chunks]: the first expert with these blocks whose state is READ; else -1."""
    leaders = np.full(states.shape, -1, dtype=np.int64)
    for k, expert in enumerate(tensor.experts):
        reads = states[k] == READ
        leaders[k, reads] = k
        for earlier in range(k):
            same = tensor.experts[earlier].twin == expert.twin
            leads = leaders[earlier] == earlier
            leaders[k, reads & leads & same & (leaders[k] == k)] = earlier
    return leaders


def _unit_roots(
    leaders: np.ndarray[Any, np.dtype[np.int64]], roots: list[Floats | None], chunks: int
) -> list[Any]:
    """Per leading expert, the summed roots of all that share its blocks; None where unknown."""
    totals: list[Any] = []
    for k in range(len(roots)):
        total: Floats | None = np.zeros(chunks)
        for member, root in enumerate(roots):
            follows = leaders[member] == k
            if not follows.any():
                continue
            if root is None:
                total = None
                break
            assert total is not None
            total[follows] += root[follows]
        totals.append(total)
    return totals
