"""A merge on a cluster as events in simulated time: nothing runs (`cluster_sim.py` uses it).

the coordinator   one thread: makes a slice, pickles it, hands it out, receives a receipt, as
                  `RemoteRunner.run` does; at the end it commits
an engine         slots in the order of the slices: 2 x slots + 2 are handed out at a time
a worker          start, fetch beside compute, seal, put; then the next slice
the network       a limit for each worker and direction, one for the store in all, shared fairly
what goes wrong   slow workers, workers that die (their slice runs again), late slices run twice
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mstore.blocks.elsewhere import REQUESTS
from mstore.merge.running.runners import _AHEAD, _LATE, _LEAST_LATE

BLOCK: Final = 1 << 20
GIGABIT: Final = 1e9 / 8


# What is simulated --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """What one thread takes, in seconds: for a block of 1 MiB where nothing else is said.

    base, delta: decoding and checking a block of the base, of an expert. mix, mix_each: the kernel,
    and what each expert adds. hash, encode, write: of an output block; write is into scratch. seal:
    of a pack. block: everything else of an output block. start, start_source: of a slice, and for
    each block that it reads. base_share, delta_share, out_share: bytes at rest of plain ones.
    """

    base: float
    delta: float
    mix: float
    mix_each: float
    hash: float
    encode: float
    write: float
    seal: float
    block: float
    start: float
    base_share: float
    delta_share: float
    out_share: float
    start_source: float = 0.0


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the coordinator takes, in seconds.

    start: from the call to the first slice. make_out, make_source, hand_out_source: making and
    handing out a slice, for each block of its output or that it reads; hand_out: of each. receive,
    receive_out: of a receipt, for each block of it. commit: after the last one.
    """

    start: float = 0.0
    make_out: float = 0.0
    make_source: float = 0.0
    hand_out: float = 0.0
    hand_out_source: float = 0.0
    receive: float = 0.0
    receive_out: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers and their network.

    cores: of a worker, for the one slice that it computes at a time. network, store: bytes a second
    of a worker in each direction, of the store in all. latency: of a request, of which `requests`
    run at once. slow: the share of workers that take `factor` times as long. deaths: an hour and
    worker; a worker is back after `back` seconds. overlap: a worker seals and puts a slice while it
    computes the next.
    """

    workers: int
    cores: int = 8
    network: float = 10 * GIGABIT
    store: float = 100 * GIGABIT
    latency: float = 0.010
    requests: int = REQUESTS
    slow: float = 0.0
    factor: float = 3.0
    deaths: float = 0.0
    back: float = 30.0
    overlap: bool = False


class Work(NamedTuple):
    """A slice: blocks of its output, blocks that it reads of experts, and requests for them.

    blocks: in MiB of plain output. reads: likewise, of all experts together.
    """

    blocks: float
    reads: float
    requests: int = 0

    def sources(self) -> float:
        """Blocks that it names: of the base, and of experts."""
        return self.blocks + self.reads

    def seconds(self, rates: Rates, cores: int = 1) -> float:
        """How long it computes, on so many cores, without start, seal and network."""
        each = rates.base + rates.mix + rates.hash + rates.encode + rates.write + rates.block
        return (self.blocks * each + self.reads * (rates.delta + rates.mix_each)) / cores

    def fetched(self, rates: Rates) -> float:
        """Bytes that come."""
        return BLOCK * (self.blocks * rates.base_share + self.reads * rates.delta_share)

    def put(self, rates: Rates) -> float:
        """Bytes that go."""
        return BLOCK * self.blocks * rates.out_share


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated merge took.

    seconds: without planning. fetched, put: bytes, also those for nothing. runs: of slices, all
    attempts. busy: seconds that workers worked. coordinator: seconds that it was busy.
    """

    seconds: float
    fetched: float
    put: float
    runs: int
    busy: float
    coordinator: float
    last_handed_out: float


# The network --------------------------------------------------------------------------------------


class Pipe:
    """Flows that share a limit equally, each with the same limit of its own.

    All have one rate at a time, so each ends when the bytes that a flow has had since the beginning
    of time reach what that was when it began, and its size.
    """

    def __init__(self, each: float, total: float) -> None:
        self._each, self._total = each, total
        self._now = self._had = 0.0
        self._ends: list[tuple[float, int]] = []
        self._count = 0

    def _rate(self) -> float:
        return min(self._each, self._total / max(1, self._count))

    def _advance(self, now: float) -> None:
        self._had += (now - self._now) * self._rate()
        self._now = now

    def begin(self, now: float, flow: int, size: float) -> None:
        """Begin a flow; its number is new."""
        self._advance(now)
        heapq.heappush(self._ends, (self._had + size, flow))
        self._count += 1

    def next(self) -> tuple[float, int] | None:
        """Return when the next flow ends, as it looks now."""
        if not self._ends:
            return None
        end, flow = self._ends[0]
        return self._now + max(0.0, end - self._had) / self._rate(), flow

    def end(self, now: float) -> None:
        """End the flow that `next` told."""
        self._advance(now)
        heapq.heappop(self._ends)
        self._count -= 1


# The simulation -----------------------------------------------------------------------------------


class _Run:
    """One attempt at a slice."""

    __slots__ = ("began", "computed", "dead", "fetched", "number", "slot", "submitted", "work")

    def __init__(self, number: int, work: Work, submitted: float) -> None:
        self.number, self.work, self.submitted = number, work, submitted
        self.slot = -1
        self.began = 0.0
        self.dead = self.computed = self.fetched = False


class Simulation:
    """One merge of these slices on a cluster."""

    def __init__(
        self,
        slices: Sequence[Work],
        rates: Rates,
        cluster: Cluster,
        coordinator: Coordinator | None = None,
        *,
        seed: int = 0,
        together: int = 1,
    ) -> None:
        self._slices, self._rates, self._cluster = slices, rates, cluster
        self._told = coordinator or Coordinator()
        self._together = together
        draw = random.Random(seed)
        self._draw = draw
        slow = round(cluster.slow * cluster.workers)
        self._factors = [cluster.factor] * slow + [1.0] * (cluster.workers - slow)
        draw.shuffle(self._factors)
        self._pipe = Pipe(cluster.network, cluster.store)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._flows: dict[int, Callable[[float], None]] = {}
        self._free = deque(range(cluster.workers))
        self._current: list[_Run | None] = [None] * cluster.workers
        self._queue: deque[_Run] = deque()
        self._waiting: set[_Run] = set()
        self._done: deque[_Run] = deque()
        self._finished: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._took: list[float] = []
        self._clock = self._busy = self._used = 0.0
        self._fetched = self._put = 0.0
        self._runs = 0
        self._handed = 0.0

    def run(self) -> Outcome:
        """Simulate, from the first slice's making to the commit."""
        for worker in range(self._cluster.workers):
            self._await_death(0.0, worker)
        told, limit = self._told, _AHEAD[0] * self._cluster.workers + _AHEAD[1]
        self._spend(told.start)
        for number, work in enumerate(self._slices):
            # With several in one hand-out, what each hand-out costs is paid once.
            first = number % self._together == 0
            cost = told.hand_out * first + told.make_out * work.blocks
            cost += (told.make_source + told.hand_out_source) * work.sources()
            self._spend(cost)
            self._submit(number)
            while len(self._waiting) >= limit * self._together or self._done:
                self._receive()
        while self._waiting:
            self._receive(is_end=True)
        self._used += told.commit
        return Outcome(
            seconds=self._clock + told.commit,
            fetched=self._fetched,
            put=self._put,
            runs=self._runs,
            busy=self._busy,
            coordinator=self._used,
            last_handed_out=self._handed,
        )

    # -- the coordinator

    def _spend(self, seconds: float) -> None:
        """Let the coordinator work; the others go on."""
        end = self._clock + seconds
        self._used += seconds
        while (at := self._next()) is not None and at <= end:
            self._step()
        self._clock = end

    def _submit(self, number: int) -> None:
        self._attempts[number] = self._attempts.get(number, 0) + 1
        run = _Run(number, self._slices[number], self._clock)
        self._waiting.add(run)
        self._queue.append(run)
        self._handed = self._clock
        self._assign(self._clock)

    def _receive(self, *, is_end: bool = False) -> None:
        """Wait until something ends, or, at the end, for a second; take what has."""
        look = self._clock + 1.0
        while not self._done:
            at = self._next()
            if at is None:
                raise AssertionError("nobody works")
            if is_end and at > look:
                self._clock = max(self._clock, look)
                self._hurry()
                return
            self._clock = max(self._clock, at)
            self._step()
        while self._done:
            run = self._done.popleft()
            if run not in self._waiting:
                continue
            self._waiting.discard(run)
            if run.dead:
                self._submit(run.number)
                continue
            self._took.append(self._clock - run.submitted)
            for other in [one for one in self._waiting if one.number == run.number]:
                self._waiting.discard(other)
            self._finished.add(run.number)
            self._spend(self._told.receive + self._told.receive_out * run.work.blocks)

    def _hurry(self) -> None:
        if len(self._waiting) >= self._cluster.workers or not self._took:
            return
        late = max(_LEAST_LATE, _LATE * statistics.median(self._took))
        for run in sorted(self._waiting, key=lambda one: one.number):
            if self._clock - run.submitted > late and self._attempts[run.number] == 1:
                self._submit(run.number)
                return

    # -- the workers

    def _assign(self, now: float) -> None:
        while self._queue and self._free:
            run = self._queue.popleft()
            if run not in self._waiting:
                continue
            slot = self._free.popleft()
            run.slot, run.began = slot, now
            self._current[slot] = run
            self._runs += 1
            start = self._rates.start + self._rates.start_source * run.work.sources()
            self._after(now + start * self._factors[slot], run, self._work)

    def _work(self, now: float, run: _Run) -> None:
        """Fetch and compute: the first block is fetched before, the last one computed after."""
        work, cluster = run.work, self._cluster
        parts = max(1.0, work.blocks)
        size = work.fetched(self._rates)
        self._fetched += size
        least = work.requests * cluster.latency / cluster.requests
        seconds = work.seconds(self._rates, cluster.cores) * self._factors[run.slot]
        first = size / parts / cluster.network

        def fetched(at: float) -> None:
            end = max(at, now + least) + seconds / parts
            self._after(max(now + first + seconds, end), run, self._seal)

        self._flow(now, run, size, fetched)

    def _seal(self, now: float, run: _Run) -> None:
        seconds = self._rates.seal * self._factors[run.slot]
        if self._cluster.overlap:
            self._release(now, run)
        self._after(now + seconds, run, self._send)

    def _send(self, now: float, run: _Run) -> None:
        size = run.work.put(self._rates)
        self._put += size

        def sent(at: float) -> None:
            if not self._cluster.overlap:
                self._release(at, run)
            self._done.append(run)

        self._flow(now, run, size, sent)

    def _release(self, now: float, run: _Run) -> None:
        self._busy += now - run.began
        self._current[run.slot] = None
        self._free.append(run.slot)
        self._assign(now)

    def _await_death(self, now: float, worker: int) -> None:
        if not self._cluster.deaths:
            return
        at = now + self._draw.expovariate(self._cluster.deaths / 3600)
        heapq.heappush(self._events, (at, next(self._order), lambda when: self._die(when, worker)))

    def _die(self, now: float, worker: int) -> None:
        run, back = self._current[worker], now + self._cluster.back
        if run is not None:
            run.dead = True
            self._busy += now - run.began
            self._current[worker] = None
            self._done.append(run)
        else:
            self._free.remove(worker)

        def returns(when: float) -> None:
            self._free.append(worker)
            self._await_death(when, worker)
            self._assign(when)

        heapq.heappush(self._events, (back, next(self._order), returns))

    # -- time

    def _after(self, when: float, run: _Run, do: Callable[[float, _Run], None]) -> None:
        def go(now: float) -> None:
            if not run.dead:
                do(now, run)

        heapq.heappush(self._events, (when, next(self._order), go))

    def _flow(self, now: float, run: _Run, size: float, then: Callable[[float], None]) -> None:
        flow = next(self._order)

        def go(at: float) -> None:
            # The bytes of a dead worker take the network until they would have come.
            if not run.dead:
                then(at)

        self._flows[flow] = go
        self._pipe.begin(now, flow, size)

    def _next(self) -> float | None:
        flow = self._pipe.next()
        times = [one[0] for one in (self._events[0] if self._events else None, flow) if one]
        return min(times) if times else None

    def _step(self) -> None:
        flow = self._pipe.next()
        if flow is not None and (not self._events or flow[0] <= self._events[0][0]):
            at, number = flow
            self._pipe.end(at)
            self._flows.pop(number)(at)
            return
        at, _, do = heapq.heappop(self._events)
        do(at)


def simulated(
    slices: Sequence[Work],
    rates: Rates,
    cluster: Cluster,
    coordinator: Coordinator | None = None,
    **given: int,
) -> Outcome:
    """What a merge of these slices takes."""
    return Simulation(slices, rates, cluster, coordinator, **given).run()
