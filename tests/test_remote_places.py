"""Tables of a remote's packs become local segments: several requests at once, without the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from exchanges import REMOTE, Place, place

from mstore import fs
from mstore.blocks.packs import Kind
from mstore.blocks.segments import Segments
from mstore.remotes import objects, places
from mstore.remotes.places import RemotePlaces
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Remote
from mstore.terms.errors import Unavailable
from mstore.terms.ids import Buffer

__all__ = ["place"]
PUSHES = 6
PATIENCE = 60.0


@pytest.fixture
def remote(place: Place) -> Remote:
    """A remote with six tables, as a client sees it that has read none."""
    store = place.store("store")
    for number in range(PUSHES):
        place.add(store, f"m{number}", number)
        store.push(REMOTE, [f"m{number}"])
    return place.looking()


def at_each_table(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do this in each request for tables, before it is answered."""
    read = SharedDirectory.read_each

    def later(self: SharedDirectory, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        if name.startswith("tables/"):
            act()
        return read(self, name, spans)

    monkeypatch.setattr(SharedDirectory, "read_each", later)


def check_all_is_known(remote: Remote, found: RemotePlaces) -> None:
    """Prove that every snapshot's record has its place, in segments that are sound."""
    ids = [bytes(id) for id in remote.state().rows("snapshots")]
    assert len(ids) == PUSHES
    assert None not in found.locate(Kind.SNAPSHOT, ids)
    segments = Segments(remote.directory / "places")
    segments.verify()
    assert len(segments.packs()) == PUSHES


def test_tables_are_read_several_at_once(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request for tables waits for the answer of another."""
    all_asked = threading.Barrier(PUSHES)
    at_each_table(monkeypatch, lambda: all_asked.wait(PATIENCE) and None)
    check_all_is_known(remote, RemotePlaces(remote, remote.state()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [1, places._KEPT], ids=["one-by-one", "together"])
def test_a_read_that_fails(remote: Remote, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several requests for tables one fails: its error is raised, the segments are sound, and
    the next command reads what is missing."""
    monkeypatch.setattr(places, "_KEPT", kept)
    asked: list[int] = []

    def fail_fourth() -> None:
        asked.append(len(asked))
        if len(asked) == 4:
            raise Unavailable("the place does not answer", where="tables/")

    with monkeypatch.context() as patch:
        at_each_table(patch, fail_fourth)
        with pytest.raises(Unavailable, match="does not answer"):
            RemotePlaces(remote, remote.state())
    segments = Segments(remote.directory / "places")
    segments.verify()
    known = len(segments.packs())
    assert known == 0 if kept > 1 else known < PUSHES
    asked.clear()
    at_each_table(monkeypatch, lambda: asked.append(0))
    check_all_is_known(remote, RemotePlaces(remote, remote.state()))
    assert len(asked) == PUSHES - known


def test_requests_hold_no_lock(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tables are read, another command of the store can change the segments."""
    directory: Path = remote.directory / "places"
    free: list[bool] = []

    def look() -> None:
        lock = fs.LockFile(directory / "lock")
        free.append(lock.acquire(blocking=False))
        lock.release()

    # One at a time: each holds the lock for a moment.
    monkeypatch.setattr(objects, "_READS", 1)
    at_each_table(monkeypatch, look)
    check_all_is_known(remote, RemotePlaces(remote, remote.state()))
    assert free == [True] * PUSHES
