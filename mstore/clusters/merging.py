"""A merge on a cluster: who computes, and where the packs go.

A team has one of many engines, and its models lie in the store or at a remote: these are two
questions, so they are two objects (`engine.Engine`, `merge.running.delivery.Delivery`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from mstore.clusters import address
from mstore.clusters.at_remote import FetchedDelivery, PushedDelivery
from mstore.clusters.engine import Engine
from mstore.clusters.probe import require_able
from mstore.merge.running.delivery import Delivery, InStoreDelivery
from mstore.remotes import registry
from mstore.remotes.push import PacksGone
from mstore.remotes.state import Remote
from mstore.store.catalog import Catalog
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option
from mstore.terms.report import Progress, ProgressCallback

T = TypeVar("T")
_ATTEMPTS: Final = 3
"""How often a merge whose packs the remote's gc removed goes on from what is left."""


def on_cluster(
    catalog: Catalog,
    cluster: str | Executor,
    run: Callable[[Engine, Delivery], T],
    *,
    remote: str | None,
    push: bool,
    opens: Callable[[str], AbstractContextManager[Remote]],
    memory: int,
    slice_bytes: int,
    progress: ProgressCallback | None = None,
) -> T:
    """Look at each worker, then run a merge with this engine and delivery.

    remote: through which workers get and give packs; None: through the store's directory. push:
    leave the packs there and move the remote's ref. opens: a remote by its name. memory,
    slice_bytes: of a slice.

    Raises BadRequest, Unavailable and Incompatible for the cluster, and what `run` raises.
    """
    if push and remote is None:
        raise BadRequest(
            "the result is to be pushed, and no remote is named",
            where=Option("push"),
            hint=Option("remote", _only(catalog)),
        )
    config = None if remote is None else registry.find(catalog, remote)
    with (
        nullcontext() if remote is None else opens(remote) as there,
        address.opened(cluster) as engine,
    ):
        for attempt in range(_ATTEMPTS):
            delivery: Delivery
            if config is None or there is None:
                delivery = InStoreDelivery(catalog)
            elif push:
                delivery = PushedDelivery(catalog, there, config, progress)
            else:
                delivery = FetchedDelivery(catalog, there, config)
            if not attempt:
                place = delivery.workplace(catalog.layout.tmp)
                if progress is not None:
                    # A queue may take an hour to give the first.
                    progress(Progress("wait for workers", 0, 1))
                require_able(engine, place, memory=memory, slice_bytes=slice_bytes)
            try:
                return run(engine, delivery)
            except PacksGone:
                if attempt == _ATTEMPTS - 1:
                    raise
    raise AssertionError


def _only(catalog: Catalog) -> str:
    """Return the name of the store's only remote, or what stands for a name."""
    names = [one.name for one in catalog.config.remotes]
    return names[0] if len(names) == 1 else "NAME"
