"""The tie ledger: which chunk gets how many of the elements that tie at a trim threshold.

Exactly k elements of a tensor are kept, and of those that equal the threshold the ones with the
lowest flat index.  So a chunk must know how many ties come before it.  Chunks of a tensor count
their own ties and hand the sum on in order; everything else in a chunk runs side by side.
"""

from __future__ import annotations

import math
from threading import Condition

from mstore.merge.kernels import UNLIMITED


class TieLedger:
    """For one tensor and all its experts; chunks are numbered 0, 1, ... and each reports once."""

    def __init__(self, quotas: list[int]) -> None:
        self._left = list(quotas)
        self._next = 0
        self._failed: float = math.inf
        self._turn = Condition()

    @property
    def open(self) -> list[bool]:
        """Which experts' ties must still be counted: those with a quota that is not used up.

        Quotas only fall, so an answer that is out of date costs a count and no more.
        """
        return [quota > 0 for quota in self._left]

    def take(self, chunk: int, ties: list[int]) -> list[int]:
        """How many of its `ties` per expert chunk `chunk` may keep (UNLIMITED: all of them).

        Waits for earlier chunks.  Where an expert is not `open`, its ties need not be counted.

        Raises RuntimeError where one of those failed.
        """
        with self._turn:
            self._turn.wait_for(lambda: chunk > self._failed or self._next == chunk)
            if chunk > self._failed:
                raise RuntimeError("an earlier chunk of this tensor failed")
            granted = []
            for expert, count in enumerate(ties):
                if self._left[expert] == UNLIMITED:
                    granted.append(UNLIMITED)
                    continue
                left = self._left[expert]
                # All of them is no limit: the kernel need not count.  But with nothing left nobody
                # has counted, and there may be ties.
                granted.append(UNLIMITED if 0 < left >= count else left)
                self._left[expert] -= min(count, left)
            self._next += 1
            self._turn.notify_all()
            return granted

    def fail(self, chunk: int) -> None:
        """Chunk `chunk` will never report: wake the later ones.  -1: none will be asked any more.

        Earlier ones go on, so that the first error in the order of chunks is the one that caused
        the others.
        """
        with self._turn:
            self._failed = min(self._failed, chunk)
            self._turn.notify_all()
