"""add, merge and mount on a generated family of 300 M parameters, beside plain tools.

    python bench/spine.py WORK [--rounds 5] [--millions 300]

Writes and prints bench/results/spine.json.  WORK is a directory on a local disk with
about 8 GB free; the family in it is kept for the next run.  Peers run in the same round as what
they are compared with, in turn.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import Run, drop_cache, keep, machine, median, options, run, warm_memory
from store import Store

EXPERTS = 4
METHODS = (("ties", ("density=0.2",)), ("linear", ()))
SHARD = "model-00001-of-00003.safetensors"
READ = 1 << 20
WARM_GIGABYTES = 3


class Bench:
    """One directory of work, one store in it."""

    def __init__(self, work: Path, millions: float) -> None:
        self.work = work
        self.family = work / f"family{millions:g}"
        self.store = Store(work / "store")
        write_family(self.family, millions, [BASE, *(dense(k) for k in range(EXPERTS))])
        self.plain_bytes = sum(f.stat().st_size for f in (self.family / "base").iterdir())

    # -- add ---------------------------------------------------------------------------------

    def copy_and_hash(self) -> Run:
        """What people do without a store: cp, then b3sum of the copy, synced to the disk."""
        copy = self.work / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        script = 'cp -r "$1" "$2" && sync -d "$2"/* && b3sum "$2"/* > /dev/null'
        done = run(["sh", "-c", script, "sh", str(self.family / "base"), str(copy)])
        shutil.rmtree(copy)
        return done

    def add(self) -> Run:
        self.store.make()
        return self.store.add(self.family / "base", "base")

    def add_expert(self) -> Run:
        """An expert with its base: blocks compared and statistics taken in the same pass."""
        self.add()
        return self.store.add(self.family / "expert0", "expert0")

    # -- merge -------------------------------------------------------------------------------

    def full_store(self) -> None:
        """Base and all experts."""
        self.add()
        for number in range(EXPERTS):
            self.store.add(self.family / f"expert{number}", f"expert{number}")

    def merge(self, method: str, parameters: tuple[str, ...]) -> tuple[Run, int]:
        """Plan and merge all experts at full budget, from the page cache, into a fresh copy."""
        words = [f"--expert=expert{k}" for k in range(EXPERTS)]
        words += [word for p in parameters for word in ("--param", p)]
        words += ["--method", method, "--name", method]
        with self.store.copy(self.work / "round") as store:
            os.sync()
            warm_memory(WARM_GIGABYTES)
            done = store.mstore("--json", "merge", "--base", "base", *words)
        told = json.loads(done.output)
        return done, told["expert_bytes_read"] + told["analyze_bytes_read"]

    # -- mount -------------------------------------------------------------------------------

    def mount_rates(self, rounds: int) -> dict[str, dict[str, float]]:
        """MB/s of sequential reads and of a mapped sum, cold and warm, mount beside plain file."""
        point = self.work / "mnt"
        point.mkdir(exist_ok=True)
        plain = self.family / "base" / SHARD
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, evicted in (("plain", plain), ("mount", self.store.path / "packs")):
                for way, reader in (("read", read_through), ("mmap", map_through)):
                    drop_cache(evicted)
                    if name == "mount":
                        self.store.mstore("mount", "base", str(point))
                    path = plain if name == "plain" else point / SHARD
                    try:
                        rates.setdefault(f"{name} cold {way}", []).append(reader(path))
                        rates.setdefault(f"{name} warm {way}", []).append(reader(path))
                    finally:
                        if name == "mount":
                            self.store.mstore("unmount", str(point))
        return {
            key: {"mb_s": statistics.median(found), "min": min(found), "max": max(found)}
            for key, found in rates.items()
        }


def read_through(path: Path) -> float:
    """MB/s of reading a file from end to end in a process of its own."""
    script = (
        "import sys,os\n"
        f"fd=os.open(sys.argv[1],os.O_RDONLY);b=bytearray({READ})\n"
        "while os.readv(fd,[b]): pass\n"
    )
    return _rate(path, script)


def map_through(path: Path) -> float:
    """MB/s of touching every page of a mapped file, in order."""
    script = (
        "import sys,mmap\n"
        "f=open(sys.argv[1],'rb');m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ)\n"
        "m.madvise(mmap.MADV_SEQUENTIAL);n=0\n"
        "for i in range(0,len(m),4096): n+=m[i]\n"
    )
    return _rate(path, script)


def _rate(path: Path, script: str) -> float:
    size = path.stat().st_size
    began = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", script, str(path)], check=True)
    return size / (time.perf_counter() - began) / 1e6


def in_turn(rounds: int, *what: Callable[[], Run]) -> list[list[Run]]:
    """Rounds of all, in turn, after one round that does not count."""
    found: list[list[Run]] = [[] for _ in what]
    for number in range(rounds + 1):
        for runs, call in zip(found, what, strict=True):
            warm_memory(WARM_GIGABYTES)
            done = call()
            if number:
                runs.append(done)
    return found


def main() -> None:
    arguments = options(__doc__, rounds=5, millions=300.0).parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions)
    results: dict[str, object] = {
        "machine": machine(),
        "plain_bytes": bench.plain_bytes,
        "experts": EXPERTS,
        "rounds": arguments.rounds,
    }
    peer, add, expert = in_turn(arguments.rounds, bench.copy_and_hash, bench.add, bench.add_expert)
    results["add"] = {
        "cp + b3sum": median(peer),
        "mstore add": median(add),
        "mstore add --base": median(expert),
    }
    bench.full_store()
    results["merge"] = merges(bench, arguments.rounds)
    results["mount"] = bench.mount_rates(arguments.rounds)
    shutil.rmtree(bench.store.path)
    keep(arguments.results, "spine", results)


def merges(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Each method: medians, and the expert bytes that it read."""
    found = {}
    for method, parameters in METHODS:
        runs = [bench.merge(method, parameters) for _ in range(rounds + 1)][1:]
        found[method] = {**median([r for r, _ in runs]), "expert_bytes": runs[0][1]}
    return found


if __name__ == "__main__":
    main()
