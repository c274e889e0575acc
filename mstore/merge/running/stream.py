"""The stream: the batches of many slices, computed ahead on a pool of threads, in order.

Owns how far the pool works ahead, and that no chunk waits for ties that will never come.  Belongs
to one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from mstore.ahead import in_order
from mstore.merge.running.batches import BATCH_BYTES, Batch, batches
from mstore.merge.running.computer import Computed, Computer
from mstore.merge.running.read_ahead import read_ahead
from mstore.merge.running.slices import Slice


class Stream:
    """Computes slices on a pool of threads; yields chunks in order.

    The pool works `ahead` batches ahead of the current one, across slice boundaries. together: as
    for `batches`.
    """

    def __init__(
        self,
        computer: Computer,
        pool: ThreadPoolExecutor,
        *,
        ahead: int,
        together: int = BATCH_BYTES,
    ) -> None:
        self._computer = computer
        self._pool = pool
        self._ahead = ahead
        self._together = together

    def run(self, slices: Iterable[Slice]) -> Generator[Computed]:
        """Yield every batch of every slice.  The first error in order ends it."""
        working = in_order(
            self._begin,
            read_ahead(
                (batch for slice in slices for batch in batches(slice, self._together)),
                self._computer.prefetch,
            ),
            ahead=self._ahead,
            stopping=_give_up,
        )
        with closing(working):
            for _, computed in working:
                yield computed

    def _begin(self, batch: Batch) -> Future[Computed]:
        return self._pool.submit(self._computer.batch, batch)


def _give_up(batches: Sequence[Batch]) -> None:
    """Wake the chunks that wait for one of these batches."""
    for batch in batches:
        batch.fail(wholly=True)
