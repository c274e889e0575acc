"""The queue of calls for pilots, with plain processes in the place of Slurm's jobs; its address."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path

import msgspec
import pilot_processes as runs
import pytest
from pilot_processes import QUICK, Processes

from mstore import fs
from mstore.clusters import slurm
from mstore.clusters.address import opened
from mstore.clusters.pilots import (
    Coordinator,
    Hello,
    Pace,
    PilotGone,
    Stage,
    Standing,
    _Board,
    _Name,
)
from mstore.clusters.slurm import Asked, parsed
from mstore.terms.errors import BadRequest, Incompatible, Interrupted, NotFound, Unavailable

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto" / "cluster-slurm.md"


class Queue:
    """A coordinator, and processes as its pilots."""

    def __init__(self, directory: Path, pace: Pace, wanted: Hello) -> None:
        directory.mkdir()
        self.directory = directory
        self.scheduler = Processes(directory, pace, wanted)
        self.calls = Coordinator(directory, self.scheduler, "here", pace, wanted)

    def begin(self, pilots: int) -> None:
        for number in range(pilots):
            self.scheduler.start(f"9_{number}")
        self.calls.begin()

    def files(self, kind: str) -> list[str]:
        return [name for name in _Board(self.directory).names() if f".{kind}" in name]


def until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


Make = Callable[..., Queue]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a queue with a number of pilots."""
    made: list[Queue] = []

    def new(pilots: int, pace: Pace = QUICK, wanted: Hello | None = None) -> Queue:
        one = Queue(tmp_path / "queue", pace, wanted or Hello.own())
        made.append(one)
        one.begin(pilots)
        return one

    yield new
    for one in made:
        one.calls.end()
        one.scheduler.kill()


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.rest
def test_each_call_runs_once(make: Make, tmp_path: Path) -> None:
    """Of pilots that want the same call one gets it: all run, none runs twice, and nothing stays
    in the directory."""
    queue = make(3)
    futures = [queue.calls.call(f"{n}", runs.note, tmp_path / "ran", f"{n}") for n in range(60)]
    told = [future.result(60) for future in futures]
    assert sorted((tmp_path / "ran").read_text().splitlines()) == sorted(told)
    assert [one.split()[0] for one in told] == [f"{n}" for n in range(60)]
    until(lambda: not queue.files("claim") and not queue.files("result"))
    assert queue.files("call") == []


def test_errors_come_back(make: Make) -> None:
    """An error of a call is raised with its fields; a result that cannot be pickled is one."""
    queue = make(1)
    with pytest.raises(NotFound, match="here: it is not there") as failed:
        queue.calls.call("a", runs.fail).result(60)
    assert failed.value.hint == "look there"
    with pytest.raises(RuntimeError, match="function cannot be pickled"):
        queue.calls.call("b", runs.return_what_cannot_be_pickled).result(60)


@pytest.mark.rest
def test_nobody_reads_half_a_file(make: Make, tmp_path: Path) -> None:
    """No file is written under a name that somebody reads, and large results come whole."""
    board = _Board(tmp_path)
    seen = []
    with fs.observed(seen.append):
        board.write("000001.result", bytes(5000))
    assert {Path(one.path).name[0] for one in seen} == {"."}
    assert [one.kind for one in seen] == ["create", "write", "rename"]
    assert Path(seen[-1].target).name == "000001.result"
    queue = make(2)
    futures = [queue.calls.call(f"{n}", runs.large, 5_000_000 + n) for n in range(12)]
    assert [len(one.result(60)) for one in futures] == [5_000_000 + n for n in range(12)]


@pytest.mark.rest
def test_a_cancelled_call_does_not_run(make: Make, tmp_path: Path) -> None:
    """A call that nobody has taken is taken back."""
    queue = make(0)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a")
    until(lambda: queue.files("call"))
    assert future.cancel()
    until(lambda: not queue.files("call"))
    queue.scheduler.start("9_0")
    assert queue.calls.call("b", runs.note, tmp_path / "ran", "b").result(60)
    assert (tmp_path / "ran").read_text().startswith("b ")
    with pytest.raises(CancelledError):
        future.result(0)


@pytest.mark.rest
def test_a_call_for_one_pilot(make: Make, tmp_path: Path) -> None:
    """Each pilot runs the call that is for it; one for a pilot that is gone fails."""
    queue = make(2)
    until(lambda: len(queue.calls.running()) == 2)
    asked = {
        pilot: queue.calls.call("look", runs.note, tmp_path / "ran", pilot, pilot=pilot)
        for pilot in queue.calls.running()
    }
    pids = {f"{job}.0": one.pid for job, one in queue.scheduler.running.items()}
    assert {pilot: one.result(60) for pilot, one in asked.items()} == {
        pilot: f"{pilot} {pid}" for pilot, pid in pids.items()
    }
    queue.scheduler.running["9_1"].kill()
    queue.scheduler.running["9_1"].wait()
    with pytest.raises(PilotGone):
        queue.calls.call("look", runs.note, tmp_path / "ran", "x", pilot="9_1.0").result(60)


# -- pilots that die -----------------------------------------------------------------------------


@pytest.mark.rest
def test_the_call_of_a_dead_pilot_runs_again(make: Make, tmp_path: Path) -> None:
    """A pilot is killed in its call: another one runs it, and its job is started again."""
    queue = make(2)
    told = queue.calls.call("a", runs.kill_once, tmp_path / "ran").result(60)
    first, second = (tmp_path / "ran").read_text().splitlines()
    assert told == second
    assert first.split()[1] != second.split()[1]
    until(lambda: len(queue.calls.running()) == 2)
    assert sum(pilot.endswith(".1") for pilot in queue.calls.running()) == 1
    assert len(queue.scheduler.revived) == 1


@pytest.mark.rest
def test_a_call_that_kills_all(make: Make, tmp_path: Path) -> None:
    """A call whose pilots die is handed out four times; then it fails with its last job's words,
    and other calls go on."""
    queue = make(2)
    future = queue.calls.call("slice 3", runs.kill_always, tmp_path / "ran")
    with pytest.raises(Interrupted, match=r"slice 3 ended 4 workers.*9_\d ended with -9") as lost:
        future.result(60)
    assert "its last words" in str(lost.value)
    assert len((tmp_path / "ran").read_text().splitlines()) == 4
    assert queue.calls.call("b", runs.note, tmp_path / "other", "b").result(60)


def test_a_pilot_that_is_ended_gives_its_call_back(make: Make, tmp_path: Path) -> None:
    """A pilot that is told that it will be killed leaves its call at once, and takes no other one;
    it waits, so that its job is no finished one."""
    queue = make(2)
    told = queue.calls.call("a", runs.end_early, tmp_path / "ran").result(30)
    first, second = [line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()]
    assert told.split()[1] == second != first
    for n in range(6):
        done = queue.calls.call(f"{n}", runs.note, tmp_path / "more", f"{n}").result(60)
        assert done.split()[1] == second
    assert all(one.poll() is None for one in queue.scheduler.running.values())
    assert queue.scheduler.revived == []


@pytest.mark.rest
def test_a_requeued_job_is_not_the_calls_doing(make: Make, tmp_path: Path) -> None:
    """A call whose job Slurm requeues is handed out again, and that counts for nothing."""
    queue = make(1)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a", 60.0)
    for restarts in range(6):
        until(lambda: queue.files("claim"))
        queue.scheduler.running["9_0"].kill()
        queue.scheduler.running["9_0"].wait()
        queue.scheduler.says["9_0"] = Standing(Stage.WAITING, restarts, "PENDING")
        until(lambda: queue.files("call"))
        queue.scheduler.revive("9_0")
        del queue.scheduler.says["9_0"]
    assert not future.done()


@pytest.mark.rest
def test_a_pilot_that_was_not_dead(make: Make, tmp_path: Path) -> None:
    """A scheduler reports a pilot as requeued that still runs: its call runs a second time, one
    result counts, and the other one is removed."""
    queue = make(1)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a", 1.5)
    until(lambda: queue.files("claim"))
    queue.scheduler.says["9_0"] = Standing(Stage.WAITING, 1, "PENDING")
    queue.scheduler.start("9_1")
    assert future.result(60).split()[0] == "a"
    until(lambda: len((tmp_path / "ran").read_text().splitlines()) == 2)
    until(lambda: not queue.files("claim") and not queue.files("result"))


@pytest.mark.rest
def test_a_pilot_that_is_being_ended_keeps_its_claim(make: Make, tmp_path: Path) -> None:
    """While a job is completing, its call is not handed out again: it may yet be finished."""
    queue = make(1)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a", 1.0)
    until(lambda: queue.files("claim"))
    queue.scheduler.says["9_0"] = Standing(Stage.ENDING, 0, "COMPLETING")
    queue.scheduler.start("9_1")
    assert future.result(60)
    assert len((tmp_path / "ran").read_text().splitlines()) == 1


@pytest.mark.rest
def test_a_call_whose_file_is_lost(make: Make, tmp_path: Path) -> None:
    """A call that has no file any more is written again."""
    queue = make(0)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a")
    (queue.directory / "000000.call").unlink()
    queue.scheduler.start("9_0")
    assert future.result(60)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.rest
def test_stop_ends_pilots(make: Make, tmp_path: Path) -> None:
    """Pilots end when the coordinator does, and what nobody has run fails."""
    queue = make(2)
    assert queue.calls.call("a", runs.note, tmp_path / "ran", "a").result(60)
    until(lambda: len(queue.calls.running()) == 2)
    queue.calls.end()
    assert queue.scheduler.ends() == ["the coordinator says so"] * 2
    with pytest.raises(Interrupted, match="here: the cluster was closed"):
        queue.calls.call("b", runs.note, tmp_path / "ran", "b")


@pytest.mark.rest
def test_a_lost_coordinator_ends_pilots(tmp_path: Path) -> None:
    """Pilots end some time after the last beat, and without a first one, too."""
    pace = msgspec.structs.replace(QUICK, lost=1.0)
    processes = Processes(tmp_path, pace, Hello.own())
    (tmp_path / "beat").write_bytes(b"7")
    try:
        processes.start("9_0")
        assert processes.ends() == ["the coordinator is lost"]
        (tmp_path / "beat").unlink()
        processes.start("9_1")
        assert processes.running["9_1"].communicate(timeout=60)[0].strip() == (
            "the coordinator is lost"
        )
    finally:
        processes.kill()


@pytest.mark.rest
def test_a_beating_coordinator_keeps_pilots(make: Make) -> None:
    """Idle pilots stay for much longer than they wait for a lost coordinator."""
    queue = make(1, msgspec.structs.replace(QUICK, lost=1.0))
    until(queue.calls.running)
    time.sleep(2.5)
    assert queue.scheduler.running["9_0"].poll() is None


@pytest.mark.rest
def test_pilots_end_where_the_directory_is_gone(make: Make) -> None:
    """A directory that was removed ends pilots without an error."""
    queue = make(1)
    until(queue.calls.running)
    queue.calls.end()
    fs.remove_tree(queue.directory)
    assert queue.scheduler.ends()[0].startswith("the coordinator")


@pytest.mark.rest
def test_another_mstore(make: Make, tmp_path: Path) -> None:
    """A pilot with other sources takes no call, and the coordinator names it."""
    own = Hello.own()
    queue = make(1, wanted=msgspec.structs.replace(own, code="0" * 16))
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a")
    with pytest.raises(
        Incompatible, match=r"worker 9_0 \(.*:\d+\): its version of mstore is .* with other"
    ):
        future.result(60)
    with pytest.raises(Incompatible):
        queue.calls.some_running()
    assert queue.scheduler.ends() == ["it has another mstore"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stage", "was_there", "kind", "told"),
    [
        (Stage.OVER, False, Unavailable, "no worker could start: job 9_0 X (its last words)"),
        (Stage.FAILED, False, Unavailable, "no worker could start: job 9_0 X (its last words)"),
        (Stage.HOPELESS, False, Unavailable, "no worker will ever run: job 9_0 X (its last"),
        (Stage.OVER, True, Interrupted, "no worker is left: job 9_0 X (its last words)"),
    ],
)
def test_no_pilot_is_left(
    stage: Stage, was_there: bool, kind: type[Exception], told: str, make: Make, tmp_path: Path
) -> None:
    """Where no pilot runs or will run, calls fail with the scheduler's words."""
    queue = make(0)
    if was_there:
        queue.scheduler.start("9_0")
        until(queue.calls.running)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a", 2.0)
    queue.scheduler.says["9_0"] = Standing(stage, 0, "X")
    wait([future], timeout=60)
    failed = future.exception(0)
    if was_there and failed is None:
        # It was quicker.
        return
    assert isinstance(failed, kind)
    assert told in str(failed)


@pytest.mark.rest
def test_a_waiting_scheduler_is_waited_for(make: Make, tmp_path: Path) -> None:
    """Jobs that wait, and a scheduler that does not answer, are no error."""
    queue = make(0)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a")
    queue.scheduler.says["9_0"] = Standing(Stage.WAITING, 0, "PENDING, Priority")
    time.sleep(1)
    assert not future.done()
    del queue.scheduler.says["9_0"]
    queue.scheduler.start("9_0")
    assert future.result(60)


@pytest.mark.rest
def test_a_signal_between_calls(make: Make, tmp_path: Path) -> None:
    """An idle pilot that is told to leave takes no call any more."""
    queue = make(1)
    until(queue.calls.running)
    queue.scheduler.running["9_0"].send_signal(signal.SIGTERM)
    time.sleep(0.3)
    future = queue.calls.call("a", runs.note, tmp_path / "ran", "a")
    time.sleep(1)
    assert not future.done()


# -- names, addresses, what Slurm says -----------------------------------------------------------


@pytest.mark.parametrize("name", ["000001.call", "000001.call@1_0.2", "000001.claim@12.0"])
def test_names_of_calls(name: str) -> None:
    """A name of a call says all of it."""
    assert str(_Name.of(name)) == name


@pytest.mark.parametrize("name", ["beat", "stop", "1_0.0.hello", ".00ff", "x.call", "1.other"])
def test_other_names(name: str) -> None:
    """No other name is taken for a call's."""
    assert _Name.of(name) is None


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("slurm:main", Asked("main")),
        ("slurm:main,workers=8,cpus=3", Asked("main", workers=8, cpus=3)),
        ("slurm:a-b.c,time=90", Asked("a-b.c", minutes=90)),
        ("slurm:main,time=1:30:30", Asked("main", minutes=91)),
        ("slurm:main,time=2-00:00:00", Asked("main", minutes=2880)),
        ("slurm:main,mem=4G", Asked("main", more=(("mem", "4G"),))),
        (
            "slurm:gpu,gres=gpu:1,account=me,folder=/shared/x",
            Asked(
                "gpu",
                folder="/shared/x",
                more=(("mem", "2G"), ("account", "me"), ("gres", "gpu:1")),
            ),
        ),
    ],
)
def test_addresses(address: str, asked: Asked) -> None:
    """An address names the partition, and what the jobs get."""
    found = parsed(address)
    assert dict(found.more) == dict(asked.more)
    assert msgspec.structs.replace(found, more=()) == msgspec.structs.replace(asked, more=())


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("slurm:,workers=2", "the name of a partition is missing"),
        ("slurm:a b", "the name of a partition is missing"),
        ("slurm:main,worker=2", "worker is no key of a Slurm address"),
        ("slurm:main,", "nothing is no key"),
        ("slurm:main,cpus=1,cpus=2", "cpus is given twice"),
        ("slurm:main,workers=0", "workers is a number from 1 to 1000"),
        ("slurm:main,workers=x", "workers is a number from 1 to 1000"),
        ("slurm:main,cpus=-1", "cpus is a number"),
        ("slurm:main,time=soon", "time is a number of minutes, or H:MM:SS"),
        ("slurm:main,time=0", "time is a number of minutes"),
        ("slurm:main,mem=", "mem has no value"),
        ("slurm:main,account=a\nrm -rf", "account has no value, or one with spaces"),
    ],
)
def test_addresses_that_are_none(address: str, told: str) -> None:
    """Each other address is refused, with what is wrong; an unknown key with those that there
    are."""
    with pytest.raises(BadRequest, match=told) as refused:
        parsed(address)
    if "no key" in told:
        assert "the keys are workers, time, cpus, folder, mem, account" in (
            refused.value.hint or ""
        )


def test_a_slip_of_a_key() -> None:
    """A key that was probably meant is named."""
    with pytest.raises(BadRequest) as refused:
        parsed("slurm:main,worker=2")
    assert (refused.value.hint or "").startswith("did you mean workers?")


def test_submitit_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without submitit, the error says what to install."""
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(Unavailable, match="submitit is not installed") as refused:
        opened(f"slurm:main,folder={tmp_path}")
    assert refused.value.hint == "pip install 'mstore[slurm]'"
    assert list(tmp_path.iterdir()) == []


def test_slurm_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm's commands, the error says so at once, and no directory is left."""
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(Unavailable, match="this machine has no commands of Slurm's"):
        opened(f"slurm:main,folder={tmp_path}/new/shared")
    assert time.monotonic() - began < 10
    assert list((tmp_path / "new" / "shared").iterdir()) == []


def test_settings_of_the_job_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs get no settings of a job that this process is in, nor what the address says otherwise;
    where Slurm is, and the user's own defaults, stay."""
    told = {
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_PARTITION": "other",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_QOS": "low",
        "OTHER": "x",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with slurm._outside_of_jobs(parsed("slurm:main,qos=high")):
        seen = {name: os.environ.get(name) for name in told}
    assert {name for name in told if seen[name] is None} == {
        "SLURM_JOB_ID",
        "SBATCH_PARTITION",
        "SBATCH_QOS",
    }
    assert {name: os.environ[name] for name in told} == told


def test_what_squeue_says() -> None:
    """Each line of squeue is a job: its stage, how often it was restarted, and its words."""
    told = (
        "7_0|RUNNING|1|None|\n"
        "7_1|PENDING|0|Resources|\n"
        "7_2|PENDING|0|PartitionTimeLimit|\n"
        "7_3|OUT_OF_MEMORY|0|OutOfMemory|\n"
        "7_4|COMPLETING|2|None|\n"
        "7_5|CANCELLED|0|None|\n"
        "7_6|SOMETHING_NEW|0|None|\n"
    )
    assert dict(slurm._standings(told)) == {
        "7_0": Standing(Stage.RUNNING, 1, "RUNNING"),
        "7_1": Standing(Stage.WAITING, 0, "PENDING, Resources"),
        "7_2": Standing(Stage.HOPELESS, 0, "PENDING, PartitionTimeLimit"),
        "7_3": Standing(Stage.FAILED, 0, "OUT_OF_MEMORY, OutOfMemory"),
        "7_4": Standing(Stage.ENDING, 2, "COMPLETING"),
        "7_5": Standing(Stage.OVER, 0, "CANCELLED"),
        "7_6": Standing(Stage.OVER, 0, "SOMETHING_NEW"),
    }


def test_the_page_has_each_key_and_no_other_error() -> None:
    """docs/howto/cluster-slurm.md lists the keys that there are, and errors that exist."""
    keys, errors = re.findall(r"^\|---\|.*\n((?:\|.*\n)+)", PAGE.read_text(), re.M)[0::2]
    listed = [key for row in keys.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(slurm._KEYS)
    sources = "".join(
        path.read_text() for path in (ROOT / "mstore" / "clusters").glob("*.py")
    ).replace("{_MOST_ATTEMPTS}", "4")
    told = re.findall(r"^\| `([^`]+)`", errors, re.M)
    assert len(told) == 7
    assert [one for one in told if one not in sources] == []
