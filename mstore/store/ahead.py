"""Work on a pool: ahead, in groups of neighbours, with the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

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


READ_AHEAD: Final = 32 << 20
"""Most bytes that are asked for ahead: disks and remotes are faster with many requests at a time.

The page cache of the kernel holds them, or what reads a remote.
"""


def read_ahead(
    items: Iterable[Item],
    length: Callable[[Item], int],
    prefetch: Callable[[Sequence[Item]], None],
    most: int = READ_AHEAD,
) -> Iterator[Item]:
    """Yield the items in order, each after `prefetch` was called with it, once.

    length: bytes that an item reads.
    prefetch: gets several items in one call, so that it can ask for neighbours at rest together.
    most: bytes of the items that were asked for and not yielded, except for one item.

    The first item does not wait for the others: what is asked for ahead doubles with each item.
    """
    source = iter(items)
    waiting: deque[tuple[Item, int]] = deque()
    held, window = 0, 0
    while True:
        # Only when half is used, so that a call asks for much.
        news = list(_worth(window - held, source, length)) if 2 * held <= window else []
        if news:
            prefetch([item for item, _ in news])
            waiting += news
            held += sum([size for _, size in news])
        if not waiting:
            return
        item, size = waiting.popleft()
        held -= size
        window = min(most, 2 * window + size)
        yield item


def _worth(
    wanted: int, items: Iterator[Item], length: Callable[[Item], int]
) -> Iterator[tuple[Item, int]]:
    """Take items until they have this many bytes: at least one, if there is any."""
    for item in items:
        size = length(item)
        yield item, size
        wanted -= size
        if wanted <= 0:
            return


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
