"""The disk says no: every file operation of an add and of a merge fails once, or from there on.

The fault comes from the observer of `mstore.fs`, right before the operation would be done; what
the library then removes is really removed.  One test fills a real, small filesystem.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import fs
from mstore.api import Store
from mstore.errors import MstoreError, StorageFailed
from mstore.ids import SnapshotId

REMOVALS = {"unlink", "rmtree"}


class Fault:
    """An observer that counts operations and makes the one numbered `at` fail.

    `lasting`: also all later ones, but for removals, as on a disk that is full.
    """

    def __init__(self, at: int, code: int, *, lasting: bool = False) -> None:
        self._at = at
        self._code = code
        self._lasting = lasting
        self._seen = 0
        self.hit: fs.Operation | None = None

    def __call__(self, operation: fs.Operation) -> None:
        if operation.kind == "committed":
            return
        number = self._seen
        self._seen += 1
        lasts = self._lasting and number > self._at and operation.kind not in REMOVALS
        if number == self._at or lasts:
            self.hit = self.hit or operation
            raise OSError(self._code, os.strerror(self._code))


def add(store: Store, sources: Path) -> SnapshotId:
    """The add under test: a new name, with a base."""
    return store.add(sources / "three", name="team/new", base="base", threads=1).snapshot


def merge(store: Store, sources: Path) -> SnapshotId:
    """The plan and merge under test."""
    plan = store.plan(
        base="base", experts=["one", "two"], method="ties", parameters={"density": 0.4}, threads=1
    )
    return store.merge(plan, name="team/new", threads=1).snapshot


def reset(store: Store, sources: Path) -> SnapshotId:
    """A ref that moves without new blocks."""
    return store.reset("team/new", "one").snapshot


CALLS = {call.__name__: call for call in (add, merge, reset)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, three fine-tunes of it, and a store that holds all but the last."""
    root = tmp_path_factory.mktemp("sources")
    small_model(root / "base", "base")
    for name in ("one", "two", "three"):
        small_model(root / name, "base" if name == "one" else name, changed=name)
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", "one", "two"):
            base = None if name == "base" else "base"
            store.add(root / name, name=name, base=base, threads=1)
    return root


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: syncs on a disk take their time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def names(store: Store) -> dict[str, SnapshotId]:
    """Every ref."""
    return {ref.name: ref.snapshot for ref in store.refs()}


def trial(
    call: Callable[[Store, Path], SnapshotId], sources: Path, root: Path, fault: Fault
) -> Iterator[str]:
    """Make one call with one fault; yields what is wrong afterwards."""
    shutil.copytree(sources / "store", root)
    error: MstoreError | None = None
    with Store.open(root) as store:
        refs, snapshots = names(store), set(store.snapshot_ids())
        try:
            with fs.observed(fault):
                refs["team/new"] = call(store, sources)
                snapshots.add(refs["team/new"])
        except MstoreError as caught:
            error = caught
    if error is not None and not isinstance(error, StorageFailed):
        yield f"it raises {error!r}"
    if error is not None and fault.hit is None:
        yield "it fails without a fault"
    with Store.open(root) as store:
        if names(store) != refs or set(store.snapshot_ids()) != snapshots:
            yield f"it {'fails' if error else 'returns'}, and the refs are {names(store)}"
        report = store.fsck(read_data=True)
        yield from (f"fsck: {problem}" for problem in report.problems)
        hit = fault.hit.kind if fault.hit else ""
        for path in report.garbage:
            # A pack stays where the commit itself failed: nobody knows what of it is on the disk.
            if hit not in REMOVALS and not (hit == "commit" and path.startswith("packs/")):
                yield f"{path} is left over"
        again = call(store, sources)
        if names(store) != refs | {"team/new": again}:
            yield "the same again does not work"
        if store.fsck().problems or any((root / "tmp").iterdir()):
            yield "the same again leaves a mess"


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_may_fail(
    name: str, code: int, lasting: bool, sources: Path, scratch: Path
) -> None:
    """Whatever file operation fails: an error and nothing published, or none and all of it."""
    call = CALLS[name]
    wrong: list[str] = []
    failed = []
    for at in count():
        fault = Fault(at, code, lasting=lasting)
        root = scratch / str(at)
        problems = list(trial(call, sources, root, fault))
        shutil.rmtree(root)
        if fault.hit is None:
            # There are fewer operations than that.
            wrong += problems
            break
        failed.append(fault.hit.kind)
        wrong += [f"{at}, {fault.hit.kind} {fault.hit.path}: {what}" for what in problems]
    assert wrong == []
    assert "commit" in failed


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from there on"])
def test_a_failed_init_leaves_nothing(lasting: bool, scratch: Path) -> None:
    """Whatever file operation of init fails: an error, no directory, and the next init works."""
    for at in count():
        fault = Fault(at, errno.ENOSPC, lasting=lasting)
        root = scratch / str(at) / "store"
        with fs.observed(fault), suppress(StorageFailed):
            Store.init(root, block_size=BLOCK).close()
        if fault.hit is None:
            break
        if fault.hit.kind not in REMOVALS:
            assert not root.exists(), fault.hit
        else:
            shutil.rmtree(root, ignore_errors=True)
        with Store.init(root, block_size=BLOCK) as store:
            assert store.fsck().problems == ()
    assert at > 20


# -- a real disk -------------------------------------------------------------------------------

ROOMS = [0, 4, 12, 20, 40, 60, 80, 90, 100, 120, 140, 180, 240, 400]
"""KiB that are left on the disk when an add begins; an add here needs about 150."""


def fill_a_disk(mount_point: str, scratch: str) -> list[str]:
    """Add to a disk that is full sooner or later; asserts what must hold, and tells how it went."""
    mount, models = Path(mount_point), Path(scratch)
    outcomes = []
    with Store.init(mount / "store", block_size=BLOCK) as store:
        store.add(small_model(models / "base", "base"), name="base", threads=1)
    for room in ROOMS:
        model = small_model(models / str(room), f"room {room}")
        _leave(mount, room << 10)
        with Store.open(mount / "store") as store:
            before = names(store)
            try:
                store.add(model, name=f"r{room}", base="base", threads=1)
                outcomes.append("stored")
            except StorageFailed as error:
                outcomes.append(_refusal(error))
                assert names(store) == before, "a failed add is visible"
            assert store.fsck(read_data=True).problems == ()
            assert list((mount / "store" / "tmp").iterdir()) == []
        (mount / "filler").unlink()
        with Store.open(mount / "store") as store:
            store.add(model, name=f"r{room}", base="base", threads=1)
            for path, contents in files_of(model).items():
                assert b"".join(store.read_file(f"r{room}", path)) == contents
    for room in (0, 40, 80, 120):
        _leave(mount, room << 10)
        try:
            Store.init(mount / "another", block_size=BLOCK).close()
            shutil.rmtree(mount / "another")
        except StorageFailed as error:
            outcomes.append(_refusal(error))
            assert not (mount / "another").exists(), "a failed init left a directory"
        (mount / "filler").unlink()
    return outcomes


def _refusal(error: StorageFailed) -> str:
    return "refused" if error.errno == errno.ENOSPC and error.hint else f"{error!r}"


def _leave(mount: Path, room: int) -> None:
    disk = os.statvfs(mount)
    with (mount / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize - room)


def test_a_full_disk_is_an_error_and_no_more(tmp_path: Path) -> None:
    """On a disk with room for nothing, for a part, or for all but the last page of an add: a clean
    error, a sound store, and the same add works when there is room again."""
    mount = tmp_path / "mount"
    mount.mkdir()
    small_disk = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
    enter = next((way for way in (["-m"], ["-Urm"]) if _may_mount(way, small_disk, mount)), None)
    if enter is None:
        pytest.skip("this user may not mount a small disk")
    # A process of its own: a map of a full disk ends in SIGBUS if it is not an error.
    code = "import sys, test_faults; print(*test_faults.fill_a_disk(*sys.argv[1:]))"
    python = [sys.executable, "-c", code, str(mount), str(tmp_path / "models")]
    done = subprocess.run(
        ["unshare", *enter, "sh", "-c", small_disk, str(mount), *python],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert outcomes[:3] == ["refused"] * 3
    assert outcomes[len(ROOMS) - 1] == "stored"
    assert set(outcomes) == {"refused", "stored"}


def _may_mount(way: list[str], small_disk: str, mount: Path) -> bool:
    command = ["unshare", *way, "sh", "-c", small_disk, str(mount), "true"]
    return shutil.which("unshare") is not None and (
        subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
