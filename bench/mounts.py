"""Reading a snapshot: through a mount and from Python, beside the plain files, in turn in one run.

    python bench/mounts.py WORK [--rounds 5] [--millions 300]

Writes and prints bench/results/mounts.json.  WORK needs about 5 GB; the family in it is kept.  What
is read is a fine-tune whose every element differs from its base, in bf16: as plain files, from a
store without compression and from a dense one, where it is coded as differences to its base.

    cold    nothing is in the page cache
    cached  the plain files or the packs are in the page cache; a mount is new
    warm    what the mount showed was read before

`read` reads each safetensors file from front to back, 1 MiB a call.  `load` makes an array of each
tensor and adds up one byte of every page: plain files with `safetensors.numpy.load_file`, stores
with `Snapshot.load`.  Seconds are those of reading, without the start of the program.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from measure import drop_cache, keep, machine, options, ready, spread
from store import Store

CODECS = ("raw", "dense")
STATES = ("cold", "cached", "warm")
WARM_GIGABYTES = 3

READ = """
import sys, time, os
began = time.perf_counter()
buffer = bytearray(1 << 20)
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
print(time.perf_counter() - began)
"""
LOAD_FILES = """
import sys, time, numpy, ml_dtypes
from safetensors.numpy import load_file
began = time.perf_counter()
total = 0
for path in sys.argv[1:]:
    for array in load_file(path).values():
        total += int(array.reshape(-1).view(numpy.uint8)[::4096].sum())
print(time.perf_counter() - began)
"""
LOAD_SNAPSHOT = """
import sys, time, numpy, ml_dtypes, mstore, mstore.load
with mstore.Store.open(sys.argv[1]) as store:
    began = time.perf_counter()
    total = 0
    for array in store[sys.argv[2]].load().values():
        total += int(array.reshape(-1).view(numpy.uint8)[::4096].sum())
    print(time.perf_counter() - began)
"""


def seconds(script: str, *words: str | Path) -> float:
    """Run a script in a fresh process; return the seconds that it prints."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


class Bench:
    """One fine-tune and its base, as plain files and in two stores."""

    def __init__(self, work: Path, millions: float) -> None:
        self.work = work
        models = [BASE, dense(0)]
        family = work / f"family{millions:g}"
        write_family(family, millions, models)
        self.folder = family / models[1].name
        self.name = models[1].name
        self.stores = {codec: Store(work / f"mounts-{codec}") for codec in CODECS}
        for codec, store in self.stores.items():
            store.make(codec=codec)
            for model in models:
                store.add(family / model.name, model.name)
        self.files = sorted(self.folder.glob("*.safetensors"))
        self.nbytes = sum(file.stat().st_size for file in self.files)

    def packs(self, codec: str) -> list[Path]:
        return sorted(self.stores[codec].path.rglob("*.pack"))

    @contextmanager
    def mounted(self, codec: str) -> Iterator[list[Path]]:
        """The safetensors files of a new mount."""
        store, point = self.stores[codec], self.work / "mounted"
        point.mkdir(exist_ok=True)
        store.mstore("mount", self.name, str(point))
        try:
            yield sorted(point.glob("*.safetensors"))
        finally:
            store.mstore("unmount", str(point))

    def state(self, state: str, files: list[Path]) -> None:
        """Bring files at rest into a state."""
        ready(WARM_GIGABYTES, *files)
        if state == "cold":
            drop_cache(*files)

    def round(self) -> dict[str, float]:
        """Every way in every state, in MB/s."""
        found: dict[str, float] = {}

        def note(name: str, taken: float) -> None:
            found[name] = self.nbytes / 1e6 / taken

        for state in STATES[:2]:
            self.state(state, self.files)
            note(f"read plain {state}", seconds(READ, *self.files))
            self.state(state, self.files)
            note(f"load plain {state}", seconds(LOAD_FILES, *self.files))
            for codec in CODECS:
                self.state(state, self.packs(codec))
                with self.mounted(codec) as files:
                    note(f"read {codec} {state}", seconds(READ, *files))
                    if state == "cached":
                        note(f"read {codec} warm", seconds(READ, *files))
                self.state(state, self.packs(codec))
                taken = seconds(LOAD_SNAPSHOT, self.stores[codec].path, self.name)
                note(f"load {codec} {state}", taken)
        found["read plain warm"] = found["read plain cached"]
        return found


def main() -> None:
    arguments = options(__doc__, rounds=5, millions=300.0).parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions)
    rounds = [bench.round() for _ in range(arguments.rounds)]
    results: dict[str, Any] = {
        "machine": machine(),
        "millions": arguments.millions,
        "plain_bytes": bench.nbytes,
        "rounds": len(rounds),
        "speeds": {name: spread([one[name] for one in rounds]) for name in rounds[0]},
        "of_plain": {
            name: statistics.median(one[name] / one[name.replace(codec, "plain")] for one in rounds)
            for codec in CODECS
            for name in rounds[0]
            if f" {codec} " in name
        },
    }
    for store in bench.stores.values():
        shutil.rmtree(store.path)
    keep(arguments.results, "mounts", results)


if __name__ == "__main__":
    main()
