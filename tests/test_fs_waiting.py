"""Who holds a lock for which a command waits is said once, and only then."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK, small_model

from mstore import Store
from mstore.fs import LockFile, locks

HOLDING = (
    "import fcntl, os, sys\n"
    "lock = os.open(sys.argv[1], os.O_RDONLY)\n"
    "fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "print('held', flush=True); sys.stdin.read()"
)
IMPATIENT = (
    "import runpy\n"
    "from mstore.fs import locks\n"
    "locks.AFTER = 0.2\n"
    "runpy.run_module('mstore_cli', run_name='__main__', alter_sys=True)"
)
"""The command line, which says soon that it waits."""
LONG = 60.0


@contextmanager
def held(path: Path, *words: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock on a file until its input is closed."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDING, str(path), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(LONG)
        process.stdout.close()


def until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """What is logged, with little patience."""
    monkeypatch.setattr(locks, "AFTER", 0.05)
    caplog.set_level(logging.INFO, "mstore")
    return caplog


def waited(path: Path, log: pytest.LogCaptureFixture, release: Callable[[], object]) -> str:
    """What the log says of waiting for a lock that is released then."""
    lock = LockFile(path, create=False)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    until(lambda: log.messages)
    time.sleep(0.2)
    assert thread.is_alive()
    release()
    thread.join(LONG)
    assert not thread.is_alive()
    lock.release()
    [said] = log.messages
    return said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("/usr/bin/mstore", "gc", "--all"), "mstore gc --all"),
        (("mstore_cli", "add", "x\ny"), "mstore add x?y"),
        (("other", "program"), ""),
    ],
)
def test_the_holder_is_named_once(
    words: tuple[str, ...], told: str, path: Path, log: pytest.LogCaptureFixture
) -> None:
    """After a while the log says once, at INFO, which process and command holds the lock."""
    with held(path, *words) as process:
        assert process.stdin is not None
        said = waited(path, log, process.stdin.close)
    assert said.startswith(f"waiting for {path}, held by process {process.pid} (")
    assert said.endswith(f"({told})" if told else "...)")
    assert log.records[0].levelno == logging.INFO
    assert log.records[0].name == "mstore"


def test_another_thread_holds_it(path: Path, log: pytest.LogCaptureFixture) -> None:
    """A lock that this process holds itself is said to be another thread's."""
    mine = LockFile(path)
    mine.acquire()
    said = waited(path, log, mine.release)
    assert said == f"waiting for {path}, held by another thread of this process"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a PID namespace")
def test_a_process_of_another_namespace_is_not_named(
    path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Where this process cannot see who holds the lock, it names no number."""
    with held(path) as process:
        assert process.stdin is not None
        program = (
            "import logging, sys, threading; from pathlib import Path\n"
            "from mstore.fs.locks import holder\n"
            "from mstore.fs import LockFile\n"
            "lock = LockFile(Path(sys.argv[1]), create=False)\n"
            "print(holder(lock._fd))"
        )
        line = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program, path]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no PID namespace here: {done.stderr}")
    assert done.stdout == "another process\n"


def test_a_free_lock_costs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is free, or only tried, starts no thread and polls nothing."""
    monkeypatch.setattr(locks, "Timer", None)
    lock = LockFile(path)
    assert lock.acquire()
    other = LockFile(path)
    assert not other.acquire(blocking=False)
    lock.release()
    assert other.acquire()
    other.release()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "quiet"),
    [
        # `make test` runs each of both once.
        ("lock", True),
        ("packs", False),
        pytest.param("lock", False, marks=pytest.mark.rest),
        pytest.param("packs", True, marks=pytest.mark.rest),
    ],
)
def test_a_command_that_waits(name: str, quiet: bool, tmp_path: Path) -> None:
    """A command that waits for another says so on standard error, unless quiet, and then works."""
    store = tmp_path / "store"
    with Store.init(store, block_size=BLOCK) as opened:
        opened.add(small_model(tmp_path / "m", "m"), name="m")
    command = ["tag", "v1", "m"] if name == "lock" else ["gc"]
    line = [sys.executable, "-c", IMPATIENT, "--store", str(store), *command]
    with held(store / name, "mstore", "add", "model") as holder:
        assert holder.stdin is not None
        process = subprocess.Popen(
            [*line, *(["-q"] if quiet else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        said = "" if quiet else process.stderr.readline()
        # A quiet one would have spoken by now.
        time.sleep(1.5 if quiet else 0)
        assert process.poll() is None
        holder.stdin.close()
        _, rest = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert rest == ""
    about = f"process {holder.pid} (mstore add model)"
    assert said == ("" if quiet else f"remark: waiting for {store / name}, held by {about}\n")
    Program(store).succeed("refs")
