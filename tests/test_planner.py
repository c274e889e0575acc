"""The planner as the pure function that it is: surveys made by hand, no store, no tensor data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mstore import MergeRequest
from mstore.merge.methods.registry import operation
from mstore.merge.planning.planner import ChosenChunks, Planner
from mstore.merge.planning.ranking import Ranking, Units
from mstore.merge.planning.request import Request, resolve
from mstore.merge.planning.survey import ExpertTensor, Survey, SurveyedTensor
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.histogram import Threshold
from mstore.store.models import Input
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest
from mstore.terms.ids import ManifestId, SnapshotId, TensorId
from mstore.terms.sizes import Budget

CHUNK_ELEMENTS = 1024
SNAPSHOT = SnapshotId.of(b"s")
MANIFEST = ManifestId.of(b"m")


def expert(
    norms: Sequence[float],
    costs: Sequence[int],
    *,
    equal: Sequence[int] = (),
    twins: dict[int, int] | None = None,
    position: int = 0,
    known: bool = True,
    threshold: float | None = None,
) -> ExpertTensor:
    """One expert's side: the norm of the delta and the cost of each chunk.

    `equal` are the chunks that are the base's, `twins` those that are an earlier expert's.
    """
    rows = np.zeros(len(norms), dtype=CHUNK)
    rows["sum_squares"] = np.square(np.array(norms, dtype=np.float64))
    rows["sum_abs"] = norms
    rows["max_abs"] = norms
    rows["nonzeros"] = np.array(norms) != 0
    same = np.zeros(len(norms), dtype=bool)
    same[list(equal)] = True
    twin = np.full(len(norms), position)
    for chunk, earlier in (twins or {}).items():
        twin[chunk] = earlier
    ids = (TensorId.of(b"base"), TensorId.of(bytes([position])))
    record = Tensor("F32", (CHUNK_ELEMENTS * len(norms),), 4 * CHUNK_ELEMENTS * len(norms), b"")
    cuts = () if threshold is None else (Threshold(threshold, 0, 1, 1, 0),)
    return ExpertTensor(ids, record, same, twin, np.array(costs), rows if known else None, cuts)


def tensor(name: str, *experts: ExpertTensor, copies: int = 1) -> SurveyedTensor:
    record = experts[0].record
    elements = record.shape[0]
    # `ready` sets the operation.
    own = operation("linear", {}, [1.0] * len(experts))
    return SurveyedTensor(name, record, elements, CHUNK_ELEMENTS, experts, copies, own)


def survey(*tensors: SurveyedTensor, base_squares: float | None = 1.0) -> Survey:
    count = len(tensors[0].experts)
    return Survey(MANIFEST, (MANIFEST,) * count, 4096, tensors, base_squares, (), (), ())


def ask(count: int, method: str = "task_arithmetic", **options: Any) -> Request:
    weights = options.pop("weights", (1.0,) * count)
    experts = [(f"e{k}", weight) for k, weight in enumerate(weights)]
    for option in ("budget", "expert_budget"):
        if options.get(option) is not None:
            # Bytes or a share, also where they are one byte, or all.
            options[option] = Budget(options[option])
    return resolve(
        MergeRequest(base="base", experts=experts, method=method, **options),
        base=Input(SNAPSHOT, "base"),
        experts=[Input(SNAPSHOT, name) for name, _ in experts],
    )


def ready(tensors: Survey, request: Request) -> Planner:
    """The planner of a request whose operation all tensors have."""
    own = [structs.replace(one, operation=request.operation) for one in tensors.tensors]
    return Planner(structs.replace(tensors, tensors=tuple(own)), request)


def select(tensors: Survey, **options: Any) -> ChosenChunks:
    return ready(tensors, ask(len(tensors.experts), **options)).select()


def states(selection: ChosenChunks, number: int = 0) -> list[list[int]]:
    return [list(map(int, row)) for row in selection.states[number]]


# -- what is free --------------------------------------------------------------------------------


def test_equal_shared_and_untouched_chunks_are_free() -> None:
    """Chunks equal to the base and those of an earlier expert cost nothing; counts are exact."""
    found = select(
        survey(
            tensor(
                "t",
                expert([0, 1, 1, 1], [0, 100, 100, 7], equal=[0]),
                expert([0, 1, 1, 1], [0, 100, 100, 7], equal=[0], twins={2: 0}, position=1),
                expert([1, 0, 1, 1], [100, 0, 100, 7], equal=[1], twins={2: 0, 3: 1}, position=2),
            )
        )
    )
    assert states(found) == [
        [EQUAL, READ, READ, READ],
        [EQUAL, READ, SHARED, READ],
        [READ, EQUAL, SHARED, SHARED],
    ]
    assert found.full_expert_bytes == found.planned_expert_bytes == 100 * 4 + 7 * 2
    assert found.full
    assert (found.error_bound, found.error_estimate) == (0.0, 0.0)


def test_a_zero_delta_is_free_where_bits_do_not_matter() -> None:
    """Other bytes but no delta: nothing to read, except for linear, where minus zero shows."""
    tensors = survey(tensor("t", expert([0, 2], [10, 10])))
    assert states(select(tensors)) == [[BELOW, READ]]
    assert states(select(tensors, method="dare_ties")) == [[BELOW, READ]]
    assert states(select(tensors, method="linear")) == [[READ, READ]]


def test_chunks_below_the_threshold_are_free() -> None:
    """With trimming, a chunk in which nothing reaches the threshold is not read; NaN reaches it."""
    tensors = survey(
        tensor("t", expert([1, 2, 3, math.nan, 0], [10] * 5, threshold=2.0)),
    )
    found = select(tensors, method="ties", parameters={"density": 0.5})
    assert states(found) == [[BELOW, READ, READ, READ, BELOW]]
    assert states(select(tensors, method="ties")) == [[READ, READ, READ, READ, BELOW]]


# -- what a budget buys --------------------------------------------------------------------------


def test_most_error_per_byte_first() -> None:
    """Under a budget the chunks that remove most error a byte are read, a cheap small one first.

    What does not fit is passed over; ties go to the lower tensor, chunk and expert.
    """
    tensors = survey(
        tensor("a", expert([5, 1, 1, 1], [100, 1, 4, 4])),
        tensor("b", expert([1, 4], [4, 100])),
    )
    r, o = READ, OMITTED
    for budget, a, b in (
        (1, [o, r, o, o], [o, o]),
        (12, [o, r, r, r], [o, o]),
        (101, [r, r, o, o], [o, o]),
        (112, [r, r, r, r], [o, o]),
        (113, [r, r, r, r], [r, o]),
        (213, [r, r, r, r], [r, r]),
    ):
        found = select(tensors, budget=budget)
        assert [states(found), states(found, 1)] == [[a], [b]]


def test_weights_and_copies_count() -> None:
    """Error is weighted: by an expert's weight, and by the number of names a tensor has."""
    pair = [expert([2], [10]), expert([3], [10], position=1)]
    found = select(survey(tensor("t", *pair)), budget=10, weights=(1.0, 0.5))
    assert states(found) == [[READ], [OMITTED]]
    once, twice = expert([3], [10]), expert([2.5], [10])
    found = select(survey(tensor("a", once), tensor("b", twice, copies=2)), budget=10)
    assert [states(found), states(found, 1)] == [[[OMITTED]], [[READ]]]
    assert found.error_bound == pytest.approx(3.0, rel=1e-4)
    assert found.omitted == ((3.0,), (0.0,))


def test_shared_chunks_stand_or_fall_together() -> None:
    """Of chunks that two experts share, both are read at one price, or both left out."""
    twins = survey(
        tensor(
            "t",
            expert([2, 3], [10, 10]),
            expert([2, 0], [10, 0], equal=[1], twins={0: 0}, position=1),
        )
    )
    assert states(select(twins, budget=10)) == [[READ, OMITTED], [SHARED, EQUAL]]
    found = select(twins, budget=9)
    assert states(found) == [[OMITTED, OMITTED], [OMITTED, EQUAL]]
    assert found.planned_expert_bytes == 0
    # The deltas of chunk 0 may add up: (2 + 2)^2 + 3^2.
    assert found.error_bound == pytest.approx(5.0, rel=1e-4)


def test_bound_is_the_worst_case() -> None:
    """Errors of experts add up within a chunk, and chunks are orthogonal."""
    tensors = survey(
        tensor("t", expert([3, 1], [10, 10]), expert([4, 1], [10, 10], position=1)),
        base_squares=100.0,
    )
    found = select(tensors, budget=1, weights=(1.0, -0.5))
    assert found.planned_expert_bytes == 0
    exact = math.sqrt((3 + 2) ** 2 + (1 + 0.5) ** 2) / 10
    assert exact < (found.error_bound or 0) < exact * (1 + 1e-4)
    assert found.error_estimate == pytest.approx(math.sqrt(9 + 4 + 1 + 0.25) / 10)


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_consensus_has_no_bound(method: str) -> None:
    """Where signs are elected there is no certified bound, at any budget; only an estimate."""
    tensors = survey(tensor("t", expert([3, 1], [10, 10])))
    for budget in (None, 10, 1):
        found = select(tensors, method=method, budget=budget)
        assert found.error_bound is None
        assert found.error_estimate is not None


@pytest.mark.parametrize(("normalize", "expected"), [(True, 5.0), (False, 10.0)])
def test_consensus_of_one_moves_by_its_whole_delta(normalize: bool, expected: float) -> None:
    """Estimate: an expert alone at its places counts in full, however many others have a weight."""
    first = expert([3, 0], [10, 0], equal=[1])
    second = expert([0, 4], [0, 10], equal=[0], position=1)
    found = select(
        survey(tensor("t", first, second)),
        method="ties",
        budget=1,
        weights=(2.0, 2.0),
        parameters={"normalize": normalize},
    )
    assert found.error_estimate == pytest.approx(expected)


@pytest.mark.parametrize(("rescale", "factor"), [(True, 2.0), (False, 0.5)])
def test_masks_count_by_their_mean_square(rescale: bool, factor: float) -> None:
    """Of a delta that a mask keeps by chance, the estimate has the mean square, (d / p)^2 p with
    `rescale` and d^2 p without; the bound has all of it, and what is ranked by does not change.
    """
    tensors = survey(
        tensor("t", expert([3, 1], [10, 10]), expert([4, 2], [10, 10], position=1)),
        base_squares=100.0,
    )
    parameters = {"density": 0.25, "rescale": rescale}
    found = select(tensors, method="dare_linear", parameters=parameters, budget=10)
    assert states(found) == [[OMITTED, OMITTED], [READ, OMITTED]]
    assert found.error_estimate == pytest.approx(factor * math.sqrt(9 + 1 + 4) / 10)
    worst = math.sqrt(3**2 + (1 + 2) ** 2) / 10 * (4.0 if rescale else 1.0)
    assert found.error_bound == pytest.approx(worst, rel=1e-4)
    # Places that hardly ever meet, so that nobody contests an election.
    found = select(tensors, method="dare_ties", parameters=parameters, budget=10)
    assert found.error_estimate == pytest.approx(factor * math.sqrt(9 + 1 + 4) / 10, rel=1e-3)


def dense(norm: float, position: int) -> ExpertTensor:
    """One chunk in which every element is moved."""
    member = expert([norm], [10], position=position)
    assert member.rows is not None
    member.rows["nonzeros"] = CHUNK_ELEMENTS
    return member


def test_what_is_left_out_dilutes_what_is_kept() -> None:
    """An expert that hardly moved, left out, leaves a heavy one undivided: off by a part of that
    one's norm, where they agree, and not by the light one's own.
    """
    tensors = survey(tensor("t", dense(30.0, 0), dense(0.3, 1)), base_squares=1e4)
    found = select(tensors, method="ties", weights=(1.0, 0.25), budget=10)
    assert states(found) == [[READ], [OMITTED]]
    share = 0.25 / 1.25
    assert found.error_estimate == pytest.approx(share * 30 / math.sqrt(2) / 100, rel=0.02)
    # Nothing left out, nothing lost; all left out, all of the change.
    assert select(tensors, method="ties", weights=(1.0, 0.25)).error_estimate == 0.0
    planner = ready(tensors, ask(2, method="ties", weights=(1.0, 0.25)))
    assert planner.cut(1).error_estimate == planner.change


def test_unknown_norms_are_read_first_and_leave_no_bound() -> None:
    """Without statistics a whole tensor is one unit, taken first; left out, no bound is given."""
    tensors = survey(
        tensor("a", expert([9, 9], [10, 10])),
        tensor("b", expert([1, 1], [10, 10], known=False)),
    )
    found = select(tensors, budget=25)
    assert [states(found), states(found, 1)] == [[[OMITTED, OMITTED]], [[READ, READ]]]
    assert found.error_bound == pytest.approx(math.sqrt(162), rel=1e-4)
    found = select(tensors, budget=15)
    assert [states(found), states(found, 1)] == [[[READ, OMITTED]], [[OMITTED, OMITTED]]]
    assert (found.error_bound, found.error_estimate) == (None, None)
    assert found.omitted == ((9.0,), (-1.0,))


def test_infinite_deltas_are_read_first() -> None:
    """A chunk whose delta is not finite is read before all others; and there is no bound then."""
    tensors = survey(tensor("t", expert([5, math.inf, math.nan], [10, 10, 10])))
    found = select(tensors, budget=20)
    assert states(found) == [[OMITTED, READ, READ]]
    assert (found.error_bound, found.error_estimate) == (None, None)


def test_shares_and_bytes() -> None:
    """A budget is bytes or a share of the full cost; the plan keeps the bytes."""
    tensors = survey(tensor("t", expert([1, 2, 3], [10, 10, 10])))
    assert select(tensors, budget=0.7).budget == 21
    assert select(tensors, budget=0.7).planned_expert_bytes == 20
    assert select(tensors, budget=1.0).full
    assert select(tensors, budget=30).full
    assert select(tensors).budget is None
    assert select(tensors, budget=10**12).budget == 10**12


# -- max-error -----------------------------------------------------------------------------------


def test_max_error_finds_the_cheapest_prefix() -> None:
    """--max-error reads as little of the ranking as keeps the bound; 0 reads all that matters."""
    tensors = survey(tensor("t", expert([4, 3, 2, 1], [10] * 4)), base_squares=1e4)
    planned = {
        goal: select(tensors, max_error=goal).planned_expert_bytes
        for goal in (1.0, 0.05, 0.03, 0.0101, 0.0)
    }
    assert planned == {1.0: 0, 0.05: 10, 0.03: 20, 0.0101: 30, 0.0: 40}
    for goal in planned:
        assert (select(tensors, max_error=goal).error_bound or 0.0) <= goal


def test_budget_and_max_error_must_both_hold() -> None:
    """A budget that cannot keep the error is refused with what it could keep."""
    tensors = survey(tensor("t", expert([4, 3, 2, 1], [10] * 4)), base_squares=1e4)
    assert select(tensors, budget=20, max_error=0.03).planned_expert_bytes == 20
    with pytest.raises(BadRequest, match=r"20 B keeps the error only to 0\.0224"):
        select(tensors, budget=20, max_error=0.01)


# -- properties ----------------------------------------------------------------------------------

norms = st.floats(0, 8, allow_subnormal=False)


@st.composite
def surveys(draw: st.DrawFn) -> Survey:
    """A few tensors of a few chunks, up to three experts, with equal, shared and unknown parts."""
    count = draw(st.integers(1, 3))
    tensors = []
    for number in range(draw(st.integers(1, 3))):
        chunks = draw(st.integers(1, 4))
        members: list[ExpertTensor] = []
        for k in range(count):
            size = draw(st.lists(norms, min_size=chunks, max_size=chunks))
            cost = draw(st.lists(st.integers(1, 8), min_size=chunks, max_size=chunks))
            equal = draw(st.sets(st.integers(0, chunks - 1), max_size=2))
            twins = {}
            for chunk in range(chunks):
                if k and chunk not in equal and draw(st.integers(0, 4)) == 0:
                    other = members[0]
                    if not other.equal[chunk] and other.rows is not None:
                        twins[chunk] = 0
                        size[chunk] = math.sqrt(float(other.rows["sum_squares"][chunk]))
                        cost[chunk] = int(other.cost[chunk])
            for chunk in equal:
                size[chunk], cost[chunk] = 0.0, 0
            members.append(expert(size, cost, equal=sorted(equal), twins=twins, position=k))
        tensors.append(tensor(f"t{number}", *members, copies=draw(st.integers(1, 2))))
    return survey(*tensors, base_squares=draw(st.floats(0.5, 1e6)))


@settings(max_examples=8)
@given(surveys(), st.sampled_from(["linear", "task_arithmetic", "dare_linear"]))
def test_a_larger_budget_never_has_a_larger_bound(tensors: Survey, method: str) -> None:
    """Over all budgets: planned bytes stay within, the bound never grows, and ends at zero."""
    options = {"method": method, "weights": (0.5, 1.0, 0.25)[: len(tensors.experts)]}
    full = select(tensors, **options)
    assert (full.error_bound, full.full) == (0.0, True)
    previous = math.inf
    for budget in range(1, full.full_expert_bytes + 1):
        found = select(tensors, budget=budget, **options)
        assert found.planned_expert_bytes <= budget
        assert found.full_expert_bytes == full.full_expert_bytes
        assert found.error_bound is not None
        assert found.error_bound <= previous * (1 + 1e-12)
        previous = found.error_bound
    if full.full_expert_bytes:
        assert previous == 0.0


@settings(max_examples=50)
@given(surveys(), st.integers(1, 200), st.sampled_from(["linear", "ties", "dare_ties"]))
def test_states_cover_every_chunk(tensors: Survey, budget: int, method: str) -> None:
    """What is planned is the cost of the READ chunks; a SHARED one has a reader."""
    found = select(tensors, budget=budget, method=method)
    spent = 0
    for surveyed, chosen in zip(tensors.tensors, found.states, strict=True):
        for k, member in enumerate(surveyed.experts):
            for chunk in range(surveyed.chunks):
                state = int(chosen[k, chunk])
                assert (state == EQUAL) == bool(member.equal[chunk])
                if state == READ:
                    spent += int(member.cost[chunk])
                if state == SHARED:
                    assert int(chosen[0, chunk]) == READ
                    assert int(member.twin[chunk]) == 0
    assert spent == found.planned_expert_bytes <= budget


@given(
    st.lists(st.tuples(st.integers(0, 2), norms, st.integers(1, 6)), min_size=1, max_size=8),
    st.integers(0, 30),
)
def test_greedy_beats_every_single_swap(
    given_units: list[tuple[int, float, int]], budget: int
) -> None:
    """Each unit taken removes at least as much a byte as any that was affordable at that moment."""
    experts = itertools.count()
    units = Units(
        tensor=np.zeros(len(given_units), dtype=np.int64),
        chunk=np.array([chunk for chunk, _, _ in given_units]),
        expert=np.array([next(experts) for _ in given_units]),
        cost=np.array([cost for _, _, cost in given_units]),
        root=np.array([root for _, root, _ in given_units]),
    )

    def error(left: set[int]) -> float:
        sums = [
            math.fsum(given_units[u][1] for u in left if given_units[u][0] == c) for c in range(3)
        ]
        return math.fsum(total * total for total in sums)

    out, spent = set(range(len(given_units))), 0
    for unit in Ranking(units).take(budget).tolist():
        cost = given_units[unit][2]
        gain = (error(out) - error(out - {unit})) / cost
        for other in out:
            if spent + given_units[other][2] <= budget:
                best = (error(out) - error(out - {other})) / given_units[other][2]
                assert gain >= best - 1e-9
        out.remove(unit)
        spent += cost
    assert spent <= budget
    assert all(spent + given_units[unit][2] > budget for unit in out)


# -- scores --------------------------------------------------------------------------------------


def sketched(member: ExpertTensor, *signs: float) -> ExpertTensor:
    """The same with a direction a chunk, along or against one axis."""
    assert member.rows is not None
    member.rows["sketch"][:, 0] = np.array(signs) * np.sqrt(member.rows["sum_squares"])
    return member


def test_trimmed_ranks_by_what_is_above_the_threshold() -> None:
    """Many small elements make the larger norm, one large one the larger tail."""
    flat, peak = expert([3.0, 2.0], [10, 10], threshold=1.5), READ
    assert flat.rows is not None
    flat.rows["nonzeros"], flat.rows["sum_abs"] = [100, 1], [30.0, 2.0]
    flat.rows["max_abs"] = [1.6, 2.0]
    tensors = survey(tensor("t", flat))
    options = {"method": "ties", "parameters": {"density": 0.5}, "budget": 10}
    assert states(select(tensors, **options)) == [[OMITTED, peak]]
    assert states(select(tensors, score="trimmed", **options)) == [[OMITTED, peak]]
    assert states(select(tensors, score="norm", **options)) == [[peak, OMITTED]]


def test_conflict_lowers_what_the_consensus_drops() -> None:
    """Of two blocks of like norm, the one against the heavier consensus is read last."""
    members = (
        sketched(expert([5.0, 1.0], [10, 10]), 1, 1),
        sketched(expert([3.0, 2.9], [10, 10], position=1), -1, 1),
    )
    tensors = survey(tensor("t", *members))
    r, o = READ, OMITTED
    assert states(select(tensors, method="ties", budget=20)) == [[r, o], [r, o]]
    found = select(tensors, method="ties", budget=20, score="conflict")
    assert states(found) == [[r, o], [o, r]]


def test_random_is_a_fixed_order_of_its_own() -> None:
    """The order by hash is the same for every plan, and does not follow norms or costs."""
    size = 64
    tensors = survey(tensor("t", expert(np.linspace(1, 9, size).tolist(), [10] * size)))
    taken = [
        [chunk for chunk, state in enumerate(states(found)[0]) if state == READ]
        for budget in (160, 320)
        for found in [select(tensors, budget=budget, score="random")]
    ]
    assert [len(chunks) for chunks in taken] == [16, 32]
    assert set(taken[0]) < set(taken[1])
    assert taken[0] != list(range(size - 16, size))
    bound = select(tensors, budget=160, score="random").error_bound
    best = select(tensors, budget=160).error_bound
    assert bound is not None
    assert best is not None
    assert bound > best


@settings(max_examples=50)
@given(surveys(), st.integers(1, 60), st.sampled_from(["norm", "random"]))
def test_bound_is_of_what_is_left_out(tensors: Survey, budget: int, score: str) -> None:
    """Whatever the score, the bound is the norm of what the states leave out."""
    found = select(tensors, budget=budget, score=score)
    worst = 0.0
    for surveyed, chosen in zip(tensors.tensors, found.states, strict=True):
        norms = np.array(
            [np.sqrt(e.rows["sum_squares"]) for e in surveyed.experts if e.rows is not None]
        )
        left = np.where(chosen == OMITTED, norms, 0.0).sum(axis=0)
        worst += surveyed.copies * float((left**2).sum())
    exact = math.sqrt(worst / (tensors.base_squares or 1.0))
    assert found.error_bound is not None
    assert exact * (1 - 1e-12) <= found.error_bound <= exact * (1 + 1e-8) + 1e-3


# -- limits --------------------------------------------------------------------------------------


def test_no_expert_reads_more_than_its_share() -> None:
    """The cap is on each expert; blocks that experts share are charged to their reader."""
    tensors = survey(
        tensor(
            "t",
            expert([9, 8, 7, 1], [10] * 4),
            expert([9, 2, 2, 2], [10] * 4, twins={0: 0}, position=1),
        )
    )
    found = select(tensors, expert_budget=20)
    r, o = READ, OMITTED
    assert states(found) == [[r, r, o, o], [SHARED, o, r, r]]
    assert found.expert_budget == 20
    assert (found.full_expert_bytes, found.planned_expert_bytes) == (70, 40)
    assert select(tensors, expert_budget=2 / 7).expert_budget == 20
    assert states(select(tensors, budget=10, expert_budget=20)) == [[r, o, o, o], [SHARED, o, o, o]]
    assert select(tensors, expert_budget=40).full


def test_top_p_drops_the_smallest_changes() -> None:
    """The share of output blocks with the largest deltas is read; the rest counts as left out."""
    tensors = survey(
        tensor(
            "t",
            expert([5, 1, 3, 0, 2], [10, 10, 10, 0, 10], equal=[3]),
            expert([0, 3, 0, 0, 2.5], [0, 10, 0, 0, 10], equal=[0, 2, 3], position=1),
        ),
        base_squares=100.0,
    )
    found = select(tensors, top_p=0.5)
    r, d = READ, DROPPED
    assert states(found) == [[r, d, d, EQUAL, r], [EQUAL, d, EQUAL, EQUAL, r]]
    assert not found.full
    assert (found.full_expert_bytes, found.planned_expert_bytes) == (60, 30)
    assert found.error_bound == pytest.approx(math.sqrt(4**2 + 3**2) / 10, rel=1e-4)
    assert found.omitted == ((math.sqrt(1 + 9), 3.0),)
    assert states(select(tensors, top_p=0.01)) == [[r, d, d, EQUAL, d], [EQUAL, d, EQUAL, EQUAL, d]]
    assert select(tensors, top_p=1.0).full
    # The budget is spent on what is written.
    found = select(tensors, top_p=0.5, budget=20)
    assert states(found) == [[r, d, d, EQUAL, OMITTED], [EQUAL, d, EQUAL, EQUAL, r]]


@settings(max_examples=50)
@given(surveys(), st.floats(0.01, 1.0), st.integers(1, 60))
def test_top_p_counts_blocks(tensors: Survey, share: float, budget: int) -> None:
    """At most the share of the blocks that would change does; a larger budget still never hurts."""
    full = select(tensors)
    changing = sum(int((s == READ).any(axis=0).sum()) for s in full.states)
    found = select(tensors, top_p=share, budget=budget)
    changed = sum(int((s == READ).any(axis=0).sum()) for s in found.states)
    assert changed <= max(1, int(share * changing))
    more = select(tensors, top_p=share, budget=budget + 5)
    assert (more.error_bound or 0) <= (found.error_bound or 0) * (1 + 1e-12)


@settings(max_examples=50)
@given(surveys(), st.floats(0, 3))
def test_max_error_is_the_cheapest_prefix(tensors: Survey, goal: float) -> None:
    """No shorter beginning of the ranking keeps the error."""
    planner = ready(tensors, ask(len(tensors.experts), max_error=goal))
    try:
        found = planner.select()
    except BadRequest:
        assert (planner.cut(None).error_bound or 0.0) > goal
        return
    ranked = planner._ranking.order
    costs = np.cumsum(planner._units.cost[ranked]).tolist()
    prefixes = [0, *costs]
    assert found.error_bound is not None
    assert found.error_bound <= goal
    assert found.planned_expert_bytes in prefixes
    place = prefixes.index(found.planned_expert_bytes)
    if place:
        chosen = np.zeros(len(ranked), dtype=bool)
        chosen[ranked[: place - 1]] = True
        bound, _ = planner._errors(planner._apply(chosen))
        assert bound is not None
        assert bound > goal


def test_what_is_dropped_is_rounded_too() -> None:
    """Chunks outside the top-p share are the base's, and the full merge's are rounded: the bound
    counts that as it does for those left out for the budget.
    """
    tensors = survey(tensor("t", expert([4, 3, 2, 1], [10, 10, 10, 10])))
    bounds = [select(tensors, budget=20).error_bound, select(tensors, top_p=0.5).error_bound]
    assert bounds[0] == bounds[1] > math.sqrt(5) * (1 + 1e-7)


def test_one_planner_cuts_any_budget() -> None:
    """A planner that is asked again, with other budgets between, answers the same."""
    tensors = survey(tensor("t", expert([4, 3, 2, 1], [10, 7, 5, 3])))
    planner = ready(tensors, ask(1))
    for budget in (25, 3, 12, 25, 24):
        assert states(planner.cut(budget)) == states(select(tensors, budget=budget))


def test_notes_say_the_cause() -> None:
    """Statistics that are missing are named with what was done about it, and tensors of the base
    that are not finite.
    """
    bad = survey(tensor("t", expert([1, math.nan], [10, 10])))
    bad = structs.replace(
        bad,
        missing=tuple((f"e0: t{k}", "no statistics") for k in range(5)),
        base_not_finite=("t",),
    )
    remarks = select(bad, budget=10).remarks
    assert "no statistics, chosen by whole tensors: e0: t0, e0: t1, e0: t2 and 2 more" in remarks
    assert any("infinite or NaN" in remark and remark.endswith(": t") for remark in remarks)
