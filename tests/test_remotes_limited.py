"""Transfers within a limit of bytes a second, by a clock that the tests move."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_models import BLOCK, small_model

import mstore
from mstore.remotes.limited import LimitedObjects, RateLimit
from mstore.remotes.shared_directory import SharedDirectory
from mstore.terms.errors import BadRequest, Interrupted, Unavailable
from mstore.terms.ids import Buffer


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.now += seconds
        return False


class Watched(SharedDirectory):
    """Tells when which bytes went."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock
        self.reads: list[tuple[float, int]] = []

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        self.reads.append((self._clock.now, sum(length for _, length in spans)))
        return super().read_each(name, spans)


def test_pieces_go_at_the_rate() -> None:
    """A piece goes when all bytes so far have had their time; time without a piece is not saved
    up."""
    clock = Clock()
    limit = RateLimit(1000, clock=clock, sleep=clock.sleep)
    for size, at in ((500, 100.5), (1500, 102.0)):
        limit.wait(size)
        assert clock.now == pytest.approx(at)
    clock.now = 200.0
    limit.wait(2000)
    assert clock.now == pytest.approx(202.0)


def test_threads_share_a_rate() -> None:
    """Several threads together get no more than one: each piece has a time of its own."""
    slept: list[float] = []
    limit = RateLimit(10, clock=lambda: 0.0, sleep=lambda seconds: bool(slept.append(seconds)))
    threads = [threading.Thread(target=limit.wait, args=(10,)) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(slept) == [float(n) for n in range(1, 9)]


@pytest.mark.parametrize("rate", [1 << 16, 1 << 20, 1 << 30])
def test_reads_are_the_same_bytes(rate: int, tmp_path: Path) -> None:
    """Reads within a limit give the bytes that were put, in parts of about a second's, and at no
    moment more than the rate allows."""
    clock = Clock()
    place = Watched(tmp_path, clock)
    objects = LimitedObjects(place, RateLimit(rate, clock=clock, sleep=clock.sleep))
    data = bytes(range(251)) * 4000
    began = clock.now
    objects.put("x/y", len(data), [data[:300_000], data[300_000:]])
    assert clock.now - began == pytest.approx(len(data) / rate)
    spans = [(0, 10), (7, 0), (20, 700_000), (900_000, 100), (5, 5)]
    began = clock.now
    found = objects.read_each("x/y", spans)
    assert [bytes(one) for one in found] == [data[at : at + length] for at, length in spans]
    total = 0
    for at, size in place.reads:
        assert size <= max(rate, 1 << 16)
        total += size
        assert total <= (at - began) * rate + 1e-3
    assert total == sum(length for _, length in spans)


def test_who_waits_is_woken() -> None:
    """Once a transfer has failed, threads that wait for their turn end at once."""
    limit = RateLimit(1)
    ended: list[type[BaseException]] = []

    def wait() -> None:
        try:
            limit.wait(1 << 20)
        except Interrupted as error:
            ended.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    limit.end()
    thread.join()
    assert ended == [Interrupted]


@pytest.mark.parametrize("rate", [0, -1])
def test_no_rate(rate: int) -> None:
    """A rate of nothing is refused: the transfer would never end."""
    with pytest.raises(BadRequest, match="1 byte a second"):
        RateLimit(rate)


def test_a_fetch_that_fails_wakes_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch whose first part fails lets the threads end that wait for their turn."""
    store = mstore.Store.init(tmp_path / "store", block_size=BLOCK)
    for name in ("a", "b", "c", "d"):
        store.add(small_model(tmp_path / name, name), name=name, base=None)
    store.add_remote("there", (tmp_path / "there").as_uri())
    store.push("there", every=True)
    other = mstore.Store.init(tmp_path / "other", block_size=BLOCK)
    other.add_remote("there", (tmp_path / "there").as_uri())
    woken: list[bool] = []
    plain = LimitedObjects.read_each

    def read_each(
        self: LimitedObjects, name: str, spans: Sequence[tuple[int, int]]
    ) -> list[Buffer]:
        # The threads that download; tables and records come by others.
        if not threading.current_thread().name.startswith("fetch"):
            return plain(self, name, spans)
        if spans[0][0] == 0:
            raise Unavailable("no answer")
        woken.append(self._limit._ended.wait(100))
        raise Interrupted("ended")

    monkeypatch.setattr(LimitedObjects, "read_each", read_each)
    monkeypatch.setattr("mstore.remotes.arrival.PIECE_BYTES", 1 << 16)
    with pytest.raises(Unavailable, match="no answer"):
        other.fetch("there", limit_rate=1 << 30, jobs=3)
    assert woken
    assert all(woken)
    store.close()
    other.close()
