"""`search.culprits`: which units are to blame, by few probes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.search.culprits import FEW, Answer, find, probes_left


class Probes:
    """Answers that follow a rule, counted; `skipped` is the number of a probe without a verdict."""

    def __init__(
        self, is_bad: Callable[[frozenset[int]], bool], skipped: int | None = None
    ) -> None:
        self._is_bad = is_bad
        self._skipped = skipped
        self.asked: list[frozenset[int]] = []

    def __call__(self, units: frozenset[int]) -> Answer:
        assert units not in self.asked
        self.asked.append(units)
        if len(self.asked) - 1 == self._skipped:
            return Answer.SKIPPED
        return Answer.BAD if self._is_bad(units) else Answer.GOOD


@pytest.mark.parametrize("culprit", range(8))
@pytest.mark.parametrize("skipped", [None, *range(9)])
def test_one_expert_of_eight(culprit: int, skipped: int | None) -> None:
    """One culprit of eight is found by nine probes, also if one of them says nothing."""
    probes = Probes(lambda units: culprit in units, skipped)
    found = find(range(8), probes)
    assert found.culprits == ((culprit,),)
    assert found.rest is not Answer.BAD
    assert len(probes.asked) <= 9


@pytest.mark.parametrize("skipped", [None, 0, 3, 7])
def test_one_layer_of_256(skipped: int | None) -> None:
    """One culprit of 256 is found by ten probes, 14 if one of them says nothing."""
    for culprit in range(256):
        probes = Probes(lambda units, culprit=culprit: culprit in units, skipped)
        found = find(range(256), probes)
        assert found.culprits == ((culprit,),)
        assert len(probes.asked) <= (10 if skipped is None else 14)


@given(count=st.integers(2, 64), size=st.integers(2, 3), seed=st.integers(0, 999))
def test_units_that_are_bad_only_together(count: int, size: int, seed: int) -> None:
    """A set that is bad only as a whole is found as a whole, and the rest is good."""
    guilty = frozenset(random.Random(seed).sample(range(count), min(size, count)))
    found = find(range(count), Probes(guilty.issubset))
    assert found.culprits == (tuple(sorted(guilty)),)
    assert found.rest is (None if len(guilty) == count else Answer.GOOD)


@given(count=st.integers(1, 64), guilty=st.sets(st.integers(0, 63), min_size=1, max_size=4))
def test_several_that_are_bad_alone(count: int, guilty: set[int]) -> None:
    """Culprits that each do it alone are all found, each as one of its own."""
    inside = {one % count for one in guilty}
    found = find(range(count), Probes(lambda units: bool(units & inside)))
    assert {frozenset(one) for one in found.culprits} == {frozenset([one]) for one in inside}


@given(
    count=st.integers(1, 24),
    sets=st.lists(st.sets(st.integers(0, 23), min_size=1, max_size=3), min_size=1, max_size=3),
    skips=st.randoms(use_true_random=False),
    share=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_what_is_found_is_bad(
    count: int, sets: list[set[int]], skips: random.Random, share: float
) -> None:
    """Whatever is bad and whatever says nothing: what is found was seen to be bad, or is all."""
    inside = [frozenset(one % count for one in units) for units in sets]
    told: dict[frozenset[int], Answer] = {}

    def ask(units: frozenset[int]) -> Answer:
        is_bad = any(one <= units for one in inside)
        answer = Answer.BAD if is_bad else Answer.GOOD
        told[units] = Answer.SKIPPED if skips.random() < share else answer
        return told[units]

    found = find(range(count), ask)
    for culprits, alone in zip(found.culprits, found.alone, strict=True):
        assert told.get(frozenset(culprits), Answer.BAD) is alone
        assert alone is not Answer.GOOD
        for one in culprits if len(culprits) > 1 and alone is Answer.BAD else ():
            assert told[frozenset(culprits) - {one}] is not Answer.BAD
    if share == 0.0:
        assert found.rest in (None, Answer.GOOD)


def test_the_same_answers_lead_to_the_same_probes() -> None:
    """A search that is given the answers of an interrupted one asks what that one would have."""
    first = Probes(lambda units: {3, 40} <= units)
    find(range(64), first)
    known = set(first.asked[:5])
    second = Probes(lambda units: {3, 40} <= units)
    found = find(range(64), second)
    assert found.culprits == ((3, 40),)
    assert second.asked == first.asked
    assert known <= set(second.asked)


@pytest.mark.parametrize("count", [3, 8, 20, 256])
def test_nothing_at_all_is_bad_too(count: int) -> None:
    """If everything is bad, none at all is tried once a unit and its complement are: the end."""
    probes = Probes(lambda units: True)
    find(range(count), probes)
    assert probes.asked[-1] == frozenset()
    assert len(probes.asked) <= 12


def test_few_units_are_all_left_out() -> None:
    """Of up to eight, each is left out once: a table of all of them."""
    probes = Probes(lambda units: 2 in units)
    find(range(FEW), probes)
    assert [set(range(FEW)) - one for one in probes.asked[:FEW]] == [{one} for one in range(FEW)]


def left_before_each(count: int, probes: Probes) -> list[int]:
    """What is told before each probe of `find`."""
    answers: dict[frozenset[int], Answer] = {}
    told: list[int] = []

    def ask(units: frozenset[int]) -> Answer:
        told.append(probes_left(range(count), answers))
        answers[units] = probes(units)
        return answers[units]

    find(range(count), ask)
    return told


@pytest.mark.parametrize("count", [4, 8, 20, 256])
def test_how_many_probes_are_left(count: int) -> None:
    """With one culprit, the number that is told is nearly right from the first probe on, and goes
    down to 1; a probe that says nothing does not end it."""
    for culprit in range(0, count, max(1, count // 8)):
        told = left_before_each(count, Probes(frozenset((culprit,)).issubset, skipped=1))
        true = list(range(len(told), 0, -1))
        # The second probe, which says nothing, may cost some more.
        assert abs(told[0] - true[0]) <= 4
        assert all(abs(one - other) <= 2 for one, other in zip(told[2:], true[2:], strict=True))
        assert told[-1] == 1


def test_how_many_probes_are_left_of_a_pair() -> None:
    """Of two units that are bad only together, something is told, too; of two that are bad each,
    nothing once the answers say so."""
    units = range(16)
    half = frozenset(range(8))
    good = {half: Answer.GOOD, frozenset(units) - half: Answer.GOOD}
    assert 2 <= probes_left(units, good) <= 30
    bad = {half: Answer.BAD, frozenset(units) - half: Answer.BAD}
    assert probes_left(units, bad) == 0
