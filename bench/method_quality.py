"""Which merge method is the best: every one for a trained family, untuned and with a tuned scale.

    python bench/method_quality.py WORK [--quick] [--only PATTERN]...

Writes and prints bench/results/method_quality.json.  WORK/family8 is trained by examples/family.py
if it is not there (five minutes; kept for the next run, as the Fishers are), WORK needs 2 GB.
Nothing here is timed, and everything is a function of the family.  `--only 'ties*'` measures these
candidates, and keeps what is known of the others.

What is compared stands in `candidates.py`.  Each one is merged as it is, and again with the outer
`scale` that `mstore.Store.search` found: in a grid over COARSE, then in one about what was best,
and so on if that was the largest.
Held-out excerpts are divided: every other one decides (part A), the rest reports (part B), so no
loss that is told was searched for.  Losses are nats a byte, on the domains of the experts that are
merged, in float32; those that only decide are in bf16 where the processor multiplies it.

Trials are virtual merges, whose tensors are read and judged in this process: the search is shown a
directory that has, in place of a model, what was measured of it.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

import numpy as np
import torch
from candidates import BASE, Candidate, Inputs, candidates, left_out
from density import trained
from family import DOMAINS, EXCERPT, encode, load, multiplies_bf16, next_token_loss, one_thread
from measure import RESULTS, keep, machine

import mstore
from mstore import SnapshotId
from mstore.search.search import SearchReport

BLOCK_SIZE = 1 << 16
Figures = dict[str, Any]
Range = dict[str, float]
GROUPS = {
    "three": ("code", "prose", "hexdump"),
    "all": tuple(domain.name for domain in DOMAINS),
}
PARTS = ("A", "B")
COARSE: Range = {"min": 0.1, "max": 3.2, "log": True}
JOBS = 2
LOSS = "loss.json"


def fine(best: float) -> Range:
    """The scales about the best of a coarse grid, whose neighbours are 2.4 times as far."""
    return {"min": 0.65 * best, "max": 1.55 * best, "step": 0.3 * best}


class Judge:
    """Held-out losses of snapshots of a store, computed in this process."""

    def __init__(self, store: mstore.Store, family: Path) -> None:
        self._store = store
        self._model = load(family / BASE)
        excerpts = json.loads((family / "heldout.json").read_text())
        self._texts = {
            part: {
                domain: torch.stack(
                    [encode(text)[:EXCERPT] for text in texts[number :: len(PARTS)]]
                )
                for domain, texts in excerpts.items()
            }
            for number, part in enumerate(PARTS)
        }

    def knows(self, revision: SnapshotId) -> bool:
        """Whether a snapshot is a model of the family."""
        return set(self._store[revision].tensor_names()) == set(self._model.state_dict())

    def losses(
        self, revision: str | SnapshotId, domains: Sequence[str], part: str
    ) -> dict[str, float]:
        """By domain, nats a byte."""
        snapshot = self._store[revision]
        model = copy.deepcopy(self._model)
        names = snapshot.tensor_names()
        model.load_state_dict(
            {name: torch.from_numpy(snapshot.tensor(name).astype(np.float32)) for name in names}
        )
        rounded = torch.autocast("cpu", torch.bfloat16, enabled=part == "A" and multiplies_bf16())
        # On one thread, so that it can be repeated to the bit.
        with one_thread(), torch.inference_mode(), rounded:
            return {
                domain: float(next_token_loss(model, self._texts[part][domain]))
                for domain in domains
            }


class Bench:
    """The family in a store, and what is measured of it."""

    def __init__(self, work: Path, *, quick: bool, experts: Sequence[str] = GROUPS["all"]) -> None:
        base, *others = trained(work, len(experts), quick=quick)
        self.family = base.parent
        self._work = work / "method_quality"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir()
        self._store = mstore.Store.init(self._work / "store", block_size=BLOCK_SIZE)
        self._store.add(base, name=BASE)
        for one in others:
            self._store.add(one, name=one.name, base=BASE)
        self.judge = Judge(self._store, self.family)
        self._inputs = Inputs(self._store, self.family)

    def close(self) -> None:
        """Remove all but the family."""
        self._store.close()
        shutil.rmtree(self._work)

    def group(self, experts: Sequence[str], asked: Sequence[Candidate]) -> Figures:
        """Base, experts and candidates, on the experts' domains."""
        return {
            "base": self.judge.losses(BASE, experts, "B"),
            "experts": {name: self.judge.losses(name, experts, "B") for name in experts},
            "candidates": {one.name: self._measured(one, experts) for one in asked},
        }

    def _measured(self, candidate: Candidate, experts: Sequence[str]) -> Figures:
        prepared = candidate.prepare(self._inputs, experts)
        request = self._store.read_recipe(candidate.recipe(prepared)).request
        plan = self._store.plan(request, allow_noop=True)
        self._store.merge(plan, name="untuned", virtual=True)
        untuned = self.judge.losses("untuned", experts, "B")
        searches = [self._search(candidate.recipe(prepared, COARSE), experts)]
        while True:
            best = min(searches, key=lambda one: one.best)
            scale = best.values["scale"]
            tried = {one.values[0]: one.score for found in searches for one in found.trials}
            if len(searches) > 1 and scale < max(tried):
                break
            searches.append(self._search(candidate.recipe(prepared, fine(scale)), experts))
        tuned = self.judge.losses(best.snapshot, experts, "B")
        print(f"{candidate.name}: {fmean(untuned.values()):.4f}, ", end="")
        print(f"{fmean(tuned.values()):.4f} at {scale:.3g}", flush=True)
        return {
            "untuned": untuned,
            "tuned": tuned,
            "scale": scale,
            "tried": sorted(tried.items()),
        }

    def _search(self, recipe: str, experts: Sequence[str]) -> SearchReport:
        """Search for the scale of a recipe by part A."""

        @contextmanager
        def judged(snapshot: SnapshotId, scratch: Path) -> Iterator[Path]:
            shown = scratch / "model"
            shown.mkdir()
            # The search also asks about the experts, and an adapter is no model: no score.
            if self.judge.knows(snapshot):
                loss = fmean(self.judge.losses(snapshot, experts, "A").values())
                (shown / LOSS).write_text(json.dumps({"loss": loss}))
            yield shown

        return self._store.search(
            recipe,
            ["cp", f"{{}}/{LOSS}", LOSS],
            name="tuned",
            score=f"{LOSS}:loss",
            minimize=True,
            sampler="grid",
            jobs=JOBS,
            # What reports is not asked here.
            same_set=True,
            restart=True,
            show=judged,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--quick", action="store_true", help="models of 1 M parameters")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="these candidates alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    every = candidates()
    asked = [
        one
        for one in every
        if any(fnmatchcase(one.name, pattern) for pattern in arguments.only or ["*"])
    ]
    bench = Bench(arguments.work.absolute(), quick=arguments.quick)
    members = json.loads((bench.family / "family.json").read_text())
    known = arguments.results / "method_quality.json"
    earlier: Figures = {}
    if arguments.only and known.exists():
        earlier = json.loads(known.read_text())["groups"]
    groups = {}
    for name, experts in GROUPS.items():
        print(f"{name}: {', '.join(experts)}", flush=True)
        if earlier and earlier[name]["base"] != bench.judge.losses(BASE, experts, "B"):
            sys.exit(f"{known} is of another family: measure all")
        groups[name] = group = bench.group(experts, asked)
        both = earlier.get(name, {}).get("candidates", {}) | group["candidates"]
        group["candidates"] = {one.name: both[one.name] for one in every if one.name in both}
    bench.close()
    results: Figures = {
        "machine": machine(),
        "family": {key: members[key] for key in ("parameters", "seconds", "python", "torch")},
        "groups": groups,
        "left_out": left_out(),
    }
    keep(arguments.results, "method_quality", results)


if __name__ == "__main__":
    main()
