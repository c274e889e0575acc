"""Command lines and programs in a process of their own, which may die of a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 120

_COMMANDS = """
import json, sys
from pathlib import Path
from cli_runs import Program
store, *lines = json.loads(sys.argv[1])
for line in lines:
    done = Program(Path(store))(*line)
    print(json.dumps([done.status, done.out, done.err]), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """What one command line came to: its exit status and its two streams."""

    status: int
    out: str
    err: str


def program(code: str, *arguments: str, before: Sequence[str] = ()) -> str:
    """What a program prints; it must end well.  before: a command that runs it (unshare, say)."""
    done = subprocess.run(
        [*before, sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    died = signal.Signals(-done.returncode).name if done.returncode < 0 else "ended"
    assert done.returncode == 0, f"{died} {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(
    store: Path, *lines: Sequence[str | Path], before: Sequence[str] = (), code: str = ""
) -> list[Outcome]:
    """Run command lines on a store, one after the other in one process.

    code: what that process does first.
    """
    task = json.dumps([str(store), *([str(word) for word in line] for line in lines)])
    told = program(code + _COMMANDS, task, before=before)
    return [Outcome(*json.loads(line)) for line in told.splitlines()]
