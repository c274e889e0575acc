"""What a small tensor costs to add, plan and merge, without starting Python: calls in one process.

    python bench/small_calls.py WORK --before CHECKOUT [--rounds 3]
                                [--tensors 2000 4000] [--codec raw]

Writes and prints bench/results/small_calls.json.  The families of `small.py`; what a plan, a
store or a set of statistics is named must be the same in both versions.  A round is a process of
each version, one after the other; processor time of the whole process during a call, divided by
the tensors.  Every plan is of a copy of the store, after one that only warms the process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import keep, machine, options, spread
from small import METHODS, NAMES, ROOT, write_family

EXPERTS = list(NAMES[1:])
PLANS = (("ties", "100%"), ("ties", "50%"), ("dare_ties", "100%"), ("linear", "50%"))
TRIMMED = {"density": 0.2}
Took = dict[str, list[float]]


def one_round(work: Path, tensors: int, codec: str) -> dict[str, Any]:
    """Milliseconds a tensor of each call, and a digest of what all of them gave."""
    from mstore import Store
    from mstore.blocks import lmdb_check

    family, store = work / f"family{tensors}", work / f"store{tensors}-{codec}"
    own = work / f"own-{os.getpid()}"
    took: Took = {}
    given: list[object] = []
    # As the command line has it.
    gc.set_threshold(100_000, 10, 10)

    def timed(task: str | None, call: Callable[[], Any]) -> Any:
        gc.collect()
        gc.freeze()
        began = time.process_time()
        found = call()
        if task is not None:
            took.setdefault(task, []).append(1000 * (time.process_time() - began) / tensors)
        return found

    def copied() -> None:
        shutil.rmtree(own, ignore_errors=True)
        subprocess.run(["cp", "-r", str(store), str(own)], check=True)
        # A large index is walked where it is new, and a copy is: no cost of a plan.
        for file in own.rglob(lmdb_check.DATA):
            lmdb_check.require_sound(file.parent, "")

    def called(method: str, /, *given: Any, **named: Any) -> Callable[[], Any]:
        def call() -> Any:
            with Store.open(own) as opened:
                return getattr(opened, method)(*given, **named)

        return call

    tasks = (None, *(f"plan {method} {budget}" for method, budget in PLANS))
    for task, (method, budget) in zip(tasks, (PLANS[0], *PLANS), strict=True):
        copied()
        parameters = TRIMMED if "density=0.2" in METHODS[method] else {}
        asked = _request(method, parameters, budget)
        plan = timed(task, called("plan", asked)).plan
        merged = timed(task and task.replace("plan", "merge"), called("merge", plan, name="merged"))
        given += [plan, merged.manifest]
    copied()
    swept = timed("plan --sweep", called("sweep", _request("ties", TRIMMED)))
    given += [(point.planned_expert_bytes, point.error_estimate) for point in swept.points]
    given.append(timed("diff", called("diff", "base", EXPERTS[0])).tensors)
    shutil.rmtree(own)
    Store.init(own, codec=codec).close()
    for number, name in enumerate(NAMES):
        base = "base" if number else None
        # The first one with a base warms the process, too.
        task = {0: "add", 1: None}.get(number, "add --base")
        added = timed(task, called("add", family / name, name=name, base=base))
        given.append(added.manifest)
    shutil.rmtree(own)
    return {"took": took, "gave": hashlib.sha256(repr(given).encode()).hexdigest()}


def _request(method: str, parameters: dict[str, float], budget: str | None = None) -> Any:
    from mstore import MergeRequest

    given = {"method": method, "parameters": parameters, "budget": budget}
    return MergeRequest(base="base", experts=EXPERTS, **given)


def main() -> None:
    if sys.argv[1:2] == ["round"]:
        work, tensors, codec = sys.argv[2:]
        print(json.dumps(one_round(Path(work), int(tensors), codec)))
        return
    parser = options(__doc__, rounds=3, millions=0.0)
    parser.add_argument("--before", type=Path, required=True, help="an earlier version's checkout")
    parser.add_argument("--codec", default="raw", choices=("auto", "raw"))
    parser.add_argument("--tensors", type=int, nargs="*", default=[2_000, 4_000])
    given = parser.parse_args()
    work = given.work.absolute() / "small_calls"
    path = given.results / "small_calls.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"families": {}}
    results["machine"] = machine()
    for tensors in given.tensors:
        _fill(work, tensors, given.codec)
        rounds = [
            {name: _ran(checkout, work, tensors, given.codec) for name, checkout in sides}
            for sides in [(("before", given.before.resolve()), ("now", ROOT))] * given.rounds
        ]
        results["families"][f"{tensors}, {given.codec}"] = told(rounds)
        keep(given.results, "small_calls", results)
    shutil.rmtree(work)


def told(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the median of the ratios of the rounds; raises where the versions disagree."""
    if len({one[name]["gave"] for one in rounds for name in one}) != 1:
        raise SystemExit("the two versions do not give the same")
    found: dict[str, Any] = {"rounds": len(rounds), "tasks": {}}
    for task in rounds[0]["now"]["took"]:
        sides = {
            name: [statistics.median(one[name]["took"][task]) for one in rounds]
            for name in ("before", "now")
        }
        ratios = [now / before for before, now in zip(*sides.values(), strict=True)]
        found["tasks"][task] = {
            **{name: spread(values) for name, values in sides.items()},
            "ratio": statistics.median(ratios),
        }
    return found


def _fill(work: Path, tensors: int, codec: str) -> None:
    """The family and a store of it."""
    from mstore import Store

    family, store = work / f"family{tensors}", work / f"store{tensors}-{codec}"
    if not family.exists():
        write_family(family, tensors)
    shutil.rmtree(store, ignore_errors=True)
    with Store.init(store, codec=codec) as made:
        for name in NAMES:
            made.add(family / name, name=name, base=None if name == "base" else "base")


def _ran(checkout: Path, work: Path, tensors: int, codec: str) -> dict[str, Any]:
    """One round of one version."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "round", str(work), str(tensors), codec]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
