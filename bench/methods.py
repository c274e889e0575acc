"""Every method of mergekit 0.1.5 on 300 M parameters, bf16, at full read, beside mergekit.

    python bench/methods.py WORK --mergekit VENV/bin/mergekit-yaml [--rounds 1] [--method NAME]...

Writes and prints bench/results/methods.json; --method measures these only, and keeps what is known
of the others.  WORK needs about 12 GB; the family in it is kept, and is that of mergekit.py.  Both
programs run the same recipe, with four experts where a method takes several.  They are whole
processes that start from nothing, read the same checkpoints from the page cache (mergekit the plain
files, mstore the packs of a store without compression and of a dense one) and write a whole model.
mstore also plans, measures the facts that a method needs, which a store keeps but each round begins
without, checks every block against its hash and syncs its output; mergekit does none of these.

A peer's run takes up to minutes, so there is one round unless --rounds says otherwise.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import Run, keep, machine, median, options, ready
from mergekit import WARM_GIGABYTES, merged_by, peer_versions
from store import Store

EXPERTS = 4
CODECS = ("raw", "dense")


@dataclass(frozen=True, slots=True)
class Case:
    """What a method's recipe says.

    shared: parameters. own: parameters of each model. experts: how many. weighted: whether they
    have weights. base: whether the recipe names a base, and `listed`, whether the base is among the
    models.
    """

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    experts: int = EXPERTS
    weighted: bool = True
    base: bool = True
    listed: bool = False

    def recipe(self, method: str, family: Path | None) -> dict[str, Any]:
        """mergekit's recipe, with models below a directory, or named as in the store."""

        def place(name: str) -> str:
            return name if family is None else str(family / name)

        own = self.own | ({"weight": 1.0} if self.weighted else {})
        names = ["base"] * self.listed + [f"expert{k}" for k in range(self.experts)]
        found: dict[str, Any] = {
            "merge_method": method,
            "dtype": "bfloat16",
            "parameters": self.shared,
            "models": [
                {"model": place(name), **({"parameters": own} if own else {})} for name in names
            ],
        }
        if self.base:
            found["base_model"] = place("base")
        return found


_DENSE = {"density": 0.2}
_BAND = {"density": 0.2, "gamma": 0.01}
_RANKED = {"density": 0.3, "epsilon": 0.1}
_ONE = {"experts": 1, "weighted": False, "listed": True}
SELECTING = {
    "ties": Case({"normalize": True}, _DENSE),
    "breadcrumbs": Case({"normalize": False}, _BAND),
    "breadcrumbs_ties": Case({"normalize": False}, _BAND),
    "dare_linear": Case({"normalize": False, "rescale": True}, _DENSE),
    "dare_ties": Case({"normalize": False, "rescale": True}, _DENSE),
    "della": Case({"normalize": True}, _RANKED),
    "della_linear": Case({"normalize": False}, _RANKED),
    "sce": Case({"select_topk": 0.2}, weighted=False),
    "arcee_fusion": Case(**_ONE),
}
"""Methods that select elements by thresholds, ranks or draws."""
OTHERS = {
    "linear": Case({"normalize": True}, base=False),
    "task_arithmetic": Case({"normalize": False}),
    "slerp": Case({"t": 0.5}, **_ONE),
    "nuslerp": Case({}, experts=2),
    "multislerp": Case({}),
    "karcher": Case({}, weighted=False, base=False),
    "model_stock": Case({}, weighted=False),
    "nearswap": Case({"t": 1e-3}, **_ONE),
    "ram": Case({}, weighted=False),
    "ramplus_tl": Case({}, weighted=False),
    "passthrough": Case({"scale": 0.5}, experts=1, weighted=False, base=False),
}
CASES = {**SELECTING, **OTHERS}


class Bench:
    """One family, as plain files and in two stores."""

    def __init__(self, work: Path, millions: float, program: Path) -> None:
        self.work = work
        self.program = program
        self.family = work / f"family{millions:g}"
        self.stores = {codec: Store(work / f"store-{codec}") for codec in CODECS}
        models = [BASE, *(dense(k) for k in range(EXPERTS))]
        write_family(self.family, millions, models)
        for codec, store in self.stores.items():
            store.make(codec=codec)
            for model in models:
                store.add(self.family / model.name, model.name)
        self.plain_bytes = sum(f.stat().st_size for f in (self.family / "base").iterdir())

    def mergekit(self, method: str) -> Run:
        """Its command line, with its defaults."""
        recipe = CASES[method].recipe(method, self.family)
        return merged_by(self.program, recipe, self.work, self.family)

    def mstore(self, method: str, codec: str) -> Run:
        """The command line with the same recipe, into a copy of a store."""
        file = self.work / "own.yml"
        file.write_text(json.dumps(CASES[method].recipe(method, None)))
        with self.stores[codec].copy(self.work / "round") as store:
            ready(WARM_GIGABYTES, *sorted(store.path.rglob("*.pack")))
            return store.mstore("--json", "merge", "--recipe", str(file), "--name", "merged")

    def compare(self, method: str, rounds: int) -> dict[str, Any]:
        """Both in turn, after a run of ours that does not count."""
        self.mstore(method, CODECS[0])
        theirs: list[Run] = []
        ours: dict[str, list[Run]] = {codec: [] for codec in CODECS}
        for _ in range(rounds):
            theirs.append(self.mergekit(method))
            for codec, runs in ours.items():
                runs.append(self.mstore(method, codec))
        told = json.loads(ours[CODECS[0]][-1].output)
        case = CASES[method]
        return {
            "parameters": case.shared | case.own,
            "experts": case.experts,
            "analyze_bytes": told["analyze_bytes_read"],
            "expert_bytes": told["expert_bytes_read"],
            "mergekit": median(theirs),
            **{codec: median(runs) for codec, runs in ours.items()},
            "times_faster": {codec: _ratio(theirs, runs, "wall") for codec, runs in ours.items()},
            "times_less_cpu": {codec: _ratio(theirs, runs, "cpu") for codec, runs in ours.items()},
        }


def _ratio(theirs: Sequence[Run], ours: Sequence[Run], what: str) -> float:
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)


def main() -> None:
    parser = options(__doc__, rounds=1, millions=300.0)
    parser.add_argument("--mergekit", type=Path, required=True, help="its mergekit-yaml")
    parser.add_argument("--method", action="append", choices=CASES, help="only this one")
    arguments = parser.parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions, arguments.mergekit)
    known: dict[str, Any] = {}
    if arguments.method and (arguments.results / "methods.json").exists():
        known = json.loads((arguments.results / "methods.json").read_text())["methods"]
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": peer_versions(arguments.mergekit),
        "plain_bytes": bench.plain_bytes,
        "millions": arguments.millions,
        "experts": EXPERTS,
    }
    for method in arguments.method or CASES:
        known[method] = bench.compare(method, arguments.rounds)
        # After each: a run takes long, and what is measured is kept if it is ended.
        found = {name: known[name] for name in CASES if name in known}
        keep(arguments.results, "methods", results | {"methods": found})
    for store in bench.stores.values():
        shutil.rmtree(store.path)


if __name__ == "__main__":
    main()
