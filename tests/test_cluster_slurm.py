"""Merges on a Slurm of this machine: pilots are killed, pre-empted and cancelled, and so is who
called."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import slurm_merge
from families import BLOCK, Family
from test_cluster_queue import until

from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import BadRequest, Interrupted, Unavailable
from mstore.terms.ids import ManifestId

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "slurm"
KILLS = int(os.environ.get("MSTORE_KILLS", "20"))
"""Rounds of kills."""
EXPERTS = ("e0", "e1", "e2", "e3")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """A Slurm of this machine: where its files are."""
    pytest.importorskip("submitit")
    # A short path: sockets lie in it.
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    started = subprocess.run(
        [SCRIPT, "start", directory], capture_output=True, text=True, check=False
    )
    try:
        if started.returncode:
            pytest.skip(f"no Slurm here: {started.stderr.strip()[-500:]}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
            # Jobs have the environment of who submits them.
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            yield directory
    finally:
        subprocess.run([SCRIPT, "stop", directory], check=False)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ManifestId]:
    """A store of a base and four experts, and what a merge of them is."""
    root = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(5)
    base = {f"l{n}": rng.standard_normal((256, 1024)).astype("f4") for n in range(24)}
    moved = [
        {
            name: array + rng.standard_normal(array.shape).astype("f4") / 64
            for name, array in base.items()
        }
        for _ in EXPERTS
    ]
    cast = [
        {name: families.cast(one, "BF16") for name, one in all.items()} for all in (base, *moved)
    ]
    Family(cast[0], tuple(cast[1:])).write(root)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in EXPERTS:
            store.add(root / name, name=name, base="base")
        wanted = store.merge(planned(store), name="alone", memo=False).manifest
        store.remove("alone")
    return root / "store", wanted


def planned(store: Store) -> Any:
    request = MergeRequest(base="base", experts=list(EXPERTS), method="ties", budget=0.6)
    return store.plan(request)


@pytest.fixture
def store(
    slurm: Path, family: tuple[Path, ManifestId], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """The family, pushed to a remote; merges of this process take slow slices."""
    slurm_merge.prepare(monkeypatch)
    shutil.copytree(family[0], tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        store.add_remote("origin", f"file://{tmp_path}/remote")
        store.push("origin", every=True)
        yield store
    assert list((tmp_path / "shared").iterdir()) == []
    assert jobs() == []


@pytest.fixture
def wanted(family: tuple[Path, ManifestId]) -> ManifestId:
    """What threads of this process make."""
    return family[1]


def address(tmp_path: Path, partition: str = "main", **more: object) -> str:
    """What to merge on; the directory of the calls is one of the test's."""
    (tmp_path / "shared").mkdir(exist_ok=True)
    keys = {"workers": 2, "cpus": 1, "mem": "1G", "folder": tmp_path / "shared"} | more
    return ",".join([f"slurm:{partition}", *(f"{key}={value}" for key, value in keys.items())])


def squeue(*options: str) -> list[str]:
    """What squeue says of mstore's jobs."""
    line = ["squeue", "-h", "-r", "-o", "%i|%T|%j", *options]
    told = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    return [one for one in told.splitlines() if "|mstore-" in one]


def jobs() -> list[str]:
    """mstore's jobs that wait or run."""
    return squeue()


def claims(tmp_path: Path) -> list[tuple[Path, int]]:
    """The slices that are running: their claims, and the processes of their pilots."""
    found = []
    for claim in (tmp_path / "shared").glob("*/calls/*.claim@*"):
        hello = claim.with_name(f"{claim.name.partition('@')[2]}.hello")
        pid = re.search(r":(\d+)\"", hello.read_text())
        assert pid is not None
        found.append((claim, int(pid[1])))
    return found


def is_sound(store: Store) -> bool:
    """Whether the store and its remote have no complaint."""
    # Raises if the remote cannot be collected.
    store.remote_gc("origin", dry_run=True)
    return store.fsck(read_data=True).problems == () == store.remote_fsck("origin").problems


def aside(run: Any, *given: Any) -> threading.Thread:
    """Run something in a thread, which the caller joins."""
    thread = threading.Thread(target=run, args=given)
    thread.start()
    return thread


# -- merges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_content(workers: int, store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """A merge on Slurm has the content of one on threads: where workers see the store, through a
    remote, and pushed; its jobs and its directory are gone afterwards."""
    plan = planned(store)
    on = address(tmp_path, workers=workers)
    merged = store.merge(plan, name="seen", cluster=on, memo=False)
    assert merged.manifest == wanted
    assert 0 < len(merged.workers) <= workers
    assert sum(one.slices for one in merged.workers) > 6
    assert store.merge(plan, name="fetched", cluster=on, remote="origin", memo=False).manifest == (
        wanted
    )
    pushed = store.merge(plan, name="pushed", cluster=on, remote="origin", push=True, memo=False)
    assert pushed.manifest == wanted
    assert jobs() == []
    assert is_sound(store)


def test_a_merge_from_within_a_job(
    store: Store, wanted: ManifestId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of a job that a merge is called from are not those of its pilots."""
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_MEM_PER_CPU": "77",
        "SLURM_NTASKS": "5",
        "SBATCH_PARTITION": "nowhere",
        "SLURM_RESTART_COUNT": "9",
    }.items():
        monkeypatch.setenv(name, value)
    merged = store.merge(
        planned(store), name="m", cluster=address(tmp_path), remote="origin", memo=False
    )
    assert merged.manifest == wanted
    assert os.environ["SLURM_NTASKS"] == "5"


# -- pilots that end -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(KILLS))
def test_a_pilot_is_killed(number: int, store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """A pilot's process is killed at a random moment of a slice: the merge ends, with the same
    content, and nobody has a complaint."""
    rng = random.Random(number)
    killed: list[str] = []

    def kill() -> None:
        until(lambda: claims(tmp_path))
        # The merge takes about six.
        time.sleep(rng.uniform(0, 4))
        running: list[tuple[Path, int]] = []
        until(lambda: running.extend(claims(tmp_path)) or running)
        claim, pid = rng.choice(running)
        os.kill(pid, signal.SIGKILL)
        killed.append(claim.name)

    thread = aside(kill)
    merged = store.merge(
        planned(store),
        name="m",
        cluster=address(tmp_path),
        remote="origin",
        push=number % 2 == 1,
        memo=False,
    )
    thread.join()
    assert killed
    assert merged.manifest == wanted
    assert merged.expert_bytes_read == merged.planned_expert_bytes > 0
    assert is_sound(store)


def test_all_pilots_are_killed(store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """All pilots are killed at once: Slurm starts their jobs again, and the merge ends."""
    ids: list[str] = []

    def kill() -> None:
        until(lambda: len(claims(tmp_path)) == 2)
        time.sleep(1.5)
        for _, pid in claims(tmp_path):
            os.kill(pid, signal.SIGKILL)
        until(lambda: list((tmp_path / "shared").glob("*/calls/*.1.hello")), 120)
        ids.extend(jobs())

    thread = aside(kill)
    merged = store.merge(
        planned(store), name="m", cluster=address(tmp_path), remote="origin", memo=False
    )
    thread.join()
    assert ids
    assert merged.manifest == wanted
    assert len(merged.workers) > 2
    assert is_sound(store)


def test_pilots_are_preempted(store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """Jobs of a higher partition take the nodes: pilots give their slices back, are requeued, and
    go on afterwards."""
    restarted: list[Path] = []
    given_back: list[bool] = []

    def preempt() -> None:
        until(lambda: len(claims(tmp_path)) == 2)
        time.sleep(1)
        line = ["sbatch", "-p", "high", "-n", "8", "--output", "/dev/null", "--wrap", "sleep 3"]
        subprocess.run(line, check=True, capture_output=True)
        until(lambda: not claims(tmp_path), 120)
        # Before they are killed: squeue still has them running.
        given_back.append(all("RUNNING" in one for one in squeue()))
        until(lambda: list((tmp_path / "shared").glob("*/calls/*.1.hello")), 180)
        restarted.extend((tmp_path / "shared").glob("*/calls/*.1.hello"))

    thread = aside(preempt)
    merged = store.merge(
        planned(store), name="m", cluster=address(tmp_path, "low"), remote="origin", memo=False
    )
    thread.join()
    assert restarted
    assert given_back == [True]
    assert merged.manifest == wanted
    assert len(merged.workers) > 2
    assert is_sound(store)


def test_the_time_of_a_job_is_over(
    store: Store, wanted: ManifestId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge takes longer than its job may: the pilot gives its slice back before the end, and the
    job is started again."""
    monkeypatch.setattr("mstore.clusters.engine.execute", slurm_merge.in_minutes)
    merged = store.merge(
        planned(store),
        name="m",
        cluster=address(tmp_path, workers=1, time=2),
        remote="origin",
        memo=False,
    )
    assert merged.manifest == wanted
    assert len(merged.workers) > 1
    assert is_sound(store)


def test_jobs_are_cancelled(store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """Somebody cancels the jobs: the merge is interrupted, and says so; the same merge again goes
    on from there."""

    def cancel() -> None:
        until(lambda: len(list((tmp_path / "store" / "tmp").rglob("*.receipt"))) > 4)
        names = {one.split("|")[2] for one in jobs()}
        subprocess.run(["scancel", "-n", ",".join(names)], check=True)

    plan = planned(store)
    thread = aside(cancel)
    with pytest.raises(Interrupted, match=r"no worker is left: job \d+_0 CANCELLED"):
        store.merge(plan, name="m", cluster=address(tmp_path), remote="origin", memo=False)
    thread.join()
    assert jobs() == []
    merged = store.merge(plan, name="m", cluster=address(tmp_path), remote="origin", memo=False)
    assert merged.manifest == wanted
    assert merged.resumed_expert_bytes > 0
    assert is_sound(store)


# -- pilots that never come ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "more", "told"),
    [
        ("nowhere", {}, "Slurm refuses the jobs: Batch job submission failed: Invalid partition"),
        ("short", {"time": 30}, r"will ever run: job \d+_0 PENDING, Partition(TimeLimit|Config)"),
    ],
)
def test_jobs_that_cannot_run(
    partition: str, more: dict[str, object], told: str, store: Store, tmp_path: Path
) -> None:
    """Where no job will run, the merge says what Slurm says, and leaves none."""
    with pytest.raises(Unavailable, match=told):
        store.merge(planned(store), name="m", cluster=address(tmp_path, partition, **more))
    assert jobs() == []


def test_a_python_without_mstore(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where mstore is missing on the nodes, the merge says what Python says there."""
    (tmp_path / "broken" / "mstore").mkdir(parents=True)
    (tmp_path / "broken" / "mstore" / "__init__.py").write_text("raise ImportError('not here')\n")
    # `python -m` looks in the current directory first.
    monkeypatch.chdir(tmp_path / "broken")
    with pytest.raises(Unavailable, match=r"no worker could start: job .*FAILED.*not here"):
        store.merge(planned(store), name="m", cluster=address(tmp_path))
    assert jobs() == []


def test_jobs_that_wait(store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """A merge waits for its jobs, and begins with the first one."""
    line = ["sbatch", "-p", "high", "-n", "8", "--output", "/dev/null", "--wrap", "sleep 12"]
    subprocess.run(line, check=True, capture_output=True)
    others = ["squeue", "-h", "-p", "high", "-t", "running"]
    until(lambda: subprocess.run(others, check=True, capture_output=True).stdout)
    began = time.monotonic()
    merged = store.merge(planned(store), name="m", cluster=address(tmp_path), memo=False)
    assert time.monotonic() - began > 8
    assert merged.manifest == wanted


def test_an_unknown_key_submits_nothing(store: Store, tmp_path: Path) -> None:
    """An address with a slip is refused before anything is submitted."""
    with pytest.raises(BadRequest, match="wrkers is no key"):
        store.merge(planned(store), name="m", cluster=address(tmp_path, wrkers=2))


# -- who called ----------------------------------------------------------------------------------


def _begun(store: Store, tmp_path: Path, came: int) -> subprocess.Popen[str]:
    """The same merge in a process of its own, once so many slices have come."""
    line = [sys.executable, slurm_merge.__file__, str(store.path), str(planned(store).plan)]
    process = subprocess.Popen([*line, "m", address(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = []
    for line_told in process.stdout:
        told.append(line_told)
        if len(list((tmp_path / "store" / "tmp").rglob("*.receipt"))) >= came:
            return process
    raise AssertionError("".join(told))


def test_the_coordinator_is_killed(store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """Who called is killed: the pilots end by themselves, and the same merge again goes on from
    what had come."""
    process = _begun(store, tmp_path, 5)
    process.kill()
    process.communicate()
    old = {one.split("|")[0] for one in jobs()}
    assert old
    merged = store.merge(
        planned(store), name="m", cluster=address(tmp_path), remote="origin", memo=False
    )
    assert merged.manifest == wanted
    assert merged.resumed_expert_bytes > 0
    until(lambda: not old & {one.split("|")[0] for one in jobs()}, 120)
    ends = [one for one in squeue("-t", "all") if one.split("|")[0] in old]
    assert all("COMPLETED" in one for one in ends)
    assert is_sound(store)
    # What a killed process left is removed by a later one, after a week.
    (left,) = (tmp_path / "shared").iterdir()
    os.utime(left / "calls", (0, 0))
    store.merge(planned(store), name="n", cluster=address(tmp_path), memo=False)


@pytest.mark.parametrize("came", [0, 5])
def test_ctrl_c(came: int, store: Store, wanted: ManifestId, tmp_path: Path) -> None:
    """Ctrl-C leaves no job and no directory, soon; store and remote are sound, and the same merge
    again goes on from what had come."""
    process = _begun(store, tmp_path, came)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 20
    assert jobs() == []
    assert list((tmp_path / "shared").iterdir()) == []
    assert is_sound(store)
    merged = store.merge(
        planned(store), name="m", cluster=address(tmp_path), remote="origin", memo=False
    )
    assert merged.manifest == wanted
    if came:
        assert merged.resumed_expert_bytes > 0
