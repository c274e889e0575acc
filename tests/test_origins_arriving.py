"""`ArrivingFile`: a file of a repository that is read while it arrives."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.origins import arriving
from mstore.origins.arriving import ArrivingFile
from mstore.origins.repository import RemoteFile
from mstore.terms.errors import BadCheckpoint, Unavailable


class Memory:
    """A repository of one file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []
        self.before: Callable[[int], None] = lambda offset: None

    def read(
        self, _: RemoteFile, offset: int, length: int, tick: Callable[[int], None] | None = None
    ) -> bytes:
        self.asked.append((offset, length))
        self.before(offset)
        if tick is not None:
            tick(length)
        return self.data[offset : offset + length]

    def other_bytes(self, file: RemoteFile) -> BadCheckpoint:
        return BadCheckpoint("other bytes", where=file.path)


def opened(memory: Memory, *, listed: bytes | None = None, ticks: Any = None) -> ArrivingFile:
    data = memory.data if listed is None else listed
    file = RemoteFile("w.safetensors", len(data), hashlib.sha256(data).hexdigest(), is_git=False)
    return ArrivingFile(memory, file, ticks or (lambda more: None))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_PIECE", 7)
    monkeypatch.setattr(arriving, "_AHEAD", 3)


@settings(max_examples=40)
@given(
    size=st.integers(0, 200),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    threads=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    skew=st.integers(0, 30),
)
def test_all_bytes_are_those_of_the_file(
    size: int, lengths: list[int], threads: int, order: random.Random, skew: int
) -> None:
    """Threads that read parts in any order get the file's bytes, and the digest is its own."""
    data = random.Random(size).randbytes(size)
    spans, at = [], 0
    while at < size:
        length = min(lengths[len(spans) % len(lengths)], size - at)
        spans.append((at, length))
        at += length
    for number in range(0, len(spans), skew + 1):
        part = spans[number : number + skew + 1]
        order.shuffle(part)
        spans[number : number + skew + 1] = part
    with opened(Memory(data)) as file, ThreadPoolExecutor(threads) as pool:
        for (at, length), got in zip(
            spans, pool.map(lambda span: file.read(*span), spans), strict=True
        ):
            assert got == data[at : at + length]
        file.require_unchanged()


@given(size=st.integers(1, 300), step=st.integers(1, 30))
def test_who_reads_on_asks_once(size: int, step: int) -> None:
    """A reader from begin to end asks for every byte once, with few pieces in memory."""
    memory, ticks = Memory(random.Random(1).randbytes(size)), []
    with opened(memory, ticks=ticks.append) as file:
        for at in range(0, size, step):
            file.read(at, min(step, size - at))
            assert len(file._pieces) <= 3
        file.require_unchanged()
    assert sorted(memory.asked) == [(at, min(7, size - at)) for at in range(0, size, 7)]
    assert sum(ticks) == size


def test_what_nobody_reads_is_still_hashed() -> None:
    """A file of which only the begin was read has the digest that is listed, or another."""
    data = bytes(range(100))
    with opened(Memory(data)) as file:
        file.require_start(data[:3])
        file.require_unchanged()
    with opened(Memory(data[:-1] + b"x"), listed=data) as file:
        file.require_start(data[:3])
        with pytest.raises(BadCheckpoint, match="other bytes"):
            file.require_unchanged()
    with opened(Memory(data)) as file, pytest.raises(BadCheckpoint):
        file.require_start(b"other")


def test_an_error_of_the_place_reaches_who_reads() -> None:
    """A piece that cannot be had is an error of the read, and of `require_unchanged`."""
    memory = Memory(bytes(100))

    def fail(offset: int) -> None:
        if offset == 21:
            raise Unavailable("away")

    memory.before = fail
    with opened(memory) as file:
        file.read(0, 20)
        with pytest.raises(Unavailable):
            file.read(20, 20)
        with pytest.raises(Unavailable):
            file.require_unchanged()


def test_closing_ends_what_is_under_way() -> None:
    """`close` does not wait until requests that run are answered in full."""
    memory, begun = Memory(bytes(100)), threading.Event()

    def slow(more: int) -> None:
        begun.set()

    file = opened(memory, ticks=slow)

    def drip(_: RemoteFile, __: int, ___: int, tick: Callable[[int], None] | None = None) -> bytes:
        assert tick is not None
        while True:
            tick(1)

    memory.read = drip  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(file.read, 50, 9)
        begun.wait(30)
        file.close()
        assert reading.exception(30) is not None
