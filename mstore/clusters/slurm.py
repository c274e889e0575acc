"""Slurm: one array of jobs for a merge, through submitit. Owns the address and the array.

    slurm:PARTITION[,KEY=VALUE...]

Each job of the array is a pilot (`pilots`), which takes slices from a directory that all machines
see. Slurm requeues a job that it pre-empts or whose node fails; one that failed or whose time is
over is requeued from here. Only squeue, scontrol and scancel are asked: no accounting database.

Jobs have the environment of this process, as sbatch does it; nothing of it is written or pickled.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from mstore import fs
from mstore.clusters.engine import Engine
from mstore.clusters.pilots import (
    Coordinator,
    Hello,
    Pace,
    Pilot,
    PilotGone,
    Scheduler,
    Stage,
    Standing,
)
from mstore.terms.errors import BadRequest, MstoreError, Unavailable, did_you_mean
from mstore.terms.phrases import joined

T = TypeVar("T")
PACE: Final = Pace()
_KIND: Final = "slurm:"
_MOST_WORKERS: Final = 1000
"""Slurm's own limit for an array, unless a site changes it."""
_NOTICE: Final = 30
"""Seconds before the end of a job's time at which its pilot gives its slice back."""
_PATIENCE: Final = 20
"""Seconds that a command of Slurm's may take."""
_ENDING: Final = 30.0
"""Seconds to wait for jobs that were cancelled."""
_OLD: Final = 7 * 24 * 3600
"""Seconds after which what a lost coordinator left is removed."""
_PREFIX: Final = "mstore-"
_HOME: Final = "~/"
_SHARED: Final = "~/.mstore/slurm"


# -- the address -------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """What an address asks for. minutes: of each job. more: of sbatch's parameters, as they are."""

    partition: str
    workers: int = 4
    minutes: int = 60
    cpus: int = 2
    folder: str = _SHARED
    more: tuple[tuple[str, str], ...] = (("mem", "2G"),)


_PASSED: Final = (
    "mem",
    "account",
    "qos",
    "gres",
    "constraint",
    "exclude",
    "nodelist",
    "reservation",
)
_KEYS: Final = ("workers", "time", "cpus", "folder", *_PASSED)
_CLOCK: Final = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):(\d\d):(\d\d)")


def parsed(address: str) -> Asked:
    """Read an address. Raises BadRequest."""
    partition, *rest = address.removeprefix(_KIND).split(",")
    if not re.fullmatch(r"[\w.+-]+", partition):
        raise BadRequest(
            "the name of a partition is missing", where=address, hint="slurm:main,workers=8"
        )
    given: dict[str, str] = {}
    for one in rest:
        key, _, value = one.partition("=")
        if key not in _KEYS:
            raise BadRequest(
                f"{key or 'nothing'} is no key of a Slurm address",
                where=address,
                hint=joined(did_you_mean(key, _KEYS), f"the keys are {', '.join(_KEYS)}"),
            )
        if key in given:
            raise BadRequest(f"{key} is given twice", where=address)
        if not re.fullmatch(r"[!-~]+", value):
            raise BadRequest(
                f"{key} has no value, or one with spaces", where=address, hint=f"{key}=VALUE"
            )
        given[key] = value
    base = Asked(partition)
    passed = dict(base.more) | {key: given[key] for key in _PASSED if key in given}
    return Asked(
        partition=partition,
        workers=_number(address, "workers", given.get("workers"), base.workers, _MOST_WORKERS),
        minutes=_minutes(address, given.get("time"), base.minutes),
        cpus=_number(address, "cpus", given.get("cpus"), base.cpus, 1024),
        folder=given.get("folder", base.folder),
        more=tuple(passed.items()),
    )


def _number(address: str, key: str, told: str | None, default: int, most: int) -> int:
    if told is None:
        return default
    if not told.isdecimal() or not 0 < int(told) <= most:
        raise BadRequest(f"{key} is a number from 1 to {most}", where=address, hint=f"{key}=8")
    return int(told)


def _minutes(address: str, told: str | None, default: int) -> int:
    if told is None:
        return default
    clock = _CLOCK.fullmatch(told)
    if told.isdecimal() and int(told) > 0:
        return int(told)
    if clock is None:
        raise BadRequest(
            "time is a number of minutes, or H:MM:SS", where=address, hint="time=2:00:00"
        )
    days, hours, minutes, seconds = (int(one or 0) for one in clock.groups())
    return max(1, (days * 24 + hours) * 60 + minutes + (seconds > 0))


# -- what a job runs ---------------------------------------------------------------------------


def pilot(directory: str, orders: bytes) -> str:
    """Be a pilot, in a job; return why it ended. orders: as JSON, which another mstore reads."""
    from submitit import JobEnvironment

    wanted, pace = msgspec.json.decode(orders, type=tuple[Hello, Pace])
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    name = f"{JobEnvironment().job_id}.{restarts}"
    return Pilot(Path(directory), name, wanted, pace).run()


# -- Slurm -------------------------------------------------------------------------------------

_STAGES: Final = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED"), Stage.WAITING),
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), Stage.HOPELESS),
    **dict.fromkeys(("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING"), Stage.RUNNING),
    **dict.fromkeys(("RESIZING", "STAGE_OUT"), Stage.RUNNING),
    "COMPLETING": Stage.ENDING,
    **dict.fromkeys(("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"), Stage.FAILED),
    **dict.fromkeys(("PREEMPTED", "BOOT_FAIL"), Stage.FAILED),
}
_HOPELESS: Final = frozenset(
    {
        "AssocMaxWallDurationPerJobLimit",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "JobHeldAdmin",
        "JobHeldUser",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSMaxWallDurationPerJobLimit",
    }
)
"""Why a job waits that will never run as it is."""


class Array(Scheduler):
    """The jobs of one name, which is theirs alone. logs: where submitit lets them write."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self._logs = logs

    def standings(self) -> Mapping[str, Standing] | None:
        command = ["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-n", self.name]
        columns = ("JobArrayID", "State", "RestartCnt", "Reason")
        told = _said([*command, "-O", ",".join(f"{one}:|" for one in columns)])
        return None if told is None else dict(_standings(told))

    def revive(self, job: str) -> None:
        _said(["scontrol", "requeue", job])

    def last_words(self, job: str) -> str:
        with suppress(OSError):
            lines = (self._logs / f"{job}_0_log.err").read_text(errors="replace").splitlines()
            # What srun says of a task that failed comes last, and says least.
            own = [one.strip() for one in lines if one.strip() and not one.startswith("srun:")]
            return own[-1][:200] if own else ""
        return ""

    def end(self) -> None:
        """Cancel all, and wait for a while until none is left."""
        _said(["scancel", "-u", str(os.getuid()), "-n", self.name])
        deadline = time.monotonic() + _ENDING
        while time.monotonic() < deadline:
            standings = self.standings()
            over = (Stage.FAILED, Stage.OVER)
            if standings is not None and all(one.stage in over for one in standings.values()):
                return
            time.sleep(0.3)


def _standings(told: str) -> Iterator[tuple[str, Standing]]:
    for line in told.splitlines():
        job, state, restarts, reason, *_ = line.split("|")
        stage = _STAGES.get(state, Stage.OVER)
        if stage is Stage.WAITING and reason in _HOPELESS:
            stage = Stage.HOPELESS
        said = state if reason in ("None", "") else f"{state}, {reason}"
        yield job, Standing(stage, int(restarts), said)


def _said(command: list[str]) -> str | None:
    """Run a command of Slurm's; return what it prints, None if it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for this process, which then cancels the jobs.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# -- the engine --------------------------------------------------------------------------------


class Slurm(Engine):
    """The jobs of an array, which begins and ends with this object."""

    def __init__(self, address: str, pace: Pace | None = None) -> None:
        """Submit the array. Raises BadRequest, Unavailable, StorageFailed."""
        asked = parsed(address)
        pace = PACE if pace is None else pace
        try:
            import submitit
        except ImportError as error:
            raise Unavailable(
                "submitit is not installed", where=address, hint="pip install 'mstore[slurm]'"
            ) from error
        self.where = f"{_KIND}{asked.partition}"
        self.threads = asked.cpus
        above = _folder(asked.folder)
        fs.make_directories(above)
        _remove_old(above)
        self._folder = fs.private_directory(above, _PREFIX)
        self._array = Array(f"{_PREFIX}{secrets.token_hex(6)}", self._folder / "jobs")
        self._has_jobs = False
        own = Hello.own()
        board = self._folder / "calls"
        fs.make_directory(board)
        self._calls = Coordinator(board, self._array, self.where, pace, own)
        try:
            self._submit(submitit, asked, board, msgspec.json.encode((own, pace)))
            self._calls.begin()
        except BaseException:
            self.close()
            raise

    def _submit(self, submitit: Any, asked: Asked, board: Path, orders: bytes) -> None:
        try:
            executor = submitit.SlurmExecutor(self._folder / "jobs")
        except RuntimeError as error:
            raise Unavailable(
                "this machine has no commands of Slurm's",
                where=self.where,
                hint="run this where sbatch and srun work",
            ) from error
        executor.update_parameters(
            job_name=self._array.name,
            partition=asked.partition,
            time=asked.minutes,
            nodes=1,
            ntasks_per_node=1,
            cpus_per_task=asked.cpus,
            array_parallelism=asked.workers,
            signal_delay_s=_NOTICE,
            # srun does not take it from sbatch since Slurm 22.05.
            srun_args=[f"--cpus-per-task={asked.cpus}"],
            additional_parameters={**dict(asked.more), "requeue": True},
        )
        utils = submitit.core.utils
        self._has_jobs = True
        try:
            # submitit prints what sbatch says.
            with _outside_of_jobs(asked), redirect_stderr(StringIO()):
                executor.map_array(
                    pilot, *zip(*[(str(board), orders)] * asked.workers, strict=True)
                )
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            raise Unavailable(
                f"Slurm refuses the jobs: {_last_line(str(error))}",
                where=self.where,
                hint="check the address: sbatch takes the same",
            ) from error

    def call(self, label: str, run: Callable[..., T], *given: Any) -> Future[T]:
        return self._calls.call(label, run, *given)

    def count(self) -> int:
        return len(self._calls.running())

    def each(self, run: Callable[..., T], *given: Any) -> dict[str, T]:
        """Run a call on each pilot that runs; wait for the first.

        One that comes later says in its hello whether its mstore is the same.
        """
        while True:
            asked = {
                name: self._calls.call("look at the worker", run, *given, pilot=name)
                for name in self._calls.some_running()
            }
            found = {}
            for name, future in asked.items():
                with suppress(PilotGone):
                    found[f"of job {name.rpartition('.')[0]}"] = future.result()
            if found:
                return found

    def close(self) -> None:
        self._calls.end()
        if self._has_jobs:
            self._has_jobs = False
            self._array.end()
        # A job that has just ended may leave a file meanwhile.
        with suppress(MstoreError):
            fs.remove_tree(self._folder)


def _folder(told: str) -> Path:
    # The user's own, as Slurm's nodes know it, whatever HOME says here.
    if told.startswith(_HOME):
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / told.removeprefix(_HOME)
    return Path(told).absolute()


def _remove_old(above: Path) -> None:
    """Remove directories of coordinators that were killed long ago."""
    now = time.time()
    for one in above.glob(f"{_PREFIX}*"):
        with suppress(OSError, MstoreError):
            status = (one / "calls").stat()
            if status.st_uid == os.getuid() and now - status.st_mtime > _OLD:
                fs.remove_tree(one)


@contextmanager
def _outside_of_jobs(asked: Asked) -> Iterator[None]:
    """Hide the job that this process is in: its settings would be the new jobs', too.

    For sbatch, the environment counts for more than the address: what both say is hidden as well.
    """
    known = dict(asked.more)
    kept = {"SLURM_CONF", *(f"SBATCH_{one.upper()}" for one in _PASSED if one not in known)}
    told = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_"))
        and name not in kept
    }
    try:
        yield
    finally:
        os.environ.update(told)


def _last_line(text: str) -> str:
    lines = [one.strip() for one in text.splitlines() if one.strip()]
    return lines[-1].removeprefix("sbatch: error: ") if lines else "it does not say why"
