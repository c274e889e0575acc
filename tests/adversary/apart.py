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

PATIENCE = 600
"""Seconds after which a program counts as hung: a loaded machine takes a tenth of that."""

_COMMANDS = """
import json, sys
from pathlib import Path
from cli_runs import Program
store, *lines = json.loads(sys.argv[1])
for line in lines:
    done = Program(Path(store))(*line)
    print(json.dumps([done.status, done.out, done.err]), flush=True)
"""

_DAMAGED = """
import json, os, shutil, sys
from pathlib import Path
from cli_runs import Program
sound, damages, lines = json.load(sys.stdin)
store = Path(sound).with_name("damaged")

def run(damage):
    shutil.copytree(sound, store, symlinks=True)
    if damage is not None:
        (store / damage[0]).write_bytes(bytes.fromhex(damage[1]))
    for line in lines:
        done = Program(store)(*line)
        yield [done.status, done.out, done.err]
    shutil.rmtree(store)

# What the commands import and compile is here before the first child is born.
assert [status for status, _, _ in run(None)] == [0] * len(lines)
for damage in damages:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(writer, "w") as answer:
                for told in run(damage):
                    print(json.dumps(told), file=answer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == 0, f"{damage[0]}: ended with {ended} after {told}"
    print(told, end="")
"""


@dataclass(frozen=True)
class Outcome:
    """What one command line came to: its exit status and its two streams."""

    status: int
    out: str
    err: str


def program(code: str, *arguments: str, before: Sequence[str] = (), stdin: str = "") -> str:
    """What a program prints; it must end well.  before: a command that runs it (unshare, say)."""
    done = subprocess.run(
        [*before, sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        input=stdin,
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


def damaged(
    store: Path, damages: Sequence[tuple[str, bytes]], *lines: Sequence[str | Path]
) -> list[list[Outcome]]:
    """For each damage, a file and its contents, what the lines come to on a copy that has it.

    The store is whole itself, and each line succeeds there.  A process forks a child for each
    damage, which must end well.
    """
    task = [str(store), [(name, data.hex()) for name, data in damages]]
    words = [[str(word) for word in line] for line in lines]
    # On stdin: an argument has at most 128 KiB.
    told = program(_DAMAGED, stdin=json.dumps([*task, words])).splitlines()
    found = [Outcome(*json.loads(line)) for line in told]
    return [found[start : start + len(lines)] for start in range(0, len(found), len(lines))]
