"""No test can end the run in silence (`silent_ends`, which conftest.py turns on)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENDS = (
    "os._exit(0)",
    "os.abort()",
    "os.fork()",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "os.kill(os.getppid(), signal.SIGTERM)",
    "os.kill(0, signal.SIGTERM)",
    "os.killpg(os.getpgid(0), signal.SIGTERM)",
    "signal.raise_signal(signal.SIGUSR1)",
    "signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)",
    "signal.alarm(1)",
    "signal.setitimer(signal.ITIMER_REAL, 1)",
    "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    "faulthandler.dump_traceback_later(1, exit=True)",
    "faulthandler.dump_traceback_later(1, False, sys.stderr, True)",
)

FREE = """
def test_what_is_free():
    os.kill(os.getpid(), 0)
    os.kill(os.getpid(), signal.SIGCHLD)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    faulthandler.dump_traceback_later(600)
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = subprocess.Popen(command, preexec_fn=limit)
    assert child.wait() == -9
    sleeper = subprocess.Popen(["sleep", "600"])
    os.kill(sleeper.pid, signal.SIGTERM)
    assert sleeper.wait() == -15
"""


IMPORTS = (
    "import ctypes, faulthandler, os, resource, signal, subprocess, sys, threading, time, pytest\n"
)


def pytest_on(program: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What pytest, with our conftest, makes of a file of tests."""
    (directory / "test_ends.py").write_text(IMPORTS + program)
    (directory / "pytest.ini").write_text("[pytest]\n")
    line = ["-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        # A process above it, for what ends that.
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, *line, "test_ends.py"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        # Where nothing is refused, a signal to the group is for this one only.
        start_new_session=True,
    )


@pytest.mark.rest
@pytest.mark.parametrize("workers", [0, 1])
def test_no_test_ends_the_run_in_silence(workers: int, tmp_path: Path) -> None:
    """Each call that would end pytest, or a worker of it, or the process above, fails its test
    instead, and the tests after it run."""
    program = (
        f"@pytest.mark.parametrize('call', {ENDS!r})\n"
        "def test_an_end(call):\n    eval(call)\n" + FREE
    )
    done = pytest_on(program, tmp_path, f"-n{workers}")
    assert f"{len(ENDS)} failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("belongs in a child process") >= len(ENDS)


@pytest.mark.rest
def test_a_lost_worker_is_a_failed_test(tmp_path: Path) -> None:
    """A worker that dies from within C fails the test that it was at; the others run."""
    program = "".join(f"def test_{number}():\n    pass\n" for number in range(6))
    program += "def test_wild():\n    ctypes.string_at(0)\n"
    done = pytest_on(program, tmp_path, "-n2", "--dist=worksteal")
    assert "1 failed, 6 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_ends.py::test_wild'" in done.stdout
    assert done.returncode == 1
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_xdist_may_end_a_worker() -> None:
    """A worker that is busy when nobody listens to it any more is ended by xdist, as ever."""
    program = (
        "import signal, types, silent_ends\n"
        "from execnet.gateway_base import WorkerGateway\n"
        "silent_ends.refuse()\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "busy = types.SimpleNamespace(trigger_shutdown=lambda: None, waitall=lambda time: False)\n"
        "worker = types.SimpleNamespace(_trace=lambda said: None, _execpool=busy)\n"
        "WorkerGateway._terminate_execution(worker)\n"
        "print('it lives')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.rest
def test_who_is_ended_says_where(tmp_path: Path) -> None:
    """A run that somebody ends names the tests that ran, and those that had failed."""
    (tmp_path / "test_ends.py").write_text(
        f"{IMPORTS}"
        "def test_one(): assert False\n"
        "def test_two():\n"
        "    open('begun', 'w').close()\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    line = ["-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "-n", "1"]
    tests = subprocess.Popen(
        [sys.executable, *line],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while tests.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.05)
    tests.send_signal(signal.SIGTERM)
    said = tests.communicate(timeout=300)[0]
    assert "ended during test_ends.py::test_two" in said
    assert "FAILED test_ends.py::test_one" in said
