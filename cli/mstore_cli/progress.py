"""A progress bar on standard error, for terminals only.

Converts the library's `Progress` ticks to a bar with rate and time left.  Ticks may come from any
thread.  There is no rate before anything moved.  It covers the last seconds, and falls to 0 B/s
when ticks stop, as with a network mount that hangs.  The bar disappears when the command ends; only
the result stays.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mstore_cli.output import is_terminal, printable
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.terms.report import Progress, ProgressCallback


WINDOW_SECONDS = 5.0


class Rate:
    """Bytes per second over the last seconds, until now and not until the last tick."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ticks: deque[tuple[float, int]] = deque()
        self.has_moved = False
        """Whether more was done at some tick than at the first one."""

    def tick(self, done: int) -> None:
        """Record the bytes done so far; fewer than before starts a new count."""
        with self._lock:
            if self._ticks and done < self._ticks[-1][1]:
                self._ticks.clear()
            self._ticks.append((self._clock(), done))
            self.has_moved = self.has_moved or done > self._ticks[0][1]
            self._forget()

    def now(self) -> float:
        """Return bytes per second; 0 before the first tick."""
        with self._lock:
            self._forget()
            if not self._ticks:
                return 0.0
            began, first = self._ticks[0]
            passed = self._clock() - began
            return (self._ticks[-1][1] - first) / passed if passed > 0 else 0.0

    def _forget(self) -> None:
        """Keep one tick from before the window: the rate counts from there."""
        start = self._clock() - WINDOW_SECONDS
        while len(self._ticks) > 1 and self._ticks[1][0] <= start:
            self._ticks.popleft()


@contextmanager
def bar(*, wanted: bool) -> Iterator[ProgressCallback | None]:
    """Yield a callback that moves the bar, or None if nobody would see it."""
    if not wanted or not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Amount(ProgressColumn):
        """`done / total` and bytes per second, in binary units."""

        def render(self, task: Task) -> Text:
            rate = rates[task.id]
            told = f"  {format_size(int(rate.now()))}/s" if rate.has_moved else ""
            total = format_size(int(task.total or 0))
            return Text(f"{format_size(int(task.completed))} / {total}{told}")

    lock = threading.Lock()
    tasks: dict[str, TaskID] = {}
    rates: defaultdict[TaskID, Rate] = defaultdict(Rate)
    with Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        Amount(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:

        def tick(progress: Progress) -> None:
            with lock:
                if progress.phase not in tasks:
                    # Hidden until the total is known: it would be drawn at once with a total of
                    # 100.
                    words = printable(progress.phase)
                    tasks[progress.phase] = bars.add_task(words, total=None, visible=False)
                task = tasks[progress.phase]
                rates[task].tick(progress.done)
            seen = progress.total > 0
            bars.update(task, completed=progress.done, total=progress.total, visible=seen)

        yield tick
