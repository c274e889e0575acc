"""Faults between client and server: each request of each command meets each fault in turn.

A command ends right, or with an error of mstore's that shows no secret. A push that returned is
whole; of one that did not, all is visible or nothing. Then the same command succeeds.
"""

from __future__ import annotations

import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import remote_scenes
import servers
from fault_proxy import Asked, Fault, FaultProxy
from proof_models import model_files, write_files
from remote_scenes import COMMANDS, OTHER, SECRET, URL, Refs, Scene, refs_of, start

from mstore import Store
from mstore.remotes import bucket
from mstore.terms.errors import Conflict, MstoreError, NotFound

PARTS = 8
"""Of the requests of a command, a test does every eighth."""
LASTING = [Fault.LOST, Fault.RESET, Fault.UNAVAILABLE]
"""Faults that all later requests may meet as well: the server is gone, or answers are lost."""
PATIENCE = 200.0
"""Seconds after which a command counts as stuck, on cores that are much too busy."""
_buckets = count()


@dataclass
class Stage:
    """A server, and scenes that can be laid out there."""

    server: str
    scenes: dict[str, Scene]
    scratch: Path
    counted: dict[str, list[Asked]] = field(default_factory=dict)
    """the requests of each command without faults, once they were counted"""

    def laid_out(self, command: str) -> Laid:
        """Lay out a scene in a bucket of its own."""
        scene = self.scenes[command]
        proxy = FaultProxy(self.server, f"case-{next(_buckets)}")
        proxy.fill(*scene.states)
        path = self.scratch / proxy.bucket / "store"
        path.parent.mkdir()
        if scene.store is not None:
            shutil.copytree(scene.store, path)
        return Laid(command, scene, proxy, path)


@dataclass
class Laid:
    """A scene that is laid out: the command can be run."""

    command: str
    scene: Scene
    proxy: FaultProxy
    path: Path
    moved: set[str] | None = None
    """refs that the last run moved, as it reports; None if it raised"""

    def run(self) -> MstoreError | None:
        """Run the command; return its error. Fails if it hangs, or raises another one."""
        self.moved = None
        return ended(self._run)

    def _run(self) -> None:
        self.moved = remote_scenes.run(self.command, self.path)

    def remote_refs(self) -> Refs:
        """Return what a clone of the remote has, without faults: all that its root names."""
        target = self.path.with_name("clone")
        shutil.rmtree(target, ignore_errors=True)
        self.proxy.begin()
        try:
            Store.clone(URL, target)
        except NotFound:
            # There is no root.
            return {}
        return refs_of(target)

    def close(self) -> None:
        """End the proxy, and remove the stores."""
        self.proxy.close()
        shutil.rmtree(self.path.parent)


def ended(call: Callable[[], None]) -> MstoreError | None:
    """Call; return the error of mstore's with which it ended. Fails for others, and if it hangs."""
    errors: list[BaseException] = []

    def called() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- it goes to the test's own thread
            errors.append(error)

    thread = threading.Thread(target=called, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the command hangs"
    for error in errors:
        if not isinstance(error, MstoreError):
            raise error
        assert SECRET not in "".join(traceback.format_exception(error))
        return error
    return None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with all scenes."""
    scratch = tmp_path_factory.mktemp("remote-faults")
    (scratch / "scenes").mkdir()
    # Tests cut small packs into small pieces.
    with servers.moto(scratch, least_part=1024) as moto:
        server = moto.endpoint
        yield Stage(server, remote_scenes.scenes(server, scratch / "scenes"), scratch)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are tried again at once, and given up soon."""
    tries = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=10),
        "backoff": {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=2),
            "base": 2,
        },
    }
    monkeypatch.setattr(bucket, "_TRIES", tries)


def counted(stage: Stage, command: str) -> list[Asked]:
    """Return the requests of a command without faults."""
    if command in stage.counted:
        return stage.counted[command]
    laid = stage.laid_out(command)
    with remote_scenes.reached(laid.proxy):
        laid.proxy.begin()
        assert laid.run() is None
        stage.counted[command] = list(laid.proxy.log)
        check_ended(laid, None)
    laid.close()
    return stage.counted[command]


def check_ended(laid: Laid, error: MstoreError | None) -> None:
    """Prove what holds after a command, which ended so."""
    scene = laid.scene
    if laid.command in remote_scenes.KEEPING:
        assert laid.remote_refs() == scene.after
        return
    if laid.command in ("first", "second"):
        remote = laid.remote_refs()
        assert remote == scene.after or (error is not None and remote in (scene.before, {}))
        changed = {name for name in scene.after if scene.after[name] != scene.before.get(name)}
        assert error is not None or laid.moved == changed
        return
    assert all(one.method in ("GET", "HEAD") for one in laid.proxy.log)
    if laid.command == "clone":
        assert laid.path.exists() == (error is None)
        if error is None:
            assert refs_of(laid.path) in (scene.after, remote_scenes.SECOND)
        return
    own, seen = refs_of(laid.path), refs_of(laid.path, "remotes/origin/")
    # A stale root shows what the remote was; a command that failed changed nothing.
    possible = [remote_scenes.FIRST] if error else [remote_scenes.SECOND, remote_scenes.THIRD]
    assert seen in possible
    assert own == (seen if laid.command == "pull" else remote_scenes.FIRST)


def check_again(laid: Laid) -> None:
    """Prove that the same command succeeds without faults."""
    laid.proxy.begin()
    if laid.command == "clone":
        shutil.rmtree(laid.path, ignore_errors=True)
    assert laid.run() is None
    if laid.command in ("first", "second"):
        assert laid.remote_refs() == laid.scene.after
    if laid.command in ("fetch", "pull"):
        assert refs_of(laid.path, "remotes/origin/") == laid.scene.after
    if laid.command in ("pull", "clone"):
        assert refs_of(laid.path) == laid.scene.after


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_faults_puts_each_object_once(stage: Stage, command: str) -> None:
    """No object is put twice but the root, no bucket is listed, and a fetch puts nothing."""
    log = counted(stage, command)
    puts = [(one.name, one.query) for one in log if one.method == "PUT" and "probe" not in one.name]
    others = [one for one in puts if not one[0].endswith("mstore-remote")]
    assert len(others) == len(set(others))
    assert not any("list-type" in one.query for one in log)
    if command in ("fetch", "pull"):
        assert not puts


@pytest.mark.sampled(440)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_any_request(
    stage: Stage, command: str, fault: Fault, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a command meets a fault."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number == at else None)
            with monkeypatch.context() as patch:
                if fault == Fault.SILENT:
                    patch.setattr(bucket, "CLIENT", {**bucket.CLIENT, "timeout": "2s"})
                error = laid.run()
            assert len(laid.proxy.log) > number
            check_ended(laid, error)
            # What returned and is whole was proved; a stale root may have hidden the last push.
            if error is not None or fault == Fault.STALE:
                check_again(laid)
        laid.close()


@pytest.mark.sampled(120)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_all_requests_from_one_on(
    stage: Stage, command: str, fault: Fault, part: int
) -> None:
    """From some request on, each meets a fault, as if the server went away: that is an error."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)
        with remote_scenes.reached(laid.proxy):
            laid.proxy.begin(lambda asked, at=number: fault if asked.number >= at else None)
            error = laid.run()
            assert error is not None
            check_ended(laid, error)
            check_again(laid)
        laid.close()


# -- another client in between -----------------------------------------------------------------


@contextmanager
def rival_of(laid: Laid) -> Iterator[Callable[[str, tuple[int, int]], MstoreError | None]]:
    """Yield what pushes a new commit to a branch from another store, past the faults."""
    path = laid.path.with_name("rival")
    direct = FaultProxy(laid.proxy.server, laid.proxy.bucket)

    def push(name: str, model: tuple[int, int]) -> MstoreError | None:
        source = write_files(path.with_name("source"), model_files(*model))
        with Store.open(path) as store:
            store.add(source, name=name, base="base", threads=1)
            try:
                store.push("direct", [name])
            except MstoreError as error:
                return error
        return None

    try:
        Store.clone(URL, path)
        with Store.open(path) as store:
            store.add_remote("direct", URL, endpoint=direct.url)
        # The settings of a store alone name no server that gets credentials.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "trusted_endpoints", {direct.url})
            yield push
    finally:
        direct.close()


@pytest.mark.rest
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("branch", ["more", "tuned"])
@pytest.mark.parametrize("is_stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.usefixtures("soon")
def test_another_push_before_any_request(
    stage: Stage, branch: str, part: int, *, is_stale: bool
) -> None:
    """Another store pushes while a push runs: no update is lost, even if all later reads of the
    root are stale. Of two pushes of one branch exactly one succeeds; those of two both do."""
    for number in range(part, len(counted(stage, "second")), PARTS):
        laid = stage.laid_out("second")
        told: list[MstoreError | None] = []
        with remote_scenes.reached(laid.proxy), rival_of(laid) as push:

            def before(
                asked: Asked, at: int = number, told: list[MstoreError | None] = told
            ) -> Fault | None:
                if asked.number == at:
                    told.append(push(branch, OTHER))
                # A stale read ends once: else no push could.
                return Fault.STALE if is_stale and at <= asked.number < at + 4 else None

            laid.proxy.begin(before)
            error = laid.run()
            [rivals] = told
            mine = {"tuned": remote_scenes.TUNED_AGAIN} if error is None else {}
            theirs = {branch: OTHER} if rivals is None else {}
            if branch == "more":
                assert rivals is None
                assert error is None or is_stale
            else:
                assert isinstance(error, Conflict) or isinstance(rivals, Conflict)
                assert error is None or rivals is None
            assert laid.remote_refs() == laid.scene.before | mine | theirs
        laid.close()


@pytest.mark.rest
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("command", ["second", "fetch", "pull"])
@pytest.mark.usefixtures("soon")
def test_the_same_command_in_another_process_before_any_request(
    stage: Stage, command: str, part: int
) -> None:
    """A second process does the same in the same store, while the first waits for an answer: both
    end right, or one of them finds that refs moved."""
    for number in range(part, len(counted(stage, command)), PARTS):
        laid = stage.laid_out(command)

        others: list[ForkServerProcess] = []

        def before(
            asked: Asked,
            at: int = number,
            laid: Laid = laid,
            others: list[ForkServerProcess] = others,
        ) -> None:
            if asked.number == at:
                other = start(laid.command, laid.path, laid.proxy)
                others.append(other)
                # One fetch waits for another: then this one goes on first.
                other.join(6 if command == "second" else 1)

        with remote_scenes.reached(laid.proxy):
            laid.proxy.begin(before)
            error = laid.run()
            for one in others:
                one.join()
            codes = [one.exitcode for one in others]
            assert error is None or isinstance(error, Conflict)
            assert codes == [0] or (error is None and codes == [1])
            if command == "second":
                assert laid.remote_refs() == laid.scene.after
            check_again(laid)
            kept = laid.path / "remotes" / "origin" / "incoming"
            assert not kept.exists() or not list(kept.iterdir())
        laid.close()
