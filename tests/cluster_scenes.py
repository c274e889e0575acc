"""A family at a remote and in a store, and merges of it on clusters, for tests.

`Scene` is one test's own: a store, and its remote on a shared path or in a bucket.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK, Family

from mstore import MergeRequest
from mstore.api import Store
from mstore.clusters.engine import Engine
from mstore.clusters.merging import on_cluster
from mstore.merge.running.commit import Merged, run_merge
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.engine import MEMORY, Resources, run_plan
from mstore.merge.running.slices import Receipt, Slice
from mstore.remotes.layout import pack_name
from mstore.store.objects.plan import Plan
from mstore.store.plans import sources_of
from mstore.terms.ids import ManifestId

REMOTE = "origin"
EXPERTS = ("e0", "e1", "e2", "e3")
_TOKEN = secrets.token_hex(16)
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
        around: Callable[[Any], Any] = lambda engine: engine,
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


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes, each a group of its own; all of them are killed afterwards."""
    own = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                words,
                env=own,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@dataclass
class Cluster:
    """A cluster that a test started.

    address: as a user gives it. scheduler: the process whose end is the cluster's. victims: the
    processes that compute now.
    """

    address: str
    scheduler: subprocess.Popen[bytes]
    victims: Callable[[], list[int]]


@contextmanager
def dask_cluster(path: Path, *, nanny: bool = False) -> Iterator[Cluster]:
    """A scheduler of Dask and two workers, each a process of its own, as a team runs them.

    nanny: whether a worker that dies is started again.
    """
    distributed = pytest.importorskip("distributed")
    file = path / "scheduler.json"
    file.unlink(missing_ok=True)
    run = [sys.executable, "-m"]
    common = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    with processes() as start:
        scheduler = start(*run, "distributed.cli.dask_scheduler", "--port", "0", *common)
        wait_for(file.exists)
        options = ["--nthreads", "1", "--local-directory", str(path), "--death-timeout", "60"]
        options.append("--nanny" if nanny else "--no-nanny")
        workers = [start(*run, "distributed.cli.dask_worker", *common, *options) for _ in range(2)]

        def victims() -> list[int]:
            # With a nanny, its child is the worker.
            return [
                pid
                for one in workers
                for pid in (children_of(one.pid) if nanny else [one.pid])
                if b"spawn_main" in command_of(pid) or not nanny
            ]

        with distributed.Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=300)
        yield Cluster(f"dask:{file}", scheduler, victims)


@contextmanager
def ray_cluster(patch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head of Ray with two processors."""
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_MODE", "token")
    patch.setenv("RAY_AUTH_TOKEN", _TOKEN)
    # It reads these when it is imported, and never again.
    pytest.importorskip("ray")
    port = free_port()
    patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
    options = ["--num-cpus", "2", "--include-dashboard=false", "--port", str(port)]
    options += ["--node-ip-address", "127.0.0.1", "--object-store-memory", str(80 << 20)]
    with processes() as start:
        head = start(*ray, *options, "--disable-usage-stats")

        def victims() -> list[int]:
            every = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]
            return [
                pid
                for pid in every
                if command_of(pid).startswith(b"ray::merge") and group_of(pid) == head.pid
            ]

        def is_up() -> bool:
            check = [ray[0], "health-check", "--address", f"127.0.0.1:{port}"]
            return subprocess.run(check, capture_output=True, check=False).returncode == 0

        wait_for(is_up)
        yield Cluster("ray:auto", head, victims)


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def group_of(pid: int) -> int:
    """The session of a process, which is that of the process that began it; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def children_of(pid: int) -> list[int]:
    """The children of a process."""
    try:
        # Any thread may have begun one.
        texts = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(one) for text in texts for one in text.split()]


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(is_so: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until something is so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)


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


class Inline(Executor):
    """An executor that runs everything at once, in this thread."""

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(run(*given, **named))
        except Exception as error:  # noqa: BLE001 -- as an executor does
            future.set_exception(error)
        return future


def expert_bytes(slices: Sequence[Slice]) -> int:
    """Bytes at rest that these slices read of experts."""
    return sum(one.expert_bytes for one in slices)
