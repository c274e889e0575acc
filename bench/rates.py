"""add and checkout beside plain tools, raw and dense; merging and mounting a dense family.

    python bench/rates.py WORK [--rounds 5] [--millions 300] [--small] [--before CHECKOUT]

Writes and prints bench/results/rates.json.  WORK is a directory on a local disk with 10 GB free.
Needs b3sum (`apt install b3sum`) and, for the mount, FUSE.  The family is `generate.near`: a base
and four experts whose deltas compress.  Page cache warm, as many threads as cores in every program.
Peers run in the same round as what they are compared with, in turn; a ratio is the median of the
ratios of the rounds.  `cp` and `checkout` are followed by `sync -d` of what they wrote.  --before:
a checkout of another version, with its kernels, measured in the same rounds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import Run, keep, machine, median, options, run, spread, warm_memory
from near_stores import CODECS, EXPERTS, NearStores
from spine import SHARD, map_through, read_through

WARM_GIGABYTES = 3
METHODS = {"ties": ["--param", "density=0.2"], "linear": []}
Figures = dict[str, Any]


class Bench(NearStores):
    """What is measured on them."""

    # -- add -----------------------------------------------------------------------------------

    def copy_and_hash(self) -> Run:
        """cp, and b3sum of the copy, synced."""
        copy = self.work / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        script = 'cp -r "$1" "$2" && sync -d "$2"/* && b3sum "$2"/* > /dev/null'
        done = run(["sh", "-ec", script, "sh", str(self.family / "expert0"), str(copy)])
        shutil.rmtree(copy)
        return done

    def add_base(self, codec: str) -> Run:
        self.scratch.make(codec=codec)
        return self.scratch.add(self.family / "base", "base")

    def add_expert(self, codec: str) -> Run:
        """Against a base that is there: blocks compared, statistics taken, deltas if dense."""
        self.add_base(codec)
        return self.scratch.add(self.family / "expert0", "expert0")

    # -- checkout --------------------------------------------------------------------------------

    def copied(self) -> Run:
        return self._out('cp -r "$1" "$2"', str(self.family / "expert0"))

    def checked_out(self, codec: str, name: str) -> Run:
        store = self.store(codec)
        words = shlex.join([*store.command(), "checkout", name])
        return self._out(f'{words} "$2"', str(store.path), store.environment())

    def _out(self, command: str, source: str, env: dict[str, str] | None = None) -> Run:
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        script = f'{command} && sync -d "$2"/*'
        done = run(["sh", "-ec", script, "sh", source, str(out)], env=env)
        shutil.rmtree(out)
        return done

    # -- merge and mount -------------------------------------------------------------------------

    def merge(self, codec: str, method: str) -> Run:
        """All experts at full budget, into a fresh copy of the store."""
        words = [f"--expert=expert{number}" for number in range(EXPERTS)]
        words += ["--method", method, *METHODS[method], "--name", "merged"]
        with self.store(codec).copy(self.work / "round") as store:
            os.sync()
            warm_memory(WARM_GIGABYTES)
            return store.mstore("merge", "--base", "base", *words)

    def mount_rates(self, rounds: int) -> Figures:
        """MB/s of one shard of an expert through a fresh mount, packs in the page cache."""
        point = self.work / "mnt"
        point.mkdir(exist_ok=True)
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for codec in CODECS:
                for way, reader in (("read", read_through), ("mmap", map_through)):
                    self.store(codec).mstore("mount", "expert0", str(point))
                    try:
                        for time in ("first", "again"):
                            found = reader(point / SHARD)
                            rates.setdefault(f"{codec} {time} {way}", []).append(found)
                    finally:
                        self.store(codec).mstore("unmount", str(point))
        return {key: spread(found) for key, found in rates.items()}


def in_turn(rounds: int, what: dict[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """Rounds of all, in turn, after one round that does not count."""
    found: dict[str, list[Run]] = {name: [] for name in what}
    for number in range(rounds + 1):
        for name, call in what.items():
            warm_memory(WARM_GIGABYTES)
            done = call()
            if number:
                found[name].append(done)
    return found


def beside(runs: dict[str, list[Run]], peer: str) -> Figures:
    """Medians of each, and the ratio of its wall time to the peer's."""
    return {
        name: median(each) | {"ratio": spread(ratios(each, runs[peer]))}
        for name, each in runs.items()
    }


def ratios(ours: Sequence[Run], peers: Sequence[Run]) -> list[float]:
    return [a.wall / b.wall for a, b in zip(ours, peers, strict=True)]


def main() -> None:
    parser = options(__doc__, rounds=5, millions=300.0)
    parser.add_argument("--small", action="store_true", help="one round of one layer")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.millions = 1, 70.0
    bench = Bench(given.work.absolute(), given.millions)
    versions = {"": bench}
    if given.before:
        versions[", before"] = Bench(bench.work, given.millions, given.before.absolute())
    adds: dict[str, Callable[[], Run]] = {"cp + b3sum": bench.copy_and_hash}
    outs: dict[str, Callable[[], Run]] = {"cp -r": bench.copied}
    merges: dict[str, dict[str, Callable[[], Run]]] = {method: {} for method in METHODS}
    for codec in CODECS:
        for words, one in versions.items():
            adds[f"{codec} base{words}"] = partial(one.add_base, codec)
            adds[f"{codec} expert{words}"] = partial(one.add_expert, codec)
            outs[f"{codec} base{words}"] = partial(one.checked_out, codec, "base")
            outs[f"{codec} expert{words}"] = partial(one.checked_out, codec, "expert0")
            for method, own in merges.items():
                own[f"{codec}{words}"] = partial(one.merge, codec, method)
    results: Figures = {
        "machine": machine(),
        "threads": len(os.sched_getaffinity(0)),
        "rounds": given.rounds,
        "plain_bytes": bench.plain_bytes,
        "experts": EXPERTS,
        "add": beside(in_turn(given.rounds, adds), "cp + b3sum"),
    }
    for one in versions.values():
        one.fill()
    results["stored_bytes"] = {
        codec: sum(path.stat().st_size for path in bench.store(codec).path.rglob("*.pack"))
        for codec in CODECS
    }
    results["checkout"] = beside(in_turn(given.rounds, outs), "cp -r")
    for method, own in merges.items():
        results[method] = beside(in_turn(given.rounds, own), "raw")
    results["mount"] = bench.mount_rates(given.rounds)
    for one in versions.values():
        one.close()
    keep(given.results, "rates", results)


if __name__ == "__main__":
    main()
