"""Which tests run: samples and parts (`lanes`) leave no case out for good."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import parts
import pytest
import samples


class Item:
    """A case of a test, with the marks that it was given."""

    def __init__(self, test: str, case: int, **marks: Any) -> None:
        self.name = f"{test}[{case}]"
        self.nodeid = f"tests/test_any.py::{self.name}"
        self.callspec = case
        self._marks = {name: pytest.mark.__getattr__(name)(value) for name, value in marks.items()}

    def get_closest_marker(self, name: str) -> Any:
        mark = self._marks.get(name)
        return None if mark is None else mark.mark

    def add_marker(self, name: str) -> None:
        self._marks[name] = pytest.mark.rest


def is_rest(item: Any) -> bool:
    return item.get_closest_marker("rest") is not None


@pytest.mark.parametrize(("cases", "of", "sampled"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (40, 3, 14)])
def test_a_sample_is_one_case_in_so_many(cases: int, of: int, sampled: int) -> None:
    """One case in four of a test is not in the rest, at least one; those of other lanes do not
    count, and tests without the mark are whole."""
    items: list[Any] = [Item("test_it", case, sampled=of) for case in range(cases)]
    long: list[Any] = [
        Item("test_it", case, sampled=of, **{lane: 1})
        for lane, first in (("slow", cases), ("rest", 2 * cases))
        for case in range(first, first + cases)
    ]
    whole: list[Any] = [Item("test_other", case) for case in range(cases)]
    samples.mark_rest([*items, *long, *whole])
    assert sum(not is_rest(item) for item in items) == sampled
    assert not any(map(is_rest, [*long[:cases], *whole]))


def test_every_case_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are disjoint, together they are all, and another order changes none."""
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    every: list[Any] = [Item("test_it", case) for case in range(50)]
    found = []
    for number in range(1, 4):
        part, backwards = list(every), every[::-1]
        for items in (part, backwards):
            monkeypatch.setenv("TEST_PART", f"{number}/3")
            parts.leave_part(config, items)
        assert part == backwards[::-1]
        assert part
        found += part
    assert sorted(found, key=every.index) == every


def test_a_part_is_not_what_a_test_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that starts pytest gets all of the tests that it names."""
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    monkeypatch.setenv("TEST_PART", "1/3")
    parts.leave_part(config, [])
    assert "TEST_PART" not in os.environ


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_a_part_that_is_none(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part outside the parts is refused, instead of running nothing."""
    monkeypatch.setenv("TEST_PART", part)
    config: Any = None
    with pytest.raises(pytest.UsageError, match="write K/N"):
        parts.leave_part(config, [])
