"""What a mixture of experts is good for: a trained family as mixtures, and as single merged models.

    python bench/moe_quality.py WORK [--quick]

Writes and prints bench/results/moe_quality.json.  WORK/family8 is trained by examples/family.py if
it is not there (five minutes; kept for the next run), WORK needs 2 GB.  Nothing here is timed, and
everything is a function of the family.

Losses are held-out, nats a byte, of each expert's domain. Routers are made by examples/routers.py
from excerpts of training texts, of which no held-out one is part; random ones are the mean of two
seeds.  `own` is the share of held-out tokens, over layers, whose experts are among others their
domain's own.  `dense`: each expert by itself, on its own domain. `right`: the MLPs of a domain's
own expert and the base's everything else, which is a mixture whose routers never err.

Groups are those of bench/quality.py: `alike` has four experts, `all` eight, of which one changed
attention only and others mostly so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

import torch
from density import trained
from family import DOMAINS, EXCERPT, HELD_OUT_EVERY, encode, load, one_thread
from measure import RESULTS, keep, machine
from routers import Prompts, routers
from safetensors.torch import save_file

import mstore
from mstore import MergeRequest

GROUPS = {
    "alike": ("code", "prose", "arithmetic", "dates"),
    "all": tuple(domain.name for domain in DOMAINS),
}
MODES = ("hidden", "cheap_embed", "lda")
RANDOM = "random"
SEEDS = (0, 1)
PER_TOKEN = (1, 2)
PROMPTS, PROMPT = 16, 128
MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "task_arithmetic": ("task_arithmetic", {}),
    "task_arithmetic 0.3": ("task_arithmetic", {"lambda": 0.3}),
    "task_arithmetic 0.4": ("task_arithmetic", {"lambda": 0.4}),
    "ties": ("ties", {}),
}
Figures = dict[str, Any]


def prompts_of(name: str) -> list[str]:
    """Excerpts of a domain's training texts, at equal distances."""
    (domain,) = (one for one in DOMAINS if one.name == name)
    documents = domain.documents()
    text = "".join(one for at, one in enumerate(documents, 1) if at % HELD_OUT_EVERY)
    stride = (len(text) - PROMPT) // (PROMPTS - 1)
    return [text[at * stride :][:PROMPT] for at in range(PROMPTS)]


def measured(directory: Path, family: Path, experts: Sequence[str]) -> Figures:
    """Losses on the experts' domains, and of a mixture the share of tokens at their own expert."""
    model = load(directory)
    excerpts = json.loads((family / "heldout.json").read_text())
    per_token = getattr(model.config, "num_experts_per_tok", None)
    told = {} if per_token is None else {"output_router_logits": True}
    found: Figures = {"losses": {}, "own": {}}
    for number, name in enumerate(experts):
        ids = torch.stack([encode(text)[:EXCERPT] for text in excerpts[name]])
        with one_thread(), torch.inference_mode():
            out = model(input_ids=ids[:, :-1], use_cache=False, **told)
        logits, goals = out.logits.flatten(0, 1).float(), ids[:, 1:].flatten()
        found["losses"][name] = float(torch.nn.functional.cross_entropy(logits, goals))
        if per_token is not None:
            chosen = torch.stack([one.topk(per_token).indices for one in out.router_logits])
            found["own"][name] = float((chosen == number).any(dim=-1).double().mean())
    return found


class Bench:
    """The family in a store, and what is measured of it."""

    def __init__(self, work: Path, *, quick: bool) -> None:
        base, *others = trained(work, len(DOMAINS), quick=quick)
        self.family = base.parent
        self.work = work / "moe"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        # A measure computes on one thread, so that it can be repeated to the bit.
        cores = len(os.sched_getaffinity(0))
        self.pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"))
        self.store = mstore.Store.init(self.work / "store", block_size=1 << 16)
        self.store.add(base, name="base")
        for one in others:
            self.store.add(one, name=one.name, base="base")
        self.prompts = Prompts(base, torch.float32)
        self.said = {one.name: prompts_of(one.name) for one in DOMAINS}
        with one_thread():
            self.seen = {name: self.prompts.inputs(said) for name, said in self.said.items()}
        self.number = 0

    def close(self) -> None:
        self.pool.shutdown()
        self.store.close()
        shutil.rmtree(self.work)

    def submitted(self, ref: str, experts: Sequence[str]) -> Future[Figures]:
        """Measure a snapshot in a process of its own."""
        self.number += 1
        directory = self.work / str(self.number)
        self.store.checkout(ref, directory)
        return self.pool.submit(measured, directory, self.family, experts)

    def mixture(
        self, experts: Sequence[str], mode: str, per_token: int, seed: int = 0
    ) -> Future[Figures]:
        recipe = {
            "base_model": "base",
            "gate_mode": mode,
            "experts_per_token": per_token,
            "experts": [
                {"source_model": name, "positive_prompts": self.said[name]} for name in experts
            ],
        }
        name = None
        if mode != RANDOM:
            name = f"routers/{mode}{len(experts)}"
            directory = self.work / name.replace("/", "-")
            if not directory.exists():
                with one_thread():
                    found = routers(recipe, self.prompts, [self.seen[one] for one in experts])
                directory.mkdir()
                save_file(found, directory / "model.safetensors")
                self.store.add(directory, name=name)
        plan = self.store.plan_moe(json.dumps(recipe), routers=name, seed=seed)
        self.store.merge(plan, name="moe")
        return self.submitted("moe", experts)

    def group(self, experts: Sequence[str]) -> Figures:
        """All measures of some experts."""
        single = {}
        for name, (method, parameters) in MERGES.items():
            request = MergeRequest(
                base="base", experts=list(experts), method=method, parameters=parameters
            )
            self.store.merge(self.store.plan(request), name="merged")
            single[name] = self.submitted("merged", experts)
        mixtures = {
            f"{mode} {count}": [self.mixture(experts, mode, count)]
            for mode in MODES
            for count in PER_TOKEN
        }
        for count in PER_TOKEN:
            mixtures[f"{RANDOM} {count}"] = [
                self.mixture(experts, RANDOM, count, seed) for seed in SEEDS
            ]
        right = {}
        for number, name in enumerate(experts):
            self.store.merge(self.store.plan_dense("moe", number), name="dense")
            right[name] = self.submitted("dense", [name])
        dense = {name: self.submitted(name, [name]) for name in experts}
        own = {
            key: {"losses": {name: one.result()["losses"][name] for name, one in found.items()}}
            for key, found in (("dense", dense), ("right", right))
        }
        return {
            "base": self.submitted("base", experts).result(),
            **own,
            "merges": {name: one.result() for name, one in single.items()},
            "mixtures": {
                name: averaged([one.result() for one in some]) for name, some in mixtures.items()
            },
        }


def averaged(some: Sequence[Figures]) -> Figures:
    """The mean of several measures of the same names."""
    return {
        key: {name: statistics.fmean(one[key][name] for one in some) for name in some[0][key]}
        for key in some[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--quick", action="store_true", help="models of 1 M parameters")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.work.absolute(), quick=arguments.quick)
    members = json.loads((bench.family / "family.json").read_text())
    results: Figures = {
        "machine": machine(),
        "family": {key: members[key] for key in ("parameters", "seconds", "python", "torch")},
        "prompts": PROMPTS,
        "prompt_bytes": PROMPT,
        "groups": {name: bench.group(experts) for name, experts in GROUPS.items()},
    }
    bench.close()
    keep(arguments.results, "moe_quality", results)


if __name__ == "__main__":
    main()
