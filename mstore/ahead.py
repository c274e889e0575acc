"""Work ahead: results in order, while a pool is already at the next ones."""

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
) -> Generator[tuple[Item, Result]]:
    """Each item with what `submit` makes of it, in the order of the items.

    submit: hands an item to a pool.  ahead: how many items at most are under way, or done, while
    one is handed on.  The first error, in the order of the items, ends it.

    Where it ends early, or is closed, what has not begun is cancelled and what has is waited for:
    afterwards no work of it runs.  stopping: is called before that with the items that were not
    handed on, to wake workers that wait for each other.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, submit(item)))
            if len(waiting) > ahead:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        if stopping is not None:
            stopping([item for item, _ in waiting])
        for _, future in waiting:
            future.cancel()
        for _, future in waiting:
            if not future.cancelled():
                future.exception()


def _first(waiting: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    # It leaves the queue first: where it failed there is nothing more to wait for.
    item, future = waiting.popleft()
    return item, future.result()
