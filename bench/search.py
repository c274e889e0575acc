"""A search over eight weights, and who broke a merge of eight: beside whole merges one by one.

    python bench/search.py WORK --mergekit VENV/bin/mergekit-yaml [--millions 300] [--trials 50]
        [--peer-trials 5]

Writes and prints bench/results/search.json.  Ours is one `mstore search` by TPE.  Its time outside
the evaluator is its whole time, less what the same evaluator takes for as many plain checkpoints:
computing blocks while the evaluator reads counts as ours.  The peer runs mergekit-yaml on the
recipe filled in, for some of the trials, and its time is that of the merges alone.  mergekit-evolve
also writes every model again at its start, and needs Ray; both are left out.

What is written: how much the store grew, all of it (plans, records, logs, cache, the winner),
against the bytes of the peer's merged models.

The broken merge is that of the same experts, one with a tensor of large values.  One `mstore bisect
run` finds the expert, one the layer of the expert.  The other way leaves out one after another: as
many whole merges by the peer, each of the median time above, and as many evaluations.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ml_dtypes  # numpy's bfloat16, which safetensors asks for
import numpy as np
from generate import BASE, dense, places, write_family
from measure import keep, machine, options, run
from mergekit import merged_by, peer_versions
from safetensors.numpy import load_file, save_file
from store import Store

EXPERTS = 8
NAMES = [f"expert{number}" for number in range(EXPERTS)]
# Reads the whole model, and takes as little time besides as it can.
EVALUATOR = """\
import json, sys
from pathlib import Path
import ml_dtypes, numpy as np
from safetensors import safe_open
loss, goal = 0.0, np.random.default_rng(int(sys.argv[2])).standard_normal(64)
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(file, "np") as model:
        for name in model.keys():
            values = model.get_tensor(name).reshape(-1)
            loss += float(np.abs(values[:64].astype(np.float32) - goal[: values.size]).sum())
            values.view(np.uint16).max()
Path("loss.json").write_text(json.dumps({"loss": loss}))
"""


# Bad, as `git bisect run` has it, is a model with a large value.
JUDGE = """\
import sys
from pathlib import Path
import ml_dtypes, numpy as np
from safetensors import safe_open
largest = 0.0
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(file, "np") as model:
        for name in model.keys():
            largest = max(largest, float(model.get_tensor(name).astype(np.float32).max()))
sys.exit(largest > 1)
"""
BROKEN = "expert5"


RECIPE = "merge_method: task_arithmetic\nbase_model: base\ndtype: bfloat16\nmodels:\n" + "".join(
    f"  - {{model: {name}, parameters: {{weight: {{min: 0, max: 1}}}}}}\n" for name in NAMES
)


def size_of(directory: Path) -> int:
    """Bytes of all files, as they lie on the disk."""
    files = (one for one in directory.rglob("*") if one.is_file())
    return sum(one.stat().st_blocks * 512 for one in files)


def evaluator(work: Path, family: Path, program: str) -> float:
    """Seconds that an evaluator takes for a plain checkpoint, the median of five."""
    words = [sys.executable, str(work / program), str(family / NAMES[0]), "1"]
    seconds = []
    for _ in range(5):
        here = work / "evaluated"
        here.mkdir(exist_ok=True)
        seconds.append(run(["env", f"--chdir={here}", *words]).wall)
    return statistics.median(seconds)


def searched(work: Path, store: Store, trials: int, seconds: float) -> dict[str, Any]:
    """One search, into the store."""
    (work / "search.yml").write_text(RECIPE)
    command = shlex.join([sys.executable, str(work / "evaluate.py"), "{}"])
    before = size_of(store.path)
    done = store.mstore(
        *("--json", "search", "--recipe", str(work / "search.yml"), "--name", "best"),
        *("--trials", str(trials), "--minimize", "--score", "loss.json:loss"),
        *("--eval", f"{command} 1", "--report-eval", f"{command} 2"),
    )
    found = json.loads(done.output)
    evaluations = found["evaluated"] + len(found["reported"])
    return {
        "wall": done.wall,
        "cpu": done.cpu,
        "evaluations": evaluations,
        "outside": done.wall - evaluations * seconds,
        "written": size_of(store.path) - before,
        "winner_written": found["bytes_written"],
    }


def merged(program: Path, work: Path, family: Path, trials: int) -> dict[str, Any]:
    """Whole merges of random candidates by the peer: seconds of each, and bytes of one."""
    draw = random.Random(0)
    runs = []
    for _ in range(trials):
        recipe: dict[str, Any] = {
            "merge_method": "task_arithmetic",
            "base_model": str(family / "base"),
            "dtype": "bfloat16",
            "models": [
                {"model": str(family / name), "parameters": {"weight": draw.random()}}
                for name in NAMES
            ],
        }
        runs.append(merged_by(program, recipe, work, family))
    plain = sum(one.stat().st_size for one in (family / "base").glob("*.safetensors"))
    return {"wall": statistics.median(one.wall for one in runs), "bytes": plain}


def broken(work: Path, store: Store, family: Path) -> None:
    """Merge the experts, one of them with large values in a tensor of a middle layer."""
    bad = work / "broken"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(family / BROKEN, bad)
    names = json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"]
    projections = [one for one in names if "down_proj" in one]
    name = projections[len(projections) // 2]
    file = bad / names[name]
    tensors = load_file(file)
    tensors[name] = np.full(tensors[name].shape, 100, ml_dtypes.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    store.add(bad, "broken")
    shutil.rmtree(bad)
    experts = ["broken" if name == BROKEN else name for name in NAMES]
    weights = [word for one in experts for word in ("--expert", f"{one}=0.3")]
    store.mstore("merge", "--method", "task_arithmetic", "--base", "base", *weights, "--name", "m")


def found(work: Path, store: Store, by: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """One bisection: what it took, and what it found."""
    judge = [sys.executable, str(work / "judge.py"), "{}"]
    done = store.mstore("--json", "bisect", "run", *by, "m", "--", *judge)
    told = json.loads(done.output)
    return {
        "wall": done.wall,
        "cpu": done.cpu,
        "probes": told["probes"],
        "culprits": told["culprits"],
        "outside": done.wall - told["probes"] * seconds,
    }


def main() -> None:
    parser = options(__doc__, rounds=1, millions=300.0)
    parser.add_argument("--mergekit", type=Path, required=True, help="its mergekit-yaml")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--peer-trials", type=int, default=5)
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    family, store = work / f"family{arguments.millions:g}", Store(work / "store")
    models = [BASE, *(dense(number) for number in range(EXPERTS))]
    write_family(family, arguments.millions, models)
    store.make()
    for model in models:
        store.add(family / model.name, model.name)
    (work / "evaluate.py").write_text(EVALUATOR)
    (work / "judge.py").write_text(JUDGE)
    seconds = evaluator(work, family, "evaluate.py")
    ours = searched(work, store, arguments.trials, seconds)
    theirs = merged(arguments.mergekit, work, family, arguments.peer_trials)
    judged = evaluator(work, family, "judge.py")
    broken(work, store, family)
    layers = len({place.layer for place in places(arguments.millions)})
    one_by_one = theirs["wall"] + judged
    bisections = {
        what: {
            **found(work, store, by, judged),
            "units": units,
            "one_by_one": units * one_by_one,
        }
        for what, by, units in (
            ("experts", ("--experts",), EXPERTS),
            ("layers of experts", ("--experts", "--layers"), EXPERTS * layers),
        )
    }
    results = {
        "machine": machine(),
        "versions": peer_versions(arguments.mergekit),
        "millions": arguments.millions,
        "trials": arguments.trials,
        "peer_trials": arguments.peer_trials,
        "evaluator": seconds,
        "mstore": ours,
        "mergekit": theirs,
        "judge": judged,
        "bisections": bisections,
        "time_share": ours["outside"] / (theirs["wall"] * arguments.trials),
        "bytes_share": ours["written"] / (theirs["bytes"] * arguments.trials),
    }
    shutil.rmtree(store.path)
    keep(arguments.results, "search", results)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as failed:
        sys.exit(f"{failed}\n{failed.output}")
