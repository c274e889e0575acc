"""The coordinator of a merge on a cluster, with receipts of slices that nobody computed.

    python bench/cluster_coordinator.py WORK --layers 32 --experts 20 --budget 10%

A task of `cluster_sim.py`; prints JSON. What is real: the plan, the work list, slices,
`RemoteRunner`, `PushedDelivery`, the commit and the push of records, tables and root to a remote, a
directory. What is not: blocks (their ids are drawn, in the catalog as in the remote's tables), and
the workers: `Pretended` pickles each slice, and returns at once a receipt with a table, ids and
rows of the right size. Its own time is taken off. Seconds are the processor's, of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import planning
from remote_scale import address_objects, model

from mstore import MergeRequest, Store
from mstore.blocks.codecs import Codec
from mstore.blocks.pack_tables import FIELDS
from mstore.blocks.packs import NONCE_BYTES, PAGE, Kind, SentPack, header
from mstore.clusters import at_remote
from mstore.merge.running import finished, runners, task
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.slices import ALL_FINITE, Receipt, Result, Slice
from mstore.remotes import push
from mstore.remotes.layout import PackRow, PackState, TableId, table_name
from mstore.remotes.state import Changes, Remote
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import ID_BYTES, BlockId, PackId

STORED = 160_000
"""Bytes at rest of a block."""
PACK_BLOCKS = 4096
Figures = dict[str, Any]


def anonymous() -> int:
    """Anonymous bytes of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


# The family ---------------------------------------------------------------------------------------


def make(work: Path, size: str, layers: int, experts: int) -> None:
    """A store whose rows, records and statistics are those of a family, and a remote with it."""
    planning.make(work / "store", experts, replace(planning.SIZES[size], layers=layers))
    url = (work / "remote").as_uri()
    with Store.init(work / "small") as store:
        store.add(model(work / "model", 0), name="small")
        store.add_remote("origin", url)
        store.push("origin", every=True)
    with Store.open(work / "store") as store:
        store.add_remote("origin", url)
    catalog = Catalog.open(work / "store")
    remote = Remote("origin", address_objects(url), work / "making")
    remote.make_directory()
    state = remote.state()
    changes, draw = Changes(), np.random.default_rng(5)
    for name in ("base", *(f"expert{k}" for k in range(experts))):
        ids = _ids(catalog, name)
        for start in range(0, len(ids), PACK_BLOCKS):
            data = table(draw, ids[start : start + PACK_BLOCKS])
            id, made = TableId.of(data), state.root.generation + 1
            remote.objects.put_bytes(table_name(made, id), data)
            count = len(ids[start : start + PACK_BLOCKS])
            size_there = PAGE + count * STORED
            place = (made, bytes(id), 0, len(data))
            pack = bytes(PackId.of(data))
            changes.put("packs", PackRow(pack, size_there, PackState.LIVE, 0, count, *place))
    remote.change(state, changes)
    catalog.close()
    shutil.rmtree(work / "making")


def _ids(catalog: Catalog, name: str) -> Any:
    """The blocks of a model, in order; each once."""
    snapshot = catalog.snapshot(catalog.resolve(name))
    manifest = catalog.record(Manifest, snapshot.manifest_id())
    blocks = b"".join(
        catalog.record(Tensor, part.tensor_id()).blocks
        for file in manifest.files
        for part in file.parts[1:]
    )
    return np.frombuffer(blocks, f"V{ID_BYTES}")


def table(draw: np.random.Generator, ids: Any, bases: bytes = b"") -> bytes:
    """The header and table of a pack with these blocks."""
    rows = np.zeros(len(ids), FIELDS)
    order = np.argsort(np.frombuffer(ids.tobytes(), f"S{ID_BYTES}"))
    rows["id"] = np.frombuffer(ids.tobytes(), f"S{ID_BYTES}")[order]
    if bases:
        rows["base"] = np.frombuffer(bases, f"V{ID_BYTES}")[order]
    rows["offset"] = PAGE + order * STORED
    rows["stored"], rows["plain"] = STORED, planning.BLOCK
    rows["kind"], rows["width"] = Kind.BLOCK, 2
    rows["codec"] = Codec.DELTA if bases else Codec.FLOATS
    return header(draw.bytes(NONCE_BYTES)) + rows.tobytes()


# The workers --------------------------------------------------------------------------------------


class Pretended(Executor):
    """Pickles slices, and returns receipts at once.

    seconds: that this took itself. pickling: of slices, and unpickling receipts, which a real
    engine does, too.
    """

    def __init__(self, workers: int) -> None:
        self._max_workers = workers
        self._draw = np.random.default_rng(6)
        self.seconds = self.pickling = 0.0
        self.slices = self.blocks = self.sources = self.sent = self.received = 0

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if run is not runners.execute:
            future.set_result(run(*given, **named))
            return future
        began = time.process_time()
        sent = pickle.dumps(given[0])
        pickled = time.process_time()
        received = pickle.dumps(self._receipt(given[0]))
        made = time.process_time()
        future.set_result(pickle.loads(received))
        ended = time.process_time()
        self.pickling += pickled - began + ended - made
        self.seconds += ended - began
        self.sent += len(sent)
        self.received += len(received)
        return future

    def _receipt(self, slice: Slice) -> Receipt:
        results, bases = [], []
        for run in slice.runs:
            for one, key in zip(run.chunks, run.keys, strict=True):
                count = len(one.base.sources)
                ids = tuple(BlockId(self._draw.bytes(ID_BYTES)) for _ in range(count))
                taken = (0,) * len(run.tensor.quotas)
                value = Remembered.of(one, ids, taken, ALL_FINITE).encode()
                bytes_read = one.expert_bytes
                results.append(
                    Result(run.tensor.name, one.number, ids, key, value, bytes_read, ALL_FINITE)
                )
                bases += [bytes(source.id) for source in one.base.sources]
                self.sources += count + sum(len(row.sources) for row in one.rows)
                self.blocks += count
        ids_all = np.frombuffer(
            b"".join(block for made in results for block in made.blocks), f"V{ID_BYTES}"
        )
        data = table(self._draw, ids_all, b"".join(bases))
        pack = SentPack(PackId.of(data), PAGE + len(ids_all) * STORED, data)
        self.slices += 1
        worker = f"machine{self.slices % self._max_workers}:1"
        return Receipt(pack, tuple(results), slice.expert_bytes, STORED, worker, 1.0)


# What is measured ---------------------------------------------------------------------------------


class Watch:
    """Processor seconds of parts of the real code, and when they first began and last ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def wrap(self, of: Any, name: str, what: str) -> None:
        """Time the calls of a method."""
        real = getattr(of, name)

        def call(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return real(*given, **named)
            finally:
                self._add(what, began)

        setattr(of, name, call)

    def wrap_iterator(self, of: Any, name: str, what: str) -> None:
        """Time what a generator does between its values."""
        real = getattr(of, name)

        def call(*given: Any) -> Iterator[Any]:
            source = real(*given)
            while True:
                began = time.process_time()
                one = next(source, None)
                self._add(what, began)
                if one is None:
                    return
                yield one

        setattr(of, name, call)

    def _add(self, what: str, began: float) -> None:
        self.last[what] = time.process_time()
        self.first.setdefault(what, began)
        self.seconds[what] = self.seconds.get(what, 0.0) + self.last[what] - began


class Peaks:
    """Most anonymous memory in each phase, sampled every 20 ms by a thread."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.bytes: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes[self.phase] = max(self.bytes.get(self.phase, 0), anonymous())

    def end(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()


def _in_phase(real: Callable[..., Any], peaks: Peaks) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        peaks.phase = "run"
        try:
            return real(*given)
        finally:
            peaks.phase = "commit"

    return run


class Held:
    """Bytes that parts of the coordinator hold: of the objects themselves, each counted once."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._kept: dict[str, Any] = {}

    def watch(self) -> None:
        """Look at the end of the run and of the push; keep nothing alive that would be gone."""
        self._keep(finished.FinishedChunks, "finished")
        self._keep(task.Tasks, "tasks")
        self._after(runners.RemoteRunner, "run", self._ran)
        self._after(push.Push, "run", self._pushed)

    def _keep(self, of: Any, name: str) -> None:
        real = of.__init__

        def init(own: Any, *given: Any, **named: Any) -> None:
            real(own, *given, **named)
            self._kept[name] = own

        of.__init__ = init

    def _after(self, of: Any, name: str, look: Callable[..., None]) -> None:
        real = getattr(of, name)

        def call(own: Any, *given: Any, **named: Any) -> Any:
            found = real(own, *given, **named)
            look(own, *given)
            return found

        setattr(of, name, call)

    def _ran(self, runner: Any, work: Any) -> None:
        chunks, tasks = self._kept.pop("finished"), self._kept.pop("tasks")
        self.bytes["FinishedChunks.rows"] = held([chunks.rows])
        self.bytes["Tasks._members"] = held(
            [
                (one.base.blocks, one.present.nbytes, *(e.blocks for e in one.experts), one.states)
                for one in tasks._members.values()
            ]
        ) + sum(one.present.nbytes for one in tasks._members.values())
        self.bytes["Job.ids"] = held([job.ids for job in work.jobs.values()])
        self.bytes["SentPack.table"] = held([one.table for one in runner._delivery._sent])
        self.bytes["Transaction._own"] = held([runner._sink._own])

    def _pushed(self, done: Any) -> None:
        self.bytes["Push._sent"] = held([done._sent.packs])
        self.bytes["Push._needs"] = held([done._needs.blocks])


def held(values: Any) -> int:
    """Bytes of containers and of what they contain, three levels deep, each object once."""
    seen: set[int] = set()

    def size(one: Any) -> int:
        if id(one) in seen:
            return 0
        seen.add(id(one))
        found = sys.getsizeof(one)
        if isinstance(one, dict):
            return found + sum(size(key) + size(value) for key, value in one.items())
        if isinstance(one, (list, tuple, set)):
            return found + sum(map(size, one))
        return found

    return size(values)


def plan(store: Store, budget: str, method: str) -> Figures:
    """Plan, and say how long that took."""
    names = sorted(one.name for one in store.refs() if one.name.startswith("expert"))
    began = time.process_time()
    made = store.plan(
        MergeRequest(
            base="base",
            experts=[(name, 1 / len(names)) for name in names],
            method=method,
            parameters={"density": 0.2} if method == "ties" else {},
            budget=budget,
            analyze=False,
        )
    )
    return {"plan": str(made.plan), "seconds": time.process_time() - began}


def plan_before(work: Path, budget: str, method: str) -> Figures:
    """Plan in a process of its own, whose memory is not the coordinator's; its peak is told."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        peaks = Peaks("plan")
        with Store.open(work / "store") as store:
            told = plan(store, budget, method)
        peaks.end()
        os.write(writing, json.dumps(told | {"anonymous": peaks.bytes["plan"]}).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found: Figures = json.loads(answer.read())
    os.waitpid(child, 0)
    return found


def once(
    work: Path, budget: str, method: str, workers: int, *, looks: bool, before: bool = False
) -> Figures:
    """One merge, in this process. before: planned in another."""
    planned = plan_before(work, budget, method) if before else {}
    watch, cluster = Watch(), Pretended(workers)
    kept = Held()
    if looks:
        # It takes memory itself, so peaks are another run's.
        kept.watch()
    watch.wrap_iterator(runners.WorkList, "slices", "make slices")
    watch.wrap(runners.RemoteRunner, "_receive", "receive")
    watch.wrap(runners.RemoteRunner, "run", "run")
    peaks = Peaks("start")
    runners.RemoteRunner.run = _in_phase(runners.RemoteRunner.run, peaks)  # type: ignore[method-assign]
    watch.wrap(at_remote.PushedDelivery, "publish", "publish")
    with Store.open(work / "store") as store:
        if not before:
            planned = plan(store, budget, method)
        began = time.process_time()
        report = store.merge(
            planned["plan"], name=f"merged{time.time_ns()}", memo=False, cluster=cluster,
            remote="origin", push=True,
        )  # fmt: skip
        ended = time.process_time()
    peaks.end()
    own = cluster.seconds - cluster.pickling
    found: Figures = {
        "slices": cluster.slices,
        "blocks": cluster.blocks,
        "sources": cluster.sources,
        "bytes sent for a block read": cluster.sent / cluster.sources,
        "bytes sent for a slice": cluster.sent / cluster.slices,
        "bytes received for a block": cluster.received / cluster.blocks,
        "plan seconds": planned["seconds"],
        "merge seconds": ended - began - own,
        "seconds": {
            "start": watch.first["run"] - began,
            "make": watch.seconds["make slices"],
            "hand out": cluster.pickling,
            "receive": watch.seconds["receive"],
            "run": watch.seconds["run"] - own,
            "commit": ended - watch.last["run"],
            "of it publish": watch.seconds["publish"],
        },
        "anonymous": peaks.bytes | {"plan": planned.get("anonymous", 0)},
        "held": kept.bytes,
        "pushed_to": report.pushed_to,
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", choices=sorted(planning.SIZES), default="8 B")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--method", default="ties")
    parser.add_argument("--workers", type=int, default=128)
    parser.add_argument("--held", action="store_true", help="also what holds the memory")
    parser.add_argument("--before", action="store_true", help="plan in another process")
    given = parser.parse_args()
    given.work = given.work.absolute()
    if not (given.work / "store").exists():
        given.work.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if not child:
            # Its memory is not the coordinator's.
            make(given.work, given.size, given.layers, given.experts)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("no family was made")
    ways = {"looks": given.held, "before": given.before}
    print(json.dumps(once(given.work, given.budget, given.method, given.workers, **ways)))


if __name__ == "__main__":
    main()
