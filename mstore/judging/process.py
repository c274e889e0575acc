"""Runs a command that a user named, and leaves no process of it behind.

Without a shell. A supervisor (`supervisor_program`) stands between: it alone is the parent of
what the command starts, so this process, which may be somebody's notebook, adopts and reaps
nothing. Nothing here waits for the end of a stream that the command could hold open.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore.terms.errors import CommandFailed, Unavailable, WrongCommand

PROGRAM: Final = Path(__file__).with_name("supervisor_program.py")
GRACE: Final = 30.0
"""Seconds that the supervisor has to end everything, after the command's own time."""


class Ended(msgspec.Struct, frozen=True):
    """How a command ended: its exit status, negative for a signal, and the seconds it took."""

    status: int
    seconds: float


class _Answer(msgspec.Struct, frozen=True):
    status: int | None = None
    timed_out: bool = False
    refused: str | None = None
    file: str | None = None
    ended: bool = True


def run(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    timeout: float,
    log: Path,
    scratch: Path,
    output: int | None = None,
) -> Ended:
    """Run a command in a directory until it ends, and then end all that it started.

    environment: variables beside those of this process. timeout: in seconds. log: the file that
    gets its output, unless `output`, a descriptor, does. scratch: a directory to remove if this
    process is killed meanwhile. KeyboardInterrupt ends it, too.

    Raises WrongCommand if it cannot be started, CommandFailed if it takes longer than `timeout`, or
    leaves a process that cannot be killed; Unavailable.
    """
    if not sys.executable:
        raise Unavailable("a command needs a Python to watch it, and this program names none")
    began = time.monotonic()
    line, own_end = socket.socketpair()
    # A number of its own: the supervisor has other standard streams.
    passed = None if output is None else os.dup(output)
    request = {
        "command": list(command),
        "environment": dict(environment),
        "timeout": timeout,
        "log": str(log),
        "output": passed,
        "line": line.fileno(),
        "scratch": str(scratch),
    }
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            pass_fds=[line.fileno(), *(() if passed is None else (passed,))],
            # Ctrl-C goes to this process only, which then cuts the line.
            start_new_session=True,
        )
    except BaseException:
        own_end.close()
        raise
    finally:
        line.close()
        if passed is not None:
            os.close(passed)
    try:
        told, _ = supervisor.communicate(timeout=timeout + GRACE)
    except subprocess.TimeoutExpired:
        told = b""
    finally:
        with suppress(OSError):
            # Unlike a line that is only cut: this process lives, and removes what it made.
            own_end.send(b".")
        own_end.close()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(GRACE)
        supervisor.kill()
        supervisor.wait()
    answer = _answer_of(told)
    shown = command[0]
    if answer.refused is not None:
        raise WrongCommand(f"cannot be started: {answer.refused}", where=answer.file or shown)
    if answer.timed_out:
        seconds = f"{timeout:g} second{'' if timeout == 1 else 's'}"
        raise CommandFailed(f"took longer than {seconds}, and was ended", where=shown)
    if answer.status is None:
        raise CommandFailed("what watched it was killed", where=shown)
    if not answer.ended:
        raise CommandFailed("left a process that cannot be killed", where=shown)
    return Ended(answer.status, time.monotonic() - began)


def _answer_of(told: bytes) -> _Answer:
    try:
        return msgspec.json.decode(told, type=_Answer)
    except msgspec.DecodeError:
        return _Answer()
