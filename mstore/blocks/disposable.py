"""Disposable LMDB environments, and their rows: a damaged one is moved away and replaced.

The whole directory is renamed, with data and lock file: a process that has it open continues with
both, and no two processes ever have different data under one lock file. The directory's own lock
(flock) lets one process at a time do so, and a second one that saw the damage finds a new
directory.

A user without write access works without: if the environment is missing, damaged, or too large to
copy into memory (`lmdb_copy`), that reader gets none.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from mstore import fs
from mstore.blocks import lmdb_check
from mstore.blocks.lmdb_env import Environment, closed
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.tables import Table
from mstore.terms.errors import Corrupt, StorageFailed

Tell = Callable[[str], None]
_ATTEMPTS = 10
_OF_ROW = 256
"""Memory overhead of a pending row, beside its bytes."""
_V = TypeVar("_V")
COPIED_BYTES = 1 << 28
"""A larger environment is not copied: its content is not worth so much memory."""


def silent(remark: str) -> None:
    """Ignore a remark."""


def acquire(path: Path, databases: tuple[str, ...], what: str, tell: Tell) -> Environment | None:
    """Open the environment at this path; create a missing one, replace a damaged one.

    what: the name of its contents, for people. `tell` is called if a damaged one was moved, with
    its new path. Returns None if this user has no write access and there is none to read. Raises
    Corrupt if a damaged one cannot be moved away, StorageFailed.
    """
    if not fs.may_write(path, path / "lock.mdb"):
        return _as_it_is(path, databases, what, tell)
    refused = ""
    for _ in range(_ATTEMPTS):
        # The user may have deleted it: a rebuild only takes time.
        if fs.make_directory(path, exist_ok=True):
            fs.sync_directory(path.parent)
        found = _inode(path)
        try:
            env = Environment.acquire(path, databases, hint=f"rm -r {path}")
            if _inode(path) == found:
                return env
            # Another process moved one away just now: the two open files may be of different
            # directories.
            env.release()
        except (StorageFailed, FileNotFoundError):
            # Where there was none, another process had just moved it away.
            if found is not None and _inode(path) == found:
                raise
        except Corrupt as error:
            # LMDB may reject a file that passes our page checks: believe it the second time.
            is_sure = refused == error.what
            refused = error.what
            try:
                aside = _set_aside(path, is_sure=is_sure)
            except StorageFailed as refusal:
                if refusal.errno == errno.ENOENT:
                    # Another process is moving it away.
                    continue
                break
            if aside is not None:
                why = error.what.removeprefix("damaged index: ")
                tell(
                    f"the {what} was damaged ({why}) and is replaced by a new one; nothing in it "
                    f"is needed, and {aside} can be deleted"
                )
    raise Corrupt(
        f"the {what} is damaged; nothing in it is needed", where=str(path), hint=f"rm -r {path}"
    )


class DisposableTables:
    """Rows of tables that can all be computed again; safe for any number of threads.

    New rows are visible at once, and on disk after `flush`, in one transaction: a synced commit for
    each would cost more than the rows.  Rows lost in a crash are computed again.  For a user
    without write permission, new rows stay in this object.
    """

    def __init__(
        self,
        path: Path,
        databases: tuple[str, ...],
        what: str,
        tell: Tell,
        *,
        most_pending: int | None = None,
    ) -> None:
        """Open nothing yet.  what, tell: as for `acquire`.  most_pending: bytes until a flush."""
        self._path = path
        self._databases = databases
        self._what = what
        self._tell = tell
        self._lock = Lock()
        self._env: Environment | None = None
        self._is_out_of_reach = False
        self._is_closed = False
        self._pending: dict[tuple[Table[Any, Any], bytes], bytes] = {}
        self._most_pending = most_pending
        self._pending_bytes = 0

    def close(self) -> None:
        """Release the environment once running reads have ended; idempotent.

        Unflushed rows are lost.  Raises Unavailable inside a call of this thread's own.
        """
        self.require_outside()
        with self._lock:
            env, self._env = self._env, None
            self._is_closed = True
        if env is not None:
            env.release()

    def require_outside(self) -> None:
        """Raise Unavailable inside a transaction of this thread's own."""
        env = self._env
        if env is not None:
            env.require_outside()

    def flush(self) -> None:
        """Write pending rows in one transaction.  Raises StorageFailed, Corrupt."""
        if not self._pending:
            return
        env = self._open(create=True)
        if env is None or not env.may_write():
            return
        with self._lock:
            waiting, self._pending = self._pending, {}
            self._pending_bytes = 0
        if waiting:
            # Nothing in it depends on the files that were there before.
            env.follow()
            with env.write() as transaction:
                self._insert(env, transaction, waiting)

    def file_bytes(self) -> int:
        """Return the size on disk; 0 if there are no tables, or this user cannot read them."""
        env = self._open(create=False)
        return 0 if env is None else env.file_bytes()

    def _open(self, *, create: bool) -> Environment | None:
        """Return the environment; None where there is none, unless `create`, or none to read."""
        with self._lock:
            if self._is_closed:
                raise closed(self._path)
            if self._env is None and not self._is_out_of_reach:
                if not create and not (self._path / lmdb_check.DATA).exists():
                    return None
                self._env = acquire(self._path, self._databases, self._what, self._tell)
                self._is_out_of_reach = self._env is None
            return self._env

    def _found(self, table: Table[Any, _V], keys: Sequence[bytes]) -> list[_V | None]:
        """Return the values of rows, None for one that is missing or damaged, with one lookup."""
        with self._lock:
            waiting = {key: self._pending.get((table, key)) for key in keys}
        found = {
            key: None if value is None else table.value.decode(value)
            for key, value in waiting.items()
        }
        # In the order of the table: neighbours are found without another descent.
        asked = sorted(key for key, value in found.items() if value is None)
        env = (self._env or self._open(create=False)) if asked else None
        if env is not None:
            with env.read() as transaction:
                rows = rows_of(env, transaction, table, asked)
            found.update((key, table.found(key, row)) for key, row in rows.items())
        return [found[key] for key in keys]

    def _put(self, table: Table[Any, Any], rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add keys and values as bytes."""
        with self._lock:
            for key, value in rows:
                self._pending[table, key] = value
                self._pending_bytes += len(key) + len(value) + _OF_ROW
            is_full = self._most_pending is not None and self._pending_bytes >= self._most_pending
        if is_full:
            self.flush()

    def _insert(
        self,
        env: Environment,
        transaction: IndexTransaction,
        rows: Mapping[tuple[Table[Any, Any], bytes], bytes],
    ) -> None:
        for (table, key), value in sorted(
            rows.items(), key=lambda one: (one[0][0].name, one[0][1])
        ):
            transaction.put(key, table.sealed(key, value), db=env.databases[table.name])


def rows_of(
    env: Environment, transaction: IndexTransaction, table: Table[Any, Any], keys: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Return the rows that a table has of these keys."""
    with transaction.cursor(db=env.databases[table.name]) as cursor:
        return dict(cursor.getmulti(keys))


def _as_it_is(path: Path, databases: tuple[str, ...], what: str, tell: Tell) -> Environment | None:
    """Open the environment for a reader who cannot create one; None if that fails."""
    try:
        if (path / lmdb_check.DATA).stat().st_size > COPIED_BYTES:
            return None
        return Environment.acquire(path, databases, create=False)
    except FileNotFoundError:
        return None
    except Corrupt as error:
        tell(f"the {what} is not used: {error.what}")
    except PermissionError:
        tell(f"the {what} is not used: this user may not read it")
    except StorageFailed as error:
        if error.errno not in (errno.EACCES, errno.ENOENT):
            raise
        tell(f"the {what} is not used: this user may not read it")
    return None


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _set_aside(path: Path, *, is_sure: bool) -> Path | None:
    """Rename the directory if it is still damaged; return its new name.

    is_sure: it is damaged even if its pages look sound.
    """
    lock = fs.LockFile(path, create=False)
    try:
        lock.acquire()
        if not lock.is_current() or not (is_sure or lmdb_check.faults(path)):
            return None
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = path.with_name(f"{path.name}.damaged-{moment}-{time.time_ns() % 10**6:06d}")
        fs.rename(path, aside)
        fs.sync_directory(path.parent)
        return aside
    finally:
        lock.release()
