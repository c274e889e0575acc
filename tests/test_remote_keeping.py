"""gc, fsck and du of a remote: each request in turn meets each fault, or kill -9 of the client.

A command ends right, or with an error of mstore's. Whatever the end, all that refs need is there,
byte for byte; the same command, run again, ends its work, and two runs more leave no garbage.
"""

from __future__ import annotations

import pytest
import remote_scenes
from fault_proxy import Fault
from remote_scenes import KEEPING, STRAY, collect
from test_remote_faults import LASTING, PARTS, Laid, Stage, counted, soon, stage
from test_remote_kill import kill_at

from mstore import Store
from mstore.remotes import bucket

pytestmark = pytest.mark.rest

__all__ = ["soon", "stage"]


def packs(laid: Laid) -> set[str]:
    """The packs at the remote."""
    return set(laid.proxy.names("models/packs/"))


def check_kept(laid: Laid) -> None:
    """Prove that refs have all that they need; that the command succeeds now, and ends the work."""
    if laid.command != "gc":
        # Who asks for nothing else changes nothing.
        assert {one.method for one in laid.proxy.log} <= {"GET", "HEAD"}
        laid.proxy.begin()
        assert laid.run() is None
        return
    assert laid.remote_refs() == laid.scene.after
    laid.proxy.begin()
    assert laid.run() is None
    with Store.open(laid.path) as store:
        before = store.remote_contents("origin").refs
        # The first names what no root named, the second deletes it.
        collect(store)
        collect(store)
        last = collect(store)
        assert (last.packs_condemned, last.packs_deleted, last.leftover_objects) == (0, 0, 0)
        assert last.waiting_bytes == 0
        assert store.remote_contents("origin").refs == before
        assert store.remote_fsck("origin", read_data=True).problems == ()
    # All that is left is needed: what is missing of the garbage was deleted.
    littered = {name for name in laid.scene.states[-1] if "/packs/" in name}
    assert packs(laid) < littered - {f"models/{STRAY}"}


@pytest.mark.parametrize("command", ["fsck", "du"])
def test_a_check_changes_nothing(stage: Stage, command: str) -> None:
    """fsck and du put and remove nothing at the remote."""
    assert {one.method for one in counted(stage, command)} <= {"GET", "HEAD"}


def test_a_collection_meets_each_kind_of_request(stage: Stage) -> None:
    """The scene of gc has garbage to condemn and to delete: else faults prove nothing."""
    log = counted(stage, "gc")
    assert any(one.method == "DELETE" or one.query.startswith("delete") for one in log)
    assert sum(one.method == "PUT" and one.name.endswith("mstore-remote") for one in log) == 2


@pytest.mark.sampled(24)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("is_forwarded", [False, True], ids=["arrives", "is-done"])
@pytest.mark.parametrize("command", KEEPING)
def test_a_kill_at_any_request(
    stage: Stage, command: str, part: int, *, is_forwarded: bool
) -> None:
    """kill -9 at a request loses nothing that refs need, and the next run ends the work."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            kill_at(laid, number, is_forwarded=is_forwarded)
            check_kept(laid)
        laid.close()


@pytest.mark.sampled(132)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("command", KEEPING)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_any_request(
    stage: Stage, command: str, fault: Fault, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request meets a fault."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number == at else None)
            with monkeypatch.context() as patch:
                if fault == Fault.SILENT:
                    patch.setattr(bucket, "CLIENT", {**bucket.CLIENT, "timeout": "2s"})
                laid.run()
            assert len(laid.proxy.log) > number
            check_kept(laid)
        laid.close()


@pytest.mark.sampled(72)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("command", KEEPING)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_all_requests_from_one_on(
    stage: Stage, command: str, fault: Fault, part: int
) -> None:
    """From some request on, each meets a fault: that is an error, and loses nothing."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number >= at else None)
            assert laid.run() is not None
            check_kept(laid)
        laid.close()
