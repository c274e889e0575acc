"""What statistics cost: add beside add --base, and their bytes beside those of the family.

    python bench/taking.py WORK [--rounds 5] [--millions 300]

Writes bench/results/statistics.json and prints it.  WORK is a directory on a local disk with
about 8 GB free; the family in it is kept for the next run.  Both kinds of add take the same
expert, in turn, into a copy of a store that holds the base.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import Run, keep, machine, median, options, run, warm_memory

EXPERTS = 4
BLOCK_SIZES = ("64KiB", "256KiB", "1MiB")
WARM_GIGABYTES = 2


class Bench:
    """One directory of work, one store in it."""

    def __init__(self, work: Path, millions: float) -> None:
        self.store = work / "statistics-store"
        self.saved = work / "statistics-base"
        self.family = work / f"family{millions:g}"
        self.experts = [dense(number) for number in range(EXPERTS)]
        write_family(self.family, millions, [BASE, *self.experts])

    def mstore(self, *words: str) -> Run:
        """Run the command line on the store of this bench."""
        program = [sys.executable, "-m", "mstore_cli"]
        where = [] if words[0] == "init" else ["--store", str(self.store)]
        return run([*program, *where, "--no-progress", *words])

    def fresh(self, block_size: str) -> None:
        """An empty store."""
        shutil.rmtree(self.store, ignore_errors=True)
        self.mstore("init", "--codec", "raw", "--block-size", block_size, str(self.store))

    def add(self, name: str, *words: str) -> Run:
        """Store one member of the family."""
        return self.mstore("add", str(self.family / name), "--name", name, *words)

    def sides(self, rounds: int) -> dict[str, object]:
        """add and add --base of one expert, in turn."""
        self.fresh("1MiB")
        self.add("base")
        shutil.rmtree(self.saved, ignore_errors=True)
        self.store.rename(self.saved)
        found: dict[str, list[Run]] = {"add": [], "add --base": []}
        for number in range(rounds + 1):
            for kind, words in (("add", ("--base", "none")), ("add --base", ("--base", "base"))):
                shutil.rmtree(self.store, ignore_errors=True)
                shutil.copytree(self.saved, self.store)
                os.sync()
                warm_memory(WARM_GIGABYTES)
                done = self.add(self.experts[0].name, *words)
                # The first round fills caches, the compiler's too, and does not count.
                if number:
                    found[kind].append(done)
        shutil.rmtree(self.saved)
        sides: dict[str, object] = {kind: median(runs) for kind, runs in found.items()}
        for measure in ("wall", "cpu"):
            sides[f"{measure}_ratio"] = statistics.median(
                getattr(b, measure) / getattr(a, measure)
                for a, b in zip(found["add"], found["add --base"], strict=True)
            )
        return sides

    def sizes(self, block_size: str) -> dict[str, float]:
        """Bytes of all statistics of the family, and its plain bytes."""
        self.fresh(block_size)
        self.add("base")
        for expert in self.experts:
            self.add(expert.name, "--base", "base")
        told = json.loads(self.mstore("stats", "--json").output)
        taken, plain = told["statistics_bytes"], told["plain_bytes"]
        return {"statistics_bytes": taken, "plain_bytes": plain, "share": taken / plain}


def main() -> None:
    arguments = options(__doc__, rounds=5, millions=300.0).parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions)
    results = {
        "machine": machine(),
        "millions": arguments.millions,
        "experts": EXPERTS,
        "rounds": arguments.rounds,
        "add": bench.sides(arguments.rounds),
        "statistics": {size: bench.sizes(size) for size in BLOCK_SIZES},
    }
    shutil.rmtree(bench.store)
    keep(arguments.results, "statistics", results)


if __name__ == "__main__":
    main()
