"""Leases: marks of running operations, and the files that belong to them.

    leases    name (16 hex digits)    -> [pid, purpose]

An operation that writes takes a lease first: a directory tmp/<lease>/ with a lock file that the
process holds, and a row in the index. The kernel drops the lock however the process ends, so a
lease is live exactly as long as its owner; no clock is involved. The directory of a dead lease is
garbage that anyone may remove.

An operation that reads a snapshot *holds* it: tmp/<random>.<SnapshotId>.pin, locked in the same
way. A hold protects the snapshot's contents from garbage collection and needs neither a row nor a
transaction. Where no hold can be taken (a read-only store), reading continues without one. A hold
that is taken while gc publishes may be too late: its reader then finds blocks missing, and gets the
error that the snapshot was collected (`mstore.store.contents.held`).

`collecting` is the lock of garbage collection: flock(2) on the directory of packs. Repair and
reindex hold it as well.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import LEASE_NAME_BYTES, LEASES, LeaseRow
from mstore.store import layout as layouts
from mstore.store.layout import Layout
from mstore.terms.errors import BadName, Corrupt, StorageFailed
from mstore.terms.ids import SnapshotId

LOCK = ".lock"
HOLD = ".pin"
"""The end of a hold's name, from when holds were called pins: other versions look for it."""
PACK = ".pack"
RECEIPT = ".receipt"


class Lease:
    """A live lease. Its owner alone uses `directory`, which is removed with the lease.

    The lock is taken before the directory exists and removed after it, so a directory without a
    held lock is dead for good.
    """

    def __init__(self, layout: Layout, index: Index, purpose: str) -> None:
        self._index = index
        layouts.require_writable(layout)
        self._lock = _locked(layout, LOCK)
        self.name = self._lock.path.name.removesuffix(LOCK)
        self.directory = layout.tmp / self.name
        try:
            fs.make_directory(self.directory, private=True)
            with index.env.write() as transaction:
                # A path in it may be no text.
                text = purpose.encode(errors="backslashreplace").decode()
                index.put(transaction, LEASES, self.name.encode(), LeaseRow(os.getpid(), text))
                self.number = transaction.id()
                """Of the transaction that wrote the row, and nothing else."""
        except BaseException:
            self.release()
            raise

    def drop_row(self, transaction: IndexTransaction) -> None:
        """Delete the lease's row, in the transaction that publishes the work."""
        self._index.delete(transaction, LEASES, self.name.encode())

    def leave(self) -> None:
        """Release the lock but keep the directory, for another lease to `claim`."""
        with suppress(StorageFailed):
            self._lock.remove()

    def release(self) -> None:
        """Remove directory and lock. `sweep` removes the row, and what remains after an error."""
        if self._lock.is_own:
            with suppress(StorageFailed):
                fs.remove_tree(self.directory)
        with suppress(StorageFailed):
            self._lock.remove()


@contextmanager
def collecting(layout: Layout) -> Iterator[None]:
    """Hold the lock of garbage collection: one holder across all processes; others wait.

    The holder may remove rows and packs. Never take it while holding the writer lock.
    """
    layouts.require_writable(layout)
    with fs.locked(layout.packs, create=False):
        yield


class Hold:
    """Protects the contents of a snapshot from garbage collection until `release`."""

    def __init__(self, layout: Layout, snapshot: SnapshotId) -> None:
        self._lock: fs.LockFile | None = None
        with suppress(StorageFailed):
            self._lock = _locked(layout, f".{snapshot}{HOLD}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a hold belongs to its process and cannot be pickled")

    def release(self) -> None:
        """Let go; idempotent."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with suppress(StorageFailed):
                lock.remove()


@contextmanager
def holding(layout: Layout, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Hold these snapshots while the block runs."""
    with ExitStack() as held:
        for snapshot in sorted(set(snapshots)):
            held.callback(Hold(layout, snapshot).release)
        yield


def holds(layout: Layout) -> set[SnapshotId]:
    """Return the snapshots that live processes hold."""
    found = set()
    for path in _listed(layout):
        if path.name.endswith(HOLD) and _is_live(layout, path):
            with suppress(BadName):
                found.add(SnapshotId.parse(path.name.removesuffix(HOLD).rpartition(".")[2]))
    return found


def live(layout: Layout) -> set[str]:
    """Return the names of live leases, without holds."""
    return {
        path.name.removesuffix(LOCK)
        for path in _listed(layout)
        if path.name.endswith(LOCK) and _is_live(layout, path)
    }


def is_live(layout: Layout, name: str) -> bool:
    """Return whether the owner of this lease is alive."""
    return _is_live(layout, _lock_path(layout, name))


def row_of(index: Index, transaction: IndexTransaction, name: str) -> LeaseRow | None:
    """Return the index's row of a lease; None if there is none or it is unreadable."""
    with suppress(Corrupt):
        return index.get(transaction, LEASES, name.encode())
    return None


def names(index: Index, transaction: IndexTransaction) -> list[str]:
    """Return the names of all leases that have a row, dead ones too."""
    keys = index.keys(transaction, LEASES)
    # A damaged key names no lease.
    return [key.decode("ascii", "replace") for key in keys if len(key) == LEASE_NAME_BYTES]


def _locked(layout: Layout, end: str) -> fs.LockFile:
    """Hold a new lock file, whose name is random and ends so."""
    while True:
        lock = fs.LockFile(layout.tmp / f"{os.urandom(8).hex()}{end}")
        lock.acquire()
        if lock.is_current():
            return lock
        # A sweeper saw the file just before it was locked, and removed it.
        lock.release()


def _lock_path(layout: Layout, name: str) -> Path:
    return layout.tmp / f"{name}{LOCK}"


def garbage(layout: Layout) -> list[Path]:
    """List everything in tmp/ that belongs to no live lease, for reports. Changes nothing."""
    return [path for path in _listed(layout) if not _is_live(layout, path)]


class Leftover(msgspec.Struct, frozen=True):
    """Files that a dead lease left in tmp/, and their bytes.

    resumable: left by an interrupted merge; the next merge resumes from it or removes it.
    """

    files: int
    size: int
    resumable: bool


def leftovers(layout: Layout) -> list[Leftover]:
    """List what dead leases left in tmp/. Changes nothing."""
    found = []
    for path in garbage(layout):
        # Another lease may claim it at any moment.
        with suppress(OSError, StorageFailed):
            resumable = _has_receipts(path)
            sizes = [
                one.lstat().st_size
                for one in ([path, *path.rglob("*")] if not path.is_symlink() else [path])
                if one.is_symlink() or not one.is_dir()
            ]
            # An empty lock is not worth reporting.
            if sum(sizes):
                found.append(Leftover(len(sizes), sum(sizes), resumable))
    return found


def _listed(layout: Layout) -> list[Path]:
    # A copy of a store may lack tmp/. A reader may not look into it; a writer must be able to.
    may_look = os.access(layout.tmp, os.R_OK | os.X_OK) or os.access(layout.tmp, os.W_OK)
    if not layout.tmp.exists() or not may_look:
        return []
    with fs.translated(layout.tmp):
        return [layout.tmp / name for name in fs.listed(layout.tmp)]


def _owner_lock(layout: Layout, path: Path) -> Path:
    # A hold is its own lock.
    return path if path.name.endswith(HOLD) else _lock_path(layout, path.name.removesuffix(LOCK))


def _is_live(layout: Layout, path: Path) -> bool:
    try:
        lock = fs.LockFile(_owner_lock(layout, path), create=False)
    except StorageFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        # If the lock may not be tested (another user's), assume that its owner is alive.
        if error.errno in (errno.EACCES, errno.EPERM):
            return True
        # Too few descriptors, say: whoever asks removes what the dead leave.
        raise
    try:
        return not lock.acquire(blocking=False)
    finally:
        lock.release()


def _seize(layout: Layout, path: Path) -> fs.LockFile | None:
    """Acquire the lock of the lease that owned `path`; None while its owner is alive."""
    lock = fs.LockFile(_owner_lock(layout, path))
    if lock.acquire(blocking=False):
        return lock
    lock.release()
    return None


def claim(layout: Layout, lease: Lease) -> None:
    """Move the leftovers of dead leases into the directory of `lease`, and remove useless ones.

    Moves a pack before its receipt, so that no receipt of a pack here is without it.
    """
    for path in _listed(layout):
        # The directory of a live lease may vanish at any moment.
        with suppress(StorageFailed):
            if path != lease.directory and _has_receipts(path):
                _claim_one(layout, path, lease)


def _claim_one(layout: Layout, path: Path, lease: Lease) -> None:
    lock = _seize(layout, path)
    if lock is None:
        return
    try:
        with fs.translated(path):
            names = fs.listed(path)
        for stem in [name.removesuffix(RECEIPT) for name in names if name.endswith(RECEIPT)]:
            for suffix in (PACK, RECEIPT) if stem + PACK in names else (RECEIPT,):
                fs.rename(path / (stem + suffix), lease.directory / _new_name(path, stem, suffix))
        fs.remove_tree(path)
    finally:
        lock.remove()


def _new_name(path: Path, stem: str, suffix: str) -> str:
    # A leftover that is claimed repeatedly keeps a short name: it contains its writer's lease once.
    return f"{stem}{suffix}" if "-" in stem else f"{path.name}-{stem}{suffix}"


def _has_receipts(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    with fs.translated(path):
        return any(name.endswith(RECEIPT) for name in fs.listed(path))


def sweep(layout: Layout, index: Index) -> None:
    """Remove what dead leases left behind, except leftovers. Call with the writer lock held.

    Skips what cannot be removed (another user's files, for example), without an error.
    """
    for path in _listed(layout):
        with suppress(StorageFailed):
            _sweep_one(layout, path)
    with index.env.read() as transaction:
        keys = list(index.keys(transaction, LEASES))
    # A damaged key names no lease.
    locks = [_lock_path(layout, key.decode(errors="replace")) for key in keys]
    gone = [key for key, lock in zip(keys, locks, strict=True) if not lock.exists()]
    if gone:
        with index.env.write() as transaction:
            for key in gone:
                index.delete(transaction, LEASES, key)


def _sweep_one(layout: Layout, path: Path) -> None:
    lock = _seize(layout, path)
    if lock is None:
        return
    try:
        if path != lock.path and not _has_receipts(path):
            if path.is_dir() and not path.is_symlink():
                fs.remove_tree(path)
            else:
                fs.unlink(path, missing_ok=True)
    finally:
        lock.remove()
