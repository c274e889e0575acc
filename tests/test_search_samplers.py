"""Samplers: what they choose, in which order, and that equal answers lead to equal choices."""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.search.genome import read_template
from mstore.search.samplers import SAMPLERS, Chosen, points, sampler_of
from mstore.search.template import Template
from mstore.search.trials import Trial, ranked
from mstore.terms.errors import BadRequest, Unavailable

Score = Callable[[Chosen], float | None]


def template(
    *ranges: str, names: str = "abcdefgh", method: str = "linear", count: int | None = None
) -> Template:
    """A recipe with these ranges as weights of its models; further models have the weight 1."""
    weights = [*ranges, *("1" for _ in range((count or len(ranges)) - len(ranges)))]
    models = "".join(
        f"  - model: {name}\n    parameters: {{weight: {weight}}}\n"
        for name, weight in zip(names, weights, strict=False)
    )
    return read_template(f"merge_method: {method}\nmodels:\n{models}", "r.yml", lambda model: None)


def chosen(
    name: str, found: Template, score: Score, *, seed: int = 0, jobs: int = 1, most: int = 30
) -> list[Chosen]:
    """What a sampler chooses, where `jobs` choices are tried side by side."""
    sampler = sampler_of(name, found, seed)
    tried: list[Chosen] = []
    while len(tried) < most:
        asked: list[Chosen] = []
        while len(asked) < min(jobs, most - len(tried)):
            one = sampler.ask()
            if one is None:
                break
            asked.append(one)
        if not asked:
            break
        for one in asked:
            sampler.tell(score(one))
        tried += asked
    return tried


def peak(*best: float) -> Score:
    return lambda one: -sum((x - y) ** 2 for x, y in zip(one.values, best, strict=True))


RANGES = ("{min: 0, max: 1}", "{min: 0.01, max: 1, log: true}", "{min: -1, max: 1, step: 0.25}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("name", ["tpe", "cmaes", "grid"])
def test_equal_answers_lead_to_equal_choices(name: str, jobs: int) -> None:
    """With one seed and one number of jobs the choices are the same, and all within their ranges;
    the first has weights of 1/K."""
    found = template(*RANGES)
    first = chosen(name, found, peak(0.3, 0.1, 0.5), seed=3, jobs=jobs)
    assert first == chosen(name, found, peak(0.3, 0.1, 0.5), seed=3, jobs=jobs)
    assert len(first) == 30
    assert first[0].values == (0.3333, 0.3333, 0.25)
    for choice in first:
        assert choice.experts is None
        for one, value in zip(found.free, choice.values, strict=True):
            assert one.low <= value <= one.high
        assert (choice.values[2] / 0.25).is_integer()
    if name != "grid":
        assert first != chosen(name, found, peak(0.3, 0.1, 0.5), seed=4, jobs=jobs)


@pytest.mark.parametrize("name", SAMPLERS)
def test_how_many_are_tried_side_by_side(name: str) -> None:
    """With another number of jobs, tpe tries others; all other samplers try the same."""
    found = template(*["{min: 0, max: 1}"] * 3)
    score = peak(0.3, 0.1, 0.5)
    one = chosen(name, found, score, seed=3)
    same = [chosen(name, found, score, seed=3, jobs=jobs) == one for jobs in (2, 4, 7)]
    assert same == [name != "tpe"] * 3


@pytest.mark.parametrize("name", ["tpe", "cmaes"])
def test_better_than_the_start(name: str) -> None:
    """Fifty trials over eight numbers end nearer to the best ones than 1/K is."""
    found = template(*["{min: 0, max: 1}"] * 8)
    score = peak(0.1, 0.7, 0.4, 0.2, 0.9, 0.3, 0.6, 0.5)
    tried = chosen(name, found, score, most=50)
    scores = [score(one) or 0.0 for one in tried]
    assert max(scores) > scores[0] / 2


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_failed_is_no_answer(name: str) -> None:
    """A sampler goes on where some choices could not be tried, and where all could not."""
    draw = random.Random(1)
    found = template(*["{min: 0, max: 1}"] * 3)
    assert chosen(name, found, lambda one: None if draw.random() < 0.5 else draw.random())
    assert chosen(name, found, lambda one: None)


def test_a_grid() -> None:
    """A grid has all combinations: by step, else five values."""
    found = template("{min: 0, max: 1, step: 0.5}", "{min: 0.01, max: 1, log: true}")
    assert points(found.free[0]) == [0, 0.5, 1]
    assert points(found.free[1]) == pytest.approx([0.01, 0.03162, 0.1, 0.3162, 1], rel=1e-3)
    tried = chosen("grid", found, lambda one: 0.0)
    assert [one.values for one in tried[1:]] == [*itertools.product(*map(points, found.free))]


# Over experts


def by_subset(seed: int, levels: int) -> Callable[[frozenset[str]], float]:
    """A score for each set of experts, drawn once; few levels make many ties."""

    def score(experts: frozenset[str]) -> float:
        told = f"{seed} {sorted(experts)}".encode()
        return zlib.crc32(told) % levels / levels

    return score


def greedy_soup(names: list[str], score: Callable[[frozenset[str]], float]) -> list[frozenset[str]]:
    """Wortsman et al. 2022, Recipe 1, word for word; equal models by name.

    Returns each set that held-out accuracy is asked of, in order; the last is the soup.
    """
    asked = []

    def accuracy(ingredients: frozenset[str]) -> float:
        asked.append(ingredients)
        return score(ingredients)

    singles = {name: accuracy(frozenset([name])) for name in names}
    ingredients: frozenset[str] = frozenset()
    best = -1.0
    for name in sorted(names, key=lambda one: (-singles[one], one)):
        candidate = ingredients | {name}
        got = singles[name] if len(candidate) == 1 else accuracy(candidate)
        if got >= best:
            ingredients, best = candidate, got
    return [*asked, ingredients]


@given(
    count=st.integers(2, 8),
    seed=st.integers(0, 1000),
    levels=st.integers(2, 1000),
    jobs=st.integers(1, 5),
)
def test_greedy_soup_is_that_of_the_paper(count: int, seed: int, levels: int, jobs: int) -> None:
    """On the same scores it asks what a straightforward implementation asks, and ends with the
    same soup."""
    found = template(count=count)
    score = by_subset(seed, levels)
    tried = chosen("greedy-soup", found, lambda one: score(frozenset(one.experts or ())), jobs=jobs)
    *asked, soup = greedy_soup(list(found.models), score)
    assert [frozenset(one.experts or ()) for one in tried] == asked
    trials = [
        Trial(number, None, one.values, one.experts, score(frozenset(one.experts or ())))
        for number, one in enumerate(tried)
    ]
    assert frozenset(ranked(trials, minimize=False)[0].experts or ()) == soup


@given(
    count=st.integers(2, 8),
    seed=st.integers(0, 1000),
    levels=st.integers(2, 1000),
    most=st.integers(0, 20),
)
def test_greedy_soup_tells_its_steps(count: int, seed: int, levels: int, most: int) -> None:
    """It tells the experts in the order of their own scores, and of each that was tried the score
    of the soup with it, and whether it stayed."""
    found = template(count=count)
    score = by_subset(seed, levels)
    sampler = sampler_of("greedy-soup", found, 0)
    tried = 0
    while tried < most and (one := sampler.ask()) is not None:
        sampler.tell(score(frozenset(one.experts or ())))
        tried += 1
    told = sampler.ingredients()
    if tried < count:
        assert told == ()
        return
    singles = {name: score(frozenset([name])) for name in found.models}
    order = sorted(found.models, key=lambda one: (-singles[one], one))
    assert [(one.expert, one.alone) for one in told] == [(name, singles[name]) for name in order]
    soup: frozenset[str] = frozenset()
    best = -1.0
    for number, one in enumerate(told):
        if number > tried - count:
            assert (one.tried, one.kept) == (None, None)
            continue
        with_it = soup | {one.expert}
        assert one.tried == score(with_it)
        assert one.kept == (one.tried >= best)
        if one.kept:
            soup, best = with_it, one.tried
    if tried < most:
        assert soup == greedy_soup(list(found.models), score)[-1]


def test_subsets_have_equal_weights() -> None:
    """Free weights are shares of the experts that are there."""
    found = template("{min: 0, max: 1}", "{min: 0, max: 1}", "{min: 0, max: 1}", count=4)
    without = chosen("leave-one-out", found, lambda one: 0.0)
    assert [one.experts for one in without] == [
        *(("a", "b", "c", "d"), ("b", "c", "d"), ("a", "c", "d"), ("a", "b", "d")),
        ("a", "b", "c"),
    ]
    assert [one.values[0] for one in without] == [0.25, 0.3333, 0.3333, 0.3333, 0.3333]
    alone = chosen("add-one-in", found, lambda one: 0.0)
    assert [one.experts for one in alone][1:] == [("a",), ("b",), ("c",), ("d",)]
    assert alone[1].values == (1, 1, 1)


# What cannot be


def test_what_has_nothing_to_do() -> None:
    """Without free numbers or experts, and for an unknown name, the error says what to write."""
    with pytest.raises(BadRequest, match="no free number for tpe"):
        sampler_of("tpe", template(count=2), 0)
    with pytest.raises(BadRequest, match="greedy-soup chooses among experts, and the recipe has 1"):
        sampler_of("greedy-soup", template(count=1), 0)
    with pytest.raises(BadRequest, match="cmaes needs two free numbers"):
        sampler_of("cmaes", template("{min: 0, max: 1}"), 0)
    with pytest.raises(BadRequest, match="no sampler is called 'soup'") as caught:
        sampler_of("soup", template(count=2), 0)
    assert "greedy-soup" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "module"), [("tpe", "optuna"), ("cmaes", "cmaes")])
def test_without_the_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sampler's package is missing, the error says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unavailable, match=f"needs the package {module}") as caught:
        sampler_of(name, template(*RANGES), 0)
    assert caught.value.hint == "pip install 'mstore[search]'"
