"""The limit of this machine for add, checkout and merges, and how near mstore comes to it.

    python bench/limits.py WORK [--rounds 5] [--millions 300]

Writes and prints bench/results/limits.json.  WORK is a directory on a local disk with 10 GB free.
Each round measures the parts of the work, each alone on the same bytes (`parts.py`), then runs the
commands.  The limit of a command is the larger of its processor parts, shared by all processors,
and its part of the disk, after the start of an interpreter.  No program that does the same work on
this machine, with these libraries, can be faster; a real one also plans, looks up and publishes.
Page cache warm.  The family is `generate.near`, whose deltas compress.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import parts
from measure import Run, keep, machine, median, options, ready, run, spread, warm_memory
from near_stores import CODECS, EXPERTS, NearStores

METHODS = {"ties": ["--param", f"density={parts.DENSITY}"], "linear": []}
WARM_GIGABYTES = 3
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A command, and the parts that it cannot do without."""

    call: Callable[[], Run]
    processor: tuple[str, ...]
    disk: tuple[str, ...]


class Bench(NearStores):
    """What is measured on them."""

    def __init__(self, work: Path, millions: float) -> None:
        super().__init__(work, millions)
        self.fill()

    # -- commands --------------------------------------------------------------------------------

    def add(self, codec: str, name: str) -> Run:
        """Add the base to an empty store, or an expert to one that has the base."""
        self.scratch.make(codec=codec)
        if name != "base":
            self.scratch.add(self.family / "base", "base")
        ready(WARM_GIGABYTES, *sorted((self.family / name).iterdir()))
        return self.scratch.add(self.family / name, name)

    def check_out(self, codec: str, name: str) -> Run:
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        ready(WARM_GIGABYTES, *self.packs(codec))
        program = [sys.executable, "-m", "mstore_cli", "--no-progress"]
        script = '"$@" && sync -d "$OUT"/*'
        words = [*program, "--store", str(self.store(codec).path), "checkout", name, str(out)]
        done = run(["sh", "-ec", f'OUT="{out}"; {script}', "sh", *words])
        shutil.rmtree(out)
        return done

    def merge(self, codec: str, method: str, out: str | None = None) -> Run:
        """All experts at full budget, into a copy of the store that never merged.

        out: the codec of the output, if it is not that of the store.
        """
        words = [f"--expert=expert{number}" for number in range(EXPERTS)]
        with self.store(codec).copy(self.work / "round") as store:
            ready(WARM_GIGABYTES, *sorted(store.path.rglob("*.pack")))
            return store.mstore(
                *("merge", "--base", "base", *words, "--method", method),
                *(*METHODS[method], "--name", "merged"),
                *([] if out is None else ["--codec", out]),
            )

    def packs(self, codec: str) -> list[Path]:
        return sorted(self.store(codec).path.rglob("*.pack"))

    def works(self) -> dict[str, Work]:
        """Every command that has a limit."""
        found = {
            "add raw base": Work(
                partial(self.add, "raw", "base"), ("read model", "hash model"), ("write model",)
            ),
            "add raw expert": Work(
                partial(self.add, "raw", "expert0"),
                # The base is read and checked, too: the statistics are of the difference.
                ("read model", "hash model", "read model", "hash model", "statistics"),
                ("write model",),
            ),
            "add dense expert": Work(
                partial(self.add, "dense", "expert0"),
                ("read model", "hash model", "hash model", "decode base", "statistics"),
                (),
            ),
        }
        for codec in CODECS:
            for name in ("base", "expert0"):
                needs = ["hash model", *(["read model"] if codec == "raw" else [f"decode {name}"])]
                if codec == "dense" and name != "base":
                    needs += ["decode base"]
                found[f"checkout {codec} {name}"] = Work(
                    partial(self.check_out, codec, name), tuple(needs), ("write model",)
                )
            for method in METHODS:
                needs = [f"read packs {codec}", *["hash model"] * (EXPERTS + 2)]
                needs += [*(["decode all"] if codec == "dense" else []), f"kernel {method}"]
                written = ("write model",)
                found[f"{method} {codec}"] = Work(
                    partial(self.merge, codec, method),
                    tuple(needs),
                    written if codec == "raw" else (),
                )
                if codec != "raw":
                    found[f"{method} {codec}, raw output"] = Work(
                        partial(self.merge, codec, method, "raw"), tuple(needs), written
                    )
        return found

    # -- parts -----------------------------------------------------------------------------------

    def parts(self) -> dict[str, float]:
        """Seconds of each part alone: of the processor in all, or of the disk; and the start."""
        models = [parts.plain(self.family / model.name) for model in self.models]
        warm_memory(WARM_GIGABYTES)
        by_model = self._payloads()
        return {
            "start": parts.start(),
            "read model": parts.read(sorted((self.family / "base").iterdir())),
            "hash model": parts.hashed(models[0]),
            "statistics": parts.measured(models[0], models[1]),
            "decode base": parts.decoded(by_model["base"]),
            "decode expert0": parts.decoded(by_model["expert0"]),
            "decode all": parts.decoded([one for each in by_model.values() for one in each]),
            **{f"read packs {codec}": parts.read(self.packs(codec)) for codec in CODECS},
            **{f"kernel {method}": parts.mixed(method, models) for method in METHODS},
            "write model": parts.written(self.work / "written", self.plain_bytes),
        }

    def _payloads(self) -> dict[str, list[parts.Coded]]:
        """The payloads of each model; each was added by a command of its own, in this order."""
        packs = sorted(self.packs("dense"), key=lambda path: path.stat().st_mtime_ns)
        found: dict[str, list[parts.Coded]] = {}
        payloads = parts.Payloads()
        for pack in packs:
            inside = payloads.of(pack)
            if inside:
                found[self.models[len(found)].name] = inside
        assert len(found) == len(self.models), "a pack for each model"
        return found


def limit(work: Work, seconds: dict[str, float]) -> float:
    """The least that the command can take, in seconds."""
    processor = sum(seconds[name] for name in work.processor) / parts.CORES
    disk = sum(seconds[name] for name in work.disk)
    return seconds["start"] + max(processor, disk)


def compared(
    works: dict[str, Work], rounds: Sequence[tuple[dict[str, float], dict[str, Run]]]
) -> Figures:
    """Medians of each command and of its limit, and of their ratio in one round."""
    found: Figures = {}
    for name, work in works.items():
        runs = [ran[name] for _, ran in rounds]
        limits = [limit(work, seconds) for seconds, _ in rounds]
        found[name] = median(runs) | {
            "limit": statistics.median(limits),
            "ratio": spread([r.wall / least for r, least in zip(runs, limits, strict=True)]),
            "processor": list(work.processor),
            "disk": list(work.disk),
        }
    return found


def measured(bench: Bench, rounds: int) -> Figures:
    """All parts and all commands, in turn, after a round that does not count."""
    works, found = bench.works(), []
    for number in range(rounds + 1):
        seconds = bench.parts()
        ran = {name: work.call() for name, work in works.items()}
        if number:
            found.append((seconds, ran))
    return {
        "parts": {name: spread([s[name] for s, _ in found]) for name in found[0][0]},
        "works": compared(works, found),
    }


def main() -> None:
    given = options(__doc__, rounds=5, millions=300.0).parse_args()
    bench = Bench(given.work.absolute(), given.millions)
    try:
        results: Figures = {
            "machine": machine(),
            "cores": parts.CORES,
            "rounds": given.rounds,
            "millions": given.millions,
            "plain_bytes": bench.plain_bytes,
            "experts": EXPERTS,
            **measured(bench, given.rounds),
        }
    finally:
        bench.close()
    keep(given.results, "limits", results)


if __name__ == "__main__":
    main()
