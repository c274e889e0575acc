"""The stream: the batches of many slices, computed ahead on a pool of threads, in order.

Owns the threads, how far they and the disk work ahead, and that no chunk waits for ties that will
never come.  Belongs to one thread, which computes, too, while it would wait.  So no more threads
are busy than the merge may have: a thread too many takes the processor from one that others wait
for.  What the kernel reads ahead is in its page cache, not in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final, Protocol, TypeVar

from mstore.merge.running.computer import Computed, Computer
from mstore.merge.running.slices import Batch, Bounds, Slice, batches
from mstore.store.ahead import in_order


def computed(computer: Computer, bounds: Bounds, slices: Iterable[Slice]) -> Generator[Computed]:
    """Yield every batch of every slice, in order.  The first error in order ends it."""
    helps = bounds.threads > 1
    found = (batch for slice in slices for batch in batches(slice, bounds.together))
    with ThreadPoolExecutor(bounds.threads - helps, "merge") as pool:
        working = in_order(
            lambda batch: pool.submit(computer.batch, batch),
            read_ahead(found, computer.prefetch),
            ahead=bounds.ahead,
            stopping=_give_up,
            helping=computer.batch if helps else None,
        )
        # Before the pool ends: it would run everything queued first.
        with closing(working):
            for _, one in working:
                yield one


def _give_up(batches: Sequence[Batch]) -> None:
    """Wake the chunks that wait for one of these batches."""
    for batch in batches:
        batch.fail(wholly=True)


READ_AHEAD: Final = 16 << 20
"""Most bytes at rest that are asked for ahead: disks are faster with many requests at a time."""


class Needy(Protocol):
    """What needs bytes at rest."""

    @property
    def stored_bytes(self) -> int:
        """How many."""


Item = TypeVar("Item", bound=Needy)


def read_ahead(
    items: Iterable[Item], prefetch: Callable[[Sequence[Item]], None], most: int = READ_AHEAD
) -> Iterator[Item]:
    """Yield the items in order, each after `prefetch` was called with it, once.

    prefetch: gets several items in one call, so that it can ask for neighbours at rest together.
    most: bytes at rest of the items that were asked for and not yielded, except for one item.

    The first item does not wait for the others: what is asked for ahead doubles with each item.
    """
    source = iter(items)
    waiting: deque[tuple[Item, int]] = deque()
    held, window = 0, 0
    while True:
        # Only when half is used, so that a call asks for much.
        news = list(_worth(window - held, source)) if 2 * held <= window else []
        if news:
            prefetch([item for item, _ in news])
            waiting += news
            held += sum([length for _, length in news])
        if not waiting:
            return
        item, length = waiting.popleft()
        held -= length
        window = min(most, 2 * window + length)
        yield item


def _worth(room: int, items: Iterator[Item]) -> Iterator[tuple[Item, int]]:
    """Take items until they need this many bytes: at least one, if there is any."""
    for item in items:
        length = item.stored_bytes
        yield item, length
        room -= length
        if room <= 0:
            return
