"""The next merge of a family: what the memo table saves, and merges that are not computed yet.

    python bench/incremental.py WORK [--rounds 5] [--millions 600 3000]

Writes and prints bench/results/incremental.json.  WORK needs 15 GB for models of 600 M parameters,
and 60 GB for those of 3 B (11 models are generated one at a time and removed once they are in the
store); all is removed at the end.

A store holds a dense family (every expert moved everything) and a TIES merge of eight experts.
Then, each time on a copy of that store that was opened before, with and without the memo table
(`--no-memo`), in turn:

    ninth     the same with a ninth expert, which moved the attention of two layers
    changed   the same with one expert trained on in two layers
    repeated  the same merge, with another message

and, of the smallest models, `mstore merge --virtual` of a plan of the eight: how long the commit
takes, and a checkout of it, against a materialised merge and its checkout.  Whole processes, page
cache warm.

Then planning alone, in catalogs of 8 B and 70 B parameters without the data (`planning.py`): the
eight, and on a copy of the store that has planned them, nine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import planning
from generate import BASE, Model, Place, Training, dense, layer_count
from measure import Run, keep, machine, median, options, run, spread, warm_memory
from store import Store

EXPERTS = 8
CHANGED = 3  # which expert is trained on
METHOD = ("--method", "ties", "--param", "density=0.2")
WARM_GIGABYTES = 4
VIRTUAL_ROUNDS = 3
SIMULATED = ("8 B", "70 B")
Figures = dict[str, Any]


def in_layers(name: str, seed: int, layers: Sequence[int], part: str | None) -> Training:
    """A training that moved only these layers, or one part of them."""

    def touches(place: Place) -> bool:
        return place.layer in layers and part in (None, place.part)

    return Training(name, seed, 1e-3, 1e-3, touches)


def request(experts: Sequence[str]) -> list[str]:
    """The words of a merge of these experts."""
    return ["--base", "base", *(f"--expert={expert}" for expert in experts), *METHOD]


class Bench:
    """A store with eight experts merged, and two more to merge."""

    def __init__(self, work: Path, millions: float) -> None:
        self.work = work
        self.store = Store(work / "store")
        middle = layer_count(millions) // 2
        two = (middle, max(0, middle - 1))
        self.eight = [dense(k) for k in range(EXPERTS)]
        self.ninth = Model("ninth", (in_layers("two layers' attention", 71, two, "attention"),))
        more = in_layers("two layers", 72, two, None)
        old = self.eight[CHANGED]
        self.changed = replace(old, name="changed", trainings=(*old.trainings, more))
        self.store.make()
        models = [BASE, *self.eight, self.ninth, self.changed]
        self.store.add_generated(work / "family", millions, models)
        # The store without the merge of the eight, and then with it.
        self.before = self.store.duplicate(work / "before")
        self.merge(self.store, self.names(), "eight")

    def names(self) -> list[str]:
        """The experts of the first merge."""
        return [model.name for model in self.eight]

    def merge(self, store: Store, experts: Sequence[str], name: str, *words: str) -> Run:
        """Merge these experts with the command line."""
        return store.mstore("--json", "merge", *request(experts), "--name", name, *words)

    def _ready(self, copy: Store) -> None:
        # A copy is new to mstore: whoever opens it first also checks its index.
        copy.mstore("plan", *request(self.names()))
        os.sync()
        warm_memory(WARM_GIGABYTES)

    # -- memo --------------------------------------------------------------------------------

    def cases(self) -> dict[str, tuple[list[str], list[str]]]:
        """Name -> experts, further words."""
        swapped = self.names()
        swapped[CHANGED] = self.changed.name
        return {
            "ninth": ([*self.names(), self.ninth.name], []),
            "changed": (swapped, []),
            "repeated": (self.names(), ["--message", "again"]),
        }

    def with_and_without(self, experts: list[str], words: list[str], rounds: int) -> Figures:
        """Rounds of both in turn, after one that does not count."""
        runs: dict[str, list[Run]] = {"memo": [], "no memo": []}
        for number in range(rounds + 1):
            for way, more in (("memo", []), ("no memo", ["--no-memo"])):
                with self.store.copy(self.work / "round", memo=True) as copy:
                    self._ready(copy)
                    done = self.merge(copy, experts, "eight", *words, *more)
                if number:
                    runs[way].append(done)
        told: Figures = {way: median(found) | reported(found) for way, found in runs.items()}
        pairs = list(zip(runs["no memo"], runs["memo"], strict=True))
        told["times_faster"] = spread([a.wall / b.wall for a, b in pairs])
        told["times_faster_inside"] = spread([seconds(a) / seconds(b) for a, b in pairs])
        manifests = {json.loads(r.output)["manifest"] for found in runs.values() for r in found}
        if len(manifests) != 1:
            raise SystemExit(f"memo or not gives different content: {manifests}")
        return told

    # -- virtual -----------------------------------------------------------------------------

    def virtual(self, rounds: int) -> Figures:
        """Merge and checkout, computed at once or when read."""
        runs: dict[str, list[Run]] = {}
        for number in range(rounds + 1):
            for way, words in (("virtual", ["--virtual"]), ("materialised", [])):
                checkout = self.work / "checkout"
                with self.before.copy(self.work / "round") as copy:
                    planned = copy.mstore("--json", "plan", *request(self.names()))
                    plan = json.loads(planned.output)["plan"]
                    self._ready(copy)
                    merged = copy.mstore(
                        "--json", "merge", "--plan", plan, "--name", "merged", *words
                    )
                    read = copy.mstore("checkout", "merged", str(checkout))
                shutil.rmtree(checkout)
                if number:
                    runs.setdefault(f"{way} merge", []).append(merged)
                    runs.setdefault(f"{way} checkout", []).append(read)
        told: Figures = {step: median(found) for step, found in runs.items()}
        told["virtual merge"] |= {"seconds": spread([seconds(r) for r in runs["virtual merge"]])}
        told["speed"] = spread(
            [
                (a.wall + b.wall) / (c.wall + d.wall)
                for a, b, c, d in zip(*(runs[step] for step in STEPS), strict=True)
            ]
        )
        return told


STEPS = ("materialised merge", "materialised checkout", "virtual merge", "virtual checkout")


def seconds(done: Run) -> float:
    """What a merge says of itself: without starting Python."""
    return float(json.loads(done.output)["seconds"])


def reported(runs: Sequence[Run]) -> Figures:
    """What the merges say; bytes must not vary."""
    told = [json.loads(done.output) for done in runs]
    found: Figures = {"seconds": spread([t["seconds"] for t in told])}
    for key in ("expert_bytes_read", "base_bytes_read", "bytes_written"):
        found[key] = statistics.median(t[key] for t in told)
    return found


# -- planning alone ------------------------------------------------------------------------------


def plan_once(path: Path, experts: int) -> None:
    """Plan a merge of so many experts in this process; print the seconds, as JSON."""
    # As in the command line.
    gc.set_threshold(100_000, 10, 10)
    from mstore import MergeRequest, Store

    names = [f"expert{k}" for k in range(experts)]
    with Store.open(path) as store:
        asked = MergeRequest(
            base="base", experts=names, method="ties", parameters={"density": 0.2}, analyze=False
        )
        wall, cpu = time.perf_counter(), time.process_time()
        report = store.plan(asked)
        told = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps(told | {"bytes": report.full_expert_bytes}))


def simulated(work: Path, size: str, rounds: int) -> Figures:
    """Plans of eight experts, and of nine in a store that has planned the eight."""
    model = planning.SIZES[size]
    two = tuple(f"layers.{model.layers // 2 - k}.self_attn" for k in range(2))
    planning.make(
        work / "store",
        EXPERTS + 1,
        model,
        lambda number, tensor: number < EXPERTS or any(layer in tensor for layer in two),
    )

    def plan(store: Path, experts: int) -> Figures:
        done = run([sys.executable, __file__, str(store), "--plan", str(experts)])
        told: Figures = json.loads(done.output)
        return told

    runs: dict[int, list[Figures]] = {EXPERTS: [], EXPERTS + 1: []}
    for _ in range(rounds):
        shutil.copytree(work / "store", work / "round")
        for experts, found in runs.items():
            found.append(plan(work / "round", experts))
        shutil.rmtree(work / "round")
    shutil.rmtree(work / "store")
    return {
        name: {key: spread([one[key] for one in runs[experts]]) for key in ("wall", "cpu")}
        for name, experts in (("eight", EXPERTS), ("ninth", EXPERTS + 1))
    } | {"bytes": runs[EXPERTS + 1][0]["bytes"]}


def main() -> None:
    parser = options(__doc__, rounds=5, millions=(600.0, 3000.0))
    parser.add_argument("--plan", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan:
        plan_once(arguments.work, arguments.plan)
        return
    work = arguments.work.absolute() / "incremental"
    results: Figures = {"machine": machine(), "experts": EXPERTS, "sizes": [], "simulated": {}}
    for millions in arguments.millions:
        bench = Bench(work, millions)
        told: Figures = {"millions": millions, "layers": layer_count(millions)}
        for name, (experts, words) in bench.cases().items():
            told[name] = bench.with_and_without(experts, words, arguments.rounds)
        results["sizes"].append(told)
        if "virtual" not in results:
            results["virtual"] = bench.virtual(min(arguments.rounds, VIRTUAL_ROUNDS))
        shutil.rmtree(work)
    for size in SIMULATED:
        results["simulated"][size] = simulated(work, size, arguments.rounds)
    keep(arguments.results, "incremental", results)


if __name__ == "__main__":
    main()
