"""Pilots: processes that take calls from a directory, for clusters that start processes late.

Owns the directory and both of its sides: a `Pilot` takes calls and leaves their results, the
`Coordinator` hands them out. What starts pilots is a `Scheduler`, which also says which ones run.

    PILOT.hello           a pilot is here, and this is its mstore. PILOT is JOB.RESTARTS: 12_0.1
    NUMBER.call           a call for any pilot
    NUMBER.call@PILOT     a call for one pilot
    NUMBER.claim@PILOT    the call while a pilot runs it
    NUMBER.result         what came of it
    beat                  a counter; where it stands still, the coordinator is lost, and pilots end
    stop                  pilots end

A file is written under another name and renamed, so nobody reads half of one. To claim a call is to
rename it, which succeeds for one pilot only, on NFS too. NFS shows a directory as it was half a
minute ago unless this machine changed it since: so each side changes it before it looks, and
everything lies in one directory. No clock of another machine is ever read.

A pilot that dies leaves its claim; the call is handed out again, four times at most. A pilot whose
death was reported too early may still deliver: of two results of a call the first one counts.

Calls and results are pickles. So the directory is for one user alone (`fs.private_directory`), and
a pilot with another mstore reads none.
"""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from mstore import fs
from mstore.clusters.engine import require_alike, sources
from mstore.merge.running.runners import worker_name
from mstore.terms import __version__
from mstore.terms.errors import Interrupted, MstoreError, StorageFailed, Unavailable

T = TypeVar("T")
_BEAT: Final = "beat"
_STOP: Final = "stop"
_HELLO: Final = ".hello"
_CALL: Final = "call"
_CLAIM: Final = "claim"
_RESULT: Final = "result"
_MOST_ATTEMPTS: Final = 4
"""How often a call is handed out whose pilots die."""
_MOST_REVIVALS: Final = 4
"""How often a job is started again whose pilots die, until one of them returns a result."""
_SILENCES: Final = 3
"""How often a scheduler may know none of the jobs before that is believed."""
_TOLD: Final = 3
"""Jobs that an error tells of."""


class Pace(msgspec.Struct, frozen=True):
    """Seconds. They travel with the pilots.

    poll: between two looks at the directory, from the first to the last of an idle time. beat:
    between two beats. lost: without a beat, after which a pilot ends. look: between two questions
    to the scheduler. rest: after a pilot was told that it will be killed, and is not.
    """

    poll: tuple[float, float] = (0.1, 2.0)
    beat: float = 2.0
    lost: float = 180.0
    look: float = 5.0
    rest: float = 600.0


class Hello(msgspec.Struct, frozen=True):
    """What a pilot says of itself. worker: its machine and process. code: digest of its sources."""

    worker: str
    version: str
    code: str

    @classmethod
    def own(cls) -> Hello:
        """Return what this process says."""
        return cls(worker_name(), __version__, sources())

    @property
    def build(self) -> tuple[str, str]:
        """What decides which bytes it computes."""
        return self.version, self.code


# -- the directory -----------------------------------------------------------------------------


class _Name(NamedTuple):
    """The name of a call's file."""

    number: str
    kind: str
    pilot: str

    @classmethod
    def of(cls, name: str) -> _Name | None:
        number, _, rest = name.partition(".")
        kind, _, pilot = rest.partition("@")
        is_one = number.isdecimal() and kind in (_CALL, _CLAIM, _RESULT)
        return cls(number, kind, pilot) if is_one else None

    def __str__(self) -> str:
        return f"{self.number}.{self.kind}" + (f"@{self.pilot}" if self.pilot else "")


class _Board:
    """The directory, for both sides."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return all names. Raises FileNotFoundError."""
        return sorted(os.listdir(self.path))

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is none. Raises OSError."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            # NFS says ESTALE of a file that was replaced while it was opened.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file that appears whole. Raises StorageFailed."""
        file = fs.NewFile(self.path / f".{secrets.token_hex(8)}")
        try:
            file.append(data)
            file.close()
            fs.rename(file.path, self.path / name)
        except BaseException:
            file.abandon()
            raise

    def move(self, old: str, new: str) -> bool:
        """Rename; return whether this call did it. Raises StorageFailed."""
        try:
            fs.rename(self.path / old, self.path / new)
        except StorageFailed as error:
            if error.errno != errno.ENOENT:
                raise
            # Where an answer was lost, NFS asked again, and hears that the old name is gone.
            return (self.path / new).exists()
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises StorageFailed."""
        fs.unlink(self.path / name, missing_ok=True)

    def change(self) -> None:
        """Change the directory, so that NFS lists it as it is now."""
        file = fs.NewFile(self.path / f".{secrets.token_hex(8)}")
        file.abandon()


# -- a pilot -----------------------------------------------------------------------------------


class _Leave(BaseException):
    """Ends a call, whatever it is at: this process is about to be killed."""


class Pilot:
    """Takes calls from a directory until it is told to end. In the main thread of a process.

    name: JOB.RESTARTS. wanted: what the coordinator says of itself.
    """

    def __init__(self, directory: Path, name: str, wanted: Hello, pace: Pace) -> None:
        self._board = _Board(directory)
        self._name = name
        self._wanted = wanted
        self._pace = pace
        self._beat: bytes | None = None
        self._heard = time.monotonic()
        self._can_leave = False
        self._rests_until = 0.0

    def run(self) -> str:
        """Run calls; return why this ended. Raises StorageFailed."""
        own = Hello.own()
        try:
            self._board.write(f"{self._name}{_HELLO}", msgspec.json.encode(own))
            if own.build != self._wanted.build:
                return "it has another mstore"
            for one in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(one, self._told_to_leave)
            return self._run()
        except FileNotFoundError:
            return "the coordinator removed the directory"
        except StorageFailed as error:
            if error.errno != errno.ENOENT:
                raise
            return "the coordinator removed the directory"

    def _told_to_leave(self, *_: object) -> None:
        """Slurm sends SIGTERM some time before it kills, and SIGUSR2 before a job's time is over.

        Who ends by itself then has done its work, for Slurm, and is not started again.
        """
        self._rests_until = time.monotonic() + self._pace.rest
        if self._can_leave:
            self._can_leave = False
            raise _Leave

    def _run(self) -> str:
        first, last = self._pace.poll
        delay = first
        while True:
            if (self._board.path / _STOP).exists():
                return "the coordinator says so"
            self._listen()
            if time.monotonic() - self._heard > self._pace.lost:
                return "the coordinator is lost"
            claimed = self._claim() if time.monotonic() > self._rests_until else None
            if claimed is not None:
                self._take(claimed)
                delay = first
                continue
            time.sleep(delay)
            delay = min(1.5 * delay, last)
            self._board.change()

    def _listen(self) -> None:
        beat = self._board.read(_BEAT)
        if beat is not None and beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()

    def _claim(self) -> _Name | None:
        """Take a call, if there is one; one for this pilot first. Return its name as it was."""
        calls = [one for one in map(_Name.of, self._board.names()) if one and one.kind == _CALL]
        for call in sorted(calls, key=lambda one: (not one.pilot, one)):
            if call.pilot in ("", self._name) and self._board.move(str(call), self._held(call)):
                return call
        return None

    def _held(self, call: _Name) -> str:
        return str(call._replace(kind=_CLAIM, pilot=self._name))

    def _take(self, call: _Name) -> None:
        try:
            result = self._result(self._held(call))
        except _Leave:
            result = None
        if result is None:
            self._board.move(self._held(call), str(call))
            return
        self._board.write(str(_Name(call.number, _RESULT, "")), result)
        self._board.remove(self._held(call))

    def _result(self, claim: str) -> bytes | None:
        """Run a call; None if it cannot be read, so that somebody else may have it by now."""
        told = self._board.read(claim)
        if told is None:
            return None
        try:
            self._can_leave = True
            run, given = pickle.loads(told)  # noqa: S301 -- from a directory of this user alone
            return _packed(self._name, run(*given), None)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the coordinator raises it
            return _packed(self._name, None, error)
        finally:
            self._can_leave = False


def _packed(pilot: str, value: object, error: Exception | None) -> bytes:
    try:
        return pickle.dumps((pilot, value, error))
    except Exception as refused:  # noqa: BLE001 -- pickle raises what objects raise
        what = value if error is None else error
        told = RuntimeError(f"{type(what).__name__} cannot be pickled ({refused}): {what}")
        return pickle.dumps((pilot, None, told))


# -- what starts pilots ------------------------------------------------------------------------


class Stage(Enum):
    """Where a job is."""

    WAITING = "it will run, unless it is ended"
    HOPELESS = "it waits for what does not come"
    RUNNING = "its pilot runs"
    ENDING = "its pilot is ended, and may still run"
    FAILED = "it is over, and may be started again"
    OVER = "it is over"


class Standing(NamedTuple):
    """What a scheduler says of a job. restarts: how often it was started again. said: its words."""

    stage: Stage
    restarts: int
    said: str


class Scheduler(ABC):
    """What starts pilots. All methods are called from one thread."""

    @abstractmethod
    def standings(self) -> Mapping[str, Standing] | None:
        """Return how each job stands, those that are over as long as they are known; None if the
        scheduler does not answer now."""

    @abstractmethod
    def revive(self, job: str) -> None:
        """Start a job again that failed, if that can be done."""

    @abstractmethod
    def last_words(self, job: str) -> str:
        """Return what a job wrote last; empty if that is unknown."""


# -- the coordinator ---------------------------------------------------------------------------


class PilotGone(Exception):
    """The pilot that a call was for is gone."""


class _Pending(NamedTuple):
    """A call that has no result yet. data: it, as pilots read it."""

    label: str
    future: Future[Any]
    pilot: str
    data: bytes


class Coordinator:
    """Hands out calls, and sets their futures in a thread of its own.

    where: what people call the cluster, for errors. `begin` starts the thread, `end` ends it.
    """

    def __init__(
        self, directory: Path, scheduler: Scheduler, where: str, pace: Pace, own: Hello
    ) -> None:
        self._board = _Board(directory)
        self._scheduler = scheduler
        self._where = where
        self._pace = pace
        self._own = own
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._pending: dict[str, _Pending] = {}
        self._count = 0
        self._error: Exception | None = None
        self._hellos: dict[str, Hello] = {}
        self._running: dict[str, Hello] = {}
        self._losses: Counter[str] = Counter()
        self._revivals: Counter[str] = Counter()
        self._lacking: set[str] = set()
        self._silences = 0
        self._beats = 0
        self._next_beat = self._next_look = 0.0
        self._wake = Event()
        self._ends = Event()
        self._thread = Thread(target=self._work, name="pilots", daemon=True)

    def begin(self) -> None:
        """Start."""
        self._tell_beat()
        self._thread.start()

    def end(self) -> None:
        """Tell all pilots to end, and forget the calls; idempotent."""
        with suppress(MstoreError):
            self._board.write(_STOP, b"")
        self._ends.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._fail(Interrupted("the cluster was closed", where=self._where))

    def call(self, label: str, run: Callable[..., T], *given: Any, pilot: str = "") -> Future[T]:
        """Hand out a call. pilot: for this one alone. Raises what ended the coordinator."""
        future: Future[T] = Future()
        data = pickle.dumps((run, given))
        with self._lock:
            if self._error is not None:
                raise self._error
            number = f"{self._count:06d}"
            self._count += 1
            self._pending[number] = _Pending(label, future, pilot, data)
        try:
            self._board.write(str(_Name(number, _CALL, pilot)), data)
        except BaseException:
            self._taken(number)
            raise
        self._wake.set()
        return future

    def running(self) -> dict[str, Hello]:
        """Return the pilots that ran when the scheduler was asked last."""
        with self._lock:
            return dict(self._running)

    def some_running(self) -> dict[str, Hello]:
        """The same, but wait for the first. Raises what ended the coordinator."""
        with self._changed:
            while not self._running:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return dict(self._running)

    # -- in its thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        first, last = self._pace.poll
        delay = first
        while not self._ends.is_set():
            try:
                has_moved = self._turn()
            except Exception as error:  # noqa: BLE001 -- the thread has no one else to tell
                self._fail(error)
                return
            delay = first if has_moved else min(1.5 * delay, last)
            if self._wake.wait(delay):
                self._wake.clear()
                delay = first

    def _turn(self) -> bool:
        """Look once; return whether anything came."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._tell_beat()
        else:
            self._board.change()
        names = self._board.names()
        files = [one for one in map(_Name.of, names) if one is not None]
        self._greet(names)
        has_moved = False
        for one in files:
            if one.kind == _RESULT:
                self._receive(one)
                has_moved = True
        self._withdraw(files)
        if now >= self._next_look:
            # Claims were listed before: a pilot that is not running now has lost them.
            standings = self._scheduler.standings()
            self._next_look = time.monotonic() + self._pace.look
            if standings is not None:
                self._judge(standings, files)
        return has_moved

    def _tell_beat(self) -> None:
        self._beats += 1
        self._board.write(_BEAT, b"%d" % self._beats)
        self._next_beat = time.monotonic() + self._pace.beat

    def _greet(self, names: list[str]) -> None:
        for name in names:
            pilot = name.removesuffix(_HELLO)
            if pilot == name or pilot in self._hellos:
                continue
            told = self._board.read(name)
            if told is None:
                continue
            hello = msgspec.json.decode(told, type=Hello)
            self._hellos[pilot] = hello
            self._next_look = 0.0
            worker = f"worker {_job(pilot)} ({hello.worker})"
            require_alike(hello.build, self._own.build, worker)

    def _receive(self, name: _Name) -> None:
        told = self._board.read(str(name))
        if told is None:
            return
        pending = self._taken(name.number)
        if pending is not None:
            pilot, value, error = _unpacked(told)
            self._revivals.pop(_job(pilot), None)
            _set(pending.future, value, error)
        self._board.remove(str(name))

    def _taken(self, number: str) -> _Pending | None:
        with self._lock:
            return self._pending.pop(number, None)

    def _withdraw(self, files: list[_Name]) -> None:
        """Take back calls that nobody waits for; pilots end those that they have begun."""
        with self._lock:
            gone = [number for number, one in self._pending.items() if one.future.cancelled()]
            for number in gone:
                del self._pending[number]
            known = set(self._pending)
        for one in files:
            if one.kind == _CALL and one.number not in known:
                self._board.remove(str(one))

    def _judge(self, standings: Mapping[str, Standing], files: list[_Name]) -> None:
        """Act on what the scheduler says."""
        self._silences = 0 if standings else self._silences + 1
        if not standings and self._silences < _SILENCES:
            # Just submitted, or the scheduler has just begun.
            return

        def is_at(pilot: str, *stages: Stage) -> bool:
            standing = standings.get(_job(pilot))
            return (
                standing is not None
                and standing.stage in stages
                and standing.restarts == _restarts(pilot)
            )

        with self._changed:
            self._running = {
                one: told for one, told in self._hellos.items() if is_at(one, Stage.RUNNING)
            }
            self._changed.notify_all()
        for one in files:
            if one.pilot and not is_at(one.pilot, Stage.RUNNING, Stage.ENDING):
                self._lose(one, standings.get(_job(one.pilot)))
        self._restore(files)
        self._revive(standings)

    def _restore(self, files: list[_Name]) -> None:
        """Write calls again that have no file, twice in a row: a list may miss what is renamed."""
        listed = {one.number for one in files}
        with self._lock:
            lacking = {one: told for one, told in self._pending.items() if one not in listed}
        for number in self._lacking & lacking.keys():
            told = lacking[number]
            self._board.write(str(_Name(number, _CALL, told.pilot)), told.data)
        self._lacking = set(lacking) - self._lacking

    def _revive(self, standings: Mapping[str, Standing]) -> None:
        """Start jobs again that failed. Raises Interrupted or Unavailable if no pilot will run."""
        come = (Stage.WAITING, Stage.RUNNING, Stage.ENDING)
        has_hope = any(one.stage in come for one in standings.values())
        for job, standing in standings.items():
            if standing.stage is Stage.FAILED and self._may_revive(job):
                self._revivals[job] += 1
                self._scheduler.revive(job)
                has_hope = True
        if not has_hope:
            raise self._hopeless(standings)

    def _may_revive(self, job: str) -> bool:
        # One that never said a word has no mstore, and will have none.
        has_been_here = any(_job(pilot) == job for pilot in self._hellos)
        return has_been_here and self._revivals[job] < _MOST_REVIVALS

    def _lose(self, file: _Name, standing: Standing | None) -> None:
        """Hand a call out again whose pilot is gone; fail one that was for this pilot alone."""
        with self._lock:
            pending = self._pending.get(file.number)
        if pending is None or (self._board.path / str(_Name(file.number, _RESULT, ""))).exists():
            if file.kind == _CLAIM:
                self._board.remove(str(file))
            return
        if pending.pilot:
            self._board.remove(str(file))
            self._taken(file.number)
            _set(pending.future, None, PilotGone(file.pilot))
            return
        if standing is None or standing.stage in (Stage.FAILED, Stage.OVER):
            self._losses[file.number] += 1
        # Else it was pre-empted, or its machine failed: that is not the call's doing.
        if self._losses[file.number] < _MOST_ATTEMPTS:
            self._board.move(str(file), str(_Name(file.number, _CALL, "")))
            return
        self._board.remove(str(file))
        self._taken(file.number)
        job = _job(file.pilot)
        said = "" if standing is None else f" {standing.said}"
        lost = Interrupted(
            f"{pending.label} ended {_MOST_ATTEMPTS} workers, the last one in job {job}{said}"
            f"{self._words_of(job)}",
            where=self._where,
            hint="give each worker more memory, then run the same merge again: it reuses the "
            "finished slices",
        )
        _set(pending.future, None, lost)

    def _hopeless(self, standings: Mapping[str, Standing]) -> MstoreError:
        """Return what to raise where no pilot runs or will run."""
        told = [f"job {job} {one.said}{self._words_of(job)}" for job, one in standings.items()]
        said = "; ".join(told[:_TOLD]) or "the scheduler knows its jobs no more"
        if self._hellos:
            return Interrupted(
                f"no worker is left: {said}",
                where=self._where,
                hint="run the same merge again: it reuses the finished slices",
            )
        if all(one.stage is Stage.HOPELESS for one in standings.values()) and standings:
            return Unavailable(
                f"no worker will ever run: {said}",
                where=self._where,
                hint="change what the address asks for",
            )
        return Unavailable(
            f"no worker could start: {said}",
            where=self._where,
            hint="workers need this Python, with mstore and submitit, under the same path",
        )

    def _words_of(self, job: str) -> str:
        words = self._scheduler.last_words(job)
        return f" ({words})" if words else ""

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            pending = list(self._pending.values())
            self._pending.clear()
            self._changed.notify_all()
        for one in pending:
            _set(one.future, None, error)


def _set(future: Future[Any], value: object, error: Exception | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _unpacked(told: bytes) -> tuple[str, object, Exception | None]:
    try:
        pilot, value, error = pickle.loads(told)  # noqa: S301 -- from a directory of this user
    except Exception as refused:  # noqa: BLE001 -- pickle raises what objects raise
        return "", None, RuntimeError(f"a result cannot be read: {refused!r}")
    return pilot, value, error


def _job(pilot: str) -> str:
    return pilot.rpartition(".")[0]


def _restarts(pilot: str) -> int:
    return int(pilot.rpartition(".")[2])
