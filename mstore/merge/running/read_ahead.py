"""Reading ahead: has the disk bring what batches need before they are computed.

Owns how far the disk works ahead of the computation.  Reads nothing itself; what the kernel reads
is in its page cache, not in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

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
