"""What every `Objects` promises, as tests: inherit `ObjectsSuite`, and give an empty place.

A new kind of place adds a class to `test_objects.py`; nothing else proves that it may hold a
remote. `BucketSuite` adds what holds for all places that obstore reaches; `ReadingSuite` is the
part for those that are only read.
"""

from __future__ import annotations

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError

from mstore import fs
from mstore.remotes.bucket import Bucket
from mstore.remotes.objects import (
    MOST_ROOT_BYTES,
    PIECE_BYTES,
    PROBE,
    ROOT,
    Absent,
    Objects,
    Overtaken,
    RootStamp,
)
from mstore.terms.errors import Corrupt, Incompatible

MANY = 12
Lose = Callable[[], None]


def some_bytes(size: int) -> bytes:
    """Bytes that differ at every place."""
    return Random(size).randbytes(size)


def odd_pieces(data: bytes) -> Iterator[bytes]:
    """The data in pieces of many lengths, none at all too."""
    lengths = [1, 0, 4097, 1 << 20, 3, (5 << 20) + 1]
    start = 0
    while start < len(data):
        length = lengths[start % len(lengths)] or 7
        yield data[start : start + length]
        yield b""
        start += length


def root_of(objects: Objects) -> bytes:
    """The bytes of the root."""
    found = objects.read_root()
    assert found is not None
    return found[0]


def race(attempt: Callable[[int], RootStamp]) -> list[int]:
    """Let many threads try at once; return who won. Whoever loses is told that it was overtaken."""
    start = threading.Barrier(MANY)

    def one(number: int) -> int | None:
        start.wait()
        try:
            attempt(number)
        except Overtaken:
            return None
        return number

    with ThreadPoolExecutor(MANY) as pool:
        return [number for number in pool.map(one, range(MANY)) if number is not None]


Hold = Callable[[Mapping[str, bytes]], Objects]


class ReadingSuite(ABC):
    """What holds for every place, also for one that is only read: inherit it, and give `hold`."""

    @pytest.fixture
    @abstractmethod
    def hold(self) -> Hold:
        """What makes a place that has these objects, a root among them."""

    @pytest.mark.parametrize("size", [1, MOST_ROOT_BYTES, MOST_ROOT_BYTES + 1])
    def test_a_root_is_read_up_to_its_limit(self, hold: Hold, size: int) -> None:
        """A root of 64 KiB is read, one that is longer is Corrupt."""
        objects = hold({ROOT: some_bytes(size)})
        if size <= MOST_ROOT_BYTES:
            assert root_of(objects) == some_bytes(size)
            return
        with pytest.raises(Corrupt, match="too long"):
            objects.read_root()

    @pytest.mark.parametrize("size", [0, 1, PIECE_BYTES + 1])
    def test_an_object_is_read(self, hold: Hold, size: int) -> None:
        """An object has the size and the bytes that were put."""
        data = some_bytes(size)
        objects = hold({ROOT: b"1", "packs/ab/1.pack": data})
        assert objects.size("packs/ab/1.pack") == size
        assert bytes(objects.read_each("packs/ab/1.pack", [(0, size)])[0]) == data

    def test_many_spans_are_read(self, hold: Hold) -> None:
        """Spans come back in their order: far and near ones, overlapping, equal and empty ones."""
        data = some_bytes(9 << 20)
        objects = hold({ROOT: b"1", "a": data})
        chosen = Random(1)
        spans = [(chosen.randrange(len(data) - 5000), chosen.randrange(5000)) for _ in range(200)]
        spans += [(0, len(data)), (5, 10), (5, 10), (6, 2), (len(data), 0), (len(data) - 1, 1)]
        found = [bytes(one) for one in objects.read_each("a", spans)]
        assert found == [data[offset : offset + length] for offset, length in spans]
        assert objects.read_each("a", []) == []

    @pytest.mark.parametrize(
        "spans",
        [
            [(8, 3)],
            [(10, 1)],
            [(0, 11)],
            [(1, 2), (20, 2)],
            [(1, 2), (300_000, 2)],
            [(20, 2), (1, 2)],
            [(2**40, 1)],
            [(2**62, 2**62)],
        ],
    )
    def test_no_read_goes_beyond_the_end(self, hold: Hold, spans: list[tuple[int, int]]) -> None:
        """An object that ends before a span does is Corrupt."""
        objects = hold({ROOT: b"1", "a": some_bytes(10), "empty": b""})
        for name in ("a", "empty"):
            with pytest.raises(Corrupt, match="shorter"):
                objects.read_each(name, spans)

    def test_what_is_missing_is_absent(self, hold: Hold) -> None:
        """Reads and questions about a missing object raise Absent."""
        objects = hold({ROOT: b"1", "packs/ab/1.pack": b"1"})
        for name in ("packs/ab/2.pack", "packs/cd/1.pack", "tables/1"):
            for ask in (
                lambda name: objects.read_each(name, [(0, 1)]),
                lambda name: objects.read_each(name, [(0, 1), (5, 1)]),
                objects.size,
                objects.time_ns,
            ):
                with pytest.raises(Absent):
                    ask(name)

    def test_threads_read_at_once(self, hold: Hold) -> None:
        """Reads of many threads do not disturb each other."""
        data = some_bytes(100_000)
        objects = hold({ROOT: b"1", "a": data})

        def read(start: int) -> bool:
            return bytes(objects.read_each("a", [(start, 500)])[0]) == data[start : start + 500]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(0, 99_000, 1000)))


class ObjectsSuite(ReadingSuite):
    """Inherit it in a class whose name begins with Test, and make empty `objects`."""

    @pytest.fixture
    @abstractmethod
    def objects(self) -> Objects:
        """A place that has nothing."""

    @pytest.fixture
    @abstractmethod
    def lose(self, monkeypatch: pytest.MonkeyPatch) -> Lose:
        """What makes the answer to the next put of a root get lost, though the root stands."""

    @pytest.fixture
    def hold(self, objects: Objects) -> Hold:
        """Puts of all of them."""

        def made(contents: Mapping[str, bytes]) -> Objects:
            for name, data in contents.items():
                if name == ROOT:
                    objects.swap_root(data, None)
                else:
                    objects.put_bytes(name, data)
            return objects

        return made

    # -- the root ----------------------------------------------------------------------------

    def test_a_root_is_created_once(self, objects: Objects) -> None:
        """There is none at first; who creates one can read it; nobody creates a second."""
        with pytest.raises(Absent):
            objects.read_root()
        stamp = objects.swap_root(b"first", None)
        assert objects.read_root() == (b"first", stamp)
        with pytest.raises(Overtaken):
            objects.swap_root(b"second", None)
        assert root_of(objects) == b"first"

    def test_one_of_many_creates_the_root(self, objects: Objects) -> None:
        """Of twelve who create it at once one succeeds, and its root stands."""
        winners = race(lambda number: objects.swap_root(b"%d" % number, None))
        assert [b"%d" % number for number in winners] == [root_of(objects)]

    def test_a_root_is_replaced_by_who_knows_the_last(self, objects: Objects) -> None:
        """Each replacement needs the stamp of the last; an older one is refused, and changes
        nothing."""
        first = objects.swap_root(b"first", None)
        second = objects.swap_root(b"second", first)
        assert objects.read_root() == (b"second", second)
        with pytest.raises(Overtaken):
            objects.swap_root(b"third", first)
        assert root_of(objects) == b"second"
        third = objects.swap_root(b"third", second)
        assert objects.read_root() == (b"third", third)

    def test_one_of_many_replaces_the_root(self, objects: Objects) -> None:
        """Of twelve who replace the same root at once one succeeds, three times over."""
        stamp = objects.swap_root(b"first", None)
        for turn in range(3):

            def attempt(number: int, turn: int = turn, known: RootStamp = stamp) -> RootStamp:
                return objects.swap_root(b"%d/%d" % (turn, number), known)

            winners = race(attempt)
            found = objects.read_root()
            assert found is not None
            data, stamp = found
            assert [b"%d/%d" % (turn, number) for number in winners] == [data]

    def test_a_lost_answer_is_no_conflict(self, objects: Objects, lose: Lose) -> None:
        """A put whose answer is lost is read back: it gives the stamp of the root that stands."""
        lose()
        first = objects.swap_root(b"first", None)
        assert objects.read_root() == (b"first", first)
        lose()
        second = objects.swap_root(b"second", first)
        assert objects.read_root() == (b"second", second)
        # The stamp that was read back is good for the next one.
        objects.swap_root(b"third", second)
        assert root_of(objects) == b"third"

    def test_a_known_root_is_not_read_again(self, objects: Objects) -> None:
        """A read that names the root's stamp gives None until the root changes."""
        stamp = objects.swap_root(b"first", None)
        assert objects.read_root(stamp) is None
        new = objects.swap_root(b"second", stamp)
        assert objects.read_root(stamp) == (b"second", new)
        assert objects.read_root(new) is None

    def test_a_probe_leaves_nothing(self, objects: Objects) -> None:
        """A place that honours conditions is accepted, and is empty afterwards."""
        objects.probe("one")
        assert list(objects.names(PROBE)) == []
        with pytest.raises(Absent):
            objects.read_root()

    # -- others ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, pytest.param(20 << 20, marks=pytest.mark.rest)]
    )
    def test_what_was_put_is_read(self, objects: Objects, size: int) -> None:
        """An object of any size has the bytes of its pieces; a second put changes nothing."""
        data = some_bytes(size)
        for jobs in (1, 4):
            objects.put("packs/ab/1.pack", size, odd_pieces(data), jobs=jobs)
            assert objects.size("packs/ab/1.pack") == size
            assert bytes(objects.read_each("packs/ab/1.pack", [(0, size)])[0]) == data

    @pytest.mark.parametrize("size", [100, 20 << 20])
    def test_pieces_that_fail_leave_no_object(self, objects: Objects, size: int) -> None:
        """An error of the pieces comes out as it is, and there is no object, not even a part."""

        def pieces() -> Iterator[bytes]:
            yield some_bytes(size - 1)
            raise Corrupt("my block is damaged")

        with pytest.raises(Corrupt, match="my block is damaged"):
            objects.put("tables/1", size, pieces())
        with pytest.raises(Absent):
            objects.size("tables/1")
        assert list(objects.names("tables/")) == []

    def test_names_are_those_below(self, objects: Objects) -> None:
        """Names and sizes of all objects below, and of no others; nothing where nothing is."""
        sizes = {f"packs/{number % 3:02x}/{number:04x}.pack": number for number in range(30)}
        for name, size in sizes.items():
            objects.put_bytes(name, bytes(size))
        objects.put_bytes("packs-of-others", b"1")
        objects.put_bytes("lists/1", b"1")
        assert {one.name: one.size for one in objects.names("packs/")} == sizes
        assert [one.name for one in objects.names("lists/")] == ["lists/1"]
        assert list(objects.names("tables/")) == []

    def test_what_was_removed_is_gone(self, objects: Objects) -> None:
        """A removed object is absent, and removing it again is no error."""
        objects.put_bytes("lists/1", b"1")
        objects.put_bytes("lists/2", b"2")
        for _ in range(2):
            objects.remove("lists/1")
        with pytest.raises(Absent):
            objects.size("lists/1")
        assert [one.name for one in objects.names("lists/")] == ["lists/2"]
        objects.remove("tables/never")

    def test_times_are_the_places(self, objects: Objects) -> None:
        """An object's time is that of its put, and a listing tells the same.

        The servers of tests have this machine's clock; a minute is for slow ones.
        """
        before = time.time_ns()
        objects.put_bytes("lists/1", b"1")
        told = objects.time_ns("lists/1")
        assert before - 60 * 10**9 <= told <= time.time_ns() + 60 * 10**9
        (listed,) = objects.names("lists/")
        assert abs(listed.time_ns - told) <= 10**9

    def test_threads_share_a_place(self, objects: Objects) -> None:
        """Puts and reads of many threads do not disturb each other."""

        def work(number: int) -> bool:
            data = some_bytes(10_000 + number)
            objects.put_bytes(f"lists/{number}", data)
            return bytes(objects.read_each(f"lists/{number}", [(0, len(data))])[0]) == data

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(40)))

    def test_no_root_is_read_through_a_damaged_stamp(self, objects: Objects) -> None:
        """A stamp that no root had, as a damaged file gives it, never hides the root."""
        stamp = objects.swap_root(b"first", None)
        assert objects.read_root(RootStamp("0" * 15 + "f")) == (b"first", stamp)


class ReadOnlySuite(ReadingSuite):
    """What holds for places that are only read."""

    def test_nothing_is_changed(self, hold: Hold) -> None:
        """Whatever would change the place says that it is read-only, and what is not."""
        objects = hold({ROOT: b"1", "lists/1": b"1"})
        for attempt in (
            lambda: objects.swap_root(b"2", None),
            lambda: objects.swap_root(b"2", objects.read_root()[1]),  # type: ignore[index]
            lambda: objects.probe("one"),
            lambda: objects.put_bytes("lists/1", b"2"),
            lambda: objects.remove("lists/1"),
        ):
            with pytest.raises(Incompatible, match="read-only") as caught:
                attempt()
            assert caught.value.hint
        assert root_of(objects) == b"1"
        assert objects.size("lists/1") == 1


class BucketSuite(ObjectsSuite):
    """What holds for a `Bucket`, whatever server it reaches."""

    @pytest.fixture(params=["retried", "unanswered"])
    def lose(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lose:
        """obstore tries again and finds its own root there, or gives up."""
        put = obstore.put

        def lost(*given: object, **options: object) -> None:
            monkeypatch.setattr(obstore, "put", put)
            put(*given, **options)  # type: ignore[arg-type]
            if request.param == "retried":
                raise AlreadyExistsError("there is one")
            raise GenericError("no answer")

        return lambda: monkeypatch.setattr(obstore, "put", lost)

    def test_a_root_that_went_is_not_replaced(self, objects: Objects) -> None:
        """Whoever replaces a root that somebody removed meanwhile is overtaken."""
        stamp = objects.swap_root(b"first", None)
        objects.remove(ROOT)
        with pytest.raises(Overtaken):
            objects.swap_root(b"second", stamp)
        with pytest.raises(Absent):
            objects.read_root()

    def test_a_bucket_is_not_pickled(self, objects: Objects) -> None:
        """Credentials do not travel: a pickle of obstore's store would have them."""
        with pytest.raises(TypeError, match="open the remote where it is used"):
            pickle.dumps(objects)
        assert isinstance(objects, Bucket)


def lose_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next link(2) of a file say that its name is taken, though it was made."""
    create = fs.create_whole

    def lost(*given: object, **options: object) -> bool:
        monkeypatch.setattr(fs, "create_whole", create)
        assert create(*given, **options)  # type: ignore[arg-type]
        return False

    monkeypatch.setattr(fs, "create_whole", lost)
