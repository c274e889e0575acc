"""Many processes at work in one store at once, for as long as asked: is anything ever lost?

    python tests/soak.py --seconds 600

Each worker owns the refs below its own name and reads those of all.  What a snapshot contains can
be told from its message alone (`contents`), so any worker can check any snapshot.  A worker tells
each call that returned in a log of its own; at the end the refs must be as the logs say.  On the
way: each call has a deadline, memory and descriptors of a worker and the store's size are bounded.

Readers look at all that through mounts, one of the whole store and some of single snapshots: what
they see is right, and none of their reads takes longer than READ_WITHIN.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import json
import mmap
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proof_models import BLOCK, Files, merged_files, model_files, write_files

from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import Conflict, MstoreError, Unavailable
from mstore.terms.ids import SnapshotId
from mstore_fuse import mounts
from mstore_fuse.fuse_driver import require_fuse

WORKERS = 8
READERS = 2
READ_WITHIN = 10.0
"""Seconds that one read through a mount may take."""
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

    def _calls(self) -> list[Callable[[Store], None]]:
        """What there is to do, as often as it is to be drawn."""
        return [
            *[self.add] * 6, *[self.merge] * 3, *[self.read] * 6, self.remove, self.remove,
            self.gc, self.prune, self.fsck, self.reset, self.pin, self.pin,
        ]  # fmt: skip

    def run(self, seconds: float) -> None:
        """Work for so long, and for LEAST calls."""
        began = time.monotonic()
        size_then = done = 0
        calls = self._calls()
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
            if _is_named(store, ref.snapshot):
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


class Reader(Worker):
    """A process that reads through mounts; `whole` is one of the store, which others read too."""

    def __init__(self, root: Path, name: str, scratch: Path, seed: int) -> None:
        super().__init__(root, name, scratch, seed)
        self._whole = _whole(root)

    def _calls(self) -> list[Callable[[Store], None]]:
        return [*[self.look] * 8, *[self.follow] * 8, self.keep]

    def look(self, store: Store) -> None:
        """All of any snapshot, by its id."""
        ref = self._draw.choice(store.refs())
        self._check(store, ref.snapshot, self._whole / "snapshots" / str(ref.snapshot))

    def follow(self, store: Store) -> None:
        """All of any ref while one of its files is open: it is one snapshot, whatever it is."""
        ref = self._draw.choice(store.refs())
        folder = self._whole / "refs" / ref.name
        try:
            with (folder / "config.json").open("rb"):
                found = self._files(folder)
        except OSError as error:
            # It may have gone, and what it was been collected, before it was opened.
            if store.refs() and any(now == ref for now in store.refs()):
                raise
            self._tell(gone=ref.name, error=errno.errorcode[error.errno or 0])
            return
        config = json.loads(found["config.json"])
        added = [config["seed"], config["tuned"]]
        if "README.md" not in found and not is_told(found, json.dumps(added)):
            raise AssertionError(f"{ref.name} is a mixture, or wrong")

    def keep(self, store: Store) -> None:
        """A mount of a snapshot for some seconds, in which others remove and collect it."""
        ref = self._draw.choice(store.refs())
        point = self._scratch.with_suffix(".mount")
        point.mkdir(exist_ok=True)
        try:
            message = store.show(str(ref.snapshot)).message
            log = _log_of_mounts(self._root)
            mounts.mount(self._root, str(ref.snapshot), point, timeout=DEADLINE, log=log)
        except MstoreError as error:
            # It may have gone, and been pruned or collected, before it was mounted.
            if _is_named(store, ref.snapshot):
                raise
            self._tell(gone=ref.name, error=str(error))
            return
        try:
            for _ in range(10):
                if not is_told(self._files(point), message):
                    raise AssertionError(f"the mount of {ref.snapshot} shows other contents")
                time.sleep(self._draw.random() / 4)
        finally:
            mounts.unmount(point)

    def _check(self, store: Store, snapshot: SnapshotId, folder: Path) -> None:
        try:
            message = store.show(str(snapshot)).message
            found = self._files(folder)
        except (OSError, MstoreError) as error:
            if _is_named(store, snapshot):
                raise
            self._tell(gone=str(snapshot), error=str(error))
            return
        if not is_told(found, message):
            raise AssertionError(f"{folder} has other contents than {snapshot}")

    def _files(self, folder: Path) -> Files:
        return {name: self._contents(folder / name) for name in sorted(os.listdir(folder))}

    def _contents(self, path: Path) -> bytes:
        """A file in one of the ways that there are, half of the time cold."""
        with path.open("rb", buffering=0) as file:
            number, size = file.fileno(), os.fstat(file.fileno()).st_size
            if self._draw.random() < 0.5:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            way = self._draw.random()
            if way < 0.3 and size:
                with mmap.mmap(number, 0, prot=mmap.PROT_READ) as mapped:
                    return self._timed(lambda: mapped[:])
            step = size + 1 if way < 0.6 else self._draw.randrange(5_000, 100_000)
            places = range(0, size, step)
            order = self._draw.sample(places, len(places))
            pieces = {at: self._timed(lambda at=at: os.pread(number, step, at)) for at in order}
            return b"".join(pieces[at] for at in places)

    def _timed(self, read: Callable[[], bytes]) -> bytes:
        began = time.monotonic()
        data = read()
        seconds = time.monotonic() - began
        self._tell(read=len(data), seconds=seconds)
        return data


def _is_named(store: Store, snapshot: SnapshotId) -> bool:
    """Whether a ref still points at this snapshot: if none does, it may be gone."""
    return any(ref.snapshot == snapshot for ref in store.refs())


def _whole(root: Path) -> Path:
    """Where the whole store is mounted."""
    return root.with_name("whole")


def _log_of_mounts(root: Path) -> Path:
    """What goes wrong in any of the mounts: a reader sees no more than EIO, or SIGBUS."""
    return root.with_name("mounts.log")


@contextmanager
def _shown(root: Path) -> Iterator[int | None]:
    """The process that serves a mount of the whole store; None where nothing can be mounted."""
    try:
        require_fuse()
    except Unavailable as missing:
        print(f"no readers of mounts: {missing}", flush=True)
        yield None
        return
    _whole(root).mkdir()
    log = _log_of_mounts(root)
    info = mounts.mount(root, None, _whole(root), timeout=DEADLINE, log=log)
    try:
        yield info.pid
    finally:
        for each in mounts.mounts():
            # Those of readers that were killed too.
            if each.mountpoint.is_relative_to(root.parent.resolve()):
                mounts.unmount(each.mountpoint, lazy=True)


def _memory(process: int | str = "self") -> int:
    """Bytes of anonymous memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def work(root: str, name: str, scratch: str, seed: str, seconds: str) -> None:
    """A worker process's main: a reader, if it is called so."""
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    kind = Reader if name.startswith("r") else Worker
    kind(Path(root), name, Path(scratch), int(seed)).run(float(seconds))


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


def soak(
    scratch: Path, seconds: float, *, seed: int, workers: int = WORKERS, readers: int = READERS
) -> dict[str, object]:
    """Run them all; raises AssertionError about the first thing that does not hold."""
    (scratch / "warm").mkdir()
    subprocess.run(**_process("warm", scratch / "warm", seed), check=True)
    root = scratch / "store"
    live = _begin(root)
    # What all refs hold at most, and as much again that waits for its collection.
    live += workers * (len(NAMES) + 1) * (live // SEEDS)
    with _shown(root) as server:
        names = [f"w{number}" for number in range(workers)]
        if server is not None:
            names += [f"r{number}" for number in range(readers)]
        largest = _run(root, scratch, names, seed, seconds)
        told: dict[str, object] = {"largest": largest, "live at most": live}
        if server is not None:
            told |= {"server": _memory(server), "files of it": _descriptors(server)}
    return _verdict(root, scratch, names) | told


def _run(root: Path, scratch: Path, names: list[str], seed: int, seconds: float) -> int:
    """Start the processes of these names and wait; the largest size of the store meanwhile."""
    processes = {}
    for number, name in enumerate(names):
        errors = (scratch / f"{name}.errors").open("w")
        start = _process("work", root, name, scratch, seed + number, seconds)
        processes[name] = subprocess.Popen(**start, stderr=errors)
    largest = 0
    try:
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.5)
            largest = max(largest, _size(root))
            for name, process in processes.items():
                if process.poll():
                    told = (scratch / f"{name}.errors").read_text() + _told_by_mounts(root)
                    raise AssertionError(f"{name} ended with {process.returncode}: {told}")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return largest


def _told_by_mounts(root: Path) -> str:
    """The log of the mounts but for when they began and ended."""
    log = _log_of_mounts(root)
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return "".join(line for line in lines if "serving" not in line and "has ended" not in line)


def _descriptors(server: int) -> int:
    """The open files of the mount's process, which end with those of its readers."""
    count = len(os.listdir(f"/proc/{server}/fd"))
    assert count < 200, f"the mount has {count} files open"
    return count


def _process(call: str, *words: object) -> dict[str, Any]:
    """How to start a process that calls a function of this module."""
    code = f"import sys, soak; soak.{call}(*sys.argv[1:])"
    return {
        "args": [sys.executable, "-c", code, *map(str, words)],
        "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    }


def _verdict(root: Path, scratch: Path, names: list[str]) -> dict[str, object]:
    refs: dict[str, str | None] = {}
    calls: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    memory = []
    reads, longest = 0, 0.0
    for name in names:
        lines = (scratch / f"{name}.log").read_text().splitlines()
        for told in map(json.loads, lines):
            if "ref" in told:
                refs[told["ref"]] = told["snapshot"]
            if "call" in told:
                calls[told["call"]] += 1
                slowest[told["call"]] = max(slowest.get(told["call"], 0), told["seconds"])
            if "read" in told:
                reads, longest = reads + 1, max(longest, told["seconds"])
            if "conflict" in told:
                calls["conflicts"] += 1
            if "gone" in told:
                calls["reads of refs that went"] += 1
            if "end" in told:
                memory.append(told["memory"])
                assert told["descriptors"] < 100, told
    assert longest < READ_WITHIN, f"a read through a mount took {longest:.1f} s"
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
    return {
        "calls": dict(calls),
        "slowest": slowest,
        "memory": memory,
        "end": _size(root),
        "reads": reads,
        "longest read": longest,
    }


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
