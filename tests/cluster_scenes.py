"""A family at a remote and in a store, and merges of it on clusters, for tests.

`Scene` is one test's own: a store, and its remote on a shared path or in a bucket.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import families
import numpy as np
from families import BLOCK, Family

from mstore import MergeRequest
from mstore.api import Store
from mstore.clusters.engine import AnyExecutor, Engine
from mstore.clusters.merging import on_cluster
from mstore.merge.running.commit import Merged, run_merge
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.engine import MEMORY, Resources, run_plan
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Receipt, Slice
from mstore.remotes.layout import pack_name
from mstore.store.objects.plan import Plan
from mstore.store.plans import sources_of
from mstore.terms.ids import ManifestId

REMOTE = "origin"
EXPERTS = ("e0", "e1", "e2", "e3")
SMALL = 2 * BLOCK
"""Bytes of output a slice, so that a small family has many."""


def build(root: Path) -> None:
    """A base and four tunes of it, in a store, and pushed to a shared path."""
    rng = np.random.default_rng(7)
    size = 4 * BLOCK // 2
    base = {name: families.cast(rng.standard_normal(size), "BF16") for name in "abcdef"}
    experts = [
        {
            name: families.cast(array.astype("f4") + rng.standard_normal(size) / 64, "BF16")
            for name, array in base.items()
        }
        for _ in EXPERTS
    ]
    Family(base, tuple(experts)).write(root)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in EXPERTS:
            store.add(root / name, name=name, base="base")
        store.add_remote(REMOTE, (root / "remote").as_uri())
        store.push(REMOTE, every=True)


class Scene:
    """A store of the family that knows a remote which has it, too."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store

    @classmethod
    def at(cls, path: Path, url: str | None = None, **options: Any) -> Scene:
        """Open a copy of what `build` made; with an address, push it there."""
        store = Store.open(path / "store")
        store.remove_remote(REMOTE)
        store.add_remote(REMOTE, url or (path / "remote").as_uri(), **options)
        if url is None:
            store.fetch(REMOTE)
        else:
            store.push(REMOTE, every=True)
        return cls(path, store)

    def plan(self, method: str = "ties", **options: Any) -> Plan:
        """A plan of all four."""
        parameters = {"density": 0.4} if method == "ties" else {}
        request = MergeRequest(
            base="base", experts=list(EXPERTS), method=method, parameters=parameters, **options
        )
        return self.store._catalog.record(Plan, self.store.plan(request, threads=1).plan)

    def wanted(self, plan: Plan) -> ManifestId:
        """What a thread of this process makes."""
        return run_plan(self.store._catalog, plan, None, resources=Resources(1)).manifest.id()

    def merge(
        self,
        plan: Plan,
        cluster: str | Executor | Engine,
        *,
        remote: str | None = REMOTE,
        push: bool = False,
        name: str = "m",
        around: Callable[[Engine], Any] = lambda engine: engine,
        **options: Any,
    ) -> Merged:
        """Run a plan on a cluster in small slices, without a memo table.

        around: what stands between the merge and the engine.
        """
        catalog = self.store._catalog

        def run(engine: Engine, delivery: Delivery) -> Merged:
            return run_merge(
                catalog,
                plan,
                sources_of(catalog, plan.id(), plan),
                name=name,
                message="",
                threads=1,
                slice_bytes=SMALL,
                workers=around(engine),
                delivery=delivery,
                **options,
            )

        return on_cluster(
            catalog,
            cluster,
            run,
            remote=remote,
            push=push,
            opens=self.store._remote,
            memory=MEMORY,
            slice_bytes=SMALL,
        )

    # -- what must hold --------------------------------------------------------------------------

    def strays(self) -> set[str]:
        """Packs at the remote that its root does not name."""
        with self.store._remote(REMOTE) as remote:
            remote.make_directory()
            named = {pack_name(row.pack) for row in remote.state().packs().values()}
            return {one.name for one in remote.objects.names("packs/")} - named

    def sound(self) -> None:
        """Nothing is missing or damaged, here and at the remote."""
        assert self.store.fsck(read_data=True, threads=1).problems == ()
        assert self.store.remote_fsck(REMOTE, read_data=True).problems == ()

    def cleared(self) -> None:
        """All is sound, and gc removes each pack at the remote that no root names."""
        self.sound()
        # The first finds them, the second removes them.
        for _ in range(2):
            self.store.remote_gc(REMOTE, grace_hours=0)
        assert self.strays() == set()
        self.sound()

    def is_there(self, name: str, manifest: ManifestId) -> bool:
        """Whether a clone of the remote has this on a branch."""
        config = self.store._catalog.config.remotes[0]
        clone = self.path / f"clone-{name}"
        shutil.rmtree(clone, ignore_errors=True)
        Store.clone(config.url, clone, endpoint=config.endpoint, region=config.region)
        with Store.open(clone) as other:
            assert other.fsck(read_data=True, threads=1).problems == ()
            return other.show(name).manifest == manifest


class Standing:
    """Something between a merge and its engine: it sees each slice, and may do otherwise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slices: list[Slice] = []

    def submit(self, slice: Slice) -> Future[Receipt]:
        self.slices.append(slice)
        return self.instead(len(self.slices) - 1, slice)

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        """What becomes of the slice that was handed out as this number."""
        return self.engine.submit(slice)

    def slots(self) -> int:
        return self.engine.slots()

    def is_lost(self, error: Exception) -> bool:
        return self.engine.is_lost(error)


class Failing(Standing):
    """An engine that fails for good when it has had so many slices; those before are done."""

    def __init__(self, engine: Engine, after: int) -> None:
        super().__init__(engine)
        self._after = after

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        if number >= self._after:
            raise RuntimeError("the scheduler is gone")
        future = self.engine.submit(slice)
        with suppress(Exception):
            future.result()
        return future


class AtOnce(AnyExecutor):
    """An engine of one worker: this thread."""

    def __init__(self) -> None:
        self.where = "here"

    def call(self, label: str, run: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(run(*given))
        except Exception as error:  # noqa: BLE001 -- as an executor does
            future.set_exception(error)
        return future

    def slots(self) -> int:
        return 1


class Inline(Executor):
    """An executor that runs everything at once, in this thread."""

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        return AtOnce().call("", run, *given)


def expert_bytes(slices: Sequence[Slice]) -> int:
    """Bytes at rest that these slices read of experts."""
    return sum(one.expert_bytes for one in slices)


__all__ = [
    "EXPERTS",
    "REMOTE",
    "SMALL",
    "AtOnce",
    "Failing",
    "Inline",
    "Scene",
    "Standing",
    "build",
    "execute",
    "expert_bytes",
]
