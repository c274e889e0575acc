"""The stream: the batches of many slices, computed ahead on a pool of threads, in order.

Owns the threads, how far they work ahead, and that no chunk waits for ties that will never come.
Belongs to one thread, which computes, too, while it would wait.  So no more threads are busy than
the merge may have: a thread too many takes the processor from one that others wait for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from mstore.ahead import in_order
from mstore.merge.running.batches import Batch, batches
from mstore.merge.running.computer import Computed, Computer
from mstore.merge.running.read_ahead import read_ahead
from mstore.merge.running.slices import Bounds, Slice


class Stream:
    """Computes slices within `bounds`; yields chunks in order, across slice boundaries."""

    def __init__(self, computer: Computer, bounds: Bounds) -> None:
        self._computer = computer
        self._bounds = bounds

    def run(self, slices: Iterable[Slice]) -> Generator[Computed]:
        """Yield every batch of every slice.  The first error in order ends it."""
        helps = self._bounds.threads > 1
        with ThreadPoolExecutor(self._bounds.threads - helps, "merge") as pool:
            working = in_order(
                lambda batch: pool.submit(self._computer.batch, batch),
                read_ahead(self._batches(slices), self._computer.prefetch),
                ahead=self._bounds.ahead,
                stopping=_give_up,
                helping=self._computer.batch if helps else None,
            )
            # Before the pool ends: it would run everything queued first.
            with closing(working):
                for _, computed in working:
                    yield computed

    def _batches(self, slices: Iterable[Slice]) -> Iterator[Batch]:
        for slice in slices:
            yield from batches(slice, self._bounds.together)


def _give_up(batches: Sequence[Batch]) -> None:
    """Wake the chunks that wait for one of these batches."""
    for batch in batches:
        batch.fail(wholly=True)
