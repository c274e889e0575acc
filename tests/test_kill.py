"""kill -9 at random moments, with real processes on a real store.

A nursery process imports everything once and forks a worker for each line that it is told, so
that a round costs milliseconds.  Workers add and merge in a loop and write a line after each call
that returned.  Two work at a time: one is killed, the other must go on, and is killed as well.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore.api import Store
from mstore.ids import SnapshotId

# A fresh store now and then: each check reads all that is in it.
ROUNDS_A_STORE = 10
PATIENCE = 60.0


# -- in the nursery ----------------------------------------------------------------------------


def nursery(scratch: str) -> None:
    """Obey `work STORE NAME` and `bury PID` on stdin; answer `born PID` and `buried PID`."""
    # What workers import and compile is here before the first of them is born.
    warm = Path(scratch) / "warm"
    Store.init(warm, block_size=BLOCK).close()
    work(warm, "warm", "0", Path(scratch))
    tell("ready")
    for line in sys.stdin:
        order, *what = line.split()
        if order == "work":
            child = os.fork()
            if child == 0:
                work_for_ever(Path(what[0]), what[1], Path(scratch))
            tell(f"born {child}")
        else:
            os.waitpid(int(what[0]), 0)
            tell(f"buried {what[0]}")


def work_for_ever(root: Path, name: str, scratch: Path) -> None:
    """A worker's life; ends with a stack on stderr or, as it should, from outside."""
    try:
        for number in count():
            work(root, name, f"{os.getpid()}-{number}", scratch)
    finally:
        traceback.print_exc()
        os._exit(1)


def work(root: Path, name: str, seed: str, scratch: Path) -> None:
    """Add a base and an expert and merge them; tell of each call that returned."""
    with Store.open(root) as store:
        for part in ("base", "expert"):
            model = small_model(scratch / f"{name}-{part}", seed, changed=part)
            base = None if part == "base" else f"{name}/base"
            added = store.add(model, name=f"{name}/{part}", base=base, threads=1)
            tell(f"done {name}/{part} {added.snapshot} {seed}")
        plan = store.plan(
            base=f"{name}/base", experts=[f"{name}/expert"], method="linear", threads=1
        )
        merged = store.merge(plan, name=f"{name}/merged", threads=1)
        tell(f"done {name}/merged {merged.snapshot} {seed}")


def tell(line: str) -> None:
    """One line, in one write: lines of several processes do not mix."""
    os.write(1, f"{line}\n".encode())


# -- outside -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """An acknowledged call."""

    ref: str
    snapshot: SnapshotId
    seed: str


class Nursery:
    """The nursery process, and what its children have acknowledged (`done`, oldest first)."""

    def __init__(self, scratch: Path) -> None:
        self._errors = (scratch / "errors").open("w+")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, test_kill; test_kill.nursery(sys.argv[1])",
                scratch,
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._unread = b""
        self.done: list[Done] = []
        self._until("ready")

    @property
    def _stdout(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _order(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def _lines(self) -> Iterator[list[str]]:
        """Words of each line as it comes; `done` ones are kept on the way."""
        give_up = time.monotonic() + PATIENCE
        while True:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                words = line.decode().split()
                if words[0] == "done":
                    ref, snapshot, seed = words[1:]
                    self.done.append(Done(ref, SnapshotId.parse(snapshot), seed))
                yield words
            if not self._selector.select(give_up - time.monotonic()):
                raise TimeoutError(f"no answer; errors: {self.errors()}")
            read = os.read(self._stdout, 1 << 16)
            assert read, f"the nursery died: {self.errors()}"
            self._unread += read

    def _until(self, *words: str) -> list[str]:
        return next(line for line in self._lines() if tuple(line[: len(words)]) == words)

    def start(self, store: Path, name: str) -> int:
        """The process id of a new worker."""
        self._order(f"work {store} {name}")
        return int(self._until("born")[1])

    def kill(self, worker: int) -> None:
        """SIGKILL; returns when the process is gone and all that it told was read."""
        os.kill(worker, signal.SIGKILL)
        self._order(f"bury {worker}")
        self._until("buried", str(worker))

    def wait_for(self, name: str) -> None:
        """Until a call of this worker is acknowledged that was not yet."""
        next(line for line in self._lines() if line[0] == "done" and line[1].startswith(f"{name}/"))

    def errors(self) -> str:
        """What the nursery and its children wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._selector.close()
        self._errors.close()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Nursery]:
    """A nursery, ready."""
    nursery = Nursery(tmp_path)
    yield nursery
    nursery.close()


def inspect(root: Path, done: list[Done], scratch: Path) -> bool:
    """Assert all that must hold in a store after a kill; whether the kill left garbage."""
    last = {told.ref: told for told in done}
    with Store.open(root) as store:
        report = store.fsck(read_data=True)
        assert report.problems == ()
        assert {told.snapshot for told in done} <= set(store.snapshot_ids())
        for ref, told in last.items():
            # Calls that were killed may have published without having said so.
            moves = [move.new for move in store.reflog(ref)]
            assert told.snapshot in moves
            assert store[ref].id == moves[0]
            part = ref.split("/")[1]
            if part != "merged":
                model = small_model(scratch / f"expected-{part}", told.seed, changed=part)
                view = store.view(told.snapshot)
                found = {path: b"".join(view.stream(path)) for path in view.files}
                assert found == files_of(model)
    return bool(report.garbage)


def kill_at_random(children: Nursery, rounds: int, scratch: Path) -> int:
    """That many rounds; how many kills left garbage, which is to say: hit something running."""
    littered = 0
    root = scratch / "none"
    for number in range(rounds):
        if number % ROUNDS_A_STORE == 0:
            root = scratch / f"store{number}"
            Store.init(root, block_size=BLOCK).close()
            children.done.clear()
        first, second = children.start(root, "a"), children.start(root, "b")
        time.sleep(random.uniform(0, 0.2))
        children.kill(first)
        children.wait_for("b")
        time.sleep(random.uniform(0, 0.05))
        children.kill(second)
        littered += inspect(root, children.done, scratch)
        assert children.errors() == ""
    with Store.open(root) as store:
        store.add(small_model(scratch / "end", "end"), name="end", threads=1)
        assert list((root / "tmp").iterdir()) == []
        assert store.fsck().problems == ()
    return littered


def test_killed_at_random_moments(children: Nursery, tmp_path: Path) -> None:
    """After kill -9 at 100 random moments of add and merge: fsck is clean each time, nothing that
    was acknowledged is lost, a second process goes on, and the next add clears up."""
    littered = kill_at_random(children, 50, tmp_path)
    assert littered >= 10
