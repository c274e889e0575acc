"""Work ahead: results come in order, no more is under way than allowed, and nothing runs on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.store.ahead import in_groups, in_order


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


@given(count=st.integers(0, 40), ahead=st.integers(0, 9), failing=st.integers(0, 60))
def test_one_who_helps_changes_no_result(
    pool: ThreadPoolExecutor, count: int, ahead: int, failing: int
) -> None:
    """Results and the first error come in order, each item is worked on once at most, and no more
    than `ahead` are under way, whoever does the work."""
    lock, begun, done = threading.Lock(), Counter[int](), 0

    def work(item: int) -> int:
        with lock:
            begun[item] += 1
            assert item <= done + ahead
        if item >= failing:
            raise ValueError(item)
        return item * item

    found = in_order(lambda item: pool.submit(work, item), range(count), ahead=ahead, helping=work)
    error = pytest.raises(ValueError, match=f"^{failing}$") if failing < count else nullcontext()
    with error:
        for item, result in found:
            assert (item, result) == (done, done * done)
            with lock:
                done += 1
    assert done == min(count, failing)
    assert not count or set(begun.values()) == {1}


def test_who_would_wait_helps() -> None:
    """While the pool is busy with an item, the thread that waits for it works on the next ones."""
    free, helped = threading.Event(), []

    def helping(item: int) -> int:
        helped.append(item)
        if len(helped) == 3:
            free.set()
        return item

    def waiting(item: int) -> int:
        free.wait(60)
        return item

    with ThreadPoolExecutor(1) as pool:
        found = in_order(
            lambda item: pool.submit(waiting, item), range(4), ahead=3, helping=helping
        )
        assert list(found) == [(item, item) for item in range(4)]
    assert helped == [1, 2, 3]


def test_a_failure_of_the_helper_comes_in_its_turn() -> None:
    """An error while helping is raised after the results before it, like one of the pool."""
    free = threading.Event()

    def waiting(item: int) -> int:
        free.wait(60)
        return item

    def helping(item: int) -> int:
        free.set()
        raise ValueError(item)

    with ThreadPoolExecutor(1) as pool:
        found = in_order(
            lambda item: pool.submit(waiting, item), range(3), ahead=2, helping=helping
        )
        assert next(found) == (0, 0)
        with pytest.raises(ValueError, match=r"^1$"):
            next(found)


def test_ctrl_c_in_the_helping_thread_ends_it_at_once() -> None:
    """KeyboardInterrupt while this thread helps is raised then, not in the turn of the item."""
    free = threading.Event()

    def helping(item: int) -> bool:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        found = in_order(
            lambda _: pool.submit(free.wait, 60),
            range(4),
            ahead=3,
            stopping=lambda _: free.set(),
            helping=helping,
        )
        with pytest.raises(KeyboardInterrupt):
            next(found)


def test_ctrl_c_while_it_waits_wakes_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt while this thread waits for a result leaves that among what `stopping` is
    told of: the work still runs."""
    free = threading.Event()

    def interrupted() -> None:
        raise KeyboardInterrupt

    def submit(_: int) -> Future[bool]:
        future = pool.submit(free.wait, 60)
        monkeypatch.setattr(future, "result", interrupted)
        return future

    def stopping(left: Sequence[int]) -> None:
        told.extend(left)
        free.set()

    told: list[int] = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        next(in_order(submit, [1], ahead=1, stopping=stopping))
    assert told == [1]


def test_groups_of_neighbours() -> None:
    """Neighbours come together, in order, up to a number of bytes; a longer item comes alone."""
    items = [3, 3, 4, 11, 1, 9, 1]
    assert list(in_groups(items, int, 10)) == [[3, 3, 4], [11], [1, 9], [1]]
    assert list(in_groups([], int, 10)) == []
