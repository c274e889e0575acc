"""Applying LoRA adapters to 300 M parameters, bf16, beside PEFT, in turn in one run.

    python bench/adapters.py WORK --peft VENV/bin/python [--rounds 3]

Writes and prints bench/results/adapters.json.  WORK needs about 5 GB; the base in it is kept.  Both
programs are whole processes that start from nothing, read the same files from the page cache and
write a whole model.  `one` applies an adapter, `eight` adds eight with weight 1; `unmeasured` does
that with --no-analyze, and `virtual` commits the eight as a plan (only mstore can).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from generate import BASE, places, write_family
from measure import Run, keep, machine, median, options, ready, run
from safetensors.numpy import save_file
from store import Store

RANK = 16
ADAPTERS = 8
CASES = {"one": 1, "eight": ADAPTERS}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_GIGABYTES = 3

PEER = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, out, *paths = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
names = [f"a{n}" for n in range(len(paths))]
model = PeftModel.from_pretrained(model, paths[0], adapter_name=names[0])
for name, path in zip(names[1:], paths[1:]):
    model.load_adapter(path, adapter_name=name)
model.merge_and_unload(adapter_names=names).save_pretrained(out)
"""


def write_adapter(path: Path, millions: float, seed: int) -> None:
    """Random factors of all linear layers, as PEFT saves them: float32."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for place in places(millions):
        module = place.name.removesuffix(".weight")
        if module.endswith(PARTS):
            rows, columns = place.shape
            name = f"base_model.model.{module}"
            own = rng.standard_normal((RANK, rows + columns), dtype=np.float32) * np.float32(0.01)
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(own[:, rows:])
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(own[:, :rows].T)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(PARTS),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


class Bench:
    """The base and adapters, as plain files and in a store."""

    def __init__(self, work: Path, millions: float, python: Path) -> None:
        self.work = work
        self.python = python
        self.family = work / f"base{millions:g}"
        write_family(self.family, millions, [BASE])
        self.store = Store(work / "adapters-store")
        self.store.make()
        self.store.add(self.family / "base", "base")
        self.paths = [work / "adapters" / f"a{number}" for number in range(ADAPTERS)]
        for number, path in enumerate(self.paths):
            write_adapter(path, millions, number)
            self.store.add(path, path.name)
        self.plain_bytes = _size(self.family / "base")
        self.adapter_bytes = _size(self.paths[0])

    def peft(self, count: int) -> Run:
        """A program of its users: load, apply, save."""
        out = self.work / "merged"
        shutil.rmtree(out, ignore_errors=True)
        ready(
            WARM_GIGABYTES,
            *(self.family / "base").iterdir(),
            *(p for d in self.paths for p in d.iterdir()),
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        words = [str(self.family / "base"), str(out), *map(str, self.paths[:count])]
        try:
            return run([str(self.python), "-c", PEER, *words], env=environment)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def mstore(self, count: int, *more: str) -> Run:
        """The command line, into a copy of the store."""
        words = [f"--expert={path.name}" for path in self.paths[:count]]
        with self.store.copy(self.work / "round") as store:
            ready(WARM_GIGABYTES, *sorted(store.path.rglob("*.pack")))
            return store.mstore(
                *("--json", "merge", "--base", "base", *words, "--method", "task_arithmetic"),
                *("--name", "merged", *more),
            )


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def compare(bench: Bench, count: int, rounds: int) -> dict[str, Any]:
    """Both in turn, after a run of ours that does not count; ratios of runs of one round."""
    bench.mstore(count)
    pairs = [(bench.peft(count), bench.mstore(count)) for _ in range(rounds)]
    told = json.loads(pairs[-1][1].output)
    return {
        "peft": median([one for one, _ in pairs]),
        "mstore": median([other for _, other in pairs]),
        "expert_bytes": told["expert_bytes_read"],
        "analyze_bytes": told["analyze_bytes_read"],
        "times_faster": statistics.median(a.wall / b.wall for a, b in pairs),
        "times_less_cpu": statistics.median(a.cpu / b.cpu for a, b in pairs),
    }


def main() -> None:
    parser = options(__doc__, rounds=3, millions=300.0)
    parser.add_argument("--peft", type=Path, required=True, help="a Python that has it")
    arguments = parser.parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions, arguments.peft)
    results: dict[str, Any] = {
        "machine": machine(),
        "plain_bytes": bench.plain_bytes,
        "adapter_bytes": bench.adapter_bytes,
        "millions": arguments.millions,
        "rank": RANK,
    }
    for name, count in CASES.items():
        results[name] = compare(bench, count, arguments.rounds)
    runs = [bench.mstore(ADAPTERS, "--no-analyze") for _ in range(arguments.rounds)]
    results["unmeasured"] = {"mstore": median(runs)}
    runs = [bench.mstore(ADAPTERS, "--virtual") for _ in range(arguments.rounds)]
    results["virtual"] = {"mstore": median(runs)}
    results["virtual"]["bytes_written"] = json.loads(runs[-1].output)["bytes_written"]
    shutil.rmtree(bench.store.path)
    keep(arguments.results, "adapters", results)


if __name__ == "__main__":
    main()
