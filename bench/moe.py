"""A mixture of eight experts of a dense model, beside mergekit-moe, in turn in one run.

    python bench/moe.py WORK --mergekit VENV/bin/mergekit-moe [--rounds 3] [--millions 1000]

Writes and prints bench/results/moe.json.  WORK needs 45 GB for models of 1 B parameters; all is
removed at the end.  Routers are random, so neither program loads a model.  Both are whole processes
on models in the page cache, as far as it holds them: mergekit-moe writes all experts anew, mstore
names their blocks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_model
from measure import Run, keep, machine, median, options, ready, run, spread
from mergekit import WARM_GIGABYTES, peer_versions
from store import Store

EXPERTS = 8
TOKENIZER: dict[str, Any] = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1}, "unk_token": "<unk>"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "unk_token": "<unk>",
    },
}
"""mergekit-moe loads one even where routers are random."""


class Bench:
    """A base and eight experts, as files and in a store."""

    def __init__(self, work: Path, millions: float, program: Path) -> None:
        self.work = work
        self.program = program
        self.family = work / "family"
        self.store = Store(work / "store")
        self.store.make()
        self.models = [BASE, *(dense(k) for k in range(EXPERTS))]
        for model in self.models:
            write_model(self.family / model.name, millions, model)
            self.store.add(self.family / model.name, model.name)
        for name, fields in TOKENIZER.items():
            (self.family / "base" / name).write_text(json.dumps(fields))

    def recipe(self, folder: Path | None) -> dict[str, Any]:
        """The recipe, with directories below `folder` or with refs."""

        def place(name: str) -> str:
            return name if folder is None else str(folder / name)

        return {
            "base_model": place("base"),
            "gate_mode": "random",
            "dtype": "bfloat16",
            "experts": [{"source_model": place(one.name)} for one in self.models[1:]],
        }

    def mstore(self) -> Run:
        """Make the mixture in a copy of the store."""
        file = self.work / "ours.yml"
        file.write_text(json.dumps(self.recipe(None)))  # JSON is YAML
        with self.store.copy(self.work / "round") as copy:
            ready(WARM_GIGABYTES)
            return copy.mstore("--json", "moe", "--recipe", str(file), "--name", "moe")

    def mergekit(self) -> tuple[Run, int]:
        """Make it with mergekit-moe; also the bytes that it wrote."""
        file, out = self.work / "theirs.yml", self.work / "merged"
        file.write_text(json.dumps(self.recipe(self.family)))
        ready(WARM_GIGABYTES)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        words = [str(self.program), str(file), str(out), "--device", "cpu"]
        try:
            done = run([*words, "--no-copy-tokenizer"], env=environment | {"HF_HUB_OFFLINE": "1"})
            return done, sum(one.stat().st_size for one in out.iterdir())
        finally:
            shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    parser = options(__doc__, rounds=3, millions=1000.0)
    parser.add_argument("--mergekit", type=Path, required=True, help="its mergekit-moe")
    arguments = parser.parse_args()
    work = arguments.work.absolute() / "moe"
    bench = Bench(work, arguments.millions, arguments.mergekit)
    ours, theirs, written = [], [], 0
    for _ in range(arguments.rounds):
        done, written = bench.mergekit()
        theirs.append(done)
        ours.append(bench.mstore())
    (made,) = json.loads(ours[0].output)["made"]
    results = {
        "machine": machine(),
        "versions": peer_versions(arguments.mergekit),
        "millions": arguments.millions,
        "experts": EXPERTS,
        "mergekit": median(theirs),
        "mstore": median(ours),
        "times_faster": spread([a.wall / b.wall for a, b in zip(theirs, ours, strict=True)]),
        "mergekit_bytes": written,
        "mstore_bytes": made["bytes_written"],
        "blocks": made["blocks_total"],
        "blocks_reused": made["blocks_reused"],
    }
    shutil.rmtree(work)
    keep(arguments.results, "moe", results)


if __name__ == "__main__":
    main()
