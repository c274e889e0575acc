"""What commands on names cost as refs grow: tag, refs, rm, du, at 20, 200 and 2,000 refs.

    python bench/refs.py WORK [--before CHECKOUT] [--rounds 5] [--small]

Writes and prints bench/results/refs.json.  --before: an earlier version's checkout, measured in
the same rounds for comparison (`git worktree add CHECKOUT REVISION`).  The stores are simulated as
those of `growth.py`: two families, each ref an expert of its own in which 3 of 300 tensors changed.
Every command runs in a process of its own (`named.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from growth import Family, Figures, Simulated, move_rows
from measure import keep, machine, options, run, spread
from named import TASKS

from mstore import Store

REFS = (20, 200, 2_000)
FAMILIES = 2
BLOCKS = 3_000
"""Blocks of a base."""
ROOT = Path(__file__).resolve().parent.parent


def simulate(path: Path, refs: int) -> Figures:
    """A store of so many refs; what is in it."""
    shutil.rmtree(path, ignore_errors=True)
    Store.init(path).close()
    into = Simulated(path)
    families = [Family(into, BLOCKS, number) for number in range(FAMILIES)]
    for number in range(refs - FAMILIES):
        families[number % FAMILIES].expert(number // FAMILIES)
        if number % 100 == 0:
            into.flush()
    move_rows(into, families)
    into.close()
    with Store.open(path) as store, store._catalog.index.env.read() as transaction:
        index = store._catalog.index
        return {name: index.count(transaction, name) for name in ("refs", "snapshots", "blocks")}


def measured(store: Path, libraries: dict[str, Path], rounds: int) -> Figures:
    """Wall and CPU seconds of each command with each library, in turn."""
    program = str(Path(__file__).parent / "named.py")
    found: Figures = {}
    for task in TASKS:
        told: dict[str, list[Figures]] = {name: [] for name in libraries}
        for number in range(rounds):
            for name, library in libraries.items():
                env = {**os.environ, "PYTHONPATH": str(library)}
                done = run([sys.executable, program, task, str(store), str(number)], env=env)
                told[name].append(json.loads(done.output))
        found[task] = {
            name: {clock: spread([one[clock] for one in runs]) for clock in ("wall", "cpu")}
            for name, runs in told.items()
        }
        print(task, found[task], flush=True)
    return found


def main() -> None:
    parser = options(__doc__, rounds=5, millions=0.0)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--refs", type=int, nargs="*", default=list(REFS))
    parser.add_argument("--small", action="store_true", help="20 and 100 refs, two rounds")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.refs = 2, [20, 100]
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    libraries = {"now": ROOT}
    if given.before is not None:
        libraries["before"] = given.before.resolve()
    results: Figures = {"machine": machine(), "rounds": given.rounds, "sizes": {}}
    for refs in given.refs:
        store = work / f"refs{refs}"
        told = simulate(store, refs)
        results["sizes"][str(refs)] = told | {"tasks": measured(store, libraries, given.rounds)}
        shutil.rmtree(store)
    keep(given.results, "refs", results)


if __name__ == "__main__":
    main()
