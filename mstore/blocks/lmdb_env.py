"""LMDB environments: one per path and process, guarded against fork, closed by the last user.

Owns opening, map size and transactions; what the rows mean is for `index` and `stats`.
Always full sync, never `writemap`: a full disk is then an error and not a SIGBUS.

An environment that is there already is opened for reading first, and again for writing when a
write transaction is asked for: LMDB opens named databases of a writable environment in a write
transaction, and a reader would wait there for whoever is writing.

LMDB trusts its file: some damage ends the process.  So a file from elsewhere is never opened, and
one that may be damaged is looked at by `lmdb_pages` first.  A commit that fails leaves what was
committed before; the environment is then opened anew before the next one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any

import lmdb

from mstore import fs
from mstore.errors import Corrupt, MstoreError, StorageFailed, Unavailable

MAP_SIZE = 1 << 38
MAX_READERS = 1024
# LMDB's lock file: a header and 64 bytes a reader.
_LOCK_BYTES = 4096 + 64 * MAX_READERS
_environments: dict[str, Environment] = {}
_environments_lock = Lock()


class Environment:
    """A shared LMDB environment with named databases.

    Readers see the state at which they began and never wait for a writer; LMDB itself lets one
    writer in at a time, over all processes.
    """

    def __init__(
        self, path: Path, databases: tuple[str, ...], *, create: bool, hint: str = "mstore reindex"
    ) -> None:
        self.path = path
        self._hint = hint
        self.databases: dict[str, Any] = {}
        self._names = databases
        self._pid = os.getpid()
        self._users = 0
        # Guards the change from reading to writing: who has a transaction open just now.
        self._gate = Condition()
        self._readers: dict[int, int] = {}
        self._writers: set[int] = set()
        self._changing = False
        self._is_open = False
        self.aborted = 0
        """How many write transactions were dropped: what was read in them never was."""
        if not _is_born(path / "data.mdb"):
            if not create:
                raise self._damaged("the index is missing or empty")
            self._create()
            return
        try:
            self._open(writable=False)
        except lmdb.NotFoundError as error:
            if not create:
                raise self._damaged("a database of the index is missing") from error
            self._create()

    def _open(self, *, writable: bool) -> None:
        """Open the two files of one environment: `reindex` may exchange them in between."""
        while True:
            before = _file_id(self.path)
            self._open_once(writable=writable)
            self._file_id = _file_id(self.path)
            # LMDB makes a lock file that is missing.
            if self._file_id == before or (before[0] == self._file_id[0] and before[1] is None):
                return
            self._env.close()
            self._is_open = False

    def _open_once(self, *, writable: bool) -> None:
        try:
            self._env = self._lmdb(writable=writable)
            try:
                # Not in a transaction of ours: the handles of a read transaction end with it.
                self.databases = {
                    name: self._env.open_db(name.encode(), create=False) for name in self._names
                }
            except BaseException:
                self._env.close()
                raise
        except lmdb.InvalidError as error:
            raise self._damaged("not an LMDB index") from error
        except lmdb.NotFoundError:
            raise
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error
        self._writable = writable
        self._is_open = True

    def _lmdb(self, *, writable: bool) -> Any:
        fs.about_to_map(self.path)
        return lmdb.open(
            str(self.path),
            map_size=MAP_SIZE,
            max_dbs=len(self._names) + 8,
            max_readers=MAX_READERS,
            metasync=True,
            sync=True,
            writemap=False,
            readahead=False,
            readonly=not writable,
            create=False,
            mode=0o644,
        )

    def _create(self) -> None:
        """Make what is missing; the files' names are durable when this returns."""
        data = self.path / "data.mdb"
        # A file of no bytes may be one that another process is about to fill; LMDB takes it.
        if data.exists() and data.stat().st_size > 0 and not _is_born(data):
            fs.unlink(data)
        try:
            # LMDB would make a sparse file and map it: on a full disk that is a SIGBUS.
            fs.create_whole(self.path / "lock.mdb", bytes(_LOCK_BYTES))
        except StorageFailed as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
        try:
            self._env = self._lmdb(writable=True)
            try:
                with self._env.begin(write=True) as transaction:
                    for name in self._names:
                        self.databases[name] = self._env.open_db(name.encode(), txn=transaction)
                    with fs.index_commit(self.path):
                        transaction.commit()
                fs.sync_directory(self.path)
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error
        self._writable = self._is_open = True
        self._file_id = _file_id(self.path)

    def _damaged(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self.path), hint=self._hint)

    @classmethod
    def acquire(
        cls,
        path: Path,
        databases: tuple[str, ...],
        *,
        create: bool = True,
        hint: str = "mstore reindex",
    ) -> Environment:
        """The environment of this path, opened at most once in this process.

        Raises Corrupt where it is damaged (`hint` says what to do then), or is missing and not to
        be made; StorageFailed.
        """
        key = os.path.realpath(path)
        with _environments_lock:
            found = _environments.get(key)
            if found is None:
                found = _environments[key] = cls(path, databases, create=create, hint=hint)
            else:
                found._guard()
                found.require_in_place()
            found._users += 1
            return found

    def release(self) -> None:
        """Give up one use; the last one closes the environment."""
        with _environments_lock:
            self._users -= 1
            if self._users == 0 and self._pid == os.getpid():
                self._env.close()
                del _environments[next(k for k, e in _environments.items() if e is self)]

    def _guard(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable(
                "this store was open when the process forked, and cannot be used in the child",
                where=str(self.path),
                hint="close the store before the fork, or start the child with 'spawn'",
            )

    def require_in_place(self) -> None:
        """Raise Unavailable where the files that are open here are not those of this path any more.

        What is committed to them would be gone without a word, and what they say may be out of
        date: `reindex` puts a new environment in the place of an old one.
        """
        if _file_id(self.path) != self._file_id:
            raise Unavailable(
                "this store was removed or replaced while this process has it open",
                where=str(self.path),
                hint="close the store first, and run the command again",
            )

    def _begin(self, *, write: bool) -> Any:
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:
            # Another process enlarged the map; adopt its size.
            self._env.set_mapsize(0)
            return self._env.begin(write=write)

    @contextmanager
    def read(self) -> Iterator[Any]:
        """A short read transaction: copy what is needed, leave, then do I/O."""
        self._guard()
        thread = get_ident()
        with self._gate:
            # New readers let a change to writing pass; one inside another is part of that.
            while self._changing and thread not in self._readers and thread not in self._writers:
                self._gate.wait()
            if not self._is_open:
                self._open(writable=False)
            self._readers[thread] = self._readers.get(thread, 0) + 1
        try:
            with self._errors_translated():
                transaction = self._begin(write=False)
                try:
                    yield transaction
                finally:
                    self._drop(transaction)
        finally:
            with self._gate:
                self._readers[thread] -= 1
                if not self._readers[thread]:
                    del self._readers[thread]
                    self._gate.notify_all()

    @contextmanager
    def write(self) -> Iterator[Any]:
        """The one write transaction; committed and synced on leaving, dropped on an exception."""
        self._guard()
        self._make_writable()
        try:
            with self._errors_translated():
                # Killed readers would hold on to old pages for ever.
                self._env.reader_check()
                transaction = self._begin(write=True)
                try:
                    # What goes into the file of an index that was made anew meanwhile is lost.
                    self.require_in_place()
                    yield transaction
                    self._commit(transaction)
                except BaseException:
                    self.aborted += 1
                    raise
                finally:
                    # Does nothing after a commit.
                    self._drop(transaction)
        finally:
            with self._gate:
                self._writers.discard(get_ident())
                self._gate.notify_all()

    def _commit(self, transaction: Any) -> None:
        try:
            with fs.index_commit(self.path):
                transaction.commit()
        except lmdb.Error:
            # LMDB gives up on an environment whose head it could not write: the next writer
            # opens it anew.
            self._writable = False
            raise

    def _drop(self, transaction: Any) -> None:
        # Not in a child that was forked meanwhile: what it would give up is the parent's.
        if self._pid == os.getpid():
            transaction.abort()

    def _make_writable(self) -> None:
        """Open for writing, if need be, and count this thread among the writers."""
        with self._gate:
            if self._writable:
                self._writers.add(get_ident())
                return
            if get_ident() in self._readers:
                raise RuntimeError("a write transaction asked for inside a read transaction")
            self._changing = True
            try:
                while self._readers or self._writers:
                    self._gate.wait()
                if not self._writable:
                    self._env.close()
                    self._is_open = False
                    try:
                        self._open(writable=True)
                    except BaseException:
                        # What cannot be written may still be read, now or when all is well again.
                        with suppress(MstoreError):
                            self._open(writable=False)
                        raise
                self._writers.add(get_ident())
            finally:
                self._changing = False
                self._gate.notify_all()

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error

    def file_bytes(self) -> int:
        """Size of the data file on disk."""
        with fs.translated(self.path):
            return (self.path / "data.mdb").stat().st_size


def is_open(path: Path) -> bool:
    """Whether this process has the environment of this path open."""
    with _environments_lock:
        return os.path.realpath(path) in _environments


_FileId = tuple[tuple[int, int] | None, tuple[int, int] | None]


def _file_id(path: Path) -> _FileId:
    """Device and inode of data and of locks.

    Two lock files beside one file of data would be two writers that do not know of each other.
    """
    found: list[tuple[int, int] | None] = []
    for name in ("data.mdb", "lock.mdb"):
        try:
            status = os.stat(path / name)
            found.append((status.st_dev, status.st_ino))
        except FileNotFoundError:
            found.append(None)
    return found[0], found[1]


def _is_born(data: Path) -> bool:
    """Whether LMDB ever got as far as a header here; a crash may leave no byte, or only zeros."""
    try:
        with fs.translated(data), data.open("rb") as file:
            return any(file.read(4096))
    except StorageFailed as error:
        if error.errno == errno.ENOENT:
            return False
        raise


def _translated(error: Any, path: Path, hint: str) -> StorageFailed | Corrupt:
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return Corrupt(f"damaged index: {error}", where=str(path), hint=hint)
    if isinstance(error, lmdb.MapFullError):
        return StorageFailed(
            f"the index has grown to the {MAP_SIZE >> 30} GiB that it may have",
            where=str(path),
            hint="mstore gc",
            errno=errno.ENOSPC,
        )
    if isinstance(error, lmdb.ReadersFullError):
        return StorageFailed(
            f"{MAX_READERS} readers have the index open",
            where=str(path),
            hint="let some of them end and run the command again",
            errno=errno.EAGAIN,
        )
    # Positive codes are the system's, negative ones LMDB's own.
    code = max(0, int(getattr(error, "code", 0)))
    if code == errno.EIO and _is_full(path):
        # LMDB takes a short write for an I/O error.
        code = errno.ENOSPC
    if code == errno.ENOMEM:
        return StorageFailed(
            "the index could not be mapped: not enough address space",
            where=str(path),
            hint="ulimit -v unlimited",
            errno=code,
        )
    return fs.refusal(code, path, f"the index could not be used: {error}")


def _is_full(path: Path) -> bool:
    try:
        room = os.statvfs(path)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < 1 << 20
