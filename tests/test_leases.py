"""Leases: nobody takes a live one's work, and nobody keeps a dead one's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstore import fs
from mstore.store import leases
from mstore.store.catalog import Catalog
from mstore.store.leases import Lease, LeaseRow
from mstore.terms.errors import StorageFailed
from mstore.terms.ids import SnapshotId


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty store."""
    catalog = Catalog.create(tmp_path / "store", 1 << 16)
    yield catalog
    catalog.close()


def rows(catalog: Catalog) -> dict[str, LeaseRow]:
    """What the index knows of leases."""
    db = catalog.index.db("leases")
    with catalog.index.env.read() as transaction, transaction.cursor(db=db) as cursor:
        return {key.decode(): msgspec.msgpack.decode(value, type=LeaseRow) for key, value in cursor}


def in_tmp(catalog: Catalog) -> list[str]:
    """Every name below tmp/."""
    return sorted(str(p.relative_to(catalog.layout.tmp)) for p in catalog.layout.tmp.rglob("*"))


def sweep(catalog: Catalog) -> None:
    """As a writer does it."""
    with catalog.publishing():
        leases.sweep(catalog.layout, catalog.index)


@contextmanager
def leaseholder(catalog: Catalog) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds a lease with a half-written pack in it, and the lease's name."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mstore.store.catalog import Catalog; from mstore.store.leases import Lease\n"
        "catalog = Catalog.open(Path(sys.argv[1]))\n"
        "lease = Lease(catalog.layout, catalog.index, 'elsewhere')\n"
        "(lease.directory / '0.pack').write_bytes(b'half')\n"
        "print(lease.name, flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(catalog.layout.root)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        try:
            yield holder, holder.stdout.readline().strip()
        finally:
            holder.kill()


def test_a_lease_comes_and_goes_whole(catalog: Catalog) -> None:
    """A lease is a directory of one's own, a held lock and a row; released, its files are gone."""
    lease = Lease(catalog.layout, catalog.index, "test")
    assert in_tmp(catalog) == [lease.name, f"{lease.name}.lock"]
    assert lease.directory.stat().st_mode & 0o777 == 0o700
    assert rows(catalog) == {lease.name: LeaseRow(os.getpid(), "test")}
    (lease.directory / "0.pack").write_bytes(b"half")
    lease.release()
    assert in_tmp(catalog) == []


def test_a_lease_of_this_process_is_not_swept(catalog: Catalog) -> None:
    """A sweep by the process that holds a lease leaves it alone."""
    lease = Lease(catalog.layout, catalog.index, "test")
    sweep(catalog)
    assert in_tmp(catalog) == [lease.name, f"{lease.name}.lock"]
    assert lease.name in rows(catalog)
    assert leases.garbage(catalog.layout) == []
    lease.release()


def test_a_live_lease_is_not_swept_and_a_dead_one_is(catalog: Catalog) -> None:
    """While its process lives, stopped or not, a lease stays; after kill -9 everything goes."""
    with leaseholder(catalog) as (holder, name):
        holder.send_signal(signal.SIGSTOP)
        sweep(catalog)
        assert in_tmp(catalog) == [name, f"{name}.lock", f"{name}/0.pack"]
        assert rows(catalog)[name] == LeaseRow(holder.pid, "elsewhere")
        assert leases.garbage(catalog.layout) == []
        holder.send_signal(signal.SIGKILL)
    assert leases.garbage(catalog.layout) == [
        catalog.layout.tmp / name,
        catalog.layout.tmp / f"{name}.lock",
    ]
    sweep(catalog)
    assert in_tmp(catalog) == []
    assert rows(catalog) == {}


def test_looking_for_garbage_changes_nothing(catalog: Catalog) -> None:
    """`garbage` lists what no live lease owns and makes or removes no file."""
    (catalog.layout.tmp / "junk").write_bytes(b"junk")
    (catalog.layout.tmp / "dead").mkdir()
    lease = Lease(catalog.layout, catalog.index, "test")
    before = in_tmp(catalog)
    listener: list[fs.Operation] = []
    with fs.observed(listener.append):
        found = leases.garbage(catalog.layout)
    assert [path.name for path in found] == ["dead", "junk"]
    assert in_tmp(catalog) == before
    assert listener == []
    lease.release()


def test_anything_in_tmp_is_swept(catalog: Catalog) -> None:
    """Files, directories, lone locks and links go; what a link points at stays."""
    tmp = catalog.layout.tmp
    outside = catalog.layout.root / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp / "file").touch()
    (tmp / "a.lock").touch()
    (tmp / "deep" / "er").mkdir(parents=True)
    (tmp / "link").symlink_to(outside)
    (tmp / ".mirror.01234567").touch()
    sweep(catalog)
    assert in_tmp(catalog) == []
    assert (outside / "kept").exists()


def test_what_cannot_be_removed_stops_nobody(catalog: Catalog) -> None:
    """A sweep goes on past a refusal of the system, and so does releasing a lease."""
    for name in ("a", "b", "c"):
        (catalog.layout.tmp / name).mkdir()

    def refuse(operation: fs.Operation) -> None:
        if operation.kind == "rmtree" and Path(operation.path).name not in ("a", "c"):
            raise OSError(errno.EACCES, "no")

    lease = Lease(catalog.layout, catalog.index, "test")
    with fs.observed(refuse):
        sweep(catalog)
        assert [path.name for path in catalog.layout.tmp.glob("?")] == ["b"]
        lease.release()
    assert lease.directory.exists()
    sweep(catalog)
    assert in_tmp(catalog) == []


def test_who_cannot_look_takes_nobody_for_dead(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock cannot be opened for lack of descriptors, that is the error: a lease that counts
    as dead loses its files, and the packs that it protects."""
    lease = Lease(catalog.layout, catalog.index, "test")
    hold = leases.Hold(catalog.layout, SnapshotId(bytes(32)))
    opened = os.open

    def refuse(path: str | Path, *given: Any, **named: Any) -> int:
        if str(path).endswith((leases.LOCK, leases.HOLD)):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for ask in (leases.live, leases.holds, leases.garbage):
            with pytest.raises(StorageFailed, match="too many open files"):
                ask(catalog.layout)
        with pytest.raises(StorageFailed, match="too many open files"):
            leases.is_live(catalog.layout, lease.name)
    assert leases.live(catalog.layout) == {lease.name}
    hold.release()
    lease.release()
    assert not leases.is_live(catalog.layout, lease.name)


def test_a_lock_that_was_swept_at_birth_is_taken_anew(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sweeper removed the lock file between its making and its locking, the lease takes
    another: it never relies on a lock that others cannot see."""
    acquire = fs.LockFile.acquire
    swept: list[Path] = []

    def sweep_once(lock: fs.LockFile, *, blocking: bool = True) -> bool:
        if not swept:
            swept.append(lock.path)
            lock.path.unlink()
        return acquire(lock, blocking=blocking)

    monkeypatch.setattr(fs.LockFile, "acquire", sweep_once)
    lease = Lease(catalog.layout, catalog.index, "test")
    assert swept
    assert in_tmp(catalog) == [lease.name, f"{lease.name}.lock"]
    assert swept[0].name != f"{lease.name}.lock"
    lease.release()


@pytest.mark.parametrize("kind", ["create", "mkdir", "commit"])
def test_a_lease_that_could_not_be_taken_leaves_nothing(catalog: Catalog, kind: str) -> None:
    """Whatever step of taking a lease fails, tmp/ and the rows are as before."""

    def refuse(operation: fs.Operation) -> None:
        if operation.kind == kind:
            raise OSError(errno.ENOSPC, "full")

    with fs.observed(refuse), pytest.raises(StorageFailed):
        Lease(catalog.layout, catalog.index, "test")
    assert in_tmp(catalog) == []
    assert rows(catalog) == {}


def test_a_row_without_a_lock_is_swept(catalog: Catalog) -> None:
    """Rows of leases whose files are gone are removed, those of live ones stay."""
    dead, live = (Lease(catalog.layout, catalog.index, name) for name in ("dead", "live"))
    dead.release()
    assert rows(catalog).keys() == {dead.name, live.name}
    sweep(catalog)
    assert rows(catalog).keys() == {live.name}
    live.release()


def test_claiming_passes_over_what_goes_meanwhile(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live lease whose directory goes while it is looked at disturbs no other merge."""
    other, mine = (Lease(catalog.layout, catalog.index, "merge") for _ in range(2))
    look = leases._has_receipts

    def going(path: Path) -> bool:
        if path == other.directory:
            raise StorageFailed("no such file or directory", errno=errno.ENOENT)
        return look(path)

    monkeypatch.setattr(leases, "_has_receipts", going)
    leases.claim(catalog.layout, mine)
    assert list(mine.directory.iterdir()) == []
    other.release()
    mine.release()


def test_a_pin_lives_as_long_as_its_owner(catalog: Catalog) -> None:
    """A pinned snapshot is listed while it is pinned, by whatever process; after a kill it is not,
    and the next writer removes what is left of it."""
    snapshot = SnapshotId(bytes(range(32)))
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mstore.store import layout, leases; from mstore.terms.ids import SnapshotId\n"
        "pin = leases.Hold(layout.locate(Path(sys.argv[1])), SnapshotId(bytes(range(32))))\n"
        "print('pinned', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(catalog.layout.root)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "pinned\n"
        assert leases.holds(catalog.layout) == {snapshot}
        sweep(catalog)
        assert leases.holds(catalog.layout) == {snapshot}
        holder.kill()
    assert leases.holds(catalog.layout) == set()
    assert len(leases.garbage(catalog.layout)) == 1
    sweep(catalog)
    assert in_tmp(catalog) == []


def test_pins_are_for_each_of_several(catalog: Catalog) -> None:
    """Pins of one snapshot do not end each other; leases are not pins, and pins no leases."""
    one, other = SnapshotId(bytes(32)), SnapshotId(bytes(range(32)))
    lease = Lease(catalog.layout, catalog.index, "test")
    with leases.holding(catalog.layout, [one, other, one]):
        again = leases.Hold(catalog.layout, one)
        assert leases.live(catalog.layout) == {lease.name}
        assert leases.holds(catalog.layout) == {one, other}
    assert leases.holds(catalog.layout) == {one}
    again.release()
    again.release()
    assert leases.holds(catalog.layout) == set()
    lease.release()
    assert leases.live(catalog.layout) == set()
    assert not leases.is_live(catalog.layout, lease.name)


def test_where_nothing_can_be_written_a_pin_is_none(catalog: Catalog) -> None:
    """In a store that may only be read a pin keeps nothing, and reading goes on."""

    def refuse(operation: fs.Operation) -> None:
        raise OSError(errno.EROFS, "read-only")

    with fs.observed(refuse), leases.holding(catalog.layout, [SnapshotId(bytes(32))]):
        assert leases.holds(catalog.layout) == set()


def test_one_collects_at_a_time(catalog: Catalog) -> None:
    """The lock of garbage collection is held by one; it is no file of its own."""
    with leases.collecting(catalog.layout):
        second = fs.LockFile(catalog.layout.packs, create=False)
        assert not second.acquire(blocking=False)
        second.release()
    second = fs.LockFile(catalog.layout.packs, create=False)
    assert second.acquire(blocking=False)
    second.release()
    assert in_tmp(catalog) == []


FORKING = """
import os, signal, sys
from pathlib import Path
from mstore import fs
from mstore.terms.ids import SnapshotId
from mstore.store import leases
from mstore.store.catalog import Catalog

catalog = Catalog.open(Path(sys.argv[1]))
lease = leases.Lease(catalog.layout, catalog.index, "test")
hold = leases.Hold(catalog.layout, SnapshotId(bytes(32)))
lock = fs.LockFile(catalog.layout.lock)
lock.acquire()
before = sorted(os.listdir(catalog.layout.tmp))
if os.fork() == 0:
    lease.release(); hold.release(); lock.release()
    os._exit(0)
os.wait()
print(len(before) == 3 and sorted(os.listdir(catalog.layout.tmp)) == before)
other = fs.LockFile(catalog.layout.lock)
print(other.acquire(blocking=False))
child = os.fork()
if child == 0:
    signal.pause()
lock.release()
print(other.acquire(blocking=False))
os.kill(child, signal.SIGKILL); os.wait()
"""


def test_forked_children(catalog: Catalog) -> None:
    """A child that lets go of what it inherited takes nothing from the parent; what the parent
    releases is free, though a child that was forked meanwhile lives."""
    line = [sys.executable, "-c", FORKING, catalog.layout.root]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr
