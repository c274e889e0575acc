"""Many processes at work in one store at once, for as long as asked: is anything ever lost?

    python tests/soak.py --seconds 600

Each worker owns the refs below its own name and reads those of all.  What a snapshot contains can
be told from its message alone (`contents`), so any worker can check any snapshot.  A worker tells
each call that returned in a log of its own; at the end the refs must be as the logs say.  On the
way: each call has a deadline, memory and descriptors of a worker and the store's size are bounded.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof_models import BLOCK, Files, merged_files, model_files, write_files

from mstore import MergeRequest
from mstore.api import Store
from mstore.errors import Conflict, MstoreError
from mstore.ids import SnapshotId

WORKERS = 8
DEADLINE = 120
"""Seconds that one call may take before it counts as stuck, on cores that are much too busy."""
NAMES = ("one", "two", "three")
SEEDS = 3
LEAST = 40
"""Calls of a worker, however short the time is: a busy machine skips no kind of call."""
WARM = 0.3
"""Share of the time after which memory and descriptors are no longer to grow."""


# -- contents ----------------------------------------------------------------------------------


def is_told(found: Files, message: str) -> bool:
    """Whether these are the files of a snapshot with this message; a merge also has a card, and a
    recipe."""
    is_merge = not isinstance(json.loads(message), list)
    card = found.pop("README.md", None) if is_merge else None
    recipe = found.pop("mergekit_config.yml", None) if is_merge else None
    is_card = card is None or b"base_model_relation: merge" in card
    is_card &= recipe is None or b"merge_method: " in recipe
    return is_card and found == contents(message)


def contents(message: str) -> Files:
    """The files of a snapshot with this message."""
    told = json.loads(message)
    if isinstance(told, list):
        return model_files(*told)
    experts = [model_files(*expert) for expert in told["experts"]]
    return merged_files(model_files(*told["base"]), experts, told["weights"])


# -- a worker ----------------------------------------------------------------------------------


class Worker:
    """One process's work; `spoken` is its log, a line of JSON for each call that returned."""

    def __init__(self, root: Path, name: str, scratch: Path, seed: int) -> None:
        self._root = root
        self._name = name
        self._scratch = scratch / name
        self._draw = random.Random(seed)
        self._spoken = (scratch / f"{name}.log").open("a", buffering=1)
        self._mine: dict[str, SnapshotId] = {}

    def run(self, seconds: float) -> None:
        """Work for so long, and for LEAST calls."""
        began = time.monotonic()
        size_then = done = 0
        calls: list[Callable[[Store], None]] = [
            *[self.add] * 6, *[self.merge] * 3, *[self.read] * 6, self.remove, self.remove,
            self.gc, self.prune, self.fsck, self.reset, self.pin, self.pin,
        ]  # fmt: skip
        store = Store.open(self._root)
        while (passed := time.monotonic() - began) < seconds or done < LEAST:
            done += 1
            if self._draw.random() < 0.1:
                store.close()
                store = Store.open(self._root)
            if not size_then and passed > WARM * seconds:
                size_then = _memory()
            call = self._draw.choice(calls)
            # SIGALRM ends the process with every thread's stack.
            signal.alarm(DEADLINE)
            start = time.monotonic()
            self._patiently(call, store)
            signal.alarm(0)
            self._tell(call=call.__name__, seconds=time.monotonic() - start)
        store.close()
        self._tell(
            memory=[size_then, _memory()], descriptors=len(os.listdir("/proc/self/fd")), end=True
        )

    def _patiently(self, call: Callable[[Store], None], store: Store) -> None:
        """Do what the hint of a conflict says: what was counted on was collected, so once more."""
        for attempt in range(20):
            try:
                call(store)
            except Conflict as error:
                self._tell(conflict=str(error), attempt=attempt)
            else:
                return
        raise AssertionError(f"{call.__name__} never gets through")

    def _tell(self, **what: object) -> None:
        print(json.dumps(what), file=self._spoken)

    def _own(self) -> str:
        return f"{self._name}/{self._draw.choice(NAMES)}"

    def add(self, store: Store) -> None:
        """A model of a few seeds, tuned anew, so that there is always something to collect."""
        told = [self._draw.randrange(SEEDS), self._draw.randrange(1, 1000)]
        shutil.rmtree(self._scratch, ignore_errors=True)
        source = write_files(self._scratch, model_files(*told))
        base = f"base/{told[0]}"
        name = self._own()
        added = store.add(source, name=name, base=base, message=json.dumps(told), threads=1)
        self._acknowledged(name, added.snapshot)

    def merge(self, store: Store) -> None:
        """A merge of own experts; sometimes a virtual one."""
        experts, told = [], []
        for name, snapshot in self._mine.items():
            message = json.loads(store.show(str(snapshot)).message)
            if isinstance(message, list):
                experts.append(name)
                told.append(message)
        if not experts:
            return
        seed = told[0][0]
        weights = [1.0, 0.5, 0.25, 0.125][: len(experts)]
        plan = store.plan(
            MergeRequest(
                base=f"base/{seed}",
                experts=list(zip(experts, weights, strict=True)),
                method="task_arithmetic",
                skip=["i"],
            ),
            threads=1,
        )
        message = json.dumps({"base": [seed, 0], "experts": told, "weights": weights})
        name = f"{self._name}/merged"
        merged = store.merge(
            plan, name=name, message=message, virtual=self._draw.random() < 0.3, threads=1
        )
        self._acknowledged(name, merged.snapshot)

    def read(self, store: Store) -> None:
        """All of any ref, by a checkout or a read; a ref that goes meanwhile may stop it."""
        ref = self._draw.choice(store.refs())
        try:
            record = store.show(str(ref.snapshot))
            if self._draw.random() < 0.3:
                target = self._scratch.with_suffix(".out")
                shutil.rmtree(target, ignore_errors=True)
                store.checkout(str(ref.snapshot), target, threads=1)
                found = {path.name: path.read_bytes() for path in target.iterdir()}
            else:
                view = store.view(ref.snapshot)
                found = {path: b"".join(view.stream(path)) for path in view.files}
        except MstoreError:
            if any(now.snapshot == ref.snapshot for now in store.refs()):
                raise
            self._tell(gone=ref.name)
            return
        if not is_told(found, record.message):
            raise AssertionError(f"{ref.name} at {ref.snapshot} has other contents")

    def remove(self, store: Store) -> None:
        """An own ref goes."""
        if self._mine:
            name = self._draw.choice(sorted(self._mine))
            store.remove(name)
            self._acknowledged(name, None)

    def reset(self, store: Store) -> None:
        """An own ref goes to where another is."""
        if len(self._mine) > 1:
            name, other = self._draw.sample(sorted(self._mine), 2)
            self._acknowledged(name, store.reset(name, other).snapshot)

    def gc(self, store: Store) -> None:
        store.gc()

    def pin(self, store: Store) -> None:
        """An own snapshot is pinned, or unpinned if it was: nobody else does that to it."""
        real = [name for name in sorted(self._mine) if not store.show(name).virtual]
        if real:
            name = self._draw.choice(real)
            if store.show(name).pinned:
                store.unpin(name, threads=1)
            else:
                store.pin(name, raw=True, threads=1)

    def prune(self, store: Store) -> None:
        store.prune(keep_last=1, unnamed_inputs=True)

    def fsck(self, store: Store) -> None:
        """Whatever the others do meanwhile, nothing looks like damage."""
        problems = store.fsck().problems
        assert problems == (), problems

    def _acknowledged(self, name: str, snapshot: SnapshotId | None) -> None:
        if snapshot is None:
            del self._mine[name]
        else:
            self._mine[name] = snapshot
        self._tell(ref=name, snapshot=None if snapshot is None else str(snapshot))


def _memory() -> int:
    """Bytes of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def work(root: str, name: str, scratch: str, seed: str, seconds: str) -> None:
    """A worker process's main."""
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    Worker(Path(root), name, Path(scratch), int(seed)).run(float(seconds))


def warm(directory: str, seed: str) -> None:
    """Compile what workers call: eight at once could take longer than a call may."""
    root = Path(directory) / "store"
    _begin(root)
    worker = Worker(root, "w", Path(directory), int(seed))
    with Store.open(root) as store:
        # One to four experts, real and virtual: different kernels.
        for _ in range(12):
            for call in (worker.add, worker.merge, worker.read, worker.gc):
                call(store)


# -- the whole ---------------------------------------------------------------------------------


def _begin(root: Path) -> int:
    """A store with the bases; the bytes of these."""
    live = 0
    with Store.init(root, block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        for number in range(SEEDS):
            files = model_files(number)
            live += sum(map(len, files.values()))
            source = write_files(root.parent / "source", files)
            told = json.dumps([number, 0])
            store.add(source, name=f"base/{number}", message=told, threads=1)
    return live


def soak(scratch: Path, seconds: float, *, seed: int, workers: int = WORKERS) -> dict[str, object]:
    """Run the workers; raises AssertionError about the first thing that does not hold."""
    (scratch / "warm").mkdir()
    subprocess.run(**_process("warm", scratch / "warm", seed), check=True)
    root = scratch / "store"
    live = _begin(root)
    # What all refs hold at most, and as much again that waits for its collection.
    live += workers * (len(NAMES) + 1) * (live // SEEDS)
    processes = []
    for number in range(workers):
        errors = (scratch / f"w{number}.errors").open("w")
        start = _process("work", root, f"w{number}", scratch, seed + number, seconds)
        processes.append(subprocess.Popen(**start, stderr=errors))
    largest = 0
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.5)
            largest = max(largest, _size(root))
            for number, process in enumerate(processes):
                if process.poll():
                    told = (scratch / f"w{number}.errors").read_text()
                    raise AssertionError(f"worker {number} ended with {process.returncode}: {told}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _verdict(root, scratch, workers) | {"largest": largest, "live at most": live}


def _process(call: str, *words: object) -> dict[str, Any]:
    """How to start a process that calls a function of this module."""
    code = f"import sys, soak; soak.{call}(*sys.argv[1:])"
    return {
        "args": [sys.executable, "-c", code, *map(str, words)],
        "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    }


def _verdict(root: Path, scratch: Path, workers: int) -> dict[str, object]:
    refs: dict[str, str | None] = {}
    calls: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    memory = []
    for number in range(workers):
        lines = (scratch / f"w{number}.log").read_text().splitlines()
        for told in map(json.loads, lines):
            if "ref" in told:
                refs[told["ref"]] = told["snapshot"]
            if "call" in told:
                calls[told["call"]] += 1
                slowest[told["call"]] = max(slowest.get(told["call"], 0), told["seconds"])
            if "conflict" in told:
                calls["conflicts"] += 1
            if "gone" in told:
                calls["reads of refs that went"] += 1
            if "end" in told:
                memory.append(told["memory"])
                assert told["descriptors"] < 100, told
    for then, now in memory:
        assert now < then * 1.5 + (64 << 20), f"memory grew from {then} to {now}"
    wanted = {name: snapshot for name, snapshot in refs.items() if snapshot is not None}
    with Store.open(root) as store:
        found = {r.name: str(r.snapshot) for r in store.refs() if not r.name.startswith("base/")}
        assert found == wanted, "the refs are not what was acknowledged"
        store.gc()
        report = store.fsck(read_data=True)
        assert report.problems == ()
        assert report.garbage == ()
        for ref in store.refs():
            view = store.view(ref.snapshot)
            told = {path: b"".join(view.stream(path)) for path in view.files}
            assert is_told(told, store.show(ref.name).message), ref.name
    return {"calls": dict(calls), "slowest": slowest, "memory": memory, "end": _size(root)}


def _size(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(Path(directory) / name).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as scratch:
        print(f"seed {asked.seed}", flush=True)
        for key, value in soak(Path(scratch), asked.seconds, seed=asked.seed).items():
            print(key, value)


if __name__ == "__main__":
    main()
