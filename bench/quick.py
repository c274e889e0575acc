"""The main ratios in under two minutes, beside the recorded ones: did a change make it slower?

    python bench/quick.py [WORK] [--record]

Runs bench/limits.py on a small family and prints each command's wall time as a multiple of this
machine's limit, and of raw where it is dense.  Beside each stands the recorded ratio
(bench/results/quick.json; `--record` writes it).  A small family starts and plans for as long as it
computes, so these ratios are higher than those of docs/benchmarks.md.  It judges nothing: a
machine that is at work on something else gives any figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import limits
from measure import RESULTS, keep, machine

MILLIONS = 100.0
ROUNDS = 2


def ratios(measured: dict[str, Any]) -> dict[str, float]:
    """Each command against its limit, and dense against raw."""
    works = measured["works"]
    found = {f"{name} / limit": work["ratio"]["median"] for name, work in works.items()}
    for name, work in works.items():
        raw = works.get(name.replace("dense", "raw"))
        if "dense" in name and raw is not None:
            found[f"{name} / raw"] = work["wall"] / raw["wall"]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, nargs="?", help="directory on a local disk")
    parser.add_argument("--record", action="store_true", help="write what the next run is beside")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        bench = limits.Bench(Path(work), MILLIONS)
        found = ratios(limits.measured(bench, ROUNDS))
    file = given.results / "quick.json"
    recorded = json.loads(file.read_text())["ratios"] if file.exists() else {}
    for name, now in found.items():
        before = recorded.get(name)
        beside = (
            "" if before is None else f"  recorded {before:6.2f}  change {now / before - 1:+.0%}"
        )
        print(f"{name:36} {now:6.2f}{beside}")
    if given.record:
        keep(given.results, "quick", {"machine": machine(), "ratios": found})


if __name__ == "__main__":
    main()
