"""kill -9 of a real client at every request of push, fetch, pull and clone, then once more.

The proxy kills the client when a request arrives, which the server then never gets, or when the
server has answered, which the client then never knows.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

import pytest
import remote_scenes
from fault_proxy import Asked, Fault
from remote_scenes import COMMANDS, refs_of, start
from test_remote_faults import PARTS, Laid, Stage, check_again, counted, stage

from mstore import Store
from mstore.blocks.packs import read_footer
from mstore.terms.errors import MstoreError

pytestmark = pytest.mark.rest

__all__ = ["stage"]


def kill_at(laid: Laid, number: int, *, is_forwarded: bool) -> list[Asked]:
    """Start the command as a process, kill it at a request; return the requests until then."""
    started, is_killed = threading.Event(), threading.Event()
    processes: list[ForkServerProcess] = []

    def kill() -> None:
        started.wait()
        processes[0].kill()
        # Another thread joins it, and only one may.
        connection.wait([processes[0].sentinel])
        is_killed.set()

    def before(asked: Asked) -> Fault | None:
        if asked.number == number and not is_forwarded:
            kill()
        # What other threads of it had asked comes too late.
        return Fault.RESET if asked.number >= number and is_killed.is_set() else None

    def after(asked: Asked) -> None:
        if asked.number == number:
            kill()

    laid.proxy.begin(before, after)
    process = start(laid.command, laid.path, laid.proxy)
    processes.append(process)
    started.set()
    process.join()
    assert process.exitcode == -9
    return list(laid.proxy.log)


def check_put_once(laid: Laid, log: Sequence[Asked]) -> None:
    """Prove that no pack was put twice, under its name or another."""
    puts = Counter(
        one.name
        for one in log
        if one.is_done
        and "/packs/" in one.name
        and (one.method, "uploadId" in one.query) in (("PUT", False), ("POST", True))
    )
    assert max(puts.values(), default=1) == 1
    entries: Counter[tuple[int, bytes]] = Counter()
    for data in laid.proxy.objects("models/packs/").values():
        path = laid.path.with_name("pack")
        path.write_bytes(data)
        entries.update((entry.kind, entry.id) for entry in read_footer(path).entries)
    assert max(entries.values(), default=1) == 1


@pytest.mark.sampled(48)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("is_forwarded", [False, True], ids=["arrives", "is-done"])
@pytest.mark.parametrize("command", ["first", "second"])
def test_a_push_killed_at_any_request_goes_on(
    stage: Stage, command: str, part: int, *, is_forwarded: bool
) -> None:
    """All or nothing of a push that is killed is visible; the next one sends only what is not
    there."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            log = kill_at(laid, number, is_forwarded=is_forwarded)
            assert laid.remote_refs() in (laid.scene.before, laid.scene.after)
            laid.proxy.begin()
            assert laid.run() is None
            check_put_once(laid, [*log, *laid.proxy.log])
            assert laid.remote_refs() == laid.scene.after
        laid.close()


@pytest.mark.sampled(48)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("command", COMMANDS[2:])
def test_a_fetch_killed_at_any_request_goes_on(stage: Stage, command: str, part: int) -> None:
    """Of a fetch that is killed nothing is visible; the next one succeeds, and leaves no garbage.
    A clone that is killed is an empty store, or none; a pull goes on there."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            kill_at(laid, number, is_forwarded=True)
            if command == "clone":
                go_on_with_clone(laid)
            else:
                assert refs_of(laid.path) == remote_scenes.FIRST
                assert refs_of(laid.path, "remotes/origin/") == remote_scenes.FIRST
            check_again(laid)
            kept = laid.path / "remotes" / "origin" / "incoming"
            assert not kept.exists() or not list(kept.iterdir())
        laid.close()


def go_on_with_clone(laid: Laid) -> None:
    """Pull into a store that a killed clone left, if there is one."""
    try:
        with Store.open(laid.path) as store:
            assert store.refs() == []
            is_known = bool(store.remotes())
            if is_known:
                laid.proxy.begin()
                store.pull("origin")
    except MstoreError:
        # It is no store yet.
        assert not (laid.path / "mstore.json").exists()
    else:
        assert not is_known or refs_of(laid.path) == laid.scene.after
    shutil.rmtree(laid.path, ignore_errors=True)
