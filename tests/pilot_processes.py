"""Pilots as plain processes of this machine, and what they run in tests.

As a program, it is one pilot. A module of its own, because pilots import what they run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from mstore.clusters.pilots import Hello, Pace, Pilot, Scheduler, Stage, Standing
from mstore.terms.errors import NotFound

QUICK = Pace(poll=(0.02, 0.05), beat=0.1, lost=60.0, look=0.1, rest=60.0)
"""For tests, which wait for each of them."""


class Processes(Scheduler):
    """Starts pilots, and sees which run. says: in place of what is true of a job."""

    def __init__(self, directory: Path, pace: Pace, wanted: Hello) -> None:
        self._directory = directory
        self._orders = msgspec.json.encode((wanted, pace)).decode()
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._restarts: dict[str, int] = {}
        self.revived: list[str] = []
        self.says: dict[str, Standing] = {}

    def start(self, job: str) -> subprocess.Popen[str]:
        restarts = self._restarts.setdefault(job, 0)
        line = [sys.executable, __file__, str(self._directory), f"{job}.{restarts}", self._orders]
        self.running[job] = subprocess.Popen(
            line, stdout=subprocess.PIPE, text=True, env=os.environ | _path()
        )
        return self.running[job]

    def standings(self) -> Mapping[str, Standing]:
        return {job: self._standing(job) for job in self.running} | self.says

    def _standing(self, job: str) -> Standing:
        code = self.running[job].poll()
        stage = Stage.RUNNING if code is None else Stage.FAILED if code else Stage.OVER
        return Standing(stage, self._restarts[job], f"ended with {code}")

    def revive(self, job: str) -> None:
        self.revived.append(job)
        self._restarts[job] += 1
        self.start(job)

    def last_words(self, job: str) -> str:
        return "its last words"

    def ends(self) -> list[str]:
        """Wait for all; return why each ended."""
        return [one.communicate(timeout=60)[0].strip() for one in self.running.values()]

    def kill(self) -> None:
        """End all that are left."""
        for one in self.running.values():
            one.kill()
            one.communicate()


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


# -- what pilots run ----------------------------------------------------------------------------


def note(path: Path, word: str, seconds: float = 0.0) -> str:
    """Write that this ran, and by whom; return that."""
    told = f"{word} {os.getpid()}"
    with path.open("a") as file:
        file.write(f"{told}\n")
    time.sleep(seconds)
    return told


def fail() -> None:
    """Raise an error of mstore's."""
    raise NotFound("it is not there", where="here", hint="look there")


def return_what_cannot_be_pickled() -> object:
    """Return a function that has no name."""
    return lambda: None


def large(length: int) -> bytes:
    """Return many bytes."""
    return bytes(length)


def kill_once(path: Path) -> str:
    """Kill this process; run by another one, return."""
    if path.exists():
        return note(path, "second")
    note(path, "first")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill_always(path: Path) -> None:
    """Kill this process."""
    note(path, "killed")
    os.kill(os.getpid(), signal.SIGKILL)


def end_early(path: Path) -> str:
    """Have this process told that it will be killed; in another one, return."""
    if path.exists():
        return note(path, "second")
    note(path, "first")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    raise AssertionError


def main() -> None:
    """Be a pilot: DIRECTORY NAME ORDERS."""
    directory, name, orders = sys.argv[1:]
    wanted, pace = msgspec.json.decode(orders, type=tuple[Hello, Pace])
    print(Pilot(Path(directory), name, wanted, pace).run())


if __name__ == "__main__":
    main()
