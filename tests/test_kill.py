"""kill -9 at random moments, with real processes on a real store.

A nursery process imports everything once and forks a worker for each line that it is told, so
that a round costs milliseconds.  Workers add, merge and remove in a loop and write a line after
each call that returned; others collect garbage, and read through a mount.  All are at work at a
time: one writer is killed, then the collector, the other must go on, and is killed as well.
"""

from __future__ import annotations

import errno
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import Unavailable
from mstore.terms.ids import SnapshotId
from mstore_fuse import mounts
from mstore_fuse.fuse_driver import require_fuse

# A fresh store now and then: each check reads all that is in it.
ROUNDS_A_STORE = 8
PATIENCE = 600.0


# -- in the nursery ----------------------------------------------------------------------------


def nursery(scratch: str) -> None:
    """Obey `TASK WHERE NAME` and `bury PID` on stdin; answer `born PID` and `buried PID`."""
    # What workers import and compile is here before the first of them is born.
    warm = Path(scratch) / "warm"
    Store.init(warm, block_size=BLOCK).close()
    for task in (work, collect):
        task(warm, "warm", "0", Path(scratch))
    tell("ready")
    for line in sys.stdin:
        order, *what = line.split()
        if order in TASKS:
            child = os.fork()
            if child == 0:
                for_ever(order, Path(what[0]), what[1], Path(scratch))
            tell(f"born {child}")
        else:
            os.waitpid(int(what[0]), 0)
            tell(f"buried {what[0]}")


def for_ever(task: str, root: Path, name: str, scratch: Path) -> None:
    """A worker's life; ends with a stack on stderr or, as it should, from outside."""
    try:
        for number in count():
            TASKS[task](root, name, f"{os.getpid()}-{number}", scratch)
    finally:
        traceback.print_exc()
        os._exit(1)


def work(root: Path, name: str, seed: str, scratch: Path) -> None:
    """Add a base and an expert, pin that, merge them, remove the result, unpin; tell of each call
    that returned and moved a ref."""
    with Store.open(root) as store:
        for part in ("base", "expert"):
            model = small_model(scratch / f"{name}-{part}", seed, changed=part)
            base = None if part == "base" else f"{name}/base"
            added = store.add(model, name=f"{name}/{part}", base=base, threads=1)
            tell(f"done {name}/{part} {added.snapshot} {seed}")
        store.pin(f"{name}/expert", raw=True, threads=1)
        plan = store.plan(
            MergeRequest(base=f"{name}/base", experts=[f"{name}/expert"], method="linear"),
            threads=1,
        )
        merged = store.merge(plan, name=f"{name}/merged", threads=1)
        tell(f"done {name}/merged {merged.snapshot} {seed}")
        store.remove(f"{name}/merged")
        tell(f"done {name}/merged - {seed}")
        store.unpin(f"{name}/expert", threads=1)


def collect(root: Path, name: str, seed: str, scratch: Path) -> None:
    """Collect garbage."""
    with Store.open(root) as store:
        store.gc()


def watch(root: Path, name: str, seed: str, scratch: Path) -> None:
    """Read each snapshot of a mount whole; files that were added must be as they were."""
    for snapshot in sorted((root / "snapshots").iterdir()):
        try:
            found = files_of(snapshot)
        except OSError as error:
            # It was collected meanwhile, or the mount is being killed.
            if error.errno in {errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.EIO}:
                continue
            raise
        # A merge's card and recipe are nobody else's.
        found.pop("README.md", None)
        found.pop("mergekit_config.yml", None)
        if found.keys() != {"config.json", "model.safetensors"}:
            continue
        maker = found["config.json"].split(b'"')[3].decode()
        wanted = [
            files_of(small_model(scratch / f"{name}-{part}", maker, changed=part))
            for part in ("base", "expert")
        ]
        if found not in wanted and not _is_merged(found, *wanted):
            raise AssertionError(f"{snapshot} has other contents")


def _is_merged(found: dict[str, bytes], base: dict[str, bytes], expert: dict[str, bytes]) -> bool:
    """Whether these may be the files of a merge: the large tensor is that of both."""
    one, other = found["model.safetensors"], base["model.safetensors"]
    return len(one) == len(other) and one[: 60 << 10] == other[: 60 << 10]


TASKS = {task.__name__: task for task in (work, collect, watch)}


def tell(line: str) -> None:
    """One line, in one write: lines of several processes do not mix."""
    os.write(1, f"{line}\n".encode())


# -- outside -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """An acknowledged call; a removal has no snapshot."""

    ref: str
    snapshot: SnapshotId | None
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
                    made = None if snapshot == "-" else SnapshotId.parse(snapshot)
                    self.done.append(Done(ref, made, seed))
                yield words
            if not self._selector.select(give_up - time.monotonic()):
                raise TimeoutError(f"no answer; errors: {self.errors()}")
            read = os.read(self._stdout, 1 << 16)
            assert read, f"the nursery died: {self.errors()}"
            self._unread += read

    def _until(self, *words: str) -> list[str]:
        return next(line for line in self._lines() if tuple(line[: len(words)]) == words)

    def start(self, where: Path, name: str, task: str = "work") -> int:
        """The process id of a new worker."""
        self._order(f"{task} {where} {name}")
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


def inspect(root: Path, done: list[Done], scratch: Path, *, forgets: bool) -> bool:
    """Assert all that must hold in a store after a kill; whether the kill left garbage.

    forgets: gc takes what only the reflog names.
    """
    last = {told.ref: told for told in done}
    with Store.open(root) as store:
        report = store.fsck(read_data=True)
        assert report.problems == ()
        told_of = {told.snapshot for told in done} - {None}
        assert forgets or told_of <= set(store.snapshot_ids())
        refs = {ref.name: ref.snapshot for ref in store.refs()}
        for ref, told in last.items():
            # Calls that were killed may have published without having said so.
            moves = [move.new for move in store.reflog(ref)]
            assert told.snapshot in moves
            assert refs.get(ref) == moves[0]
            part = ref.split("/")[1]
            if part != "merged" and (not forgets or told.snapshot == moves[0]):
                model = small_model(scratch / f"expected-{part}", told.seed, changed=part)
                view = store.view(told.snapshot)
                found = {path: b"".join(view.stream(path)) for path in view.files}
                assert found == files_of(model)
    return bool(report.garbage)


@contextmanager
def mounted(root: Path, point: Path) -> Iterator[Path | None]:
    """The whole store under a mount whose server is killed in the end; None where none can be."""
    try:
        require_fuse()
    except Unavailable:
        yield None
        return
    point.mkdir()
    info = mounts.mount(root, None, point)
    yield point
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
    mounts.unmount(point, lazy=True)


def kill_at_random(children: Nursery, rounds: int, scratch: Path) -> int:
    """That many rounds; how many kills left garbage, which is to say: hit something running."""
    littered = 0
    for first in range(0, rounds, ROUNDS_A_STORE):
        root = scratch / f"store{first}"
        forgets = first // ROUNDS_A_STORE % 2 == 1
        with Store.init(root, block_size=BLOCK) as store:
            store.configure("reflog_days", 0 if forgets else 30)
        children.done.clear()
        with mounted(root, scratch / f"mount{first}") as point:
            for _ in range(min(ROUNDS_A_STORE, rounds - first)):
                littered += _round(children, root, point, scratch, forgets=forgets)
        with Store.open(root) as store:
            store.add(small_model(scratch / "end", "end"), name="end", threads=1)
            assert list((root / "tmp").iterdir()) == []
            store.gc()
            report = store.fsck(read_data=True)
            assert report.problems == ()
            assert report.garbage == ()
        shutil.rmtree(root)
    return littered


def _round(
    children: Nursery, root: Path, point: Path | None, scratch: Path, *, forgets: bool
) -> bool:
    """Four at work; one after the other is killed."""
    one, other = children.start(root, "a"), children.start(root, "b")
    collector = children.start(root, "c", "collect")
    reader = None if point is None else children.start(point, "d", "watch")
    time.sleep(random.uniform(0, 0.2))
    children.kill(one)
    time.sleep(random.uniform(0, 0.05))
    children.kill(collector)
    children.wait_for("b")
    time.sleep(random.uniform(0, 0.05))
    children.kill(other)
    if reader is not None:
        children.kill(reader)
    found = inspect(root, children.done, scratch, forgets=forgets)
    assert children.errors() == ""
    return found


@pytest.mark.parametrize("rounds", [4, pytest.param(16, marks=pytest.mark.rest)])
def test_killed_at_random_moments(rounds: int, children: Nursery, tmp_path: Path) -> None:
    """After kill -9 at random moments of add, merge, rm, gc and reads of a mount: fsck is clean,
    nothing acknowledged is lost, another process goes on, the next add clears up."""
    littered = kill_at_random(children, rounds, tmp_path)
    # One in three leaves some: of a few rounds perhaps none does.
    assert littered >= rounds // 8


@pytest.mark.slow
def test_killed_at_a_thousand_random_moments(children: Nursery, tmp_path: Path) -> None:
    """The same for 1,000 rounds."""
    littered = kill_at_random(children, 1000, tmp_path)
    assert littered >= 250
