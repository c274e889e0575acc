"""LMDB environments: one per path and process, closed by the last user.

Owns which threads are inside a transaction, and when files may be opened or closed; `lmdb_files`
owns the files, `index` and `stats` what the rows mean. Always full sync, never `writemap`: data
that the disk has no room for is then an error and not a SIGBUS.

An existing environment is opened for reading first, and again for writing when a write transaction
is requested. LMDB opens named databases of a writable environment in a write transaction, and a
reader would have to wait there for the current writer.

A commit that fails leaves the previous state; the environment is then reopened before the next
commit. Who reads a private copy (`lmdb_files`) gets a new one at the next read after a commit; on a
full disk writers get an error.

A forked child may not use what it inherits: transactions and readers are the parent's. It opens
environments of its own beside those.

The last user's `release` waits until no thread is inside a transaction. Later requests are refused.
"""

from __future__ import annotations

import atexit
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any, Final

import lmdb

from mstore import fs
from mstore.blocks import lmdb_files, lmdb_table
from mstore.blocks.lmdb_check import DATA
from mstore.blocks.lmdb_copy import PATIENCE
from mstore.blocks.lmdb_files import LmdbFiles
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.terms.errors import Corrupt, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Text, call

_REINDEX: Final = call("reindex")
_environments: dict[str, Environment] = {}
_environments_lock = Lock()


class Environment:
    """A shared LMDB environment with named databases.

    Readers see the state at which they began and never wait for a writer. LMDB admits one writer at
    a time, across all processes.
    """

    def __init__(
        self, path: Path, databases: tuple[str, ...], *, create: bool, hint: Text = _REINDEX
    ) -> None:
        self.path = path
        self._pid = os.getpid()
        self._users = 0
        # Guards the change from reading to writing: which threads are inside a transaction.
        self._gate = Condition()
        self._readers: dict[int, list[IndexTransaction | None]] = {}
        self._writers: set[int] = set()
        self._changing = False
        self._is_closed = False
        self._files = LmdbFiles(path, databases, hint)
        self._files.open_or_create(create=create)
        self.databases: Final = self._files.databases
        """LMDB's handles by name."""

    @property
    def epoch(self) -> int:
        """Changes when data that was read before may be invalid, as `LmdbFiles` has it."""
        return self._files.epoch

    @property
    def times_replaced(self) -> int:
        """Changes when other files were opened, as `LmdbFiles` has it."""
        return self._files.times_replaced

    @classmethod
    def acquire(
        cls,
        path: Path,
        databases: tuple[str, ...],
        *,
        create: bool = True,
        hint: Text = _REINDEX,
    ) -> Environment:
        """Return the environment of this path, opened at most once in this process.

        Raises Corrupt if it is damaged (`hint` says what to do then), or is missing and not
        `create`; StorageFailed.
        """
        key = os.path.realpath(path)
        with _environments_lock:
            # Reuse one that is waiting for its last readers before it closes.
            found = _environments.get(key)
            if found is None:
                found = cls._opened_anew(path, databases, create=create, hint=hint)
                _environments[key] = found
            else:
                found._guard()
                found.require_in_place()
            found._users += 1
            return found

    @classmethod
    def _opened_anew(
        cls, path: Path, databases: tuple[str, ...], *, create: bool, hint: Text
    ) -> Environment:
        """Open it; once more if `reindex` put other files in place meanwhile."""
        while True:
            before = fs.identity(path / DATA)
            try:
                return cls(path, databases, create=create, hint=hint)
            except (StorageFailed, Corrupt):
                now = fs.identity(path / DATA)
                if before is None or now in (before, None):
                    raise

    def release(self) -> None:
        """Release one use; the last one closes the environment when no thread is inside it.

        Raises Unavailable, and releases nothing, inside a transaction of this thread.
        """
        if self._pid != os.getpid():
            # Everything in a forked child belongs to the parent, including locks.
            return
        self.require_outside()
        with _environments_lock:
            self._users -= 1
        while not self._is_settled():
            with self._gate:
                while self._is_busy() and not self._users:
                    self._gate.wait()

    def require_outside(self) -> None:
        """Raise Unavailable inside a transaction of this thread: closing would deadlock."""
        if get_ident() in self._readers or get_ident() in self._writers:
            raise Unavailable(
                "this store cannot be closed inside a call of its own",
                where=str(self.path),
                hint="close it when that call has returned",
            )

    def _is_settled(self) -> bool:
        """Return whether it is in use or closed; close it now if nothing uses it."""
        with _environments_lock, self._gate:
            if self._users or self._is_closed:
                return True
            if self._is_busy():
                return False
            if self._files.is_open:
                self._files.close()
            self._is_closed = True
            for key in [key for key, one in _environments.items() if one is self]:
                del _environments[key]
            self._gate.notify_all()
            return True

    def _is_busy(self) -> bool:
        return bool(self._readers or self._writers or self._changing)

    def _guard(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable(
                "this store was open when the process forked, and cannot be used in the child",
                where=str(self.path),
                hint="open the store in the child",
            )

    def require_in_place(self) -> None:
        """Raise Unavailable if the open files are no longer those of this path.

        Commits to them would be lost silently, and their content may be outdated: `reindex`
        replaces an environment.
        """
        if not self._files.is_in_place():
            raise Unavailable(
                "this store was removed or replaced while this process has it open",
                where=str(self.path),
                hint="close the store first, and run the command again",
            )

    def is_replaced(self) -> bool:
        """Return whether there are other files now than those that are open."""
        return self._files.is_replaced()

    def follow(self) -> bool:
        """Open the current files if they were replaced; return whether anything changed.

        Also renews an outdated private copy. For readers whose block may have moved to where only
        the new index says. Waits for transactions of other threads; must not be called inside one.
        Raises Corrupt, and keeps the open files, if the new ones are damaged.
        """
        self._guard()
        if not self.is_replaced():
            return self.refresh()
        if self._files.copy is None:
            self._files.require_sound()
        self._reopen()
        return True

    def refresh(self) -> bool:
        """Renew a private copy to the newest commit; return whether it changed.

        Waits as long as that takes. For comparing the index with what others have written. Does
        nothing inside a transaction of this thread; waits for those of others.
        """
        self._guard()
        copy = self._files.copy
        if copy is None or get_ident() in self._readers or not copy.is_old():
            return False
        with self._exclusively():
            if self._files.copy is copy:
                self._files.renew(PATIENCE)
            return self._files.copy is not copy

    def opened(self) -> int:
        """Open the file that is read once more, for the caller to close. Raises OSError."""
        return self._files.opened()

    def mapped(self) -> mmap.mmap:
        """Map the file that is read once more, read-only; call inside a transaction.

        Raises OSError or ValueError if it cannot be mapped, or was replaced since it was opened.
        """
        return self._files.mapped()

    @contextmanager
    def read(self) -> Iterator[IndexTransaction]:
        """A short read transaction: copy what is needed, leave, then do I/O.

        Raises Unavailable once the environment is closed, Corrupt, StorageFailed.
        """
        self._guard()
        self._enter()
        try:
            with self._files.errors_translated():
                transaction = self._begin_reading()
                mine = self._readers[get_ident()]
                is_outer = transaction not in mine
                mine[-1] = transaction
                try:
                    yield transaction
                finally:
                    if is_outer:
                        self._files.end(transaction)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Count this thread among the readers."""
        thread = get_ident()
        with self._gate:
            # New readers wait for a change to writing; nested ones must not.
            inside = thread in self._readers or thread in self._writers
            while self._changing and not inside:
                self._gate.wait()
            if not inside:
                self._require_users()
            if not self._files.is_open:
                self._files.open(writable=False)
            elif not inside and not self._is_busy():
                self._files.renew_if_due()
            self._readers.setdefault(thread, []).append(None)

    def _leave(self) -> None:
        thread = get_ident()
        with self._gate:
            inside = self._readers.get(thread)
            # None where entering again has failed.
            if inside is not None:
                inside.pop()
                if not inside:
                    del self._readers[thread]
                    self._gate.notify_all()

    def _require_users(self) -> None:
        if not self._users:
            raise closed(self.path)

    def _begin_reading(self) -> IndexTransaction:
        while True:
            if not self._files.can_write_table():
                outer = self._readers[get_ident()][0]
                if outer is not None:
                    # It keeps what it sees from being reused.
                    return outer
                if get_ident() in self._writers:
                    raise fs.full(self.path)
                self._leave()
                try:
                    self._abandon()
                finally:
                    self._enter()
                continue
            try:
                return self._files.begin()
            except lmdb.MapResizedError:
                # Another process, which has more address space, let the file grow.
                if len(self._readers[get_ident()]) > 1 or get_ident() in self._writers:
                    raise
                self._leave()
                try:
                    self._reopen()
                finally:
                    self._enter()

    def _abandon(self) -> None:
        """Leave an environment whose table cannot be written, and read a copy."""
        with self._exclusively():
            if not self._files.can_write_table():
                self._files.close()
                self._files.open(writable=False)

    def _reopen(self) -> None:
        """Map the file again, with no thread inside."""
        with self._exclusively():
            self._files.close()
            self._files.open(writable=self._files.is_writable)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the gate with no thread inside; new ones wait. Call from outside a transaction."""
        with self._gate:
            while self._changing:
                self._gate.wait()
            self._require_users()
            self._changing = True
            try:
                while self._readers or self._writers:
                    self._gate.wait()
                yield
            finally:
                self._changing = False
                self._gate.notify_all()

    @contextmanager
    def write(self) -> Iterator[IndexTransaction]:
        """The only write transaction: committed and synced on leaving, dropped on an exception."""
        self._guard()
        self._files.require_writable()
        self._make_writable()
        try:
            with self._files.errors_translated():
                transaction = self._files.begin_writing()
                try:
                    # Writes to files that a rebuilt index has replaced would be lost.
                    self.require_in_place()
                    with self._files.changing(transaction):
                        yield transaction
                except BaseException:
                    self._files.epoch += 1
                    # A no-op after a commit.
                    self._files.end(transaction, is_write=True)
                    raise
        finally:
            with self._gate:
                self._writers.discard(get_ident())
                self._gate.notify_all()

    def _make_writable(self) -> None:
        """Open for writing with enough room, if needed, and count this thread as a writer."""
        files = self._files
        with self._gate:
            inside = get_ident() in self._readers
            if not inside:
                self._require_users()
            if files.is_writable and (inside or not files.is_narrow()):
                self._writers.add(get_ident())
                return
            if inside:
                raise RuntimeError("a write transaction asked for inside a read transaction")
        with self._exclusively():
            if not files.is_writable or files.is_narrow():
                # What else is there now was not asked for, and may be another store's.
                self.require_in_place()
                files.close()
                try:
                    files.open(writable=True)
                except BaseException:
                    # A user who cannot write may still read, now or after the problem is solved.
                    with suppress(MstoreError):
                        files.open(writable=False)
                    raise
            self._writers.add(get_ident())

    def require_writable(self) -> None:
        """Raise StorageFailed if this user may not write it."""
        self._files.require_writable()

    def may_write(self) -> bool:
        """Return whether this user may write here, judged by what it reads: a copy, or the file."""
        return self._files.may_write()

    def file_bytes(self) -> int:
        """Return the size of the data file on disk, in bytes."""
        with fs.translated(self.path):
            return (self.path / DATA).stat().st_size


def is_open(path: Path) -> bool:
    """Return whether this process has the environment of this path open."""
    with _environments_lock:
        return os.path.realpath(path) in _environments


def closed(path: Path) -> Unavailable:
    """Build the error for using a store after `close`."""
    return Unavailable("this store was closed", where=str(path), hint="open it again")


def _keep_if_full() -> None:
    """Keep environments that nobody has closed when Python ends: freeing them writes the table."""
    for env in list(_environments.values()):
        files = env._files
        if env._pid == os.getpid() and files.is_open and not files.can_write_table():
            lmdb_table.keep_for_ever(files.env)


atexit.register(_keep_if_full)


def _begin_anew() -> None:
    """In a forked child: forget what is the parent's.

    What is forgotten stays open: to close the parent's lock file drops the child's own fcntl locks
    on it, by which LMDB knows that the child lives.
    """
    # py-lmdb refuses files that are open in this process, and counts those that the parent opened.
    guard: Any = import_module("lmdb._envid")
    keys = guard.env_keys
    guard.env_keys = lambda path, subdir: tuple((os.getpid(), key) for key in keys(path, subdir))
    for env in _environments.values():
        if env._files.is_open:
            lmdb_table.keep_for_ever(env._files.env)
    _environments.clear()
    lmdb_files.abandoned.clear()
    _environments_lock.release()


# No environment is half opened in a child: a fork waits until other threads have opened theirs.
os.register_at_fork(
    before=_environments_lock.acquire,
    after_in_parent=_environments_lock.release,
    after_in_child=_begin_anew,
)
