"""Progress of a copy: bytes done, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mstore.progress import Progress, ProgressCallback

Tick = Callable[[int], None]
"""Called with the number of bytes just done."""


class Ticks:
    """Adds up the bytes done, over several files of a phase, and reports them."""

    def __init__(self, report: ProgressCallback | None) -> None:
        self._report = report
        self._done = Counter[str]()

    def of(self, phase: str, total: int) -> Tick:
        """Return the counter of a phase that expects `total` bytes in all."""

        def tick(more: int) -> None:
            self._done[phase] += more
            if self._report is not None:
                done = self._done[phase]
                self._report(Progress(phase, done, max(total, done)))

        return tick
