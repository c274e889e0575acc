"""What units are ranked by; their ranking, against the simplest greedy that can be written."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.merge.methods.combinations import Elected, agreement, dilution
from mstore.merge.methods.registry import METHODS, operation
from mstore.merge.methods.selections import Trimmed
from mstore.merge.planning.ranking import Floats, Ranking, Units, lottery, score_of, seed
from mstore.models.stats.chunk import CHUNK, pack_sketch
from mstore.store.objects.plan import SCORES
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId


def take(
    units: Units, budget: int | None, *, score: Floats | None = None, cap: int | None = None
) -> list[int]:
    """The units that one ranking takes, best first."""
    return Ranking(units, score=score).take(budget, cap).tolist()


ROOTS = st.sampled_from([0.0, 1.0, 2.0, 3.5, math.inf]) | st.floats(0, 8, allow_subnormal=False)
BUDGETS = st.none() | st.integers(0, 40)


@dataclass(frozen=True)
class Unit:
    tensor: int
    chunk: int
    expert: int
    cost: int
    root: float

    @property
    def place(self) -> tuple[int, int, int]:
        return self.tensor, self.chunk, self.expert


UNITS = st.lists(
    st.builds(
        Unit,
        st.integers(0, 1),
        st.integers(-1, 2),
        st.integers(0, 4),
        st.integers(1, 6),
        ROOTS,
    ),
    max_size=10,
    unique_by=lambda unit: unit.place,
)


def table(units: list[Unit]) -> Units:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(unit, name) for unit in units], dtype=dtype)

    return Units(
        column("tensor", np.int64),
        column("chunk", np.int64),
        column("expert", np.int64),
        column("cost", np.int64),
        column("root", np.float64),
    )


def reference(units: list[Unit], budget: int | None, cap: int | None) -> list[int]:
    """Take the best unit that fits, over and over."""
    left = math.inf if budget is None else budget
    own = dict.fromkeys(range(5), math.inf if cap is None else cap)
    out, taken = set(range(len(units))), []
    while True:
        fitting = [u for u in out if units[u].cost <= min(left, own[units[u].expert])]
        if not fitting:
            return taken

        def gain(u: int) -> float:
            mates = [v for v in out if units[v].place[:2] == units[u].place[:2]]
            total, root = math.fsum(units[v].root for v in mates), units[u].root
            if root == 0 or math.isinf(root):
                return root
            return root * (2 * total - root)

        best = min(fitting, key=lambda u: (-gain(u) / units[u].cost, units[u].place))
        taken.append(best)
        out.remove(best)
        left -= units[best].cost
        own[units[best].expert] -= units[best].cost


@settings(max_examples=50)
@given(UNITS, BUDGETS, BUDGETS)
def test_ranking_is_exact_greedy(units: list[Unit], budget: int | None, cap: int | None) -> None:
    """Unit for unit what the best that fits, over and over, would take; caps on experts included.

    Roots are small multiples of a quarter, so that sums are exact and ties are ties.
    """
    exact = [
        Unit(u.tensor, u.chunk, u.expert, u.cost, round(u.root * 4) / 4 if u.root < 9 else u.root)
        for u in units
    ]
    assert take(table(exact), budget, cap=cap) == reference(exact, budget, cap)


@settings(max_examples=50)
@given(UNITS, st.integers(0, 40))
def test_what_is_left_out_does_not_fit(units: list[Unit], budget: int) -> None:
    """Nothing that was left out could still be paid for."""
    taken = take(table(units), budget)
    left = budget - sum(units[u].cost for u in taken)
    assert left >= 0
    assert all(units[u].cost > left for u in set(range(len(units))) - set(taken))


@settings(max_examples=50)
@given(UNITS, BUDGETS, BUDGETS, st.randoms(use_true_random=False))
def test_order_of_the_arrays_does_not_matter(
    units: list[Unit], budget: int | None, cap: int | None, shuffler: object
) -> None:
    """The same units in any order of the arrays are taken in the same order."""
    mixed = list(units)
    shuffler.shuffle(mixed)  # type: ignore[attr-defined]
    one = [units[u] for u in take(table(units), budget, cap=cap)]
    assert [mixed[u] for u in take(table(mixed), budget, cap=cap)] == one


@settings(max_examples=50)
@given(UNITS, st.data())
def test_scores_of_their_own(units: list[Unit], data: st.DataObject) -> None:
    """With scores given, the highest first, ties by place; what does not fit is passed over."""
    scores = data.draw(
        st.lists(st.integers(0, 3), min_size=len(units), max_size=len(units)), label="scores"
    )
    budget = data.draw(BUDGETS, label="budget")
    left, wanted = math.inf if budget is None else budget, []
    for u in sorted(range(len(units)), key=lambda u: (-scores[u], units[u].place)):
        if units[u].cost <= left:
            wanted.append(u)
            left -= units[u].cost
    assert take(table(units), budget, score=np.array(scores, dtype=np.float64)) == wanted


@pytest.mark.parametrize("score", [None, np.zeros(0)])
def test_nothing(score: np.ndarray | None) -> None:
    """No units: nothing to take."""
    assert take(table([]), 5, score=score, cap=3) == []


def test_one_ranking_serves_all_budgets() -> None:
    """A ranking that was cut before cuts the same again."""
    units = table([Unit(0, c, k, 1 + (c + k) % 3, 1.0 + c * k) for c in range(5) for k in range(4)])
    ranking = Ranking(units)
    first = [ranking.take(budget, 7).tolist() for budget in range(40)]
    assert [ranking.take(budget, 7).tolist() for budget in range(40)] == first
    assert [take(units, budget, cap=7) for budget in range(40)] == first


@settings(max_examples=50)
@given(st.data())
def test_a_nested_order_never_trades(data: st.DataObject) -> None:
    """By lot, a smaller budget takes a beginning of what a larger one takes, with a cap and
    without, so what is left out never grows with the budget.
    """
    count = data.draw(st.integers(1, 12))
    numbers = st.integers(1, 9)
    units = Units(
        tensor=np.zeros(count, dtype=np.int64),
        chunk=np.arange(count) // 2,
        expert=np.arange(count) % 2,
        cost=np.array([data.draw(numbers) for _ in range(count)], dtype=np.int64),
        root=np.array([float(data.draw(numbers)) for _ in range(count)]),
    )
    score = np.array([data.draw(st.floats(0, 1)) for _ in range(count)])
    ranking = Ranking(units, score=score, nested=True)
    cap = data.draw(st.none() | st.integers(1, 40))
    taken = [ranking.take(budget, cap).tolist() for budget in range(int(units.cost.sum()) + 1)]
    for smaller, larger in itertools.pairwise(taken):
        assert larger[: len(smaller)] == smaller
    assert taken[-1] == ranking.take(None, cap).tolist()


def rows(*directions: list[float]) -> np.ndarray:
    """Rows whose sketches point there, one a chunk."""
    made = np.zeros(len(directions), dtype=CHUNK)
    for row, direction in zip(made, directions, strict=True):
        sums = np.zeros(32)
        sums[: len(direction)] = direction
        row["sketch"], row["sketch_exponent"] = pack_sketch(sums)
    return made


def test_defaults() -> None:
    """Unless asked: trimmed where a method trims, norm elsewhere."""
    found = {
        (method, density): score_of(operation(method, {"density": density}, [1.0]), None)
        for method in ("ties", "dare_ties", "dare_linear")
        for density in (0.5, 1)
    }
    assert {key for key, score in found.items() if score == "trimmed"} == {("ties", 0.5)}
    assert set(found.values()) == {"trimmed", "norm"}
    assert score_of(operation("linear", {}, [1.0]), None) == "norm"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score", [*SCORES, "taste"])
def test_scores_that_a_method_has(method: str, score: str) -> None:
    """trimmed is for methods that trim, conflict for those that elect signs, others for all."""
    own = METHODS[method]
    trims = issubclass(own.select, Trimmed)
    elects = isinstance(own.combine, Elected)
    needed = {one.name: 0.5 for one in own.parameters if one.default is None}
    # Three: of fewer, two cannot need an element by default.
    weights = [1.0] * (own.experts or 3)
    missing = {"trimmed": not trims, "conflict": not elects, "taste": True}
    if missing.get(score, False):
        with pytest.raises(BadRequest):
            score_of(own.apply(needed, weights), score)
    else:
        assert score_of(own.apply(needed, weights), score) == score


def test_agreement() -> None:
    """1 along the consensus, 1/2 across it, 0 against it; 1 where no direction is known."""
    heavy, along, across, against = [4.0], [1.0], [0.0, 1e-3], [-1.0]
    sides = [rows(heavy, heavy), rows(along, []), rows(across, heavy), rows(against, heavy)]
    found = agreement(sides, [1.0, 1.0, 1.0, 1.0])
    assert found[:, 0] == pytest.approx([1, 1, 0.5, 0], abs=1e-3)
    assert found[1, 1] == 1
    assert agreement(sides, [1.0, 1.0, 1.0, -1.0])[3, 0] == pytest.approx(1)


def test_agreement_of_huge_and_tiny_deltas() -> None:
    """Cosines come out as such whatever the scale of the deltas."""
    for scale in (2.0**-120, 1.0, 2.0**120):
        found = agreement([rows([3 * scale]), rows([0, 4 * scale])], [1.0, 1.0])
        assert found[:, 0] == pytest.approx([(1 + 3 / 5) / 2, (1 + 4 / 5) / 2])


def test_dilution() -> None:
    """A light unit counts what it takes from heavier ones, by the share of places that it keeps."""
    squares = np.array([[16.0, 4.0, np.inf], [1.0, 4.0, 8.0], [0.0, 1.0, 2.0]])
    kept = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]])
    found = dilution(squares, kept)
    assert found[:, 0].tolist() == [0.0, 1.0, 0.25 * 17 / 8]
    assert found[:, 1].tolist() == [0.0, 0.0, 0.25 * 8 / 8]
    assert found[:, 2].tolist()[1:] == [0.0, 0.25]


def test_lottery() -> None:
    """Draws follow from ids and chunk alone, differ between all of them, and fill [0, 1)."""
    base, expert, other = (TensorId.of(name) for name in (b"base", b"expert", b"other"))
    assert len({seed(base, expert), seed(base, other), seed(other, expert)}) == 3
    seeds = np.full(20000, seed(base, expert), dtype=np.uint64)
    drawn = lottery(seeds, np.arange(-1, 19999))
    assert len(set(drawn.tolist())) == 20000
    assert 0 <= drawn.min() < 0.01 < 0.99 < drawn.max() < 1
    assert math.isclose(drawn.mean(), 0.5, abs_tol=0.01)
    assert lottery(seeds[:1], np.array([5]))[0] == drawn[6]
