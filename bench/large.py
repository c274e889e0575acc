"""One family as large as the disk holds, from end to end: add, merge, mount, check out.

    python bench/large.py WORK [--millions 3000] [--experts 4]

Writes and prints bench/results/large.json.  WORK is a directory on a local disk with room for the
store, the output of three merges, and two plain models: 40 GB for 3,000 M parameters.  One round:
every command is a whole process, with whatever of its input the page cache still holds.  The
plain files are made one model at a time and removed, so each is in the page cache when it is added.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, near, write_model
from measure import Run, keep, machine, options, warm_memory
from store import Store

BUDGETS = ("10%", "30%", "100%")
METHOD = ("--method", "ties", "--param", "density=0.2")
WARM_GIGABYTES = 16
Figures = dict[str, Any]


def told(done: Run, **more: object) -> Figures:
    """What a command took."""
    return {"wall": done.wall, "cpu": done.cpu, "anonymous": done.anonymous, **more}


class Bench:
    """A store, and the family in it."""

    def __init__(self, work: Path, millions: float, experts: int) -> None:
        self.work = work
        self.millions = millions
        self.experts = experts
        self.store = Store(work / "store")
        self.plain_bytes = 0

    def add(self) -> Figures:
        """Generate each model, add it and remove its plain files."""
        self.store.make(codec="auto")
        found = {}
        for model in [BASE, *(near(number) for number in range(self.experts))]:
            directory = self.work / model.name
            write_model(directory, self.millions, model)
            self.plain_bytes = sum(f.stat().st_size for f in directory.iterdir())
            before = self.stored()
            done = self.store.add(directory, model.name)
            shutil.rmtree(directory)
            found[model.name] = told(done, bytes=self.stored() - before)
        return found

    def stored(self) -> int:
        return sum(path.stat().st_size for path in self.store.path.rglob("*") if path.is_file())

    def merge(self, budget: str) -> Figures:
        experts = [f"--expert=expert{number}" for number in range(self.experts)]
        limit = [] if budget == "100%" else ["--budget", budget]
        before = self.stored()
        done = self.store.mstore(
            *("--json", "merge", "--base", "base", *experts, *METHOD, *limit),
            *("--name", f"merged-{budget.rstrip('%')}"),
        )
        report = json.loads(done.output)
        return told(done, expert_bytes=report["expert_bytes_read"], bytes=self.stored() - before)

    def mount(self, name: str) -> Figures:
        """Until the mount is ready, and every byte through it; by one reader."""
        point = self.work / "mount"
        point.mkdir(exist_ok=True)
        ready = self.store.mstore("mount", name, str(point))
        try:
            began, size = time.perf_counter(), 0
            room = bytearray(1 << 20)
            for file in sorted(point.iterdir()):
                with file.open("rb", buffering=0) as opened:
                    while count := opened.readinto(room):
                        size += count
            seconds = time.perf_counter() - began
        finally:
            self.store.mstore("unmount", str(point))
        return {"ready": ready.wall, "wall": seconds, "bytes": size}

    def checkout(self, name: str) -> Figures:
        out = self.work / "out"
        done = self.store.mstore("checkout", name, str(out))
        size = sum(path.stat().st_size for path in out.iterdir())
        shutil.rmtree(out)
        return told(done, bytes=size)


def main() -> None:
    parser = options(__doc__, rounds=1, millions=3000.0)
    parser.add_argument("--experts", type=int, default=4)
    given = parser.parse_args()
    work = given.work.absolute()
    bench = Bench(work, given.millions, given.experts)
    warm_memory(WARM_GIGABYTES)
    added = bench.add()
    results: Figures = {
        "machine": machine(),
        "millions": given.millions,
        "experts": given.experts,
        "plain_bytes": bench.plain_bytes,
        "add": added,
        "merge": {budget: bench.merge(budget) for budget in BUDGETS},
        "mount": bench.mount("merged-100"),
        "checkout": bench.checkout("merged-100"),
    }
    shutil.rmtree(bench.store.path)
    keep(given.results, "large", results)


if __name__ == "__main__":
    main()
