"""The figures of MergePipe (arXiv 2605.29489) at this machine's size, with a cold page cache.

    python bench/paper.py WORK [--rounds 2] [--millions 600] [--experts 20]
    python bench/paper.py WORK --mergekit VENV/bin/mergekit-yaml [--rounds 5]

With --mergekit only all experts at 10 %, beside mergekit (once), the naive merge, and the disk's
own time for the bytes that the merge reads and writes: bench/results/budget.json.

Writes and prints bench/results/paper.json.  WORK needs 40 GB: the plain files of 20 experts and the
base (25 GB), a store of the same (12 GB), and what one round writes; all is removed at the end.

Experts are `mixed` (bench/generate.py).  Every run is a process of its own and begins with the
store and the plain files evicted from the page cache; variants run in turn within a round.

    naive   all bytes of all experts from plain files, our kernels (bench/naive.py)
    100%    this engine at full read: blocks equal to the base and shared blocks cost nothing
    10%...  at most that share of what full read costs
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mstore import MergeRequest

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, mixed, write_model
from measure import Run, drop_cache, keep, machine, median, options, run, spread, warm_memory
from mergekit import merged_by, peer_versions
from store import Store

import mstore

HERE = Path(__file__).parent
COUNTS = (2, 5, 10, 20)
NAIVE = "naive"
SHARES = {"10%": 0.1, "20%": 0.2, "30%": 0.3, "50%": 0.5, "70%": 0.7, "100%": None}
SOME = ("10%", "30%", "50%", "100%")
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"density": 0.2},
    "dare_linear": {"density": 0.5, "seed": 0},
}
OPERATORS_AT = 10  # experts
BLOCK_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
BLOCKS_AT = 5  # experts, one of each kind
SPREAD_ROUNDS = 10
WARM_GIGABYTES = 4
PIECE = 4 << 20
Figures = dict[str, Any]


class Paper:
    """Plain files and a store of one family, and runs on them."""

    def __init__(self, work: Path, millions: float, experts: int) -> None:
        self.work = work
        self.flat = work / "flat"
        self.millions = millions
        self.models = [BASE, *(mixed(k) for k in range(experts))]
        self.store = Store(work / "store")
        self.thresholds = work / "thresholds.json"

    def set_up(self) -> list[Figures]:
        """Generate and add; says of each expert how much of it differs from the base."""
        self.store.make()
        told = []
        for model in self.models:
            write_model(self.flat / model.name, self.millions, model)
            self.store.add(self.flat / model.name, model.name)
            drop_cache(self.flat / model.name, self.store.path)
        with mstore.Store.open(self.store.path) as store:
            for model in self.models[1:]:
                diff = store.diff("base", model.name)
                share = diff.blocks_changed / diff.blocks_total
                told.append({"moved": [t.name for t in model.trainings], "share": share})
        return told

    def look_twice(self, count: int) -> None:
        """Have the thresholds of TIES found once: what they cost is no part of any merge."""
        with mstore.Store.open(self.store.path) as store:
            for share in SHARES.values():
                store.plan(
                    MergeRequest(
                        base="base",
                        experts=self.names(count),
                        method="ties",
                        parameters=METHODS["ties"],
                        budget=share,
                    )
                )
        # Or every round would find its plan made.
        shutil.rmtree(self.store.path / "memo")

    def plain_bytes(self) -> int:
        """Of the tensors of one model."""
        files = (self.flat / "base").glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def names(self, count: int) -> list[str]:
        """The first `count` experts."""
        return [model.name for model in self.models[1 : 1 + count]]

    # -- runs --------------------------------------------------------------------------------

    def variant(self, variant: str, count: int, method: str) -> Figures:
        """One cold run."""
        if variant == NAIVE:
            return self.naive(count, method)
        return self.merge(self.store, SHARES[variant], self.names(count), method)

    def merge(
        self, store: Store, budget: float | None, experts: Sequence[str], method: str
    ) -> Figures:
        """One cold run of this engine on a copy of a store."""
        request = {
            "base": "base",
            "experts": experts,
            "method": method,
            "parameters": METHODS[method],
            "budget": budget,
        }
        with store.copy(self.work / "round") as copy:
            self._ready(copy.path)
            program = str(HERE / "once.py")
            return figures(run([sys.executable, program, str(copy.path), json.dumps(request)]))

    def naive(self, count: int, method: str) -> Figures:
        """One cold run over plain files."""
        directories = [self.flat / name for name in ("base", *self.names(count))]
        out = self.work / "naive"
        cut = self._cut(count) if method == "ties" else "-"
        self._ready(*directories)
        words = [str(out), method, json.dumps(METHODS[method]), cut, *map(str, directories)]
        try:
            return figures(run([sys.executable, str(HERE / "naive.py"), *words]))
        finally:
            shutil.rmtree(out)

    def _ready(self, *paths: Path) -> None:
        os.sync()
        warm_memory(WARM_GIGABYTES)
        drop_cache(*paths)

    def _cut(self, count: int) -> str:
        """The thresholds of TIES, a present for the naive merge."""
        with self.store.copy(self.work / "plan") as copy, mstore.Store.open(copy.path) as store:
            plan = store.plan(
                MergeRequest(
                    base="base",
                    experts=self.names(count),
                    method="ties",
                    parameters=METHODS["ties"],
                )
            )
            told = json.loads(store.export_plan(str(plan.plan)))
        cut = {t["name"]: [float(value) for value, _ in t["thresholds"]] for t in told["tensors"]}
        self.thresholds.write_text(json.dumps(cut))
        return str(self.thresholds)

    def check(self) -> None:
        """The naive merge and a merge at full read write the same bytes."""
        experts = self.names(2)
        directories = [self.flat / name for name in ("base", *experts)]
        out, checkout = self.work / "naive", self.work / "checkout"
        words = [str(out), "linear", "{}", "-", *map(str, directories)]
        run([sys.executable, str(HERE / "naive.py"), *words])
        with self.store.copy(self.work / "round") as copy, mstore.Store.open(copy.path) as store:
            plan = store.plan(MergeRequest(base="base", experts=experts, method="linear"))
            store.merge(plan, name="merged")
            store.checkout("merged", checkout)
        sides = [[hashed(f) for f in sorted(d.glob("*.safetensors"))] for d in (out, checkout)]
        shutil.rmtree(out)
        shutil.rmtree(checkout)
        if sides[0] != sides[1]:
            raise SystemExit("the naive merge and the full merge differ")

    # -- tables ------------------------------------------------------------------------------

    def table(
        self, variants: Sequence[str], count: int, method: str, rounds: int
    ) -> dict[str, Figures]:
        """Rounds of all variants in turn; ratios to the naive run of the same round."""
        runs: dict[str, list[Figures]] = {variant: [] for variant in variants}
        for _ in range(rounds):
            for variant in variants:
                runs[variant].append(self.variant(variant, count, method))
        return {variant: summary(found, runs.get(NAIVE)) for variant, found in runs.items()}

    def budget(self, count: int, rounds: int, program: Path) -> Figures:
        """Rounds at 10 %, beside the naive merge, the disk alone, and mergekit in the first."""
        recipe = {
            "models": [
                {"model": str(self.flat / name), "parameters": {"weight": 1.0}}
                for name in self.names(count)
            ],
            "merge_method": "linear",
            "dtype": "bfloat16",
        }
        runs: dict[str, list[Figures]] = {NAIVE: [], "10%": [], "disk": []}
        for _ in range(rounds):
            for variant in (NAIVE, "10%"):
                runs[variant].append(self.variant(variant, count, "linear"))
            ours = runs["10%"][-1]
            runs["disk"].append(self.disk(ours["disk_read"], ours["disk_written"]))
        theirs = merged_by(program, recipe, self.work, self.flat, is_cold=True)
        times = [theirs.wall / one["wall"] for one in runs["10%"]]
        limits = [
            one["wall"] / disk["wall"] for one, disk in zip(runs["10%"], runs["disk"], strict=True)
        ]
        return {
            "mergekit": median([theirs]),
            "times_faster": spread(times),
            "limit": spread(limits),
            "scaling": {
                str(count): {name: summary(found, runs[NAIVE]) for name, found in runs.items()}
            },
        }

    def disk(self, read: int, written: int) -> Figures:
        """The disk's own time: read so many bytes of packs, cold, while so many are written."""
        packs = sorted(self.store.path.rglob("*.pack"))
        out = self.work / "written"
        self._ready(self.store.path)

        def write() -> None:
            data = memoryview(os.urandom(PIECE))
            with out.open("wb", buffering=0) as file:
                for start in range(0, written, PIECE):
                    file.write(data[: written - start])
                os.fsync(file.fileno())

        began = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            data = memoryview(bytearray(PIECE))
            left = read
            for pack in packs:
                with pack.open("rb", buffering=0) as file:
                    while left > 0 and (got := file.readinto(data[:left])):
                        left -= got
            writing.result()
        wall = time.perf_counter() - began
        out.unlink()
        return {"wall": wall}

    def blocks(self, rounds: int) -> dict[str, Figures]:
        """The same experts in stores of other block sizes."""
        told = {}
        for size in BLOCK_SIZES:
            store = Store(self.work / "sized")
            store.make(size)
            for model in self.models[: 1 + BLOCKS_AT]:
                store.add(self.flat / model.name, model.name)
            found: Figures = {}
            for variant in ("100%", "30%"):
                experts = self.names(BLOCKS_AT)
                runs = [
                    self.merge(store, SHARES[variant], experts, "linear") for _ in range(rounds)
                ]
                found[variant] = summary(runs)
            found["catalog_bytes"] = sum(
                file.stat().st_blocks * 512
                for part in ("index", "stats")
                for file in (store.path / part).iterdir()
            )
            told[str(size)] = found
            shutil.rmtree(store.path)
        return told

    def run_to_run(self, rounds: int) -> Figures:
        """How far runs of the same merge lie apart."""
        count = min(OPERATORS_AT, len(self.models) - 1)
        runs = [self.variant("30%", count, "linear") for _ in range(rounds)]
        walls = [r["wall"] for r in runs]
        deviation = statistics.stdev(walls) / statistics.mean(walls)
        return summary(runs) | {"walls": walls, "deviation": deviation, "experts": count}


def hashed(path: Path) -> str:
    """A file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def figures(done: Run) -> Figures:
    """What a process cost, and what it said."""
    told: Figures = json.loads(done.output)
    return told | {"wall": done.wall, "cpu": done.cpu, "anonymous": done.anonymous}


def summary(runs: Sequence[Figures], naive: Sequence[Figures] | None = None) -> Figures:
    """Medians with extremes; what cannot vary must not have varied."""
    first = runs[0]
    told: Figures = {"runs": len(runs)}
    measured = ("wall", "cpu", "anonymous", "disk_read", "plan_seconds", "merge_seconds")
    for key in first:
        values = [r[key] for r in runs]
        if key in measured:
            told[key] = spread(values)
        elif key != "disk_written":
            if any(value != first[key] for value in values):
                raise SystemExit(f"{key} differs between runs: {values}")
            told[key] = first[key]
    if first.get("analyze_bytes"):
        raise SystemExit("experts were read for statistics, which were taken when they were added")
    if "plan_seconds" in first:
        told["planning_share"] = spread([r["plan_seconds"] / r["wall"] for r in runs])
    if naive is not None:
        pairs = zip(naive, runs, strict=True)
        told["times_faster"] = spread([a["wall"] / b["wall"] for a, b in pairs])
    return told


def main() -> None:
    parser = options(__doc__, rounds=2, millions=600.0)
    parser.add_argument("--experts", type=int, default=COUNTS[-1])
    parser.add_argument("--mergekit", type=Path, help="its mergekit-yaml: only 10 %%, beside it")
    arguments = parser.parse_args()
    paper = Paper(arguments.work.absolute() / "paper", arguments.millions, arguments.experts)
    rounds, most = arguments.rounds, arguments.experts
    results: Figures = {"machine": machine(), "millions": arguments.millions}
    results["experts"] = paper.set_up()
    results["plain_bytes"] = paper.plain_bytes()
    if arguments.mergekit:
        results |= {"versions": peer_versions(arguments.mergekit), "experts": most}
        results |= paper.budget(most, rounds, arguments.mergekit)
        shutil.rmtree(paper.work)
        keep(arguments.results, "budget", results)
        return
    paper.look_twice(min(OPERATORS_AT, most))
    paper.check()
    results["scaling"] = {
        str(count): paper.table(
            [NAIVE, *(SHARES if count == most else SOME)], count, "linear", rounds
        )
        for count in sorted({min(count, most) for count in COUNTS})
    }
    count = min(OPERATORS_AT, most)
    results["operators"] = {
        "experts": count,
        **{
            method: results["scaling"][str(count)]
            if method == "linear" and str(count) in results["scaling"]
            else paper.table([NAIVE, "10%", "30%", "100%"], count, method, rounds)
            for method in METHODS
        },
    }
    results["spread"] = paper.run_to_run(SPREAD_ROUNDS)
    for model in paper.models[1 + BLOCKS_AT :]:
        shutil.rmtree(paper.flat / model.name)
    shutil.rmtree(paper.store.path)
    results["blocks"] = {"experts": BLOCKS_AT, **paper.blocks(rounds)}
    shutil.rmtree(paper.work)
    keep(arguments.results, "paper", results)


if __name__ == "__main__":
    main()
