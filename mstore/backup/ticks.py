"""Progress of a copy: bytes done, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mstore.reports import Progress

Report = Callable[[Progress], None]
Tick = Callable[[int], None]
"""Told how many more bytes are done."""


class Ticks:
    """Adds up what is done, over several files of a phase, and reports it."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._done = Counter[str]()

    def of(self, phase: str, total: int) -> Tick:
        """Who is told of more bytes of this phase; `total` bytes are expected in all of it."""

        def tick(more: int) -> None:
            self._done[phase] += more
            if self._report is not None:
                done = self._done[phase]
                self._report(Progress(phase, done, max(total, done)))

        return tick
