"""A progress bar on standard error, for terminals only.

Turns the library's `Progress` ticks into a bar with rate and time left.  Ticks may come from any
thread.  The bar is gone when the command ends: what stays is the result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mstore_cli.output import is_terminal, printable
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.reports import Progress


@contextmanager
def bar(*, wanted: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A callback that moves the bar, or None where nobody would see it."""
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
        """`done / total` and bytes a second, in binary units."""

        def render(self, task: Task) -> Text:
            rate = f"{format_size(int(task.speed))}/s" if task.speed else ""
            total = format_size(int(task.total)) if task.total else "?"
            return Text(f"{format_size(int(task.completed))} / {total}  {rate}")

    lock = threading.Lock()
    tasks: dict[str, TaskID] = {}
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
                    tasks[progress.phase] = bars.add_task(printable(progress.phase))
                task = tasks[progress.phase]
            bars.update(task, completed=progress.done, total=progress.total)

        yield tick
