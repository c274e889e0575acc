"""Executors: a worker that is killed in the middle of a slice costs time, and never the merge."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK, Family
from worker_faults import Killing

from mstore import MergeRequest
from mstore.api import Store
from mstore.clusters.engine import AnyExecutor
from mstore.merge.running.commit import Merged, run_merge
from mstore.merge.running.engine import Resources, run_plan
from mstore.store import leases
from mstore.store.objects.plan import Plan
from mstore.store.plans import sources_of
from mstore.terms.errors import BadRequest, Corrupt, Interrupted
from mstore.terms.ids import ManifestId, PlanId

SMALL = 3 * BLOCK
"""Bytes of output a slice, so that a small family has several."""

KILLED = 2
"""The slice whose worker is killed; two were finished before."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts that differ everywhere, as checkpoints."""
    root = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(3)
    size = 6 * BLOCK // 2
    base = {name: families.cast(rng.standard_normal(size), "BF16") for name in ("a", "b", "c")}
    experts = [
        {
            name: families.cast(array.astype("f4") + rng.standard_normal(size) / 8, "BF16")
            for name, array in base.items()
        }
        for _ in range(2)
    ]
    Family(base, tuple(experts)).write(root)
    return root


@pytest.fixture(scope="module")
def planned(family: Path) -> tuple[Path, PlanId]:
    """A store of the family, and a plan of both experts in it."""
    with Store.init(family / "store", block_size=BLOCK, codec="raw") as store:
        store.add(family / "base", name="base")
        for name in ("e0", "e1"):
            store.add(family / name, name=name, base="base")
        report = store.plan(MergeRequest(base="base", experts=["e0", "e1"], method="linear"))
    return family / "store", report.plan


@pytest.fixture
def store(planned: tuple[Path, PlanId], tmp_path: Path) -> Iterator[Store]:
    """The family; nothing is merged yet, so that each slice writes a pack."""
    shutil.copytree(planned[0], tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def plan(store: Store, planned: tuple[Path, PlanId]) -> Plan:
    """A plan of both experts."""
    return store._catalog.record(Plan, planned[1])


@pytest.fixture
def wanted(store: Store, plan: Plan) -> ManifestId:
    """What threads of this process make."""
    return run_plan(store._catalog, plan, None, resources=Resources(1)).manifest.id()


def merge(store: Store, plan: Plan, executor: Executor, name: str = "m") -> Merged:
    """Run it in small slices, without a memo table."""
    catalog = store._catalog
    return run_merge(
        catalog,
        plan,
        sources_of(catalog, plan.id(), plan),
        name=name,
        message="",
        threads=1,
        slice_bytes=SMALL,
        workers=AnyExecutor(executor),
    )


def is_clean(store: Store) -> bool:
    """Whether all is sound, and nothing lies in tmp/."""
    return store.fsck(read_data=True).problems == () and not list((store.path / "tmp").iterdir())


def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the merge receive each slice before it hands out the next one."""
    monkeypatch.setattr("mstore.merge.running.runners._AHEAD", (0, 1))


# -- frameworks ----------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[Executor]:
    """Python's own pool."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def loky() -> Iterator[Executor]:
    """loky's pool, which joblib uses."""
    pool = pytest.importorskip("loky").ProcessPoolExecutor(2)
    try:
        yield pool
    finally:
        pool.shutdown(kill_workers=True)


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    """Two worker processes of Dask and a client, patient on a busy machine."""
    distributed = pytest.importorskip("distributed")
    patience = "600s"
    settings = {
        "distributed.comm.timeouts.connect": patience,
        "distributed.comm.timeouts.tcp": patience,
        # The cluster drops a worker that takes longer to come back.
        "distributed.deploy.lost-worker-timeout": patience,
        "distributed.worker.memory.terminate": False,
    }
    with (
        pytest.importorskip("dask").config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster, timeout=patience) as client,
    ):
        yield client


@pytest.fixture
def dask(dask_cluster: Any) -> Executor:
    """Dask as it is: a slice may cost three workers."""
    dask_cluster.cluster.scheduler.allowed_failures = 3
    return dask_cluster.get_executor()  # type: ignore[no-any-return]


@pytest.fixture
def dask_once(dask_cluster: Any) -> Executor:
    """Dask where no slice may cost a worker."""
    dask_cluster.cluster.scheduler.allowed_failures = 0
    return dask_cluster.get_executor()  # type: ignore[no-any-return]


def ray_executor(**options: Any) -> Executor:
    """Ray's tasks as an executor."""
    import ray

    class RayExecutor(Executor):
        def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
            task = ray.remote(run).options(**options)
            return task.remote(*given, **named).future()  # type: ignore[no-any-return]

    return RayExecutor()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One worker process of Ray."""
    pytest.importorskip("ray")
    settings = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # The workers import `worker_faults`.
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import ray

        options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
        # Ray's own daemons give up after 15 s: a busy machine needs another attempt.
        for attempts_left in (2, 1, 0):
            try:
                ray.init(address="local", log_to_driver=False, **options)
                break
            except Exception:
                ray.shutdown()
                if not attempts_left:
                    raise
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def ray(ray_cluster: None) -> Executor:
    """Ray as it is: a task runs up to three times more."""
    return ray_executor()


@pytest.fixture
def ray_once(ray_cluster: None) -> Executor:
    """Ray where no task runs again."""
    return ray_executor(max_retries=0)


# -- kills ---------------------------------------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize("framework", ["dask", "ray"])
def test_a_framework_that_retries_ends_the_merge(
    framework: str,
    store: Store,
    plan: Plan,
    wanted: ManifestId,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A worker is killed with its pack half written: Dask and Ray run the slice again, and the
    merge has the same content, reads no more and leaves nothing behind."""
    pool = Killing(request.getfixturevalue(framework), KILLED, tmp_path / "killed")
    merged = merge(store, plan, pool)
    assert pool.has_killed
    assert len(pool.slices) > KILLED + 1
    assert merged.manifest == wanted
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    assert is_clean(store)


@pytest.mark.rest
@pytest.mark.parametrize("framework", ["processes", "loky", "dask_once", "ray_once"])
def test_a_lost_slice_interrupts_the_merge(
    framework: str,
    store: Store,
    plan: Plan,
    wanted: ManifestId,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Where nobody runs the slice of a killed worker again, the merge publishes nothing and says
    what to do; the same merge again reuses the slices that were finished."""
    in_order(monkeypatch)
    before = store.refs()
    pool = Killing(request.getfixturevalue(framework), KILLED, tmp_path / "killed")
    with pytest.raises(Interrupted, match="did not return a slice: ") as lost:
        merge(store, plan, pool, name="never")
    assert pool.has_killed
    assert "run the same merge again" in (lost.value.hint or "")
    assert store.refs() == before
    assert store.fsck().problems == ()
    with ThreadPoolExecutor(1) as again:
        merged = merge(store, plan, again)
    finished = sum(slice.expert_bytes for slice in pool.slices[:KILLED])
    assert merged.outcome.resumed_expert_bytes == finished > 0
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned - finished
    assert merged.manifest == wanted
    assert is_clean(store)


# -- executors that misbehave --------------------------------------------------------------------


class Failing(Executor):
    """Runs slices at once; one of them fails with an error that is not mstore's."""

    def __init__(self, number: int, *, raising: bool) -> None:
        self._number = number
        self._raising = raising
        self.costs: list[int] = []

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.costs.append(given[0].expert_bytes)
        if len(self.costs) - 1 != self._number:
            future.set_result(run(*given, **named))
        elif self._raising:
            raise RuntimeError("cannot schedule new futures after shutdown")
        else:
            future.set_exception(MemoryError())
        return future


@pytest.mark.sampled(2)
@pytest.mark.parametrize("raising", [False, True])
def test_finished_slices_are_kept_received_or_not(
    raising: bool, store: Store, plan: Plan, wanted: ManifestId
) -> None:
    """Slices that were finished when another failed are reused, though nobody had taken their
    receipts; a refused submission counts as a failure."""
    pool = Failing(3, raising=raising)
    with pytest.raises(
        Interrupted, match="RuntimeError: cannot" if raising else "MemoryError(\n|$)"
    ):
        merge(store, plan, pool, name="never")
    with ThreadPoolExecutor(1) as again:
        merged = merge(store, plan, again)
    assert merged.outcome.resumed_expert_bytes == sum(pool.costs) - pool.costs[3] > 0
    assert merged.manifest == wanted
    assert is_clean(store)


@pytest.mark.parametrize("damage", [Corrupt("a bad block", where="block 1"), OSError("no")])
def test_an_error_that_a_framework_wraps_is_unwrapped(
    damage: Exception, store: Store, plan: Plan
) -> None:
    """Ray raises a class of its own, derived from the error of the slice, whose text is a
    traceback: the merge fails with the error itself."""

    class Wrapped(type(damage)):  # type: ignore[misc]
        cause = damage

        def __str__(self) -> str:
            return "ray::execute()\nTraceback"

    class Wrapping(Executor):
        def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(Wrapped("a bad block"))
            return future

    with pytest.raises((Corrupt, Interrupted)) as failed:
        merge(store, plan, Wrapping(), name="never")
    if isinstance(damage, Corrupt):
        assert failed.value is damage
    else:
        assert failed.value.what == "the workers did not return a slice: OSError: no"


def test_an_interrupted_merge_leaves_what_it_finished(store: Store, plan: Plan) -> None:
    """A finished slice waits for the next merge as a pack with its receipt: garbage that `fsck`
    reports, and resumable."""
    with pytest.raises(Interrupted):
        merge(store, plan, Failing(3, raising=True), name="never")
    (left,) = leases.leftovers(store._catalog.layout)
    assert left.resumable
    assert left.files == 2 * 3
    report = store.fsck()
    assert report.problems == ()
    assert report.garbage != ()
    with ThreadPoolExecutor(1) as again:
        merge(store, plan, again)
    assert is_clean(store)


def test_a_slice_delivered_twice_is_harmless(store: Store, plan: Plan, wanted: ManifestId) -> None:
    """Each slice runs in two processes at the same time, and one receipt counts: the merge has the
    same content, and what the other attempts wrote goes with the next commit."""

    class Twice(Executor):
        def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
            first, _ = [pool.submit(run, *given, **named) for _ in range(2)]
            return first

    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        merged = merge(store, plan, Twice())
    assert merged.manifest == wanted
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    with ThreadPoolExecutor(1) as again:
        merge(store, plan, again, name="next")
    assert is_clean(store)


@pytest.mark.rest
def test_another_future_is_refused(store: Store, plan: Plan) -> None:
    """What returns no concurrent.futures.Future (a Dask client) is refused, with what to pass."""

    class Client:
        def submit(self, run: object, *given: object) -> object:
            return object()

    before = store.refs()
    with pytest.raises(BadRequest, match="returned a object, not a concurrent") as refused:
        merge(store, plan, Client(), name="never")  # type: ignore[arg-type]
    assert refused.value.hint == "for Dask, pass its address, or client.get_executor()"
    assert store.refs() == before
    assert is_clean(store)
