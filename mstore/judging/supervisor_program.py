"""Runs one command, and ends every process that came of it.

A program of its own, which `process` starts by path: nothing imports it, and it knows nothing of
mstore. It adopts orphans (PR_SET_CHILD_SUBREAPER), so a process that forks away into another
session is its descendant still. When the command has ended, or its time is over, or the line to the
parent is cut, it kills all descendants, and then says how the command ended, in one line of JSON on
standard output. A living parent says a byte before it cuts the line. If it was killed, it says
none; then nobody else removes the scratch directory, in which a whole model may lie.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 10.0
"""Seconds in which killed processes must be gone."""

_prctl = ctypes.CDLL(None).prctl


def main() -> None:
    request = json.loads(sys.argv[1])
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A signal writes to this pipe, so that `select` ends when a child has.
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    output = request["output"]
    if output is None:
        output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            request["command"],
            env=os.environ | request["environment"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 -- this program has one thread
        )
    except OSError as error:
        answer = {"refused": os.strerror(error.errno or 0).lower(), "file": error.filename}
    else:
        answer = watch(child.pid, request["timeout"], request["line"], woken)
    answer["ended"] = end_all()
    if is_left(request["line"]):
        remove(request["scratch"])
    sys.stdout.write(json.dumps(answer) + "\n")


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def watch(child: int, timeout: float, line: int, woken: int) -> dict[str, object]:
    """Wait until the command ends, its time is over, or the line is cut."""
    deadline = time.monotonic() + timeout
    while True:
        for pid, status in reaped():
            if pid == child:
                return {"status": os.waitstatus_to_exitcode(status)}
        left = deadline - time.monotonic()
        if left <= 0:
            return {"timed_out": True}
        ready, _, _ = select.select([line, woken], [], [], left)
        if line in ready:
            return {"cut": True}
        if woken in ready:
            os.read(woken, 4096)


def reaped() -> list[tuple[int, int]]:
    """Return the children that have ended, with their statuses."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def end_all() -> bool:
    """Kill all descendants until none is left; return whether none is."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                # It is gone, or belongs to another user.
                continue
        reaped()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            # Orphans come here, so without children there are no descendants.
            return True
        time.sleep(0.01)
    return False


def is_left(line: int) -> bool:
    """Return whether the parent was killed: the line is cut, without a word."""
    ready, _, _ = select.select([line], [], [], 0)
    return bool(ready) and not os.read(line, 1)


def remove(scratch: str) -> None:
    """Remove the directory, once nothing is mounted in it: a mount ends with the parent, too."""
    deadline = time.monotonic() + PATIENCE
    while any(map(os.path.ismount, (entry.path for entry in os.scandir(scratch)))):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    shutil.rmtree(scratch, ignore_errors=True)


def descendants() -> list[int]:
    """Return the processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program may hold anything; the last parenthesis ends it.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


if __name__ == "__main__":
    main()
