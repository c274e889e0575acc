"""Dask and Ray as teams run them: what they compute, and what happens when their parts die.

The long lane: `make clusters`. Slurm has tests of its own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cluster_scenes import (
    REMOTE,
    Cluster,
    Scene,
    Standing,
    build,
    dask_cluster,
    ray_cluster,
    wait_for,
)
from servers import Server

from mstore.api import Store
from mstore.clusters.engine import Engine
from mstore.merge.running.slices import Receipt, Slice

__all__ = ["build"]
pytestmark = pytest.mark.slow
ENGINES = ("dask", "ray")
ROUNDS = 20


@contextmanager
def started(engine: str, path: Path, patch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of this engine, whose workers come back when they die."""
    path.mkdir(exist_ok=True)
    with dask_cluster(path, nanny=True) if engine == "dask" else ray_cluster(patch) as found:
        yield found


@pytest.mark.parametrize("push", [False, True], ids=["fetched", "pushed"])
@pytest.mark.parametrize("place", ["path", "bucket"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_as_alone(
    engine: str,
    place: str,
    push: bool,
    copied: Path,
    moto: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ties of four experts on two workers gives the ManifestId of one thread, and leaves at the
    remote what its root names."""
    if place == "bucket":
        moto.use(monkeypatch)
        monkeypatch.setattr(Store, "trusted_endpoints", (moto.endpoint,))
        scene = Scene.at(copied, moto.below(), endpoint=moto.endpoint)
    else:
        scene = Scene.at(copied)
    with started(engine, copied / "cluster", monkeypatch) as cluster:
        plan = scene.plan(budget=0.7)
        merged = scene.merge(plan, cluster.address, push=push)
    assert merged.manifest == scene.wanted(plan)
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    assert scene.strays() == set()
    scene.sound()
    if push:
        assert scene.is_there("m", merged.manifest)


class Murderous(Standing):
    """An engine of which a worker is killed once, at a random moment."""

    def __init__(self, engine: Engine, cluster: Cluster, seed: int) -> None:
        super().__init__(engine)
        self._cluster = cluster
        self._random = random.Random(seed)
        self._at = self._random.randrange(6)
        self.killed = 0

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        future = self.engine.submit(slice)
        if number == self._at:
            threading.Timer(self._random.uniform(0, 0.3), self._kill).start()
        return future

    def _kill(self) -> None:
        victims = self._cluster.victims()
        if victims:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(victims), signal.SIGKILL)
                self.killed += 1


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_killed_at_any_moment(
    engine: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times a worker is killed at a random moment: each merge is right, and gc knows each
    object that is left."""
    scene = Scene.at(copied)
    plan = scene.plan("linear")
    wanted = scene.wanted(plan)
    killed = 0
    with started(engine, copied / "cluster", monkeypatch) as cluster:
        for seed in range(3 * ROUNDS):
            if killed == ROUNDS:
                break
            made: list[Murderous] = []

            def around(inner: Engine, seed: int = seed, made: list[Murderous] = made) -> Murderous:
                made.append(Murderous(inner, cluster, seed))
                return made[-1]

            merged = scene.merge(
                plan, cluster.address, push=bool(seed % 2), name=f"m{seed}", around=around
            )
            assert merged.manifest == wanted
            killed += made[0].killed
    assert killed == ROUNDS
    scene.cleared()


COORDINATOR = """
import os, signal, sys
from pathlib import Path

from cluster_scenes import Scene, Standing

from mstore.api import Store
from mstore.store.objects.plan import Plan
from mstore.store.plans import find

path, plan, address, scheduler, push = sys.argv[1:]


class Late(Standing):
    def instead(self, number, slice):
        future = self.engine.submit(slice)
        if number < 5:
            future.result()
        elif number == 5:
            os.killpg(int(scheduler), signal.SIGKILL)
        return future


with Store.open(Path(path) / "store") as store:
    record = store._catalog.record(Plan, find(store._catalog, plan))
    Scene(Path(path), store).merge(record, address, push=bool(push), around=Late)
"""


@pytest.mark.parametrize("push", [False, True], ids=["fetched", "pushed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_scheduler(
    engine: str, push: bool, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is killed: nothing is published; the same merge on a new one computes what was
    not finished."""
    scene = Scene.at(copied)
    plan = scene.plan("linear")
    before = scene.store.refs()
    with started(engine, copied / "first", monkeypatch) as cluster:
        # A process of its own: Ray ends the one that called, too.
        given = [
            str(copied),
            str(plan.id()),
            cluster.address,
            str(cluster.scheduler.pid),
            "x" * push,
        ]
        ended = subprocess.run(
            [sys.executable, "-c", COORDINATOR, *given],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=600,
            check=False,
        )
    assert ended.returncode, ended.stdout
    if engine == "dask":
        assert b"Interrupted: the workers did not return a slice" in ended.stderr, ended.stderr
    assert scene.store.refs() == before
    with started(engine, copied / "second", monkeypatch) as cluster:
        merged = scene.merge(plan, cluster.address, push=push)
    assert merged.outcome.resumed_expert_bytes > 0
    assert merged.manifest == scene.wanted(plan)
    scene.cleared()
    assert ("m" in {one.name for one in scene.store.remote_contents(REMOTE).refs}) == push


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_leaves_no_task(
    engine: str, copied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C ends the command and its tasks, publishes nothing, and gc knows every object; the same
    command then ends the merge."""
    scene = Scene.at(copied)
    plan = scene.plan("linear")
    with started(engine, copied / "cluster", monkeypatch) as cluster:
        words = ["--store", str(copied / "store"), "merge", "--plan", str(plan.id())]
        words += ["--name", "m", "--no-memo", "--cluster", cluster.address]
        words += ["--remote", REMOTE, "--push"]
        program = tmp_path / "slow.py"
        program.write_text(SLOW)
        running = subprocess.Popen(
            [sys.executable, str(program), *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_for(scene.strays)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=300)
        assert running.returncode == 130, said
        time.sleep(3)
        left = scene.strays()
        time.sleep(3)
        assert scene.strays() == left, "something still computes"
        assert "m" not in {one.name for one in scene.store.remote_contents(REMOTE).refs}
        done = subprocess.run(
            [sys.executable, "-m", "mstore_cli", *words, "--json"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
        )
    assert scene.wanted(plan).hex() in done.stdout.decode()
    scene.cleared()


SLOW = """
import time

import mstore.merge.running.commit as commit
from mstore.clusters import engine
from mstore.merge.running import runners


def slow(one):
    time.sleep(0.5)
    return runners.execute(one)


submit = engine.Engine.submit
engine.Engine.submit = lambda self, one: self.call("slow", slow, one)
run_merge = commit.run_merge
commit.run_merge = lambda *given, **named: run_merge(*given, **named, slice_bytes=131072)

if __name__ == "__main__":
    from mstore_cli.main import main

    main()
"""
