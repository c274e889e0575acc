"""Many clients of one remote at once, for as long as asked: is anything ever lost?

    python tests/remote_soak.py --seconds 600

Each worker is a process; where there are many, two share a store. It adds to a branch of its own
and to branches that all share, pushes, fetches and pulls. Where another was first, it takes that
one's commit and adds on top. It tells each push that was acknowledged. At the end the moves that
were told follow each other; a clone has every commit, byte for byte.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fault_proxy import FaultProxy, moto
from proof_models import BLOCK, model_files, write_files
from remote_scenes import URL, settings

from mstore import Store
from mstore.terms.errors import Conflict

WORKERS = 8
SHARED = ("shared/a", "shared/b")
SEEDS = 3
DEADLINE = 300
"""Seconds that one call may take before it counts as stuck, on cores that are much too busy."""
LEAST = 8
"""Calls of a worker, however short the time is: a busy machine skips no kind of call."""


class Worker:
    """One process's work; its log has a line of JSON for each call that returned."""

    def __init__(self, root: Path, name: str, scratch: Path, seed: int) -> None:
        self._root = root
        self._name = name
        self._scratch = scratch / name
        self._draw = random.Random(seed)
        self._spoken = (scratch / f"{name}.log").open("a", buffering=1)
        self._store = Store.open(root)

    def run(self, seconds: float) -> None:
        """Work for so long, and for LEAST calls."""
        began, done = time.monotonic(), 0
        calls = [*[self.push_own] * 3, *[self.push_shared] * 4, self.pull, self.fetch, self.collect]
        while time.monotonic() - began < seconds or done < LEAST:
            done += 1
            call = self._draw.choice(calls)
            # SIGALRM ends the process with every thread's stack.
            signal.alarm(DEADLINE)
            start = time.monotonic()
            self._patiently(call)
            signal.alarm(0)
            self._tell(call=call.__name__, seconds=time.monotonic() - start)
        self._store.close()

    def _patiently(self, call: Callable[[], None]) -> None:
        """Call once more after a conflict: another worker of this store moved the same refs."""
        for attempt in range(20):
            try:
                call()
            except Conflict as error:
                self._tell(conflict=error.what, attempt=attempt)
            else:
                return
        raise AssertionError(f"{call.__name__} never gets through")

    def _tell(self, **what: object) -> None:
        print(json.dumps(what), file=self._spoken)

    def _add(self, name: str) -> None:
        told = [self._draw.randrange(SEEDS), self._draw.randrange(1, 1000)]
        shutil.rmtree(self._scratch, ignore_errors=True)
        source = write_files(self._scratch, model_files(*told))
        base = f"base/{told[0]}"
        self._store.add(source, name=name, base=base, message=json.dumps(told), threads=1)

    def _push(self, name: str) -> None:
        for one in self._store.push("origin", [name]).moved:
            self._tell(ref=one.name, old=str(one.old or ""), new=str(one.new))

    def push_own(self) -> None:
        """One or two commits of a branch that nobody else moves."""
        for _ in range(self._draw.randrange(1, 3)):
            self._add(self._name)
        self._push(self._name)

    def push_shared(self) -> None:
        """A commit of a branch that all move: until this one is on top of the others'."""
        name = self._draw.choice(SHARED)
        for attempt in range(100):
            self._add(name)
            try:
                self._push(name)
            except Conflict as error:
                self._tell(conflict=error.what, attempt=attempt)
                self._store.fetch("origin", [name])
                self._store.reset(name, f"remotes/origin/{name}")
            else:
                return
        raise AssertionError(f"{name} can never be pushed")

    def pull(self) -> None:
        """All branches; those with own commits that are not pushed stay."""
        diverged = self._store.pull("origin").diverged
        assert set(diverged) <= set(SHARED), diverged

    def fetch(self) -> None:
        """All remote refs; one of them is read whole."""
        self._store.fetch("origin")
        ref = self._draw.choice(self._store.refs("remotes/*"))
        check_contents(self._store, ref.name)

    def collect(self) -> None:
        """Garbage of the own store; the remote's, where that can be collected."""
        if self._draw.random() < 0.5:
            self._store.gc()
        else:
            # No time of grace: a second run deletes what the first condemned.
            self._store.remote_gc("origin", reflog_days=0, grace_hours=0)


def check_contents(store: Store, revision: str) -> None:
    """Prove that a snapshot has the files that its message tells."""
    # Another worker of the store may move the ref meanwhile: one snapshot for both.
    shown = store.show(revision)
    wanted = model_files(*json.loads(shown.message))
    found = {path: b"".join(store.read_file(shown.snapshot, path)) for path in wanted}
    assert found == wanted, revision


def work(root: str, name: str, scratch: str, seed: str, seconds: str) -> None:
    """A worker process's main."""
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    Worker(Path(root), name, Path(scratch), int(seed)).run(float(seconds))


def _process(*words: object) -> list[str]:
    code = "import sys, remote_soak; remote_soak.work(*sys.argv[1:])"
    return [sys.executable, "-c", code, *map(str, words)]


def soak(scratch: Path, seconds: float, *, seed: int, workers: int = WORKERS) -> dict[str, object]:
    """Run them all; raises AssertionError about the first thing that does not hold."""
    with moto() as server:
        proxy = FaultProxy(server, "soak")
        try:
            proxy.fill()
            os.environ.update(settings(proxy))
            _begin(scratch)
            names = [f"w{number}" for number in range(workers)]
            _run(scratch, names, seed, seconds)
            return _verdict(scratch, names) | {"requests": len(proxy.log)}
        finally:
            proxy.close()


def _begin(scratch: Path) -> None:
    """Make the remote, with bases and shared branches."""
    with Store.init(scratch / "first", block_size=BLOCK) as store:
        for number in range(SEEDS):
            source = write_files(scratch / "source", model_files(number))
            told = json.dumps([number])
            store.add(source, name=f"base/{number}", message=told, threads=1)
        for name in SHARED:
            store.reset(name, "base/0")
        store.add_remote("origin", URL)
        store.push("origin", every=True)


def _run(scratch: Path, names: Sequence[str], seed: int, seconds: float) -> None:
    """Start the processes of these names and wait."""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    stores = -(-len(names) * 3 // 4)
    try:
        for number, name in enumerate(names):
            root = scratch / f"store-{number % stores}"
            if not root.exists():
                Store.clone(URL, root)
            with (scratch / f"{name}.errors").open("w") as errors:
                command = _process(root, name, scratch, seed + number, seconds)
                processes[name] = subprocess.Popen(command, stderr=errors, env=path)
        for name, process in processes.items():
            if process.wait():
                told = (scratch / f"{name}.errors").read_text()
                raise AssertionError(f"{name} ended with {process.returncode}: {told}")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _verdict(scratch: Path, names: Sequence[str]) -> dict[str, object]:
    calls: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    told: dict[str, set[tuple[str, str]]] = {}
    for name in names:
        for line in map(json.loads, (scratch / f"{name}.log").read_text().splitlines()):
            if "ref" in line:
                moves = told.setdefault(line["ref"], set())
                assert (line["old"], line["new"]) not in moves
                moves.add((line["old"], line["new"]))
            if "call" in line:
                calls[line["call"]] += 1
                slowest[line["call"]] = max(slowest.get(line["call"], 0), line["seconds"])
            if "conflict" in line:
                calls["conflicts"] += 1
    Store.clone(URL, scratch / "last")
    with Store.open(scratch / "last") as store:
        assert store.fsck(read_data=True).problems == ()
        heads = {ref.name: str(ref.snapshot) for ref in store.refs()}
        for name, moves in told.items():
            _check_order(name, moves, heads[name])
            ancestors = {str(entry.snapshot) for entry in store.log(name)}
            assert {new for _, new in moves} <= ancestors, f"{name} lost commits"
        for name in heads:
            check_contents(store, name)
    pushes = sum(map(len, told.values()))
    return {"calls": dict(calls), "slowest": slowest, "pushes": pushes, "branches": len(heads)}


def _check_order(name: str, moves: set[tuple[str, str]], head: str) -> None:
    """Prove that moves follow each other, and that the last one made the head."""
    after = dict(moves)
    assert len(after) == len(moves), f"two pushes moved {name} from the same commit"
    [start] = set(after) - set(after.values())
    length = 0
    while start in after:
        start, length = after[start], length + 1
    assert length == len(moves), f"the moves of {name} are no chain"
    assert start == head, f"{name} is not where the last push moved it"


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(f"seed {asked.seed}", flush=True)
        for key, value in soak(Path(scratch), asked.seconds, seed=asked.seed).items():
            print(key, value)


if __name__ == "__main__":
    main()
