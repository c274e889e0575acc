"""What a budget costs in quality: a trained family of eight experts, merged under budgets.

    python bench/quality.py WORK [--quick]

Writes and prints bench/results/quality.json.  WORK/family8 is trained by examples/family.py if it
is not there (five minutes; kept for the next run), WORK needs 1 GB.  Nothing here is timed, and
everything is a function of the family, so each merge runs once.

The models are small, so the store has the smallest blocks there are (64 KiB): some 300 a model.
Errors are against the merge at full budget, over all elements; `block_p95` is the 95th percentile
over blocks of ||merged - full|| / ||full|| in the block.  Losses are held-out, nats a byte.

Groups: `alike`, experts trained with one step size (some with frozen lower layers); `differ`,
experts that differ in where they changed (attention only, the top only, steps that fall from the
top down or from the bottom up); `all`, the eight.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mstore import MergeRequest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

import numpy as np
from family import DOMAINS, FULL, QUICK, domain_losses, train_family
from measure import RESULTS, keep, machine

import mstore

BLOCK_SIZE = 1 << 16
ITEMSIZE = 2  # bfloat16
BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7)
GROUPS = {
    "alike": ("code", "prose", "arithmetic", "dates"),
    "differ": ("syntax", "unicode", "hexdump", "records"),
    "all": tuple(domain.name for domain in DOMAINS),
}
LOSSES_OF = ("differ", "all")
LOSSES_AT = (0.1, 0.3, 0.5)
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"lambda": 0.3},
    "ties": {"density": 0.2},
}
SCORES = {
    "task_arithmetic": ("norm", "random"),
    "ties": ("trimmed", "norm", "conflict", "random"),
}
RANDOM = "random"
Figures = dict[str, Any]
Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Error:
    """How far a merge is from the one at full budget.

    of_delta: ||merged - full|| / ||full - base||.  of_weights: over ||full||.
    """

    of_delta: float
    of_weights: float
    block_p95: float


def error(merged: Weights, full: Weights, base: Weights) -> Error:
    """Over all elements, in float64."""
    off = moved = whole = 0.0
    blocks = []
    length = BLOCK_SIZE // ITEMSIZE
    for name, goal in full.items():
        starts = np.arange(0, goal.size, length)
        squares = (merged[name] - goal).ravel().astype(np.float64) ** 2
        goals = goal.ravel().astype(np.float64) ** 2
        in_block = np.add.reduceat(squares, starts)
        blocks.append(np.sqrt(in_block / np.add.reduceat(goals, starts)))
        off += float(in_block.sum())
        whole += float(goals.sum())
        moved += float(((goal - base[name]).astype(np.float64) ** 2).sum())
    return Error(
        float(np.sqrt(off / moved)),
        float(np.sqrt(off / whole)),
        float(np.percentile(np.concatenate(blocks), 95)),
    )


class Quality:
    """A trained family, and a store of it."""

    def __init__(self, work: Path, *, quick: bool) -> None:
        self.work = work
        self.family = work / ("family8quick" if quick else "family8")
        if not (self.family / "family.json").exists():
            shutil.rmtree(self.family, ignore_errors=True)
            train_family(
                self.family,
                size=QUICK if quick else FULL,
                experts=len(DOMAINS),
                report=lambda name, member: print(f"{name}: {member.seconds:.0f} s", flush=True),
            )
        for left in ("store", "checkouts"):
            shutil.rmtree(work / left, ignore_errors=True)
        # A measure computes on one thread, so that it can be repeated to the bit.
        cores = len(os.sched_getaffinity(0))
        self.pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
        self.measured: list[Future[dict[str, float]]] = []
        self.store = mstore.Store.init(work / "store", block_size=BLOCK_SIZE)
        self.store.add(self.family / "base", name="base")
        for name in GROUPS["all"]:
            self.store.add(self.family / name, name=name, base="base")
        self.base = self.weights("base")
        self.plain_bytes = sum(array.nbytes // 2 for array in self.base.values())

    def close(self) -> None:
        """Remove all but the family."""
        self.pool.shutdown()
        self.store.close()
        shutil.rmtree(self.work / "store")
        shutil.rmtree(self.work / "checkouts")

    def weights(self, ref: str) -> Weights:
        """All tensors of a snapshot, in float32."""
        snapshot = self.store[ref]
        return {n: snapshot.tensor(n).astype(np.float32) for n in snapshot.tensor_names()}

    def merge(
        self, experts: Sequence[str], method: str, budget: float | None, score: str | None
    ) -> Figures:
        """Merge into the ref `merged`."""
        plan = self.store.plan(
            MergeRequest(
                base="base",
                experts=experts,
                method=method,
                parameters=METHODS[method],
                budget=budget,
                score=score,
            )
        )
        done = self.store.merge(plan, name="merged")
        return {
            "full_bytes": done.full_expert_bytes,
            "bytes": done.planned_expert_bytes,
            "bound": done.error_bound,
            "estimate": done.error_estimate,
        }

    def losses(self) -> Future[dict[str, float]]:
        """Of what a checkout of the last merge loads as, in a process of its own."""
        directory = self.work / "checkouts" / str(len(self.measured))
        directory.parent.mkdir(exist_ok=True)
        self.store.checkout("merged", directory)
        self.measured.append(self.pool.submit(domain_losses, directory, self.family))
        return self.measured[-1]

    def group(self, name: str, method: str) -> Figures:
        """All budgets and scores."""
        experts = GROUPS[name]
        told: Figures = {"full": self.merge(experts, method, None, None), "scores": {}}
        full = self.weights("merged")
        told["plain_bytes"] = len(experts) * self.plain_bytes
        with_losses = name in LOSSES_OF
        if with_losses:
            told["full"]["losses"] = self.losses()
        for score in SCORES[method]:
            # Losses take time: of the method's own score, and of what it has to beat.
            shown = with_losses and score in (SCORES[method][0], RANDOM)
            told["scores"][score] = {
                str(budget): self.point(experts, method, budget, score, full)
                | (self.at(budget) if shown else {})
                for budget in BUDGETS
            }
        # As a share of all bytes of all experts, as a reader of flat files counts them.  Whoever
        # draws blocks blindly reads that share of the changed blocks too: `random` at that share.
        told["of_plain"] = {
            str(share): self.point(experts, method, int(share * told["plain_bytes"]), None, full)
            | (self.at(share) if with_losses else {})
            for share in BUDGETS
        }
        return told

    def point(
        self, experts: Sequence[str], method: str, budget: float, score: str | None, full: Weights
    ) -> Figures:
        """One budget: what it read, and how far off it is."""
        told = self.merge(experts, method, budget, score)
        return told | asdict(error(self.weights("merged"), full, self.base))

    def at(self, budget: float) -> Figures:
        """The losses of the last merge, at the budgets for which they are measured."""
        return {"losses": self.losses()} if budget in LOSSES_AT else {}


def settle(told: Any, goal: dict[str, float] | None = None) -> Any:
    """Wait for the losses; beside each, the largest rise over those of the full merge."""
    if not isinstance(told, dict):
        return told
    full = told.get("full", {}).get("losses")
    goal = full.result() if full is not None else goal
    settled = {key: settle(value, goal) for key, value in told.items() if key != "losses"}
    if "losses" in told and goal is not None:
        settled["losses"] = losses = told["losses"].result()
        settled["worst_rise"] = max(losses[domain] / goal[domain] - 1 for domain in goal)
    return settled


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--quick", action="store_true", help="models of 1 M parameters")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    quality = Quality(arguments.work.absolute(), quick=arguments.quick)
    members = json.loads((quality.family / "family.json").read_text())
    results: Figures = {
        "machine": machine(),
        "family": {key: members[key] for key in ("parameters", "seconds", "python", "torch")},
        "members": {
            name: {key: member[key] for key in ("losses", "delta", "decay")}
            | {"frozen": len(member["frozen"])}
            for name, member in members["members"].items()
        },
        "block_size": BLOCK_SIZE,
        "groups": GROUPS,
        "parameters": METHODS,
        "base_losses": domain_losses(quality.family / "base", quality.family),
    }
    for method in METHODS:
        groups = {name: quality.group(name, method) for name in GROUPS}
        results[method] = {name: settle(group) for name, group in groups.items()}
    quality.close()
    keep(arguments.results, "quality", results)


if __name__ == "__main__":
    main()
