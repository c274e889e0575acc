"""No test can end the run in silence (`silent_ends`, which conftest.py turns on)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENDS = (
    "os._exit(0)",
    "os.abort()",
    "os.fork()",
    "os.kill(os.getpid(), signal.SIGKILL)",
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


def test_no_test_ends_the_run_in_silence(tmp_path: Path) -> None:
    """Each call that would end pytest fails its test instead, and the tests after it run."""
    program = tmp_path / "test_ends.py"
    program.write_text(
        "import faulthandler, os, resource, signal, subprocess, sys, threading, time\n"
        "import pytest\n"
        f"@pytest.mark.parametrize('call', {ENDS!r})\n"
        "def test_an_end(call):\n    eval(call)\n" + FREE
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        # Where nothing is refused, a signal to the group is for this one only.
        start_new_session=True,
    )
    assert f"{len(ENDS)} failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("belongs in a child process") >= len(ENDS)
