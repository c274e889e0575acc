"""Merging 300 M parameters, bf16, K = 4 at full read, beside mergekit 0.1.5, in turn in one run.

    python bench/mergekit.py WORK --mergekit VENV/bin/mergekit-yaml [--rounds 5] [--peer-rounds 2]

Writes and prints bench/results/mergekit.json.  WORK needs about 10 GB; the family in it is kept.
Both programs are whole processes that start from nothing, read the same checkpoints from the page
cache (mergekit the plain files, mstore its packs) and write a whole model; mstore also plans,
checks every block against its hash and syncs its output to the disk, mergekit does neither.

A peer's run of TIES takes minutes, so the peer may have fewer rounds; each figure says how many.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import Run, drop_cache, keep, machine, median, options, ready, run
from store import Store

EXPERTS = 4
DENSITY = 0.2
# Parameters as both programs spell them, apart from density and weight, which go with the models.
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"normalize": True},
    "dare_ties": {"density": DENSITY, "normalize": False, "rescale": True},
    "ties": {"density": DENSITY, "normalize": True},
}
WARM_GIGABYTES = 4


class Bench:
    """One family, as plain files and in a store."""

    def __init__(self, work: Path, millions: float, program: Path) -> None:
        self.work = work
        self.program = program
        self.family = work / f"family{millions:g}"
        self.store = Store(work / "store")
        models = [BASE, *(dense(k) for k in range(EXPERTS))]
        write_family(self.family, millions, models)
        self.store.make()
        for model in models:
            self.store.add(self.family / model.name, model.name)
        self.plain_bytes = sum(f.stat().st_size for f in (self.family / "base").iterdir())

    def mergekit(self, method: str) -> Run:
        """Its command line, with its defaults."""
        parameters = dict(METHODS[method])
        own = {"weight": 1.0}
        if "density" in parameters:
            own["density"] = parameters.pop("density")
        recipe: dict[str, Any] = {
            "merge_method": method,
            "dtype": "bfloat16",
            "parameters": parameters,
            "models": [
                {"model": str(self.family / f"expert{k}"), "parameters": own}
                for k in range(EXPERTS)
            ],
        }
        if method != "linear":
            recipe["base_model"] = str(self.family / "base")
        return merged_by(self.program, recipe, self.work, self.family)

    def mstore(self, method: str) -> Run:
        """The command line, into a copy of the store."""
        words = [f"--expert=expert{k}" for k in range(EXPERTS)]
        words += [f"--param={key}={value}" for key, value in METHODS[method].items()]
        with self.store.copy(self.work / "round") as store:
            ready(WARM_GIGABYTES, *sorted(store.path.rglob("*.pack")))
            return store.mstore(
                "--json", "merge", "--base", "base", *words, "--method", method, "--name", "merged"
            )


def merged_by(
    program: Path, recipe: dict[str, Any], work: Path, family: Path, *, is_cold: bool = False
) -> Run:
    """Run mergekit's command line on a recipe of models below `family`; the result is removed.

    is_cold: with nothing of them in the page cache, where otherwise all of them are.
    """
    file, out = work / "recipe.yml", work / "merged"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    shutil.rmtree(out, ignore_errors=True)
    if is_cold:
        ready(WARM_GIGABYTES)
        drop_cache(family)
    else:
        ready(WARM_GIGABYTES, *sorted(family.glob("*/*.safetensors")))
    # Its environment is its own: what makes mstore importable here is not for it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    words = ["--no-copy-tokenizer", "--quiet"]
    try:
        return run([str(program), str(file), str(out), *words], env=environment)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def compare(bench: Bench, method: str, rounds: int, peer_rounds: int) -> dict[str, Any]:
    """Both in turn, after a run of ours that does not count; ratios of runs of one round."""
    bench.mstore(method)
    ours, theirs, expert_bytes = [], [], 0
    for number in range(rounds):
        if number < peer_rounds:
            theirs.append(bench.mergekit(method))
        ours.append(bench.mstore(method))
        expert_bytes = json.loads(ours[-1].output)["expert_bytes_read"]
    pairs = list(zip(theirs, ours, strict=False))
    return {
        "mergekit": median(theirs),
        "mstore": median(ours),
        "expert_bytes": expert_bytes,
        "parameters": METHODS[method],
        "times_faster": statistics.median(a.wall / b.wall for a, b in pairs),
        "times_less_cpu": statistics.median(a.cpu / b.cpu for a, b in pairs),
    }


def peer_versions(program: Path) -> dict[str, str]:
    """What the peer's environment says that it is."""
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({n: m.version(n) for n in ('mergekit', 'torch', 'transformers')}))"
    )
    done = subprocess.run(
        [str(program.parent / "python"), "-c", script], check=True, stdout=subprocess.PIPE
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def main() -> None:
    parser = options(__doc__, rounds=5, millions=300.0)
    parser.add_argument("--mergekit", type=Path, required=True, help="its mergekit-yaml")
    parser.add_argument("--peer-rounds", type=int, default=2)
    arguments = parser.parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions, arguments.mergekit)
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": peer_versions(arguments.mergekit),
        "plain_bytes": bench.plain_bytes,
        "millions": arguments.millions,
        "experts": EXPERTS,
    }
    for method in METHODS:
        # Only where it trims or drops does the peer take so long that its rounds must be few.
        peer_rounds = arguments.rounds if method == "linear" else arguments.peer_rounds
        results[method] = compare(bench, method, arguments.rounds, peer_rounds)
    shutil.rmtree(bench.store.path)
    keep(arguments.results, "mergekit", results)


if __name__ == "__main__":
    main()
