"""Ray: its tasks as calls. Its environments (`runtime_env`) are left to whoever starts it.

Ray runs a task again whose worker died, three times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from mstore.clusters.engine import Engine
from mstore.terms.errors import Unavailable

T = TypeVar("T")
AUTO: Final = "ray:auto"


class Ray(Engine):
    """The workers of a Ray cluster."""

    def __init__(self, address: str) -> None:
        """Connect. address: ray:auto, or ray://HOST:PORT. Raises Unavailable."""
        try:
            import ray
        except ImportError as error:
            raise Unavailable(
                "Ray is not installed", where=address, hint="pip install 'mstore[ray]'"
            ) from error
        self._ray: Any = ray
        self.where = address
        self._has_begun = not ray.is_initialized()
        self._tasks: dict[Future[Any], Any] = {}
        if self._has_begun:
            try:
                ray.init(
                    address="auto" if address == AUTO else address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise Unavailable(
                    f"there is no Ray cluster: {str(error).partition('. ')[0]}",
                    where=address,
                    hint="check the address and RAY_AUTH_TOKEN; `ray start` starts one",
                ) from error

    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        return self._called(label, run, *given)

    def _called(self, label: str, run: Callable[..., T], *given: Any, **options: Any) -> Future[T]:
        named = {"name": label, **options}
        reference = self._ray.remote(run).options(**named).remote(*given)
        future: Future[T] = reference.future()
        self._tasks[future] = reference
        future.add_done_callback(lambda done: self._tasks.pop(done, None))
        return future

    def count(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 1))

    def each(self, run: Callable[..., T], *given: Any) -> dict[str, T]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = {
            f"{one['NodeManagerHostname']} ({one['NodeID'][:8]})": self._called(
                "look at the node",
                run,
                *given,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(one["NodeID"], soft=False),
            )
            for one in self._ray.nodes()
            if one["Alive"] and one["Resources"].get("CPU")
        }
        found = {}
        for name, future in asked.items():
            # A node that is lost meanwhile computes nothing, either.
            with suppress(
                self._ray.exceptions.WorkerCrashedError, self._ray.exceptions.NodeDiedError
            ):
                found[name] = future.result()
        return found

    def close(self) -> None:
        for reference in list(self._tasks.values()):
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._tasks.clear()
        if self._has_begun:
            self._has_begun = False
            self._ray.shutdown()
