"""Faults of a lazy store's remote: each request of each command that reads there, each fault.

A command ends right, or with an error that names the remote or a block; then the same command
succeeds. No byte is wrong, and the store stays sound.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import traceback
from collections.abc import Iterator, Sequence

import lazy_scenes
import pytest
import servers
from exchanges import Place, files, merged, place, sound
from fault_proxy import BUCKET, Asked, Fault
from lazy_scenes import COMMANDS, Family, Laid, program
from proof_models import model_files
from remote_scenes import reached, settings
from test_remote_faults import LASTING, ended, soon

from mstore import Store
from mstore.remotes import bucket
from mstore.terms.errors import Conflict, Corrupt, MstoreError, Unavailable
from mstore.terms.ids import Buffer

__all__ = ["place", "soon"]
PARTS = 4
"""Of the requests of a command, a test does every fourth."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A server with a family, and lazy stores of it."""
    scratch = tmp_path_factory.mktemp("lazy-faults")
    with servers.moto(scratch, least_part=1024) as moto:
        yield lazy_scenes.family(moto.endpoint, scratch)


_counted: dict[str, int] = {}


def counted(family: Family, command: str) -> int:
    """Return how many requests a command takes, at most."""
    if command not in _counted:
        laid = family.laid_out(command)
        with reached(laid.proxy):
            laid.run()
            _counted[command] = len(laid.proxy.log)
            laid.sound()
        laid.close()
    return _counted[command]


def check(laid: Laid, error: MstoreError | None) -> None:
    """Prove what holds after a command that met a fault."""
    if error is not None:
        told = f"{error} {error.hint}"
        assert any(word in told for word in ("origin", BUCKET, "block ")), told
        if isinstance(error, Unavailable):
            assert error.hint
    laid.proxy.begin()
    laid.run()
    laid.sound()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("command", COMMANDS)
def test_without_faults(family: Family, command: str) -> None:
    """A command asks for something, and never writes at the remote."""
    laid = family.laid_out(command)
    with reached(laid.proxy):
        laid.run()
        assert laid.proxy.log
        assert {one.method for one in laid.proxy.log} <= {"GET", "HEAD"}
    laid.close()


@pytest.mark.sampled(352)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_any_request(
    family: Family, command: str, fault: Fault, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a command meets a fault."""
    for number in range(part, counted(family, command), PARTS):
        laid = family.laid_out(command)
        with reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number == at else None)
            with monkeypatch.context() as patch:
                if fault == Fault.SILENT:
                    patch.setattr(bucket, "CLIENT", {**bucket.CLIENT, "timeout": "2s"})
                error = ended(laid.run)
            # A request that is tried again hides all but an older root, which is refused.
            went_back = isinstance(error, Conflict) and "the remote went back" in error.what
            assert error is None or (fault == Fault.STALE and went_back)
            check(laid, error)
        laid.close()


@pytest.mark.sampled(96)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_all_requests_from_one_on(
    family: Family, command: str, fault: Fault, part: int
) -> None:
    """From some request on, each meets a fault, as if the server went away: an error that names
    the remote."""
    for number in range(part, counted(family, command), PARTS):
        laid = family.laid_out(command)
        with reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number >= at else None)
            error = ended(laid.run)
            # Requests are joined as they wait, so there may be fewer of them this time.
            assert error is not None or len(laid.proxy.log) <= number
            check(laid, error)
        laid.close()


# -- kill -9 ---------------------------------------------------------------------------------------


def kill_at(laid: Laid, number: int) -> bool:
    """Run a scene as a program and kill it at a request; return whether that came."""
    started = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def before(asked: Asked) -> Fault | None:
        if asked.number == number:
            started.wait()
            processes[0].kill()
            processes[0].wait()
        return Fault.RESET if asked.number >= number else None

    laid.proxy.begin(before)
    command = program(laid.command, laid.path)
    with subprocess.Popen(command, env=os.environ | settings(laid.proxy)) as process:
        processes.append(process)
        started.set()
    assert process.returncode in (0, -9)
    return process.returncode == -9


@pytest.mark.rest
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("command", ["prefetch", "merge", "read", "drop"])
def test_killed_at_any_request(family: Family, command: str, part: int) -> None:
    """A command that was killed leaves a sound store, and the same command succeeds."""
    for number in range(part, counted(family, command), PARTS):
        laid = family.laid_out(command)
        with reached(laid.proxy):
            kill_at(laid, number)
            laid.proxy.begin()
            laid.sound()
            laid.run()
            laid.sound()
            kept = laid.path / "remotes" / "origin" / "incoming"
            assert not kept.exists() or not list(kept.iterdir())
        laid.close()


# -- others ------------------------------------------------------------------------------------


def test_no_secret_in_an_error(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote that refuses is an error without the credentials, with what to do."""
    laid = family.laid_out("read")
    with reached(laid.proxy):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-shown-lazy")
        laid.proxy.begin(lambda asked: Fault.RESET)
        monkeypatch.setattr(bucket, "_TRIES", {**bucket._TRIES, "max_retries": 0})
        error = ended(laid.run)
        assert error is not None
        assert "never-shown" not in "".join(traceback.format_exception(error))
        assert "origin" in f"{error} {error.hint}" or BUCKET in str(error)
    laid.close()


def test_another_thread_is_not_delayed(family: Family) -> None:
    """While a request waits for an answer, what is here and in the cache is read at once."""
    laid = family.laid_out("read")
    with reached(laid.proxy), Store.open(laid.path) as store:
        assert files(store, "e1") == model_files(1, 1)
        held = threading.Event()
        asked = threading.Event()

        def before(one: Asked) -> None:
            asked.set()
            held.wait(60)

        laid.proxy.begin(before)
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(files(store, "e2")))
        thread.start()
        try:
            assert asked.wait(60)
            assert files(store, "e1") == model_files(1, 1)
            assert not found
        finally:
            held.set()
            thread.join()
        assert found == [model_files(1, 2)]
    laid.close()


@pytest.mark.rest
def test_a_merge_whose_pack_was_collected(place: Place) -> None:
    """A pack that gc of the remote removed ends a merge with an error that names the remote, and
    no half result; what is still there is read."""
    store = place.store("a")
    for number, name in enumerate(("base", "x", "y")):
        place.add(store, name, 1, number, base="base" if number else None)
        store.push("origin", [name])
    Store.clone(place.url, place.path / "lazy", lazy=True)
    other = place.open("lazy")
    store.push("origin", delete=["y"])
    for _ in range(2):
        store.remote_gc("origin", reflog_days=0, grace_hours=0.0)
    with pytest.raises(Corrupt, match="origin") as refused:
        merged(other, "m", "base", "x", "y")
    assert "fetch" in str(refused.value.hint)
    assert "m" not in {ref.name for ref in other.refs()}
    assert files(other, "x") == model_files(1, 1)
    merged(other, "m", "base", "x")
    store.push("origin", ["y"])
    other.fetch("origin")
    assert files(other, "y") == model_files(1, 2)
    merged(other, "n", "base", "x", "y")
    sound(other)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("command", ["merge", "read", "load", "checkout", "prefetch"])
def test_damage_on_the_way_does_not_stay(
    family: Family, command: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are flipped in any one answer give no wrong byte: the command ends right, or with
    an error that names a block, and then the same command succeeds."""
    read = bucket.Bucket.read_each
    for number in range(part, counted(family, command), PARTS):
        laid = family.laid_out(command)
        numbers = itertools.count()

        def flipped(
            self: bucket.Bucket,
            name: str,
            spans: Sequence[tuple[int, int]],
            at: int = number,
            numbers: Iterator[int] = numbers,
        ) -> list[Buffer]:
            found = read(self, name, spans)
            if name.startswith("packs/") and next(numbers) == at:
                data = [bytearray(one) for one in found]
                for one in data:
                    for place in range(0, len(one), 512):
                        one[place] ^= 1
                return list(data)
            return found

        with reached(laid.proxy):
            with monkeypatch.context() as patch:
                patch.setattr(bucket.Bucket, "read_each", flipped)
                error = ended(laid.run)
            assert error is None or isinstance(error, Corrupt), error
            check(laid, error)
        laid.close()
