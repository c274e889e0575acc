"""What a command costs before its work: refs, log, show and ls of a small store, as processes.

    python bench/start.py WORK [--rounds 21] [--before CHECKOUT]

Writes and prints bench/results/start.json.  The store: a base, four experts and their merge, of 64
tensors each.  Beside it `git branch`, `git log`, `git show --stat` and `git ls-tree` of a
repository with the same files, a branch each, and `python -c pass`, the limit of every program in
Python.  --before: an earlier version's checkout, measured in the same rounds.  One round runs
everything once, in turn; the page cache is warm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import Run, keep, machine, options, run, spread
from small import NAMES, write_family
from store import Store

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
MERGED = "merged"
LOOKS = {
    "--version": ("--version",),
    "refs": ("refs",),
    "log": ("log",),
    "show": ("show", MERGED),
    "ls": ("ls", MERGED),
}
GIT = {
    "git branch": ("branch", "-v"),
    "git log": ("log", "--all"),
    "git show": ("show", "--stat", MERGED),
    "git ls-tree": ("ls-tree", "-rl", MERGED),
}
PASS = "python -c pass"


def fill(work: Path) -> Store:
    """The family and a store of it, with its merge."""
    shutil.rmtree(work, ignore_errors=True)
    family, store = work / "family", Store(work / "store")
    write_family(family, TENSORS)
    store.make()
    for name in NAMES:
        store.add(family / name, name)
    experts = [word for name in NAMES[1:] for word in ("--expert", name)]
    store.mstore("merge", "--base", "base", *experts, "--method", "ties", "--name", MERGED)
    store.mstore("checkout", MERGED, str(family / MERGED))
    return store


def fill_git(work: Path) -> list[str]:
    """A repository of the same files, a branch for each model; the beginning of its commands."""
    repository = work / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=bench", "-c", "user.email=bench"]
    repository.mkdir()
    subprocess.run([*git, "init", "-q"], check=True)
    for name in (*NAMES, MERGED):
        subprocess.run([*git, "checkout", "-q", "-b", name], check=True)
        # New files: git takes one of the same size and stamps for unchanged.
        for file in (work / "family" / name).iterdir():
            (repository / file.name).unlink(missing_ok=True)
            shutil.copy(file, repository)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
    return git


def environment(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds one checkout first, and may keep bytecode."""
    parts = [str(checkout / part) for part in (".", "fuse", "cli", "serve")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "PYTHONSAFEPATH": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def measured(
    store: Store, git: Sequence[str], libraries: dict[str, Path], rounds: int
) -> dict[str, Any]:
    """Milliseconds of each command, wall and processor, and as a multiple of Python alone."""
    commands: dict[str, tuple[Sequence[str], dict[str, str] | None]] = {
        PASS: ((sys.executable, "-c", "pass"), None)
    }
    for label, checkout in libraries.items():
        for name, words in LOOKS.items():
            line = (sys.executable, "-m", "mstore_cli", "--store", str(store.path), *words)
            commands[f"mstore {name}, {label}"] = line, environment(checkout)
    for name, words in GIT.items():
        commands[name] = (*git, *words), None
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, (line, env) in commands.items():
            done = run(line, env=env)
            # The first round writes bytecode and fills the page cache.
            if number:
                runs[name].append(done)
    return {
        name: {
            "wall_ms": spread([1000 * one.wall for one in found]),
            "cpu_ms": spread([1000 * one.cpu for one in found]),
            "times_python": spread(
                [one.cpu / alone.cpu for one, alone in zip(found, runs[PASS], strict=True)]
            ),
        }
        for name, found in runs.items()
    }


def main() -> None:
    parser = options(__doc__, rounds=21, millions=0.0)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    given = parser.parse_args()
    work = given.work.absolute() / "start"
    store = fill(work)
    libraries = {"now": ROOT}
    if given.before is not None:
        libraries["before"] = given.before.resolve()
    results: dict[str, Any] = {
        "machine": machine(),
        "rounds": given.rounds,
        "tensors": TENSORS,
        "commands": measured(store, fill_git(work), libraries, given.rounds),
    }
    shutil.rmtree(work)
    keep(given.results, "start", results)


if __name__ == "__main__":
    main()
