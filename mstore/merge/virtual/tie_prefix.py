"""The tie prefix: how much of each quota is left before a chunk, for chunks in any order.

A real merge walks a tensor from front to back, and its ledger (`merge.running.ties`) passes each
chunk's ties on to the next. Readers of a virtual tensor come in any order, repeatedly. So this
keeps the quotas for every chunk up to the furthest known one, and a reader of a later chunk counts
the ties of the gap first.

Safe for any number of threads. A chunk that is being computed counts its own ties; others wait for
that instead of reading it a second time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition

from mstore.merge.arithmetic.kernels import UNLIMITED

Left = tuple[int, ...]
Count = Callable[[int, list[bool]], Sequence[int]]


class TiePrefix:
    """The quotas of one tensor, for all its experts.

    Invariant: row c of `_rows` is what is left of the quotas before chunk c, for every c that
    exists; it depends only on the plan, so it never changes.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._experts = len(quotas)
        # A tensor may have thousands of chunks and twenty experts: use eight bytes each, no
        # objects.
        self._rows = array("q", quotas)
        self._busy: Counter[int] = Counter()
        self._turn = Condition()

    @contextmanager
    def counting(self, chunk: int) -> Iterator[None]:
        """Announce that chunk `chunk` is being read, so that others wait for its `report`."""
        with self._turn:
            self._busy[chunk] += 1
        try:
            yield
        finally:
            with self._turn:
                self._busy[chunk] -= 1
                self._turn.notify_all()

    def before(self, chunk: int, count: Count) -> Left:
        """Return what is left of each quota (UNLIMITED: no quota) before chunk `chunk`.

        Waits for earlier chunks that other threads count. Calls `count(number, open)` for the rest,
        one after another; it returns how many ties of each open quota a chunk has.
        """
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._known(chunk) or not self._busy[self._next])
                if self._known(chunk):
                    return self._left(min(chunk, self._next))
                gap = self._next
                left = self._left(gap)
                self._busy[gap] += 1
            try:
                self.report(gap, count(gap, [quota > 0 for quota in left]))
            finally:
                with self._turn:
                    self._busy[gap] -= 1
                    self._turn.notify_all()

    def report(self, chunk: int, ties: Sequence[int]) -> None:
        """Record the ties of each open quota in chunk `chunk`, whose `before` is known."""
        with self._turn:
            if chunk == self._next:
                self._rows.extend(
                    quota if quota == UNLIMITED else max(0, quota - count)
                    for quota, count in zip(self._left(chunk), ties, strict=True)
                )
                self._turn.notify_all()

    @property
    def _next(self) -> int:
        """The first chunk whose ties are unknown."""
        return len(self._rows) // self._experts - 1

    def _left(self, chunk: int) -> Left:
        return tuple(self._rows[chunk * self._experts : (chunk + 1) * self._experts])

    def _known(self, chunk: int) -> bool:
        # Once every quota is used up, nothing changes any more.
        return chunk <= self._next or not any(quota > 0 for quota in self._left(self._next))
