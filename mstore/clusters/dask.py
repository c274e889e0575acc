"""Dask: a scheduler by its address or by its file, and the workers that it knows.

Dask runs a call again whose worker died, up to `distributed.scheduler.allowed-failures` (3) times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

from mstore.clusters.engine import Engine
from mstore.terms.errors import Unavailable

T = TypeVar("T")
_PATIENCE: Final = "30s"
_START: Final = 300.0
"""Seconds that a first worker may take to start."""
FILE: Final = "dask:"


class Dask(Engine):
    """The workers of a Dask scheduler."""

    def __init__(self, address: str) -> None:
        """Connect. address: of the scheduler, or dask:FILE. Raises Unavailable."""
        try:
            import distributed
        except ImportError as error:
            raise Unavailable(
                "Dask is not installed", where=address, hint="pip install 'mstore[dask]'"
            ) from error
        self.where = address
        given: dict[str, Any] = {"address": address}
        if address.startswith(FILE):
            given = {"scheduler_file": address.removeprefix(FILE)}
            # Dask itself would wait for it for ever.
            if not Path(given["scheduler_file"]).is_file():
                raise Unavailable(
                    "there is no such file",
                    where=address,
                    hint="a scheduler writes it, and removes it when it ends: start one",
                )
        try:
            # Whatever this process asks Dask for later is not this client's.
            self._client: Any = distributed.Client(  # type: ignore[no-untyped-call]
                **given, timeout=_PATIENCE, set_as_default=False, name="mstore"
            )
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"there is no Dask scheduler: {error}",
                where=address,
                hint="check the address, or start one: dask scheduler",
            ) from error
        self._executor: Any = self._client.get_executor(pure=False)  # type: ignore[no-untyped-call]

    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        # Dask groups tasks by what comes before the last dash.
        key = f"{label}-{uuid4().hex[:8]}"
        future: Future[T] = self._executor.submit(run, *given, key=key)
        return future

    def count(self) -> int:
        threads: dict[str, int] = self._client.nthreads()
        return sum(threads.values())

    def each(self, run: Callable[..., T], *given: Any) -> dict[str, T]:
        # A cluster that grows with its work has no worker before a task waits for one.
        first = self.call("look at the worker", run, *given)
        try:
            told = first.result(_START)
        except TimeoutError as error:
            first.cancel()
            raise Unavailable(
                f"no worker came in {_START:.0f} seconds",
                where=self.where,
                hint=f"start one on each machine: dask worker {self.where}",
            ) from error
        # One that dies meanwhile answers with an error of its connection.
        found: dict[str, Any] = self._client.run(run, *given, on_error="return")
        there = {name: one for name, one in found.items() if not isinstance(one, OSError)}
        for one in there.values():
            if isinstance(one, Exception):
                raise one
        return there or {self.where: told}

    def share(self, worker: str) -> tuple[int, int | None]:
        told = self._client.scheduler_info(n_workers=-1)["workers"].get(worker, {})
        return told.get("nthreads", 1), told.get("memory_limit") or None

    def close(self) -> None:
        # A slice that nobody waits for ends where it is; its pack is garbage.
        with suppress(Exception):
            self._executor.shutdown(wait=False, cancel_futures=True)
        with suppress(Exception):
            self._client.close()
