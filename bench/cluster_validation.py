"""A real merge on one and two processes of this machine, beside the simulation of its slices.

Workers are processes that have computed before, so that nobody waits for Python to start: an
executor in place of `local:2`. Each round runs every way once, one after the other. What a merge
here has stored is removed after it: a merge encodes and writes no block that the store has, and
workers cannot know that of theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cluster_events import Cluster, Coordinator, Rates, Work, simulated
from cluster_rates import asked, cut_at, named, work_of

from mstore import Store
from mstore.merge.running import runners
from mstore.merge.running.slices import Slice

BUDGET = "100%"
Figures = dict[str, Any]


class Processor:
    """Seconds of processor: of this process, of each worker, and of everybody else.

    The machine may be another's, too: wall time alone does not say what a way takes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began = time.perf_counter()
        self._own, self._workers, self._all = self._now()

    def _now(self) -> tuple[float, list[float], float]:
        tick = os.sysconf("SC_CLK_TCK")
        workers = []
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            workers.append((int(fields[11]) + int(fields[12])) / tick)
        # user, nice, system; then idle, iowait, interrupts.
        line = Path("/proc/stat").read_text().splitlines()[0].split()
        return time.process_time(), workers, sum(map(int, line[1:4])) / tick

    def spent(self) -> Figures:
        """Since the beginning; `others` as a share of all processors."""
        own, workers, everything = self._now()
        wall = time.perf_counter() - self._began
        each = [after - before for before, after in zip(self._workers, workers, strict=True)]
        mine = own - self._own + sum(each)
        others = (everything - self._all - mine) / wall / len(os.sched_getaffinity(0))
        return {"wall": wall, "cpu": mine, "own cpu": own - self._own, "workers cpu": each,
                "others": max(0.0, others)}  # fmt: skip


class Watch:
    """Seconds of the runner, and the slices and receipts of it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.works: list[Work] = []
        self.taken: list[float] = []
        self.limited: dict[str, bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch merges in this process."""
        runner: Any = runners.RemoteRunner
        run, submit, receive = runner.run, runner._submit, runner._receive

        def watched(own: Any, work: Any) -> None:
            began = time.perf_counter()
            run(own, work)
            self.seconds = time.perf_counter() - began

        def submitted(own: Any, slice: Slice) -> None:
            self.works.append(work_of(slice))
            self.limited.update((run.tensor.name, run.tensor.limited) for run in slice.runs)
            submit(own, slice)

        def received(own: Any, work: Any, receipt: Any) -> None:
            self.taken.append(receipt.seconds)
            receive(own, work, receipt)

        runner.run, runner._submit, runner._receive = watched, submitted, received
        try:
            yield
        finally:
            runner.run, runner._submit, runner._receive = run, submit, receive


def processes(count: int) -> ProcessPoolExecutor:
    """Workers that may be as many."""
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    for _ in pool.map(time.sleep, [0.2] * 2 * count):
        pass
    return pool


WAYS = ("1 thread", "2 threads", "1 workers", "2 workers")


def measured(
    work: Path,
    experts: int,
    slice_bytes: int,
    rounds: int,
    warm: int = 1,
    names: Sequence[str] = WAYS,
    method: str = "ties",
) -> Figures:
    """Seconds of a merge in every way, and what slices took on their workers."""
    found: dict[str, list[Figures]] = {}
    slices: dict[str, list[float]] = {}
    works: list[Work] = []
    limited: dict[str, bool] = {}

    with ExitStack() as stack:
        store = stack.enter_context(Store.open(work / "store"))
        stack.enter_context(cut_at(slice_bytes))
        pools = {
            f"{count} workers": stack.enter_context(processes(count))
            for count in (1, 2)
            if f"{count} workers" in names
        }
        plan = store.plan(asked(experts, BUDGET, method))

        def threads(count: int) -> None:
            store.merge(plan, name=named("here"), threads=count, memo=False)

        def workers(name: str) -> None:
            watch = Watch()
            with watch.watching():
                store.merge(
                    plan, name=named("there"), threads=1, memo=False, cluster=pools[name],
                    remote="origin", push=True,
                )  # fmt: skip
            only[name] = watch.seconds
            slices[name] = watch.taken
            works[:] = watch.works
            limited.update(watch.limited)

        only: dict[str, float] = {}
        ways: dict[str, Callable[[], None]] = {
            "1 thread": lambda: threads(1),
            "2 threads": lambda: threads(2),
            **{name: partial(workers, name) for name in pools},
        }
        ways = {name: way for name, way in ways.items() if name in names}
        for number in range(warm + rounds):
            if number == warm:
                found.clear()
            for name, way in ways.items():
                os.sync()
                pool = pools.get(name)
                spent = Processor([] if pool is None else list(pool._processes))
                way()
                row = spent.spent()
                if pool is not None:
                    row["slices only"] = only[name]
                found.setdefault(name, []).append(row)
                forget(store)
    return {
        "budget": BUDGET,
        "experts": experts,
        "slice_bytes": slice_bytes,
        "ways": found,
        "tensors": len(limited),
        "limited": sum(limited.values()),
        "slices": len(works),
        "works": [list(one) for one in works],
        "slice seconds": {name: sum(taken) for name, taken in slices.items()},
    }


def forget(store: Store) -> None:
    """Remove merges that are stored here, with their blocks."""
    own = [one.name for one in store.refs() if one.name.startswith("here-")]
    if own:
        store.remove(*own)
        store.gc(reflog_days=0, dead_share=1.0)


def compared(found: Figures, rates: Rates, told: Coordinator, put: float) -> Figures:
    """The same slices, simulated; and how far off that is, in percent.

    Of processor seconds, workers' own: those that others take on the machine do not count.
    """
    works = [Work(*one) for one in found["works"]]
    made: Figures = {}
    for count in (1, 2):
        # The disk is the page cache, and the remote a directory.
        cluster = Cluster(count, cores=1, network=put, store=2 * put, latency=0.0)
        done = simulated(works, rates, cluster, told)
        name = f"{count} workers"
        if name not in found["ways"]:
            continue
        rows = found["ways"][name]
        wall = statistics.median(row["slices only"] for row in rows)
        busy = statistics.median(sum(row["workers cpu"]) for row in rows)
        made[name] = {
            "simulated": done.seconds,
            "measured": wall,
            "error": 100 * (done.seconds / wall - 1),
            "others": statistics.median(row["others"] for row in rows),
            "simulated busy": done.busy,
            "measured busy": busy,
            "error of busy": 100 * (done.busy / busy - 1),
        }
    return made
