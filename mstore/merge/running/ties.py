"""The tie ledger: how many elements that tie at a trim threshold each chunk keeps.

Exactly k elements of a tensor are kept, and of those that equal the threshold the ones with the
lowest flat index.  So a chunk must know how many ties come before it.  Chunks of a tensor count
their own ties and pass the sum on in order; all other work on a chunk runs in parallel.

A chunk that is mixed before the ones before it have reported must try, and mix again if a quota
turns out to end in it.  In tensors of few blocks that is most chunks, so a chunk rather waits if
only one other is before it: both are then loaded while the other is mixed, and nobody waits for
long.  Where many threads work on one tensor, waiting would cost more than trying.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from threading import Condition

import msgspec

from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What one chunk may keep, per expert.

    quotas: in the kernel's form (UNLIMITED: all of its ties). taken: how much of the tensor's
    limited quota that uses up; 0 if the quota has no limit.
    """

    quotas: tuple[int, ...]
    taken: tuple[int, ...]


def grant_of(left: Sequence[int], ties: Sequence[int]) -> Grant:
    """Return what a chunk with these ties may keep if `left` remains of the quotas."""
    quotas, taken = [], []
    for quota, count in zip(left, ties, strict=True):
        if quota == UNLIMITED:
            quotas.append(UNLIMITED)
            taken.append(0)
        else:
            # With no quota left, nobody counted, and there may be ties.
            quotas.append(UNLIMITED if 0 < quota >= count else quota)
            taken.append(min(count, quota))
    return Grant(tuple(quotas), tuple(taken))


class TieLedger:
    """For one tensor and all its experts; the chunks of `numbers` report once each, in any order.

    known: (chunk, ties taken per expert) of chunks that do not report because their output is
    already known.  Chunks in neither take no ties.
    """

    def __init__(
        self,
        quotas: Iterable[int],
        numbers: Iterable[int],
        known: Iterable[tuple[int, Sequence[int]]] = (),
    ) -> None:
        self._left = list(quotas)
        self._numbers = sorted(numbers, reverse=True)
        self._known = sorted(known, key=lambda item: item[0], reverse=True)
        self._failed: float = math.inf
        self._turn = Condition()
        self._advance()

    @property
    def open(self) -> list[bool]:
        """Return which experts' ties must still be counted: those with quota left."""
        return [quota > 0 for quota in self._left]

    def asked(self, chunk: int) -> tuple[int, ...]:
        """Return, per expert, the quota that chunk `chunk` should try, before it reports.

        If no other chunk is before it, that is what is left of the quota, and will be granted.
        Waits while one is.  If more are, it is COUNTED where some quota is left; quotas only fall,
        so an outdated answer costs only time.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: chunk > self._failed or self._numbers[-2:-1] != [chunk] or self._spent
            )
            if self._numbers[-1:] == [chunk]:
                return tuple(self._left)
            return tuple(COUNTED if quota > 0 else quota for quota in self._left)

    @property
    def _spent(self) -> bool:
        return not any(self.open)

    def take(self, chunk: int, ties: Sequence[int]) -> Grant:
        """Return how many of its `ties` per expert chunk `chunk` may keep.

        Waits for earlier chunks.  For an expert that is not `open`, ties need not be counted.

        Raises RuntimeError if one of the earlier chunks failed.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: chunk > self._failed or (self._numbers and self._numbers[-1] == chunk)
            )
            if chunk > self._failed:
                raise RuntimeError("an earlier chunk of this tensor failed")
            grant = grant_of(self._left, ties)
            self._subtract(grant.taken)
            self._numbers.pop()
            self._advance()
            self._turn.notify_all()
            return grant

    def _advance(self) -> None:
        """Account for the known chunks that come before the next one to report."""
        while self._known and (not self._numbers or self._known[-1][0] < self._numbers[-1]):
            self._subtract(self._known.pop()[1])

    def _subtract(self, taken: Sequence[int]) -> None:
        for expert, count in enumerate(taken):
            if self._left[expert] != UNLIMITED:
                self._left[expert] -= min(count, self._left[expert])

    def fail(self, chunk: int) -> None:
        """Report that chunk `chunk` failed, and wake the later ones. -1: no more calls will come.

        Earlier chunks continue, so that the first error in chunk order is the one that caused the
        others.
        """
        with self._turn:
            self._failed = min(self._failed, chunk)
            self._turn.notify_all()
