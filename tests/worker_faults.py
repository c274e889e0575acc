"""What the workers of an executor run in tests: slices that are killed half way, and measurements.

A module of its own, because worker processes import it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from mstore.blocks.packs import PackWriter
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Receipt, Slice


def killed_once(mark: Path, slice: Slice) -> Receipt:
    """Compute a slice; the first attempt kills its process once the pack has its first block."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return execute(slice)
    append = PackWriter.append_encoded

    def killed(self: PackWriter, *given: Any) -> None:
        append(self, *given)
        os.kill(os.getpid(), signal.SIGKILL)

    PackWriter.append_encoded = killed  # type: ignore[method-assign,assignment]
    return execute(slice)


def die() -> None:
    """End this process at once."""
    os._exit(9)


class Killing(Executor):
    """Hands slices to another executor; the worker of slice `number` is killed once."""

    def __init__(self, inner: Executor, number: int, mark: Path) -> None:
        self._inner = inner
        self._number = number
        self._mark = mark
        self.slices: list[Slice] = []

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        assert run is execute
        self.slices.append(given[0])
        if len(self.slices) - 1 == self._number:
            return self._inner.submit(killed_once, self._mark, *given)
        return self._inner.submit(run, *given, **named)

    @property
    def has_killed(self) -> bool:
        """Whether the worker died, with its pack begun."""
        return self._mark.exists()


_peak = [0]


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def watch_memory() -> None:
    """Note this process's peak of anonymous memory from now on; the initializer of a worker."""

    def watch() -> None:
        while True:
            _peak[0] = max(_peak[0], _anonymous_bytes())
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()


def peak_memory() -> int:
    """The peak of anonymous memory in bytes."""
    return _peak[0]
