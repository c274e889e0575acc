"""Quotas of ties for chunks in any order: what each chunk may keep is what it keeps in a merge."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.running.slices import Grant, TieLedger, TiePrefix, grant_of

EXPERTS = 3
TIES = st.lists(
    st.lists(st.integers(0, 5), min_size=EXPERTS, max_size=EXPERTS), min_size=1, max_size=12
)
QUOTAS = st.lists(st.integers(0, 20) | st.just(UNLIMITED), min_size=EXPERTS, max_size=EXPERTS)


def in_order(quotas: list[int], ties: list[list[int]]) -> list[Grant]:
    """What a merge, which goes from front to back, gives each chunk."""
    ledger = TieLedger(quotas, range(len(ties)))
    return [
        ledger.take(number, [t if o else 0 for t, o in zip(row, ledger.open, strict=True)])
        for number, row in enumerate(ties)
    ]


class Reader:
    """Asks for chunks as a reader of a virtual tensor does, and notes which ones were counted."""

    def __init__(self, quotas: list[int], ties: list[list[int]]) -> None:
        self.prefix = TiePrefix(quotas)
        self.ties = ties
        self.counted: list[int] = []

    def count(self, number: int, wanted: Sequence[bool]) -> list[int]:
        self.counted.append(number)
        return [ties if open else 0 for ties, open in zip(self.ties[number], wanted, strict=True)]

    def ask(self, number: int) -> Grant:
        with self.prefix.counting(number):
            left = self.prefix.before(number, self.count)
            own = [t if q > 0 else 0 for t, q in zip(self.ties[number], left, strict=True)]
            self.prefix.report(number, own)
        return grant_of(left, own)


@given(QUOTAS, TIES, st.data())
def test_any_order(quotas: list[int], ties: list[list[int]], data: st.DataObject) -> None:
    """Whatever chunks are asked for, in whatever order and how often, each is given what a merge
    gives it, and no gap is counted twice."""
    wanted = in_order(quotas, ties)
    reader = Reader(quotas, ties)
    for number in data.draw(st.lists(st.integers(0, len(ties) - 1), max_size=20)):
        assert reader.ask(number) == wanted[number]
    assert len(reader.counted) == len(set(reader.counted))


@given(QUOTAS, TIES)
def test_forwards_nothing_is_counted_first(quotas: list[int], ties: list[list[int]]) -> None:
    """A reader that goes from front to back has no gaps."""
    reader = Reader(quotas, ties)
    assert [reader.ask(number) for number in range(len(ties))] == in_order(quotas, ties)
    assert reader.counted == []


def test_a_used_up_quota_ends_the_counting() -> None:
    """Once nothing is left of any quota, chunks far behind are known without the gap."""
    reader = Reader([3, UNLIMITED, 0], [[2, 9, 9]] * 100)
    assert reader.ask(99) == Grant((0, UNLIMITED, 0), (0, 0, 0))
    assert reader.counted == [0, 1]


def test_threads() -> None:
    """Many threads at once, in a wild order: the same, and each gap counted at most once."""
    ties = [[number % 4, 1, number % 3] for number in range(300)]
    quotas = [200, 150, UNLIMITED]
    wanted = in_order(quotas, ties)
    reader = Reader(quotas, ties)
    order = [number * 113 % 300 for number in range(300)] * 2
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.ask, order)) == [wanted[number] for number in order]
    assert len(reader.counted) == len(set(reader.counted))


def test_a_chunk_that_fails_wakes_the_others() -> None:
    """Who waits for a chunk that fails counts it itself; who cannot count it hears why."""
    reader = Reader([10, 10, 10], [[1, 1, 1]] * 3)
    began, fail = threading.Event(), threading.Event()

    def broken() -> None:
        with reader.prefix.counting(0):
            began.set()
            fail.wait(10)
            raise OSError("the disk says no")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(broken)
        began.wait(10)
        second = pool.submit(reader.ask, 1)
        fail.set()
        assert isinstance(first.exception(), OSError)
        assert second.result(10) == Grant((UNLIMITED,) * 3, (1, 1, 1))
    assert reader.counted == [0]

    def cannot(number: int, wanted: Sequence[bool]) -> list[int]:
        raise OSError("nor can I")

    fresh = TiePrefix([10])
    with pytest.raises(OSError, match="nor can I"):
        fresh.before(2, cannot)
    assert fresh.before(0, cannot) == (10,)
