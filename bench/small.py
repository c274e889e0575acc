"""What a tensor costs that is small: families of many tensors of 16 KB, a base and four experts.

    python bench/small.py WORK [--before CHECKOUT [--alone]] [--rounds 3]
                               [--tensors 10 500 2000 4000] [--codec auto]

Writes and prints bench/results/small.json.  --before: an earlier version's checkout, measured in
the same rounds (`git worktree add CHECKOUT REVISION`); --alone: that one and not this.  It takes
long, so figures of whichever is not measured stay as they were, if the machine is the same.
--codec: of the store; raw leaves out what compressing blocks of 16 KB takes.

Every expert moved every tensor.  Commands run as whole processes, page cache warm, each merge on a
copy of the store; the family with the fewest tensors says what a command costs that has nearly
nothing to do, so that what a tensor costs is a slope.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measure import Run, keep, machine, options, run, spread
from store import Store

TENSORS = (10, 500, 2_000, 4_000)
EXPERTS = 4
SHAPE = (64, 128)
NAMES = ("base", *(f"expert{k}" for k in range(EXPERTS)))
METHODS = {
    "ties": ("--method", "ties", "--param", "density=0.2"),
    "dare_ties": ("--method", "dare_ties", "--param", "density=0.2"),
    "task_arithmetic": ("--method", "task_arithmetic"),
    "linear": ("--method", "linear"),
}
HALF = ("ties", "linear")
"""Merged at a budget of one half, too."""
ROOT = Path(__file__).resolve().parent.parent
Took = dict[str, list[Run]]


def write_family(path: Path, tensors: int) -> None:
    """A directory for each of NAMES: one file of `tensors` tensors in bfloat16, all different."""
    elements = SHAPE[0] * SHAPE[1]
    header = {
        f"layers.{k // 8}.part{k % 8}.weight": {
            "dtype": "BF16",
            "shape": SHAPE,
            "data_offsets": (2 * elements * k, 2 * elements * (k + 1)),
        }
        for k in range(tensors)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    weights = np.random.default_rng(1).normal(0, 0.02, tensors * elements)
    for number, name in enumerate(NAMES):
        moved = np.zeros(1)
        if name != "base":
            moved = np.random.default_rng(100 + number).normal(0, 0.001, weights.size)
        bits = (weights + moved).astype("<f4").view("<u4")
        (path / name).mkdir(parents=True)
        with (path / name / "model.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.write((bits >> 16).astype("<u2").data)


class Library(Store):
    """A store used with the command line of one checkout."""

    __slots__ = ("checkout", "codec")

    def __init__(self, path: Path, checkout: Path, codec: str) -> None:
        super().__init__(path)
        object.__setattr__(self, "checkout", checkout)
        object.__setattr__(self, "codec", codec)

    def mstore(self, *words: str) -> Run:
        roots = (self.checkout, *(self.checkout / top for top in ("fuse", "serve", "cli")))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPATH"] = ":".join(map(str, roots))
        # Nor what lies in the directory that this was started in.
        env["PYTHONSAFEPATH"] = "1"
        command = [sys.executable, "-m", "mstore_cli", "--store", str(self.path)]
        return run([*command, "--no-progress", *words], env=env)

    @contextmanager
    def again(self) -> Iterator[Library]:
        """A copy for one merge, without a memo table."""
        with self.copy(self.path.with_name("copy")) as copy:
            yield Library(copy.path, self.checkout, self.codec)


def one_round(store: Library, family: Path, took: Took) -> None:
    """Each command once; the experts are added one after the other, which makes four runs."""

    def note(task: str, done: Run) -> Run:
        took.setdefault(task, []).append(done)
        return done

    store.make(codec=store.codec)
    for name in NAMES:
        task = "add" if name == "base" else "add --base"
        note(task, store.add(family / name, name))
    request = ["--base", "base", *(f"--expert={name}" for name in NAMES if name != "base")]
    for method, words in METHODS.items():
        for budget in ("100%", "50%") if method in HALF else ("100%",):
            with store.again() as copy:
                asked = ["--json", "plan", *request, *words, "--budget", budget]
                made = note(f"plan {method} {budget}", copy.mstore(*asked))
                plan = json.loads(made.output)["plan"]
                merge = ("merge", "--plan", plan, "--name", "merged")
                note(f"merge {method} {budget}", copy.mstore(*merge))
    with store.again() as copy:
        note("plan --sweep", copy.mstore("--json", "plan", *request, *METHODS["ties"], "--sweep"))
    out = store.path.with_name("out")
    note("checkout", store.mstore("checkout", "expert0", str(out)))
    shutil.rmtree(out)
    note("diff", store.mstore("--json", "diff", "base", "expert0"))


def main() -> None:
    parser = options(__doc__, rounds=3, millions=0.0)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--alone", action="store_true", help="measure the earlier version only")
    parser.add_argument("--codec", default="auto", choices=("auto", "raw"))
    parser.add_argument("--tensors", type=int, nargs="*", default=list(TENSORS))
    given = parser.parse_args()
    work = given.work.absolute() / "small"
    libraries = {} if given.alone else {"now": ROOT}
    if given.before is not None:
        libraries["before"] = given.before.resolve()
    results = _earlier(given.results) | {
        "machine": machine(),
        "experts": EXPERTS,
        "tensor_bytes": 2 * SHAPE[0] * SHAPE[1],
    }
    for tensors in given.tensors:
        family = work / "family"
        shutil.rmtree(work, ignore_errors=True)
        write_family(family, tensors)
        took: dict[str, Took] = {name: {} for name in libraries}
        for number in range(given.rounds + 1):
            for name, checkout in libraries.items():
                # The first round compiles what there is to compile, and does not count.
                into = took[name] if number else {}
                if number or tensors == given.tensors[0]:
                    one_round(Library(work / "store", checkout, given.codec), family, into)
        told = results["tensors"].setdefault(str(tensors), {})
        for name, tasks in took.items():
            label = name if given.codec == "auto" else f"{name}, {given.codec}"
            told[label] = {
                task: {
                    "wall": spread([one.wall for one in runs]),
                    "cpu": spread([one.cpu for one in runs]),
                }
                for task, runs in tasks.items()
            }
            told[label]["rounds"] = given.rounds
        keep(given.results, "small", results)
    shutil.rmtree(work)


def _earlier(folder: Path) -> dict[str, Any]:
    """The results that are there, if they are of this machine."""
    path = folder / "small.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found["machine"] == machine():
            return found
    return {"tensors": {}}


if __name__ == "__main__":
    main()
