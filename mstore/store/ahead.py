"""Work on a pool: ahead, in groups of neighbours, with the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    submit: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    *,
    ahead: int,
    stopping: Callable[[Sequence[Item]], None] | None = None,
    helping: Callable[[Item], Result] | None = None,
) -> Generator[tuple[Item, Result]]:
    """Yield each item with the result of `submit`, in the order of the items.

    submit: hands an item to a pool.
    ahead: the most items that may be running or finished while one is handed on.  The first error,
    in the order of the items, ends the iteration.

    When the iteration ends early or is closed, it cancels what has not begun and waits for what
    has: afterwards none of its work is running.
    stopping: called before that with the items that were not handed on, to wake workers that wait
    for each other.
    helping: does the work of an item in this thread.  Then this thread works, too, while it would
    wait for the next result: on the first item that the pool has not begun.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, submit(item)))
            if len(waiting) > ahead:
                yield _first(waiting, helping)
        while waiting:
            yield _first(waiting, helping)
    finally:
        if stopping is not None:
            stopping([item for item, _ in waiting])
        for _, future in waiting:
            future.cancel()
        for _, future in waiting:
            if not future.cancelled():
                future.exception()


def in_groups(
    items: Iterable[Item], length: Callable[[Item], int], most: int
) -> Generator[list[Item]]:
    """Yield neighbours together: up to `most` bytes of them, or one item that is longer."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + length(item) > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += length(item)
    if group:
        yield group


def _first(
    waiting: deque[tuple[Item, Future[Result]]], helping: Callable[[Item], Result] | None
) -> tuple[Item, Result]:
    if helping is not None:
        while not waiting[0][1].done() and _help(waiting, helping):
            pass
    # Remove it from the queue first: if it failed, there is nothing left to wait for.
    item, future = waiting.popleft()
    try:
        return item, future.result()
    finally:
        # Ctrl-C ends the waiting, and not the work.
        if not future.done():
            waiting.appendleft((item, future))


def _help(waiting: deque[tuple[Item, Future[Result]]], helping: Callable[[Item], Result]) -> bool:
    """Do the first item that the pool has not begun.  Returns False if it has begun all."""
    for at, (item, future) in enumerate(waiting):
        if future.cancel():
            # Failures come in the order of the items, like results.
            waiting[at] = item, _done(item, helping)
            return True
    return False


def _done(item: Item, helping: Callable[[Item], Result]) -> Future[Result]:
    future: Future[Result] = Future()
    try:
        future.set_result(helping(item))
    except Exception as error:  # noqa: BLE001 -- raised in its turn
        future.set_exception(error)
    return future
