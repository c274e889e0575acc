"""Backups and clones: of one commit of a store in use, whole at every moment, every byte proved."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Kind
from mstore.store import leases, listing, pack_list
from mstore.store.layout import locate
from mstore.terms.errors import BadRequest, Conflict, Corrupt, NotFound, StorageFailed
from mstore.terms.ids import PackId
from mstore.terms.phrases import as_phrase, call

LIVES = """
import os, signal, sys
from mstore import fs
from mstore.api import Store

source, target, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = 0

def observer(operation):
    global seen
    seen += 1
    if seen > at:
        os.kill(os.getpid(), signal.SIGKILL)

with Store.open(source) as store, fs.observed(observer):
    store.backup(target, threads=1)
"""
"""A backup that dies before its operation of this number."""

READER = """
import sys
from mstore.api import Store
from mstore.store import contents

with Store.open(sys.argv[1]) as store, contents.held(store._catalog, [store["one"].id]):
    print("up", flush=True)
    sys.stdin.read()
"""
"""Somebody who reads a snapshot until its standard input ends."""

BUSY = """
import sys
from pathlib import Path
from small_models import small_model
from mstore.api import Store
from mstore.terms.errors import Conflict

source, task, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
print("up", flush=True)
number = 0
while True:
    number += 1
    with Store.open(source) as store:
        if task == "gc":
            store.gc(dead_share=0.0)
            continue
        model = small_model(scratch / task, f"{task} {number}")
        store.add(model, name=f"{task}/now", threads=1)
        if number % 3 == 0:
            store.remove(f"{task}/now")
"""
"""Somebody at work in a store until it is killed: a writer, or the collector."""


def build(root: Path) -> None:
    """Three models, and a store of two of them whose reflog keeps nothing."""
    for name in ("one", "two", "three"):
        small_model(root / name, name)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        for name in ("one", "two"):
            store.add(root / name, name=name, threads=1)


@pytest.fixture
def models(template: Path) -> Path:
    """Models that tests only add."""
    return template


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of it."""
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def packs_in(root: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (root / "packs").glob("*/*.pack")}


def contents(root: Path) -> dict[str, dict[str, bytes]]:
    """Every ref of a store and its files, after fsck of every byte found nothing wrong."""
    with Store.open(root) as store:
        report = store.fsck(read_data=True, threads=1)
        assert not report.problems
        assert not report.garbage
        found = {}
        for ref in store.refs():
            view = store.view(ref.snapshot)
            found[ref.name] = {path: b"".join(map(bytes, view.stream(path))) for path in view.files}
    return found


def rot(store: Store) -> str:
    """Turn a byte of the newest pack's first payload; returns the pack."""
    path = max((store.path / "packs").glob("*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes(data)
    return path.stem


# -- backup ------------------------------------------------------------------------------------


def test_a_backup_is_the_store(store: Store, models: Path, tmp_path: Path) -> None:
    """Refs, reflogs, settings, name and every byte are the source's, and fsck finds nothing."""
    target = tmp_path / "backup"
    report = store.backup(target, threads=1)
    assert contents(target) == {name: files_of(models / name) for name in ("one", "two")}
    assert packs_in(target) == packs_in(store.path)
    assert (report.refs, report.packs_copied, report.problems) == (2, report.packs, ())
    with Store.open(target) as copy:
        assert copy.uuid == store.uuid
        assert dict(copy.config) == dict(store.config)
        assert copy.reflog("one") == store.reflog("one")
        assert copy.doubt() is None
    assert not leases.live(store._catalog.layout)


def test_a_second_backup_copies_what_is_new(store: Store, models: Path, tmp_path: Path) -> None:
    """Packs that the backup has are not written again, and the newest state takes its place."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    before = {path: path.stat().st_ino for path in (target / "packs").glob("*/*.pack")}
    store.add(models / "three", name="three", threads=1)
    store.remove("one")
    report = store.backup(target, threads=1)
    assert report.packs_copied == 1
    assert {path: path.stat().st_ino for path in before} == before
    assert contents(target) == {name: files_of(models / name) for name in ("two", "three")}
    again = store.backup(target, threads=1)
    assert (again.packs_copied, again.bytes_copied, again.packs_removed) == (0, 0, ())


def test_what_gc_removed_goes_last(store: Store, models: Path, tmp_path: Path) -> None:
    """Packs that the source has no more go from the backup, after the new index is in place."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    old = set(packs_in(target))
    store.remove("one")
    store.gc(dead_share=0.0)
    assert set(packs_in(store.path)) != old
    order: list[str] = []

    def watch(operation: fs.Operation) -> None:
        if operation.path.startswith(str(target / "packs")) and operation.kind == "unlink":
            order.append("unlink")
        if operation.kind == "exchange":
            order.append("exchange")

    with fs.observed(watch):
        report = store.backup(target, threads=1)
    assert order[0] == "exchange"
    assert set(report.packs_removed) == old - set(packs_in(store.path)) != set()
    assert packs_in(target) == packs_in(store.path)
    assert contents(target) == {"two": files_of(models / "two")}


def test_readers_of_the_backup_keep_their_packs(store: Store, models: Path, tmp_path: Path) -> None:
    """While somebody reads a snapshot of the backup nothing is removed from it; later it is."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    old = packs_in(target)
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            READER,
            str(target),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"up\n"
        store.remove("one")
        store.gc(dead_share=0.0)
        held = store.backup(target, threads=1)
        assert held.packs_removed == ()
        assert held.waiting_bytes > 0
        assert old.keys() <= packs_in(target).keys()
    finally:
        reader.communicate()
    assert store.backup(target, threads=1).packs_removed
    assert contents(target) == {"two": files_of(models / "two")}
    assert packs_in(target) == packs_in(store.path)


def test_what_a_backup_refuses(store: Store, models: Path, tmp_path: Path) -> None:
    """The store itself, what lies in it, other stores and directories are left as they are."""
    inside = store.path / "packs" / "backup"
    for bad in (store.path, inside):
        with pytest.raises(BadRequest, match="the store itself"):
            store.backup(bad)
    assert not inside.exists()
    other = tmp_path / "other"
    with Store.init(other, block_size=BLOCK) as stranger:
        stranger.backup(tmp_path / "theirs", threads=1)
    before = files_of(other)
    with pytest.raises(Conflict, match="not a backup of this one"):
        store.backup(other)
    assert files_of(other) == before
    with pytest.raises(Conflict, match="not empty"):
        store.backup(models)
    with pytest.raises(Conflict, match="of another store"):
        store.backup(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(store.path)
    with pytest.raises(BadRequest, match="the store itself"):
        store.backup(tmp_path / "link")


def test_a_backup_that_was_written_to_is_left_alone(
    store: Store, models: Path, tmp_path: Path
) -> None:
    """A backup can be turned to use; from the first commit on no backup replaces what it has."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    with Store.open(target) as copy:
        copy.add(models / "three", name="mine", threads=1)
    store.add(models / "three", name="three", threads=1)
    with pytest.raises(Conflict, match="a separate store"):
        store.backup(target, threads=1)
    assert set(contents(target)) == {"one", "two", "mine"}


@pytest.mark.rest
def test_a_store_that_went_back_takes_nothing_from_its_backup(
    store: Store, models: Path, tmp_path: Path
) -> None:
    """A store that is older than its backup, or of another history, is refused: the backup may
    be the only copy of what came since."""
    older, twin = tmp_path / "older", tmp_path / "twin"
    target = tmp_path / "backup"
    store.backup(older, threads=1)
    store.add(models / "three", name="three", threads=1)
    store.backup(target, threads=1)
    shutil.copytree(older, twin)
    with Store.open(twin) as restored:
        with pytest.raises(Conflict, match="newer than this store"):
            restored.backup(target, threads=1)
        for _ in range(2):
            restored.add(models / "three", name="lost", threads=1)
            restored.add(models / "one", name="lost", threads=1)
        with pytest.raises(Conflict, match="another history"):
            restored.backup(target, threads=1)
    assert set(contents(target)) == {"one", "two", "three"}


def test_a_backup_of_a_backup_is_how_to_restore(store: Store, models: Path, tmp_path: Path) -> None:
    """What a backup of the backup makes is the store again: it goes on, and so do its backups."""
    target, restored = tmp_path / "backup", tmp_path / "restored"
    store.backup(target, threads=1)
    store.close()
    shutil.rmtree(store.path)
    with Store.open(target) as copy:
        copy.backup(restored, threads=1)
    with Store.open(restored) as again:
        again.add(models / "three", name="three", threads=1)
        again.backup(target, threads=1)
    assert set(contents(target)) == {"one", "two", "three"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_backup_is_its_makers(store: Store, models: Path, tmp_path: Path, umask: int) -> None:
    """Whoever shares the store: nobody but its maker may write its backup, the umask says who may
    read it, and so it is with every later one.  What was restored from it is shared by a word."""
    store.configure("shared", "group")
    target, restored = tmp_path / "backup", tmp_path / "restored"
    before = os.umask(umask)
    try:
        for name in ("three", "four"):
            store.add(models / "three", name=name, message=name, threads=1)
            store.backup(target, threads=1)
            for path in (target, *target.rglob("*")):
                bits = stat.S_IMODE(path.stat().st_mode)
                assert bits & 0o022 == 0, path
                # Locks, and what is being written, are for those who may write.
                if path.name == "lock" or "tmp" in path.relative_to(target).parts:
                    continue
                assert bits & 0o044 == 0o044 & ~umask, path
        with Store.open(target) as copy:
            assert dict(copy.config) == dict(store.config) | {"shared": "umask"}
            copy.backup(restored, threads=1)
    finally:
        os.umask(before)
    with Store.open(restored) as again:
        again.configure("shared", "group")
    assert all(path.stat().st_mode & 0o020 for path in restored.rglob("*") if path.is_dir())
    assert store.config["shared"] == "group"


# -- in use ------------------------------------------------------------------------------------


@pytest.mark.rest
def test_a_backup_beside_writers_and_gc(store: Store, models: Path, tmp_path: Path) -> None:
    """Beside a process that adds and removes and one that collects, each backup is whole."""
    path = Path(__file__).parent
    environment = dict(os.environ) | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{path}"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, str(store.path), task, str(tmp_path / "scratch")],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for task in ("writer", "gc")
    ]
    kept = {name: files_of(models / name) for name in ("one", "two")}
    generations = set()
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"up\n"
        for number in count():
            if len(generations) > 5:
                break
            # The first of each anew, the others incremental.
            report = store.backup(tmp_path / f"backup{number % 2}", threads=1)
            assert not report.problems
            generations.add(report.generation)
            found = contents(tmp_path / f"backup{number % 2}")
            found.pop("writer/now", None)
            assert found == kept
            assert all(worker.poll() is None for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()


def test_no_lease_no_loss(
    store: Store, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lease can be had and gc takes a pack before it is copied, the backup begins anew
    with the rows of now."""
    from mstore.upkeep.backup import copying

    def refused(*given: object) -> None:
        raise StorageFailed("read-only", errno=errno.EROFS)

    copied = copying.copy

    def late(*given: object, **named: object) -> None:
        monkeypatch.setattr(copying, "copy", copied)
        store.remove("one")
        store.gc(dead_share=0.0)
        copied(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(copying, "Lease", refused)
    monkeypatch.setattr(copying, "copy", late)
    report = store.backup(tmp_path / "backup", threads=1)
    assert not report.problems
    assert contents(tmp_path / "backup") == {"two": files_of(models / "two")}


# -- when it ends too early --------------------------------------------------------------------


class Fault:
    """An observer that makes the operation numbered `at`, and all later ones in a directory, fail
    as a full disk does; nothing is refused elsewhere."""

    def __init__(self, at: int, directory: Path) -> None:
        self.at = at
        self.directory = str(directory)
        self.seen = 0

    def __call__(self, operation: fs.Operation) -> None:
        if not operation.path.startswith(self.directory) or operation.kind == "committed":
            return
        self.seen += 1
        if self.seen > self.at and operation.kind not in {"unlink", "rmtree"}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def prepared(store: Store, models: Path, target: Path) -> dict[str, dict[str, bytes]]:
    """A backup, and a source that added, removed and collected since; what it had and has."""
    store.backup(target, threads=1)
    store.add(models / "three", name="three", threads=1)
    store.remove("one")
    store.gc(dead_share=0.0)
    return {name: files_of(models / name) for name in ("one", "two", "three")}


@pytest.mark.rest
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_last_backup(
    store: Store, models: Path, tmp_path: Path, step: int
) -> None:
    """Wherever the backup's disk fills up, it holds the old state or the new one, readable; when
    there is room again, the next run brings it up to date."""
    first = tmp_path / "first"
    all_files = prepared(store, models, first)
    old = {name: all_files[name] for name in ("one", "two")}
    new = {name: all_files[name] for name in ("two", "three")}
    outcomes = set()
    for at in count(step=step):
        target = tmp_path / f"backup{at}"
        shutil.copytree(first, target)
        fault = Fault(at, target)
        try:
            with fs.observed(fault):
                store.backup(target, threads=1)
        except StorageFailed:
            found = read(target)
            assert found in (old, new)
            outcomes.add(found == new)
            store.backup(target, threads=1)
            assert contents(target) == new
        else:
            break
        shutil.rmtree(target)
    assert at > 20
    assert False in outcomes


def read(root: Path) -> dict[str, dict[str, bytes]]:
    """Every ref and its files, as they are read from a store that may be in between."""
    with Store.open(root) as store:
        return {
            ref.name: {
                path: b"".join(map(bytes, store.view(ref.snapshot).stream(path)))
                for path in store.view(ref.snapshot).files
            }
            for ref in store.refs()
        }


def killed_at(store: Store, target: Path, at: int) -> bool:
    """Run a backup in a process that is killed before its operation of this number; whether."""
    line = [sys.executable, "-c", LIVES, str(store.path), str(target), str(at)]
    return subprocess.run(line, check=False).returncode != 0


def points(*short: int, of: int) -> list[object]:
    """Operations to be killed before: these, and with the long lanes every third."""
    every = [at for at in range(0, of, 3) if at not in short]
    return [*short, *(pytest.param(at, marks=pytest.mark.slow) for at in every)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", points(30, 41, 48, 56, of=60))
def test_a_kill_leaves_the_last_backup(store: Store, models: Path, tmp_path: Path, at: int) -> None:
    """kill -9 in the middle leaves the old state or the new one; the next run finishes."""
    target = tmp_path / "backup"
    all_files = prepared(store, models, target)
    assert killed_at(store, target, at)
    assert read(target) in (
        {name: all_files[name] for name in ("one", "two")},
        {name: all_files[name] for name in ("two", "three")},
    )
    store.backup(target, threads=1)
    assert contents(target) == {name: all_files[name] for name in ("two", "three")}
    assert packs_in(target) == packs_in(store.path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", points(4, 41, 58, of=72))
def test_the_first_backup_goes_on_where_it_was_killed(
    store: Store, models: Path, tmp_path: Path, at: int
) -> None:
    """A first backup that was killed is no store yet; the next run takes up what is there."""
    target = tmp_path / "backup"
    assert killed_at(store, target, at)
    if not (target / "format").exists():
        with pytest.raises(NotFound):
            Store.open(target)
    store.backup(target, threads=1)
    assert contents(target) == {name: files_of(models / name) for name in ("one", "two")}


def test_whole_packs_of_an_interrupted_backup_are_not_copied_again(
    store: Store, tmp_path: Path
) -> None:
    """What was copied whole before the interruption is taken as it lies there, and proved."""
    target = tmp_path / "backup"
    reads = []

    def stop(operation: fs.Operation) -> None:
        if operation.kind == "rename" and operation.target.endswith(".pack"):
            reads.append(operation.target)
            if len(reads) == 2:
                raise OSError(errno.ENOSPC, "full")

    with fs.observed(stop), pytest.raises(StorageFailed):
        store.backup(target, threads=1)
    again: list[str] = []

    def watch(operation: fs.Operation) -> None:
        if operation.kind == "create" and operation.path.endswith(".part"):
            again.append(operation.path)

    with fs.observed(watch):
        store.backup(target, threads=1)
    assert len(again) == 1
    assert set(contents(target)) == {"one", "two"}


# -- damage ------------------------------------------------------------------------------------


@pytest.mark.rest
def test_a_damaged_pack_is_named(store: Store, models: Path, tmp_path: Path) -> None:
    """A flipped byte in the source is found on the way; the report names the block and whom it
    hurts, all else is backed up, and nothing is removed until the source was mended."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    old = packs_in(target)
    store.remove("one")
    store.gc(dead_share=0.0)
    store.add(models / "three", name="three", threads=1)
    rot(store)
    report = store.backup(target, threads=1)
    assert [one.kind for one in report.problems] == ["block"]
    assert {name for one in report.affected for name in one.refs} == {"three"}
    assert report.packs_removed == ()
    assert old.keys() <= packs_in(target).keys()
    with Store.open(target) as copy:
        view = copy.view(copy["two"].id)
        assert {path: b"".join(map(bytes, view.stream(path))) for path in view.files} == (
            files_of(models / "two")
        )
    # It does not forget: nothing new is copied, and the damage is still told.
    assert store.backup(target, threads=1).problems == report.problems
    store.repair(sources=[models / "three"], read_data=True, threads=1)
    mended = store.backup(target, threads=1)
    assert not mended.problems
    assert mended.packs_removed
    assert contents(target) == {name: files_of(models / name) for name in ("two", "three")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", ["missing", "footer", "short"])
def test_a_pack_that_cannot_be_copied_is_named(
    store: Store, models: Path, tmp_path: Path, damage: str
) -> None:
    """A pack that is missing, cut short or has a damaged footer is named, with whom it hurts."""
    path = max((store.path / "packs").glob("*/*.pack"), key=lambda path: path.stat().st_mtime_ns)
    path.chmod(0o644)
    match damage:
        case "missing":
            path.unlink()
        case "footer":
            data = bytearray(path.read_bytes())
            data[int.from_bytes(data[-64:-56], "little") + 5] ^= 1
            path.write_bytes(data)
        case "short":
            path.write_bytes(path.read_bytes()[:8192])
    report = store.backup(tmp_path / "backup", threads=1)
    assert [(one.kind, one.where) for one in report.problems] == [("pack", path.stem)]
    # Without a footer the payloads can still be read.
    affected = set() if damage == "footer" else {"two"}
    assert {name for one in report.affected for name in one.refs} == affected
    with Store.open(tmp_path / "backup") as copy:
        view = copy.view(copy["one"].id)
        assert b"".join(map(bytes, view.stream("config.json"))) == (
            (models / "one" / "config.json").read_bytes()
        )


def test_a_backup_mends_its_source(store: Store, models: Path, tmp_path: Path) -> None:
    """The line that a damaged backup suggests takes good copies from it."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    rot(store)
    after = store.repair(sources=[target], read_data=True, threads=1).after
    assert not after.problems
    assert contents(store.path).keys() == {"one", "two"}


def test_an_index_that_is_not_the_newest_is_not_backed_up(
    store: Store, models: Path, tmp_path: Path
) -> None:
    """A backup by an old index would make its loss last: it is refused, and names reindex."""
    store.close()
    shutil.copytree(store.path / "index", tmp_path / "index")
    with Store.open(store.path) as newer:
        newer.add(models / "three", name="three", threads=1)
    shutil.rmtree(store.path / "index")
    shutil.copytree(tmp_path / "index", store.path / "index")
    with Store.open(store.path) as old, pytest.raises(Corrupt) as caught:
        old.backup(tmp_path / "backup", threads=1)
    assert caught.value.texts[2] == call("reindex")
    assert not (tmp_path / "backup").exists()


def test_a_backup_that_copied_badly_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proved is the copy: a byte that turned on its way is found."""
    from mstore.upkeep.backup import copying

    real = copying.copy

    def badly(source: Packs, pack: PackId, target: Path, tick: Callable[[int], None]) -> None:
        real(source, pack, target, tick)
        target.chmod(0o644)
        with target.open("r+b") as file:
            file.seek(4096 + 100)
            byte = file.read(1)
            file.seek(4096 + 100)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(copying, "copy", badly)
    report = store.backup(tmp_path / "backup", threads=1)
    assert {one.kind for one in report.problems} == {"block"}


# -- who may use it ----------------------------------------------------------------------------


def test_a_clone_is_shared_as_the_store_is(store: Store, tmp_path: Path) -> None:
    """Files of a clone are for whom the source's setting names, whatever the umask."""
    store.configure("shared", "group")
    target = tmp_path / "copy"
    before = os.umask(0o077)
    try:
        Store.clone(store.path, target, threads=1)
    finally:
        os.umask(before)
    with Store.open(target) as copy:
        assert copy.config["shared"] == "group"
    for path in target.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode & 0o2070 == 0o2070, path
        elif path.name != "checked":
            assert mode & 0o040, path
            assert path.suffix == ".pack" or mode & 0o020, path


# -- clone -------------------------------------------------------------------------------------


def test_a_clone_is_a_store_of_its_own(store: Store, models: Path, tmp_path: Path) -> None:
    """Contents, refs, reflogs and settings are the source's, and packs are the same, byte for byte;
    the name is its own, so that neither is taken for the other."""
    target = tmp_path / "clone"
    plan = store.plan(MergeRequest(base="one", experts=["two"], method="linear"), threads=1)
    store.merge(plan, name="merged", virtual=True, threads=1)
    report = Store.clone(store.path, target, threads=1)
    assert contents(target) == contents(store.path)
    assert report.uuid != store.uuid
    assert packs_in(target) == packs_in(store.path)
    told = [pack_list.read(locate(path)).since for path in (target, store.path)]
    assert told[0] == told[1]
    with Store.open(target) as copy:
        assert copy.uuid == report.uuid
        assert dict(copy.config) == dict(store.config)
        assert copy.reflog("one") == store.reflog("one")
        copy.add(models / "three", name="three", threads=1)
        copy.gc(dead_share=0.0)
        copy.backup(tmp_path / "backup", threads=1)
    with pytest.raises(Conflict, match="another store"):
        store.backup(tmp_path / "backup")
    assert "three" in contents(target)
    Store.reindex(target)
    assert "three" in contents(target)
    assert "three" not in contents(store.path)


def test_a_clone_of_a_backup(store: Store, tmp_path: Path) -> None:
    """A backup can be cloned; the clone is no backup."""
    store.backup(tmp_path / "backup", threads=1)
    Store.clone(tmp_path / "backup", tmp_path / "clone", threads=1)
    assert not (tmp_path / "clone" / "backup").exists()
    assert contents(tmp_path / "clone") == contents(store.path)


def test_what_a_clone_refuses(store: Store, models: Path, tmp_path: Path) -> None:
    """It takes no directory that has anything in it, and none in the source."""
    with pytest.raises(BadRequest, match="the store itself"):
        Store.clone(store.path, store.path / "tmp" / "clone")
    with pytest.raises(Conflict, match="not empty"):
        Store.clone(store.path, models)
    Store.init(tmp_path / "made", block_size=BLOCK).close()
    with pytest.raises(Conflict, match="a store already"):
        Store.clone(store.path, tmp_path / "made", threads=1)


def test_a_clone_of_a_damaged_store_is_not_made(store: Store, tmp_path: Path) -> None:
    """Damage ends it with an error that names the block and the next command; nothing stays."""
    rot(store)
    with pytest.raises(Corrupt, match=r"block .*no clone") as caught:
        Store.clone(store.path, tmp_path / "clone", threads=1)
    assert caught.value.texts[2] == call("fsck", read_data=True, store=str(store.path))
    assert not (tmp_path / "clone").exists()


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_no_clone(store: Store, tmp_path: Path, step: int) -> None:
    """Wherever the disk fills up, no store is there, and the next try is not in its way."""
    target = tmp_path / "clone"
    for at in count(step=step):
        try:
            with fs.observed(Fault(at, target)):
                Store.clone(store.path, target, threads=1)
        except StorageFailed:
            assert not (target / "format").exists()
            assert not target.exists() or not list((target / "packs").glob("*/*"))
        else:
            break
    assert at > 20
    assert set(contents(target)) == {"one", "two"}


def lose_blocks(store: Store) -> None:
    """Rot in the newest pack, and a repair without a source: what it hit loses its rows."""
    rot(store)
    report = store.repair(read_data=True, threads=1)
    assert report.dropped
    assert report.after.problems


@pytest.mark.rest
def test_what_the_store_lost_stays_in_the_backup(
    store: Store, models: Path, tmp_path: Path
) -> None:
    """A store that lost blocks and dropped their rows is no success: the backup names them and
    whom they affect, keeps its own copies run after run, takes what is new, and heals the store."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    lose_blocks(store)
    store.add(models / "three", name="three", threads=1)
    for _ in range(2):
        report = store.backup(target, threads=1)
        assert {one.kind for one in report.problems} == {"block"}
        assert all("keeps its copy" in one.what for one in report.problems)
        assert {name for one in report.affected for name in one.refs} == {"two"}
        assert report.packs_removed == ()
        assert report.hint == as_phrase(call("repair", read_data=True, sources=(str(target),)))
        wanted = {name: files_of(models / name) for name in ("one", "two", "three")}
        assert contents(target) == wanted
    assert not store.repair(sources=[target], read_data=True, threads=1).after.problems
    assert not store.backup(target, threads=1).problems
    assert contents(target) == contents(store.path) == wanted


def test_a_snapshot_that_the_store_lost_stays_in_the_backup(
    store: Store, models: Path, tmp_path: Path
) -> None:
    """A lost record of a snapshot, and all that only it leads to, stays as the backup has it."""
    target = tmp_path / "backup"
    store.backup(target, threads=1)
    id = store["two"].id
    index = store._catalog.index
    with store._catalog.committing() as transaction:
        manifest = store._catalog.snapshot(id).manifest
        for kind, key in ((Kind.SNAPSHOT, id), (Kind.MANIFEST, manifest)):
            transaction.delete(bytes([kind]) + key, db=index.db("records"))
        listing.unlist(index, transaction, id)
    report = store.backup(target, threads=1)
    assert report.problems
    assert contents(target) == {name: files_of(models / name) for name in ("one", "two")}


def test_a_first_backup_of_a_store_that_lost_blocks(store: Store, tmp_path: Path) -> None:
    """All else is copied, what is missing is named, and the hint asks for another place: the new
    backup has no copies either, now or when it is run again."""
    lose_blocks(store)
    for _ in range(2):
        report = store.backup(tmp_path / "backup", threads=1)
        assert {one.kind for one in report.problems} == {"block"}
        assert {name for one in report.affected for name in one.refs} == {"two"}
        assert report.hint == as_phrase(call("repair", read_data=True, sources=("PLACE",)))


def test_a_clone_of_a_store_that_lost_blocks_is_not_made(store: Store, tmp_path: Path) -> None:
    """Blocks without rows are damage too."""
    lose_blocks(store)
    with pytest.raises(Corrupt, match=r"block .*no clone"):
        Store.clone(store.path, tmp_path / "clone", threads=1)
    assert not (tmp_path / "clone").exists()
