"""Engines: who hands slices to workers. Owns the contract, and the engines of this machine.

mstore schedules nothing: an engine is what a team runs already, or Python's own processes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self, TypeVar

from blake3 import blake3

from mstore import terms
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Receipt, Slice
from mstore.terms.errors import BadRequest, Incompatible

T = TypeVar("T")
_KNOWN: Final = 5.0
"""Seconds until an engine is asked again how many workers it has."""
_UNKNOWN_SLOTS: Final = 31
"""Where an executor does not say how many it runs at once."""


@cache
def sources() -> str:
    """Return a digest of the sources of mstore: other ones may compute other bytes."""
    root = Path(terms.__file__).parent.parent
    hasher = blake3()
    for path in sorted(root.rglob("*.py")):
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0")
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


def require_alike(told: tuple[str, str], own: tuple[str, str], where: str) -> None:
    """Raise Incompatible unless a worker has the mstore of this process.

    told, own: version and digest of the sources of each. where: what people call the worker.
    """
    if told != own:
        what = told[0] if told[0] != own[0] else f"{told[0]} with other sources"
        raise Incompatible(
            f"its version of mstore is {what}, that of this process {own[0]}",
            where=where,
            hint=f"install the same on both: pip install mstore=={own[0]}",
        )


class Engine(ABC):
    """Workers that run calls. A context manager: afterwards nothing that it began is running.

    where: what people call it, for errors. Calls and results are pickled; what they name must be
    importable where workers run.
    """

    where: str
    threads: int = 1
    """How many a slice has, unless the caller says so."""
    _slots: int = 1
    _asked: float = -math.inf

    @abstractmethod
    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        """Run a call on some worker.

        label: for the engine's own displays. Raises BadRequest where this is no usable engine; what
        else it raises is the engine's.
        """

    @abstractmethod
    def count(self) -> int:
        """Return how many calls run at a time now. May ask the engine, and raise what it raises."""

    def slots(self) -> int:
        """Return how many calls run at a time, as far as that is known; 1 or more."""
        if time.monotonic() - self._asked > _KNOWN:
            self._asked = time.monotonic()
            # Where the engine is gone, what it runs says so.
            with suppress(Exception):
                self._slots = max(1, self.count())
        return self._slots

    def each(self, run: Callable[..., T], *given: Any) -> dict[str, T]:
        """Run a call on each worker that there is; return the results by the workers' names.

        A worker that dies meanwhile is left out. Where an engine cannot say which worker runs what,
        this runs on one.
        """
        return {self.where: self.call("look at the worker", run, *given).result()}

    def share(self, worker: str) -> tuple[int, int | None]:
        """Return how many calls a worker that `each` named runs at a time, and its memory for them.

        In bytes; None where the engine sets no limit.
        """
        return 1, None

    def submit(self, slice: Slice) -> Future[Receipt]:
        """Have a slice computed. Raises as `call`."""
        return self.call(f"merge slice {slice.label}", execute, slice)

    def is_lost(self, error: Exception) -> bool:
        """Return whether a call failed because its worker died, and nobody runs it again."""
        return False

    def close(self) -> None:  # noqa: B027 -- an engine may be its caller's
        """End calls that run, and let go of the engine; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AnyExecutor(Engine):
    """A `concurrent.futures.Executor` of the caller's, who also ends it."""

    def __init__(self, executor: Executor) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise BadRequest(
                f"a cluster is an address or an executor, not a {type(executor).__name__}",
                hint="an address: local:4, tcp://HOST:8786, ray:auto, slurm:PARTITION",
            )
        self._executor = executor
        self.where = f"the {type(executor).__name__}"

    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        future = self._executor.submit(run, *given)
        if not isinstance(future, Future):
            raise BadRequest(
                f"executor.submit returned a {type(future).__name__}, not a "
                "concurrent.futures.Future",
                hint="for Dask, pass its address, or client.get_executor()",
            )
        return future

    def count(self) -> int:
        known = getattr(self._executor, "_max_workers", None)
        return known if isinstance(known, int) and known > 0 else _UNKNOWN_SLOTS


class LocalProcesses(Engine):
    """Processes of this machine: as many as asked for. One that dies is replaced."""

    def __init__(self, count: int) -> None:
        self._number = count
        self.threads = max(1, len(os.sched_getaffinity(0)) // count)
        self._lock = Lock()
        self._pool = self._new()
        self.where = f"local:{count}"

    def _new(self) -> ProcessPoolExecutor:
        # A forked child has none of the parent's threads, and may wait for their locks for ever.
        return ProcessPoolExecutor(
            self._number, multiprocessing.get_context("spawn"), initializer=_ignore_ctrl_c
        )

    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        with self._lock:
            try:
                return self._pool.submit(run, *given)
            except BrokenExecutor:
                # The pool ended all its processes when one died.
                self._pool.shutdown(wait=False)
                self._pool = self._new()
                return self._pool.submit(run, *given)

    def count(self) -> int:
        return self._number

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, BrokenExecutor)

    def close(self) -> None:
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in processes:
            # A slice that nobody waits for: its pack is garbage in any case.
            with suppress(OSError, ValueError):
                one.terminate()
        for one in processes:
            one.join()


def _ignore_ctrl_c() -> None:
    """Leave Ctrl-C, which a terminal sends to all, to the process that called."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
