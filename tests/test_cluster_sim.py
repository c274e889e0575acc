"""The simulation of merges on clusters (`bench/cluster_events.py`) adds up where that is known."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
if str(BENCH) not in sys.path:
    sys.path.append(str(BENCH))

events: Any = import_module("cluster_events")
models: Any = import_module("cluster_models")
Cluster, Coordinator, Work = events.Cluster, events.Coordinator, events.Work
simulated = events.simulated

RATES = events.Rates(
    base=0.002, delta=0.001, mix=0.001, mix_each=0.001, hash=0.001, encode=0.004, write=0.001,
    seal=0.5, block=0.001, start=0.25, base_share=0.5, delta_share=0.25, out_share=0.125,
)  # fmt: skip
FREE = {"cores": 1, "network": 1e15, "store": 1e18, "latency": 0.0}
SLICE = Work(blocks=100, reads=200)
COMPUTES = 100 * 0.010 + 200 * 0.002


def test_one_worker_takes_the_sum() -> None:
    """With one worker and nothing else in the way, the time is that of all slices."""
    some = [SLICE, Work(50, 0), Work(10, 90)]
    each = [COMPUTES, 50 * 0.010, 10 * 0.010 + 90 * 0.002]
    took = simulated(some, RATES, Cluster(1, **FREE))
    assert took.seconds == pytest.approx(sum(each) + 3 * 0.75)
    assert took.runs == 3


def test_what_the_coordinator_takes_is_added() -> None:
    """Before the first slice and after the last one, nobody else works."""
    told = Coordinator(start=5.0, make_out=0.01, commit=3.0)
    took = simulated([SLICE], RATES, Cluster(1, **FREE), told)
    assert took.seconds == pytest.approx(5.0 + 1.0 + COMPUTES + 0.75 + 3.0)
    assert took.coordinator == pytest.approx(9.0)


def test_many_equal_slices_scale() -> None:
    """Without contention, many equal slices are done by n workers in an n-th of the time."""
    some = [SLICE] * 640
    one = simulated(some, RATES, Cluster(1, **FREE)).seconds
    for count in (2, 16, 64):
        assert one / count / simulated(some, RATES, Cluster(count, **FREE)).seconds > 0.99


def test_the_network_is_shared() -> None:
    """Where the store is the limit, the time is that of its bytes; a worker has its own limit."""
    some = [Work(100, 0)] * 64
    moved = sum(work.fetched(RATES) + work.put(RATES) for work in some)
    free = {**FREE, "store": moved / 1000}
    assert simulated(some, RATES, Cluster(64, **free)).seconds == pytest.approx(1000, rel=0.02)
    own = {**FREE, "network": some[0].put(RATES) / 50}
    took = simulated(some[:1], RATES, Cluster(1, **own)).seconds
    # It comes while it is computed, but for the last block; it goes afterwards.
    fetched = some[0].fetched(RATES) / own["network"]
    assert took == pytest.approx(0.75 + fetched + 0.010 + 50)


def test_a_death_costs_the_slice_again() -> None:
    """A slice whose worker dies runs from its start on another one."""
    one = events.Simulation([SLICE], RATES, Cluster(2, **FREE, back=1000.0))
    died = 1.0

    def die(now: float, worker: int) -> None:
        one._events.append((died, -1, lambda when: one._die(when, 0)))

    one._await_death = lambda now, worker: None if worker else die(now, worker)
    took = one.run()
    alone = 0.75 + COMPUTES
    assert took.seconds == pytest.approx(died + alone)
    assert took.runs == 2


def test_slow_workers_are_overtaken() -> None:
    """At the end, a slice that takes much longer than others runs again elsewhere."""
    long = Work(blocks=2000, reads=0)
    cluster = Cluster(8, **FREE, slow=1 / 8, factor=20.0)
    took = simulated([long] * 16, RATES, cluster)
    assert took.runs > 16
    assert took.seconds < 20 * 20


MIB = 1 << 20


def sizes(tensors: Any, **given: Any) -> list[float]:
    """Blocks of each slice of a model that has these tensors alone."""
    plain = sum(one.out_bytes for one in tensors)
    return [
        one.blocks for one in models.works(tensors, RATES, budget=0.1, base_bytes=plain, **given)
    ]


def test_slices_are_those_of_the_cutter() -> None:
    """A tensor whose tie quota ends within it is one slice; others are cut by their work."""
    tensors = [
        models.Drawn("a", [MIB] * 300, [2] * 300, 300 * MIB),
        models.Drawn("b", [MIB] * 40, [1] * 40, 40 * MIB),
    ]
    # Eight slices of 42.5 MiB with 165 MiB of work each; a block of a takes 4 MiB, one of b 3.
    assert sizes(tensors, is_limited=True) == [300, 40]
    assert sizes(tensors, is_limited=False) == [42] * 7 + [46]
    assert sizes(tensors, is_limited=False, workers=100)[:2] == [16, 16]


def test_large_tensors_that_are_not_cut_go_first() -> None:
    """As the work list orders them: the largest first, those of usual size in file order."""
    counts = [10, 60, 30, 200, 40]
    tensors = [
        models.Drawn(str(number), [MIB] * count, [1] * count, count * MIB)
        for number, count in enumerate(counts)
    ]
    assert sizes(tensors) == [200, 60, 40, 40]


def test_a_receipt_takes_the_coordinator() -> None:
    """What is received costs as a receipt, and for each of its blocks."""
    told = Coordinator(receive=2.0, receive_out=0.01)
    took = simulated([SLICE], RATES, Cluster(1, **FREE), told)
    assert took.seconds == pytest.approx(COMPUTES + 0.75 + 2.0 + 1.0)
