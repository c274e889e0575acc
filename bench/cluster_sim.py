"""A merge on 1 to 256 workers, simulated from measured parts: what limits it, what would mend it.

    python bench/cluster_sim.py WORK [--millions 800] [--experts 8] [--rounds 3]
        [--only rates validation coordinator receipts scale] [--small]

Writes and prints bench/results/cluster_sim.json. WORK needs 10 GB; a family and its remote stay
there for the next run. Parts:

    rates        what one thread of this machine does for a slice (`cluster_rates.py`)
    validation   a real merge on one and two processes, and its slices simulated
                 (`cluster_validation.py`)
    long         a merge of more than 30 s by DELLA, on two threads and two processes
    coordinator  the coordinator of a merge of 20 experts of 8 B parameters, with pretended workers
                 (`cluster_coordinator.py`)
    receipts     the same, of 10,000 slices with 128 blocks each: its memory
    scale        models of 8, 70 and 405 B parameters, simulated (`cluster_events.py`,
                 `cluster_models.py`)

A part that `--only` leaves out keeps its earlier results, which `scale` uses.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from cluster_events import GIGABIT, Cluster, Coordinator, Rates, Work, simulated
from cluster_models import MODELS, Drawn, drawn, slice_bytes, works
from cluster_rates import measured as measured_rates
from cluster_validation import compared
from cluster_validation import measured as measured_merges
from generate import BASE, near, write_family
from measure import keep, machine, options, run

from mstore import Store

PARTS: Final = ("rates", "validation", "long", "coordinator", "receipts", "scale")
EXPERTS: Final = 20
BUDGETS: Final = {"100 %": 1.0, "10 %": 0.1}
WORKERS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LIMITED: Final = (16, 128, 256)
SLICE: Final = 32 << 20
HAND_OUT: Final = 0.001
"""Seconds of an engine for a task: what Dask says of its own."""
LAYERS, HELD_LAYERS = 206, 20
"""Of 405 B parameters: about 10,000 slices, and 1,000."""
Figures = dict[str, Any]


def make(work: Path, millions: float, experts: int) -> None:
    """The store of a family, and its remote, a directory."""
    if (work / "remote").exists():
        return
    half = work / "half"
    shutil.rmtree(half, ignore_errors=True)
    with Store.init(half) as store:
        for number in range(-1, experts):
            made = BASE if number < 0 else near(number)
            write_family(work / "family", millions, [made])
            base = None if number < 0 else "base"
            store.add(work / "family" / made.name, name=made.name, base=base)
            shutil.rmtree(work / "family")
        store.add_remote("origin", (work / "remote").as_uri())
        store.push("origin", every=True)
    half.rename(work / "store")


# The coordinator ----------------------------------------------------------------------------------


def coordinated(work: Path, words: Sequence[str]) -> Figures:
    """One merge with pretended workers, in a process of its own."""
    script = str(Path(__file__).parent / "cluster_coordinator.py")
    done = run([sys.executable, script, str(work), *words])
    found: Figures = json.loads(done.output.splitlines()[-1])
    return found | {"peak": done.anonymous}


def coordinator(work: Path, layers: int) -> Figures:
    """Merges of 20 experts under two budgets."""
    words = ["--layers", str(layers), "--experts", str(EXPERTS), "--budget"]
    place = work / f"coordinator{layers}"
    coordinated(place, [*words, "10%"])
    return {
        "10 %": coordinated(place, [*words, "10%"]),
        "100 %": coordinated(place, [*words, "100%"]),
    }


def receipts(work: Path, layers: int) -> Figures:
    """Many receipts; what holds the memory is asked in another run, of fewer."""

    def ran(layers: int, *more: str) -> Figures:
        words = ["--size", "405 B", "--layers", str(layers), "--experts", "1", *more]
        words += ["--budget", "100%", "--method", "task_arithmetic"]
        return coordinated(work / f"receipts{layers}", [*words, "--before"])

    looked = ran(min(layers, HELD_LAYERS), "--held")
    told = {f"held {name}": looked[name] for name in ("blocks", "slices")}
    return ran(layers) | {"held": looked["held"]} | told


def costs(told: Figures, experts: int, blocks: float, budget: str = "100 %") -> Coordinator:
    """What the coordinator of such a merge takes: what was measured, for each block and slice.

    blocks: of one model. budget: by which the merge was planned that is measured.
    """
    some = [told["10 %"], told["100 %"]]
    make_out, make_source = _shares(some, "make", "blocks", "sources")
    hand_out, hand_out_source = _shares(some, "hand out", "slices", "sources")
    receive, receive_out = _shares(some, "receive", "slices", "blocks")
    last = told["100 %"]
    all_sides = last["blocks"] * (EXPERTS + 1)
    start, commit = (told[budget]["seconds"][part] for part in ("start", "commit"))
    return Coordinator(
        start=start / all_sides * blocks * (experts + 1),
        make_out=make_out,
        make_source=make_source,
        hand_out=HAND_OUT + hand_out,
        hand_out_source=hand_out_source,
        receive=receive,
        receive_out=receive_out,
        commit=commit / last["blocks"] * blocks,
    )


def _shares(some: Sequence[Figures], part: str, *sides: str) -> tuple[float, float]:
    """Return the seconds of a part for each of two things that two merges have in other numbers."""
    counts = np.array([[one[side] for side in sides] for one in some], dtype=float)
    seconds = np.array([one["seconds"][part] for one in some])
    first, second = np.linalg.solve(counts, seconds)
    # A machine that others use measures with errors: none of them takes less than nothing.
    if second < 0:
        first, second = seconds.sum() / counts[:, 0].sum(), 0.0
    elif first < 0:
        first, second = 0.0, seconds.sum() / counts[:, 1].sum()
    return float(first), float(second)


# Scale --------------------------------------------------------------------------------------------


class Case:
    """A model under a budget: its slices as they are, and what the coordinator takes."""

    def __init__(self, name: str, budget: str, rates: Rates, told: Figures) -> None:
        self.rates, self.budget = rates, BUDGETS[budget]
        self.tensors: list[Drawn] = drawn(MODELS[name], EXPERTS, self.budget)
        self.base_bytes = sum(elements * 2 for _, elements in MODELS[name].tensors())
        self.costs = costs(told, EXPERTS, self.base_bytes / (1 << 20), budget)
        self._works: dict[tuple[int, bool], list[Work]] = {}

    def works(self, workers: int, *, is_limited: bool = True) -> list[Work]:
        """The slices for so many workers."""
        key = slice_bytes(self.base_bytes, workers), is_limited
        if key not in self._works:
            self._works[key] = works(
                *(self.tensors, self.rates),
                budget=self.budget,
                base_bytes=self.base_bytes,
                workers=workers,
                is_limited=is_limited,
            )
        return self._works[key]

    def time(self, cluster: Cluster, **given: Any) -> Figures:
        """Simulate it as it is."""
        some = self.works(cluster.workers)
        outcome = simulated(some, self.rates, cluster, self.costs, **given)
        return {"seconds": outcome.seconds, "fetched": outcome.fetched, "put": outcome.put,
                "runs": outcome.runs, "slices": len(some)}  # fmt: skip


def bounds(case: Case, cluster: Cluster) -> Figures:
    """The least seconds that each part would need alone."""
    one = simulated(case.works(1), case.rates, replace(cluster, workers=1), Coordinator())
    some = case.works(cluster.workers)
    done = simulated(some, case.rates, cluster, case.costs)
    largest = max(some, key=lambda work: work.seconds(case.rates))
    alone = simulated([largest], case.rates, replace(cluster, workers=1), Coordinator())
    return {
        "workers": one.seconds / cluster.workers,
        "largest slice": alone.seconds,
        "coordinator": done.coordinator,
        "of it start and commit": case.costs.start + case.costs.commit,
        "store's network": (one.fetched + one.put) / cluster.store,
        "all": done.seconds,
    }


def lighter(told: Coordinator, times: float) -> Coordinator:
    """The coordinator with so many times less work for each slice that it makes and hands out."""
    return replace(
        told,
        make_out=told.make_out / times,
        make_source=told.make_source / times,
        hand_out_source=told.hand_out_source / times,
    )


Change = Callable[[Case, Cluster, Coordinator, list[Work]], tuple[Cluster, Coordinator, list[Work]]]
CHANGES: Final[dict[str, Change]] = {
    "as it is": lambda case, cluster, told, some: (cluster, told, some),
    "limited tensors cut": lambda case, cluster, told, some: (
        cluster, told, case.works(cluster.workers, is_limited=False)),
    "slices as columns": lambda case, cluster, told, some: (cluster, lighter(told, 5), some),
    "put while the next computes": lambda case, cluster, told, some: (
        replace(cluster, overlap=True), told, some),
    "start, commit / 4": lambda case, cluster, told, some: (
        cluster, replace(told, start=told.start / 4, commit=told.commit / 4), some),
}  # fmt: skip
TOGETHER: Final = tuple(CHANGES)[1:]
"""The changes that are left to make."""


def changed(case: Case, cluster: Cluster, names: Sequence[str]) -> float:
    """Seconds with these changes."""
    told, some = case.costs, case.works(cluster.workers)
    for name in names:
        cluster, told, some = CHANGES[name](case, cluster, told, some)
    return simulated(some, case.rates, cluster, told).seconds


def proposals(case: Case, cluster: Cluster) -> Figures:
    """Each change alone, all together, and all but one; seconds by workers."""
    ways: dict[str, Sequence[str]] = {name: (name,) for name in CHANGES}
    ways["all"] = TOGETHER
    ways |= {f"all but {name}": [one for one in TOGETHER if one != name] for name in TOGETHER}
    found: Figures = {}
    for way, names in ways.items():
        found[way] = {
            count: changed(case, replace(cluster, workers=count), names) for count in (1, *LIMITED)
        }
    return found


def scale(rates: Rates, told: Figures) -> Figures:
    """Everything that is simulated."""
    usual = Cluster(1)
    single = replace(usual, cores=1)
    found: Figures = {"models": {}, "single": {}, "limits": {}}
    cases: dict[str, Case] = {}
    for name in MODELS:
        for budget in BUDGETS:
            case = Case(name, budget, rates, told)
            row = {count: case.time(replace(usual, workers=count)) for count in WORKERS}
            called = f"{name}, {budget}"
            cases[called] = case
            found["models"][called] = {
                "blocks": sum(work.blocks for work in case.works(1)),
                "reads": sum(work.reads for work in case.works(1)),
                "largest": max(work.blocks for work in case.works(1)),
                "workers": row,
            }
            found["single"][called] = {
                count: case.time(replace(single, workers=count))["seconds"] for count in WORKERS
            }
            found["limits"][called] = {
                count: bounds(case, replace(usual, workers=count)) for count in LIMITED
            }
    case = cases["70 B, 10 %"]
    wide = replace(usual, network=25 * GIGABIT, store=1600 * GIGABIT)
    found["proposals"] = {
        "8 cores, a store of 100 Gbit/s": proposals(case, usual),
        "1 core, a store of 100 Gbit/s": proposals(case, single),
        "8 cores, a store of 1.6 Tbit/s": proposals(case, wide),
    }
    others = {
        "25 Gbit/s a worker": replace(usual, network=25 * GIGABIT),
        "a store of 400 Gbit/s": replace(usual, store=400 * GIGABIT),
        "a store of 1.6 Tbit/s": replace(usual, store=1600 * GIGABIT),
        "latency 1 ms": replace(usual, latency=0.001),
        "5 % three times slower": replace(usual, slow=0.05),
        "0.1 deaths an hour and worker": replace(usual, deaths=0.1),
        "6 deaths an hour and worker": replace(usual, deaths=6.0),
    }
    found["others"] = {
        name: {count: case.time(replace(one, workers=count)) for count in (1, *LIMITED)}
        for name, one in others.items()
    }
    large = cases["405 B, 100 %"]
    found["deaths, 405 B, 100 %"] = {
        rate: {
            count: [
                large.time(replace(usual, workers=count, deaths=rate), seed=seed)
                for seed in range(5)
            ]
            for count in LIMITED
        }
        for rate in (0.0, 0.1, 1.0, 6.0)
    }
    return found


# The whole ----------------------------------------------------------------------------------------


def main() -> None:
    parser = options(__doc__, rounds=3, millions=800)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="small models: a run of minutes")
    given = parser.parse_args()
    if given.small:
        given.millions, given.rounds = 100.0, 1
    work = given.work.absolute()
    path = given.results / "cluster_sim.json"
    found: Figures = json.loads(path.read_text()) if path.exists() else {}
    found["machine"] = machine()
    if {"rates", "validation", "long"} & set(given.only):
        work.mkdir(parents=True, exist_ok=True)
        make(work, given.millions, given.experts)
    if "rates" in given.only:
        found["family"] = {"millions": given.millions, "experts": given.experts}
        found["rates"] = measured_rates(work, given.experts, SLICE)
    rates = Rates(**found["rates"]["rates"])
    if "coordinator" in given.only:
        found["coordinator"] = coordinator(work, 2 if given.small else 32)
    if "receipts" in given.only:
        found["receipts"] = receipts(work, 2 if given.small else LAYERS)
    if "validation" in given.only:
        found["validation"] = measured_merges(work, given.experts, SLICE, given.rounds)
    if "long" in given.only:
        ways = ("2 threads", "2 workers")
        found["long"] = measured_merges(
            *(work, given.experts, SLICE, given.rounds), names=ways, method="della"
        )
    own = costs(found["coordinator"], given.experts, 0.0)
    found["validation"]["compared"] = compared(
        found["validation"], rates, own, found["rates"]["put_bytes_s"]
    )
    if "scale" in given.only:
        found["scale"] = scale(rates, found["coordinator"])
    keep(given.results, "cluster_sim", found)
    for place in (*work.glob("coordinator[0-9]*"), *work.glob("receipts[0-9]*")):
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
