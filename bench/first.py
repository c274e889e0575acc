"""The first commands of a new installation, and the same once more.

    python bench/first.py WORK [--rounds 5] [--millions 2]

Writes and prints bench/results/first.json.  WORK needs 1 GB; all of it is removed.  Each round
copies the packages of this checkout, as an installer would, with their bytecode and kernels
(scripts/kernels.py makes them).  Then, one after the other: init, add of a base and two experts, a
merge, all as processes; then the same again in a new store.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import Run, keep, machine, median, options, run

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("mstore", "fuse/mstore_fuse", "serve/mstore_serve", "cli/mstore_cli")
METHOD = ("--method", "ties", "--param", "density=0.5")


def install(target: Path) -> dict[str, str]:
    """Copy the packages; returns the environment in which commands run."""
    for part in PARTS:
        place = target / Path(part).name
        shutil.copytree(ROOT / part, place, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(target, quiet=1, workers=os.cpu_count() or 1)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "MSTORE_"))}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept | {"PYTHONPATH": str(target)}


def commands(store: Path, family: Path, env: dict[str, str]) -> dict[str, Run]:
    """What somebody tries first, in an empty place."""
    shutil.rmtree(store, ignore_errors=True)

    def mstore(*words: str) -> Run:
        line = [sys.executable, "-P", "-m", "mstore_cli", "--store", str(store), "--no-progress"]
        return run([*line, *words], env=env)

    experts = ["expert1", "expert2"]
    found = {"init": mstore("init", str(store))}
    found["add"] = mstore("add", str(family / "base"), "--name", "base")
    for name in experts:
        done = mstore("add", str(family / name), "--name", name, "--base", "base")
        found.setdefault("add, with statistics", done)
    named = [word for name in experts for word in ("--expert", name)]
    found["merge"] = mstore("merge", *named, "--base", "base", *METHOD, "--name", "merged")
    return found


def main() -> None:
    """All rounds, in turn."""
    parser = options(__doc__, rounds=5, millions=2)
    chosen = parser.parse_args()
    subprocess.run([sys.executable, str(ROOT / "scripts" / "kernels.py")], check=True)
    family = chosen.work / "first-family"
    write_family(family, chosen.millions, [BASE, dense(1), dense(2)])
    runs: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    try:
        for _ in range(chosen.rounds):
            place = chosen.work / "first-installed"
            shutil.rmtree(place, ignore_errors=True)
            env = install(place)
            for time in ("first", "second"):
                for name, done in commands(chosen.work / "first-store", family, env).items():
                    runs[time][name].append(done)
    finally:
        for left in ("first-installed", "first-store", "first-family"):
            shutil.rmtree(chosen.work / left, ignore_errors=True)
    figures: dict[str, Any] = {
        time: {name: median(all_of) for name, all_of in by_name.items()}
        for time, by_name in runs.items()
    }
    settings = {"rounds": chosen.rounds, "millions": chosen.millions}
    keep(chosen.results, "first", {"machine": machine(), **settings, **figures})


if __name__ == "__main__":
    main()
