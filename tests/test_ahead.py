"""Work ahead: results come in order, no more is under way than allowed, and nothing runs on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.ahead import in_order


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@given(count=st.integers(0, 40), ahead=st.integers(0, 9))
def test_results_come_in_order(pool: ThreadPoolExecutor, count: int, ahead: int) -> None:
    """Every item comes with its own result, in order, and never are more than `ahead` besides the
    one handed on in the pool's hands."""
    given_out = 0

    def submit(item: int) -> Future[int]:
        nonlocal given_out
        given_out += 1
        return pool.submit(lambda: item * item)

    for done, (item, result) in enumerate(in_order(submit, range(count), ahead=ahead), start=1):
        assert (item, result) == (done - 1, item * item)
        assert given_out - done <= ahead
    assert given_out == count


def test_the_first_error_ends_it(pool: ThreadPoolExecutor) -> None:
    """An error comes in its turn, after the results before it; those after it are not seen."""

    def work(item: int) -> int:
        if item >= 3:
            raise ValueError(item)
        return item

    found = in_order(lambda item: pool.submit(work, item), range(10), ahead=4)
    assert [next(found)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(found)


def test_nothing_runs_after_it_was_closed() -> None:
    """Closing cancels what has not begun and waits for what has, once `stopping` has woken it."""
    woken, begun, ran = threading.Event(), threading.Event(), []

    def work(item: int) -> int:
        if item:
            begun.set()
            woken.wait()
        ran.append(item)
        return item

    told: list[list[int]] = []

    def stopping(items: object) -> None:
        told.append(list(items))  # type: ignore[call-overload]
        woken.set()

    with ThreadPoolExecutor(1) as pool:
        found = in_order(lambda item: pool.submit(work, item), range(9), ahead=4, stopping=stopping)
        assert next(found) == (0, 0)
        begun.wait()
        found.close()
        assert told == [[1, 2, 3, 4]]
        assert ran == [0, 1]
