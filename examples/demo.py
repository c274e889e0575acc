"""The whole of mstore on a real family of models, in the commands that a person would type.

    python examples/demo.py [DIR] [--quick]

Trains a base and three experts (examples/family.py), adds them to a store, merges them under a
budget, shows the lineage, mounts the merge, and has transformers load the mounted directory,
measure it and generate text from it.  Everything is below DIR (default: demo/); a family that
was trained there before is used again, the store is made anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from family import (
    QUICK,
    SHORT,
    Family,
    Member,
    domain_losses,
    load,
    silence_transformers,
    train_family,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ("def ", "The ", "12 + 7 = ")
# Greedy, so that the same family says the same; the penalty keeps a small model off its loops.
GENERATION = {"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.2}
MSTORE = (sys.executable, "-m", "mstore_cli")


class Shell:
    """Runs mstore commands in one directory and shows them as a person would see them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environment = {**os.environ, "MSTORE_STORE": "", "NO_COLOR": "1"}

    def run(self, *words: str, check: bool = True) -> int:
        """Show and run `mstore WORDS`; returns its exit status."""
        print(f"\n$ mstore {' '.join(words)}", flush=True)
        done = subprocess.run(
            [*MSTORE, "--no-progress", *words],
            cwd=self._directory,
            env=self._environment,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(f"demo: mstore {words[0]} failed (exit {done.returncode})")
        return done.returncode


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


class Progress:
    """How far training is: on a terminal a line that is written over, elsewhere lines now and then.

    A line says what is trained, how many steps are done, and how long that took.
    """

    SECONDS = 10.0
    """Between two lines, where what was printed stays."""

    def __init__(self) -> None:
        self._over = sys.stdout.isatty()
        self._name = ""
        self._began, self._told = 0.0, -math.inf

    def __call__(self, name: str, step: int, steps: int) -> None:
        now = time.monotonic()
        if name != self._name:
            self._name, self._began, self._told = name, now, -math.inf
        if now - self._told < (0.2 if self._over else self.SECONDS) and step < steps:
            return
        self._told = now
        line = f"  {name}: step {step} of {steps}, {now - self._began:.0f} s"
        print(f"\r{line}\033[K" if self._over else line, end="" if self._over else "\n", flush=True)

    def clear(self) -> None:
        """What is printed next begins a line of its own."""
        if self._over:
            print("\r\033[K", end="", flush=True)


def family_in(directory: Path, *, quick: bool) -> None:
    """Train the family unless it lies there already."""
    if (directory / "family.json").exists():
        print(f"using the family in {directory}")
        return
    shutil.rmtree(directory, ignore_errors=True)
    progress = Progress()

    def show(name: str, member: Member) -> None:
        progress.clear()
        own = member.losses.get(name)
        loss = "" if own is None else f", held-out loss on its own domain {own:.3f}"
        print(f"  {name}: {member.steps} steps, {member.seconds:.0f} s{loss}", flush=True)

    family: Family = train_family(
        directory, size=QUICK if quick else SHORT, report=show, progress=progress
    )
    print(f"  {family.parameters / 1e6:.1f} M parameters, {family.seconds:.0f} s in all")


def loss_table(rows: dict[str, dict[str, float]]) -> None:
    """Held-out losses, a model a row, a domain a column."""
    domains = sorted(next(iter(rows.values())))
    width = max(map(len, rows)) + 2
    print(" " * width + "".join(f"{domain:>12}" for domain in domains) + f"{'mean':>12}")
    for name, losses in rows.items():
        cells = [losses[domain] for domain in domains]
        cells.append(sum(cells) / len(cells))
        print(f"{name:<{width}}" + "".join(f"{cell:12.3f}" for cell in cells))


def generate(directory: Path) -> None:
    """Load a directory with transformers, as anyone would, and continue a few prompts."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**inputs, **GENERATION)
        print(f"  {prompt!r} -> {tokenizer.decode(output[0], skip_special_tokens=True)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("demo"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a model of 1 M parameters; for tests")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    shell = Shell(directory)
    mounted = directory / "mnt"

    silence_transformers()
    heading("a base and three experts, trained here")
    family_in(directory / "family", quick=arguments.quick)
    told = json.loads((directory / "family" / "family.json").read_text())
    experts: list[str] = told["domains"]

    heading("add them: equal blocks are stored once")
    if (directory / ".mstore").exists():
        print(f"removing the store of an earlier demo in {directory}")
    shutil.rmtree(directory / ".mstore", ignore_errors=True)
    shell.run("init", "--block-size", "64KiB")
    shell.run("add", "family/base", "--name", "base")
    for name in experts:
        shell.run("add", f"family/{name}", "--name", name, "--base", "base")

    heading("merge them, once whole and once with half of the bytes")
    chosen = [word for name in experts for word in ("--expert", name)]
    ties = ("--base", "base", *chosen, "--method", "ties", "--param", "density=0.5")
    shell.run("merge", *ties, "--name", "merged")
    shell.run("merge", *ties, "--budget", "50%", "--name", "merged-half")

    heading("where did it come from?")
    shell.run("log", "--graph", "merged")
    shell.run("explain", "merged-half", "model.layers.0.mlp.up_proj.weight")
    shell.run("replay", "merged-half")
    shell.run("stats")

    heading("mount it, and load it with transformers")
    mounted.mkdir(exist_ok=True)
    shell.run("mount", "merged", "mnt")
    try:
        rows = {name: member["losses"] for name, member in told["members"].items()}
        rows["merged (mounted)"] = domain_losses(load(mounted), directory / "family")
        print("\nheld-out loss in nats a byte:")
        loss_table(rows)
        print("\ngenerated from the mount:")
        generate(mounted)
    finally:
        shell.run("unmount", "mnt", check=False)
    shell.run("fsck", "--read-data")


if __name__ == "__main__":
    main()
