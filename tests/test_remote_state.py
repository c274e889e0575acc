"""One root and its lists: who was overtaken waits; several commands keep files of one remote."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from exchanges import REMOTE, Place, before_swap, place

from mstore import fs
from mstore.remotes import state
from mstore.terms.errors import Conflict

__all__ = ["place"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of this test, in seconds, none of which is waited."""
    found: list[float] = []
    monkeypatch.setattr(state, "time", SimpleNamespace(sleep=found.append))
    return found


def test_attempts_wait_at_random(place: Place, waits: list[float]) -> None:
    """Before each attempt but the first there is a random wait of at most a second; the longest
    doubles with each, and the attempts end."""
    remote = place.looking()
    attempts = remote.attempts()
    assert [(next(attempts), len(waits)) for _ in range(50)] == [(one, one) for one in range(50)]
    with pytest.raises(Conflict, match="others change the remote"):
        next(attempts)
    assert len(waits) == 49
    for attempt, seconds in enumerate(waits, start=1):
        assert 0 <= seconds <= min(1.0, 0.02 * 2**attempt)
    assert len(set(waits)) > 40
    assert max(waits) > 0.5


def test_a_push_that_is_overtaken_waits_once(
    place: Place, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that another overtakes waits, and then reads the root: it needs no third attempt, if
    a third push comes in during the wait."""
    store, other = place.store("store"), place.store("other")
    place.add(store, "first", 1)
    store.push(REMOTE, ["first"])
    place.add(store, "mine", 2)
    for number in (3, 4):
        place.add(other, f"theirs-{number}", number)

    def third(seconds: float) -> None:
        waits.append(seconds)
        other.push(REMOTE, ["theirs-4"])

    monkeypatch.setattr(state, "time", SimpleNamespace(sleep=third))
    with before_swap(monkeypatch, lambda: other.push(REMOTE, ["theirs-3"])) as swaps:
        store.push(REMOTE, ["mine"])
    assert len(waits) == 1
    # Its own two, and one of each of the others.
    assert len(swaps) == 4
    assert set(place.state().refs()) == {"first", "mine", "theirs-3", "theirs-4"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("below", ["lists", "sent"])
def test_a_command_removes_no_file_that_another_writes(place: Place, below: str) -> None:
    """While a command of a store writes a list, or the table of a pack that it puts, another one
    does not see the temporary file: it removes what it does not know."""
    remote = place.looking()
    seen: list[str] = []
    others: list[threading.Thread] = []

    def meanwhile(operation: fs.Operation) -> None:
        if operation.kind == "rename" and not others:
            others.append(threading.Thread(target=lambda: seen.extend(remote.kept(below))))
            others[0].start()
            # Without a lock it would be done by now.
            others[0].join(1)

    with fs.observed(meanwhile):
        remote.keep(f"{below}/name", b"data")
    [other] = others
    other.join()
    assert seen == ["name"]
