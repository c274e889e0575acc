"""What a lazy store brings ahead of its reader: bytes, memory, failures, ends, forks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.blocks.elsewhere import REQUESTS
from mstore.remotes import lazy
from mstore.remotes.layout import pack_name
from mstore.remotes.lazy import RemoteParts
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Remote
from mstore.store.disk_cache import DiskCache
from mstore.terms.errors import MstoreError, Unavailable
from mstore.terms.ids import Buffer, PackId

SIZE: Final = 3000
PACKS: Final = [PackId(bytes([number]) * 32) for number in range(2)]
PATIENCE: Final = 60.0
Span = tuple[int, int, int]
"""Number of a pack, offset, length."""


def packed(number: int) -> bytes:
    """What is in a pack."""
    return random.Random(number).randbytes(SIZE)


def spans() -> st.SearchStrategy[Span]:
    """Ranges of packs."""
    return st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
        lambda one: (one[0], one[1], min(one[2], SIZE - one[1]))
    )


Fails = Callable[[str, int, int], bool]


class Sick(SharedDirectory):
    """A remote that fails where it is told to, and may be held up."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fails: Fails = lambda name, start, end: False
        self.goes = threading.Event()
        self.goes.set()
        self.asked = threading.Semaphore(0)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        self.asked.release()
        assert self.goes.wait(PATIENCE)
        for offset, length in spans:
            if self.fails(name, offset, offset + length):
                raise Unavailable("told to fail", where=self.where)
        return super().read_each(name, spans)


class Place:
    """A remote with packs, and a reader of it."""

    def __init__(self, path: Path, limit: int) -> None:
        self.objects = Sick(path / "remote")
        for number, pack in enumerate(PACKS):
            file = path / "remote" / pack_name(pack)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(packed(number))
        self._path = path
        self.parts = RemoteParts(self.opens, DiskCache(path / "cache", lambda: limit))

    def opens(self, name: str) -> AbstractContextManager[Remote]:
        """Open the remote."""

        @contextmanager
        def opened() -> Iterator[Remote]:
            yield Remote(name, self.objects, self._path / "own")

        return opened()

    def need(self, span: Span) -> None:
        """Say that a range is read soon."""
        self.parts.will_need("origin", PACKS[span[0]], span[1], span[2])

    def read(self, span: Span) -> bytes:
        """Read a range."""
        return bytes(self.parts.read("origin", PACKS[span[0]], span[1], span[2]))

    def held(self) -> int:
        """Bytes of memory that are kept for ranges that nobody has read yet."""
        kept = {
            id(base): len(base)
            for some in self.parts._spans.values()
            for one in some
            if one.data.done() and not one.data.cancelled() and one.data.exception() is None
            for base in [memoryview(one.data.result()).obj]
        }
        return sum(kept.values())


def right(span: Span) -> bytes:
    """What is in a range."""
    return packed(span[0])[span[1] : span[1] + span[2]]


def within(seconds: float, call: Callable[[], None]) -> None:
    """Call in a thread; fail if it does not end, and raise what it raised."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- raised below
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    for error in failed:
        raise error


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory and small requests."""
    monkeypatch.setattr(lazy, "_AHEAD_BYTES", 1200)
    monkeypatch.setattr(lazy, "REQUEST_BYTES", 400)


STEPS = st.lists(st.tuples(st.sampled_from(["need", "read", "fail", "forget"]), spans()))


@pytest.mark.usefixtures("small")
@settings(max_examples=40)
@given(steps=STEPS, limit=st.sampled_from([0, 100_000]))
def test_any_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Span]], limit: int
) -> None:
    """In any order of hints and reads, bytes are right, memory is bounded, and a range that fails
    is an error for who reads it, and for no other."""
    path = tmp_path_factory.mktemp("ahead")
    place = Place(path, limit)
    bad: list[Span] = []

    def fails(name: str, start: int, end: int) -> bool:
        return any(
            name == pack_name(PACKS[pack]) and start < offset + length and offset < end
            for pack, offset, length in bad
        )

    place.objects.fails = fails

    def run() -> None:
        for act, span in steps:
            if act == "need":
                place.need(span)
            elif act == "fail":
                bad[:] = [] if bad else [(span[0], span[1], 1)]
            elif act == "forget":
                place.parts.forget(PACKS[span[0]], span[1], span[2])
            else:
                is_bad = fails(pack_name(PACKS[span[0]]), span[1], span[1] + span[2])
                try:
                    assert place.read(span) == right(span)
                except Unavailable:
                    assert is_bad
            # What is being brought counts too.
            assert place.held() <= lazy._AHEAD_BYTES + lazy.REQUEST_BYTES
        place.parts.close()

    try:
        within(PATIENCE, run)
    finally:
        shutil.rmtree(path)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_threads(tmp_path: Path, seed: int) -> None:
    """Several threads that say what they need and read get right bytes, and all of them end."""
    place = Place(tmp_path, 1500 if seed % 2 else 0)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            offset = draw.randrange(SIZE - 1)
            span = draw.randrange(2), offset, draw.randrange(1, min(500, SIZE - offset) + 1)
            if draw.random() < 0.5:
                place.need(span)
            else:
                assert place.read(span) == right(span)

    threads = [threading.Thread(target=work, args=(seed * 10 + at,)) for at in range(4)]

    def run() -> None:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        place.parts.close()

    failed: list[object] = []
    hook = threading.excepthook
    threading.excepthook = failed.append
    try:
        within(PATIENCE, run)
    finally:
        threading.excepthook = hook
    assert not failed, failed


def test_a_small_rest_keeps_no_large_piece(tmp_path: Path) -> None:
    """Of ranges that came in one request, those that were read are forgotten."""
    place = Place(tmp_path, 0)
    place.objects.goes.clear()
    for number in range(REQUESTS):
        # They hold every thread.
        place.need((1, number * 100, 10))
    for number in range(REQUESTS):
        assert place.objects.asked.acquire(timeout=PATIENCE), number
    place.need((0, 0, 2900))
    place.need((0, 2900, 100))
    place.objects.goes.set()
    assert place.read((0, 0, 2900)) == right((0, 0, 2900))
    within(PATIENCE, lambda: [one.data.result() for one in place.parts._spans[PACKS[0]]] and None)
    assert place.held() <= 100 + REQUESTS * 10
    place.parts.close()


def test_overlapping_hints_ask_once(tmp_path: Path) -> None:
    """Ranges that overlap are brought once, and a read of all of them is right."""
    place = Place(tmp_path, 0)
    for span in ((0, 0, 1000), (0, 500, 1000), (0, 200, 2000), (0, 100, 50)):
        place.need(span)
    assert place.read((0, 0, 2200)) == right((0, 0, 2200))
    assert place.parts.traffic.bytes == 2200
    place.parts.close()


def test_no_thread_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, a hint does nothing and reads ask themselves."""
    place = Place(tmp_path, 0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        place.need((0, 0, 1000))
    within(PATIENCE, lambda: _same(place, (0, 0, 1000)))
    place.parts.close()


def _same(place: Place, span: Span) -> None:
    assert place.read(span) == right(span)


def test_any_failure_is_forgotten(tmp_path: Path) -> None:
    """A request that failed ahead, whatever the reason, is asked again by who reads."""
    place = Place(tmp_path, 0)

    def fails(name: str, start: int, end: int) -> bool:
        raise MemoryError

    place.objects.fails = fails
    place.need((0, 0, 1000))
    assert place.objects.asked.acquire(timeout=PATIENCE)
    [span] = place.parts._spans[PACKS[0]]
    with pytest.raises(MemoryError):
        span.data.result(PATIENCE)
    place.objects.fails = lambda name, start, end: False
    assert place.read((0, 0, 1000)) == right((0, 0, 1000))
    place.parts.close()


def test_close_while_requests_run(tmp_path: Path) -> None:
    """Close cancels what waits and ends with what runs; who waited reads or gets an error."""
    place = Place(tmp_path, 0)
    place.objects.goes.clear()
    for number in range(2 * REQUESTS):
        place.need((number % 2, number * 150, 20))
    for _ in range(REQUESTS):
        assert place.objects.asked.acquire(timeout=PATIENCE)
    told: list[bytes | MstoreError] = []

    def read(number: int) -> None:
        try:
            told.append(place.read((number % 2, number * 150, 20)))
        except MstoreError as error:
            told.append(error)

    numbers = range(2 * REQUESTS)
    readers = [threading.Thread(target=read, args=(number,)) for number in numbers]
    closing = threading.Thread(target=place.parts.close)
    for one in (*readers, closing):
        one.start()
    place.objects.goes.set()
    for one in (*readers, closing):
        one.join(PATIENCE)
        assert not one.is_alive()
    for one_told in told:
        known = [right((number % 2, number * 150, 20)) for number in numbers]
        assert isinstance(one_told, MstoreError) or one_told in known
    assert len(told) == len(readers)
    place.parts.close()


def test_a_silent_remote_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests fail after a long time, who waits for them gets the error, and so does who
    waits for ranges behind them: nobody asks again, and waits as long again."""
    monkeypatch.setattr(lazy, "_LONG", 0.0)
    place = Place(tmp_path, 0)
    place.objects.fails = lambda *_: True
    place.objects.goes.clear()
    spans = [(number % 2, number * 150, 20) for number in range(REQUESTS + 4)]
    for span in spans:
        place.need(span)
    told: list[MstoreError] = []

    def read(span: Span) -> None:
        try:
            place.read(span)
        except MstoreError as error:
            told.append(error)

    readers = [threading.Thread(target=read, args=(span,)) for span in spans]
    for one in readers:
        one.start()
    for _ in range(REQUESTS):
        assert place.objects.asked.acquire(timeout=PATIENCE)
    place.objects.goes.set()
    for one in readers:
        one.join(PATIENCE)
    assert len(told) == len(spans)
    # A thread may have begun the next range before the first one failed.
    again = sum(place.objects.asked.acquire(blocking=False) for _ in spans)
    assert again < len(spans) - REQUESTS + REQUESTS // 2
    place.parts.close()


FORK = """
import os, signal, sys
from pathlib import Path
from test_lazy_ahead import Place, SharedDirectory, right
place = Place(Path(sys.argv[1]), 0)
# A fork may find a lock of what counts and holds up held by a thread.
place.objects = SharedDirectory(Path(sys.argv[1]) / "remote")
spans = [(number % 2, number * 100, 90) for number in range(24)]
for span in spans:
    place.need(span)
assert place.read(spans[0]) == right(spans[0])
held = [place.parts._lock, place.parts._opening]
for lock in held:
    lock.acquire()
child = os.fork()
signal.alarm(120)
if child:
    for lock in held:
        lock.release()
for span in spans:
    assert place.read(span) == right(span), span
    place.need(span)
place.parts.close()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.rest
def test_a_child_reads_on_its_own(tmp_path: Path) -> None:
    """A forked child reads what its parent was bringing, whatever a thread there held; both end."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
