"""LMDB environments: one per path and process, guarded against fork, closed by the last user.

Owns opening, map size and transactions; what the rows mean is for `index` and `stats`.
Always full sync, never `writemap`: a full disk is then an error and not a SIGBUS.

An environment that is there already is opened for reading first, and again for writing when a
write transaction is asked for: LMDB opens named databases of a writable environment in a write
transaction, and a reader would wait there for whoever is writing.

LMDB trusts its file: some damage ends the process.  So `lmdb_check` looks at the file before LMDB
maps it.  A commit that fails leaves what was committed before; the environment is then opened anew
before the next one.

Whoever may not write the lock file has no place among the readers.  He reads a private copy of the
file (`lmdb_copy`), which is taken anew at the next read after something was committed.

The last user's `release` waits until no thread is inside a transaction.  Whoever asks for one later
is refused.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any, TypeVar

import lmdb

from mstore import fs
from mstore.blocks import address_space, lmdb_check
from mstore.blocks.lmdb_check import Trust
from mstore.blocks.lmdb_copy import PATIENCE, PrivateCopy
from mstore.errors import Corrupt, MstoreError, StorageFailed, Unavailable

MAX_READERS = 1024
RENEWAL_PATIENCE = 0.1
"""Seconds to try for a newer copy, where there is one already."""
_COPY_SHARE = 10
_CHEAP_COPY = 0.02
PID_PATIENCE = 5.0
"""Seconds to wait for a process of the same number in another PID namespace."""
_PID_PAUSE = 0.02
# LMDB's lock file: a header and 64 bytes a reader.
_LOCK_BYTES = 4096 + 64 * MAX_READERS
_environments: dict[str, Environment] = {}
_environments_lock = Lock()
T = TypeVar("T")


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
        self._file_id: _FileId = (None, None)
        self.epoch = 0
        """Changes when what was read before may never have been: a write transaction was dropped,
        or other files were opened."""
        self._is_closed = False
        self._mapped = 0
        self._trust: Trust | None = None
        self._copy: PrivateCopy | None = None
        self._newer: PrivateCopy | None = None
        if not lmdb_check.is_born(path / "data.mdb"):
            if not create:
                raise self._damaged("the index is missing or empty")
            self._create()
            return
        if not self._is_foreign():
            self._trust = Trust(path, lmdb_check.require_sound(path, hint))
        try:
            self._open(writable=False)
        except lmdb.NotFoundError as error:
            if not create or self._is_foreign():
                raise self._damaged("a database of the index is missing") from error
            self._create()

    def _open(self, *, writable: bool) -> None:
        """Open the two files of one environment: `reindex` may exchange them in between."""
        while True:
            before = _file_id(self.path)
            self._open_once(writable=writable)
            now = _file_id(self.path)
            # LMDB makes a lock file that is missing.
            if now == before or (before[0] == now[0] and before[1] is None):
                if now != self._file_id:
                    self.epoch += 1
                self._file_id = now
                return
            self._close_files()

    def _open_once(self, *, writable: bool) -> None:
        try:
            self._copy = None if writable else self._private_copy()
            try:
                self._env = self._lmdb(writable=writable)
            except BaseException:
                self._drop_copy()
                raise
            try:
                # Not in a transaction of ours: the handles of a read transaction end with it.
                self.databases = {name: self._handle(name) for name in self._names}
            except BaseException:
                self._close_files()
                raise
        except lmdb.InvalidError as error:
            raise self._damaged("not an LMDB index") from error
        except lmdb.NotFoundError:
            raise
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error
        self._writable = writable
        self._is_open = True

    def _close_files(self) -> None:
        self._env.close()
        self._is_open = False
        self._drop_copy()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def require_writable(self) -> None:
        """Raise StorageFailed where this user may not write it."""
        if not self.may_write():
            fs.require_writable(self.path, [self.path / "lock.mdb", self.path / "data.mdb"])

    def _is_foreign(self) -> bool:
        """Whether this user cannot have a place among the readers in the lock file."""
        return not fs.may_write(self.path / "lock.mdb")

    def _private_copy(self) -> PrivateCopy | None:
        """What to read where the file itself cannot be read beside writers; None where it can."""
        copy, self._newer = self._newer, None
        if copy is None and self._is_foreign():
            copy = PrivateCopy(self.path / "data.mdb")
            try:
                lmdb_check.require_sound_copy(self.path, copy, self._hint)
            except BaseException:
                copy.close()
                raise
        return copy

    def _renew(self, copy: PrivateCopy, patience: float) -> None:
        """Take a newer copy, if something was committed since this one.  With no thread inside.

        Where none can be had in so many seconds, what was read before is read again: an earlier
        state.  So it is where the files are gone: it is all that there is.
        """
        with suppress(MstoreError):
            if copy.is_old():
                self._newer = PrivateCopy(self.path / "data.mdb", patience=patience)
                self._close_files()
                self._open(writable=False)

    def _handle(self, name: str) -> Any:
        return self._patiently(lambda: self._env.open_db(name.encode(), create=False))

    def _patiently(self, call: Callable[[], T]) -> T:
        """What needs this process's own place among the readers, waiting for it for a while.

        LMDB holds it by a lock on the byte whose offset is the process's number.
        """
        until = time.monotonic() + PID_PATIENCE
        while True:
            try:
                return call()
            except lmdb.Error as error:
                if getattr(error, "code", 0) != errno.EAGAIN:
                    raise
                if time.monotonic() > until:
                    raise self._equal_pids() from error
            time.sleep(_PID_PAUSE)

    def _equal_pids(self) -> Unavailable:
        return Unavailable(
            f"another process numbered {self._pid} has this store open, in another container or "
            "PID namespace; LMDB cannot tell the two apart",
            where=str(self.path),
            hint="run the two one after the other, or with one PID namespace "
            "(docker run --pid=host, or --pid=container:NAME)",
        )

    def _lmdb(self, *, writable: bool) -> Any:
        fs.about_to_map(self.path, copied=self._copy is not None)
        sizes = address_space.map_sizes(self._data_bytes())
        for size in sizes:
            try:
                env = self._patiently(partial(self._mapping, size, writable=writable))
            except lmdb.Error as error:
                if size == sizes[-1] or getattr(error, "code", 0) != errno.ENOMEM:
                    raise
            else:
                self._mapped = size
                return env
        raise AssertionError

    def _data_bytes(self) -> int:
        try:
            return os.stat(self.data).st_size
        except FileNotFoundError:
            return 0

    def _mapping(self, size: int, *, writable: bool) -> Any:
        copy = self._copy
        return lmdb.open(
            str(self.path if copy is None else copy.path),
            subdir=copy is None,
            lock=copy is None,
            map_size=size,
            max_dbs=len(self._names) + 8,
            max_readers=MAX_READERS,
            metasync=True,
            sync=True,
            writemap=False,
            readahead=False,
            readonly=not writable,
            create=False,
            mode=0o666,
        )

    def _create(self) -> None:
        """Make what is missing; the files' names are durable when this returns."""
        data = self.path / "data.mdb"
        # A file of no bytes may be one that another process is about to fill; LMDB takes it.
        if data.exists() and data.stat().st_size > 0 and not lmdb_check.is_born(data):
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
            # One that waits for its last readers to be closed is taken over.
            found = _environments.get(key)
            if found is None:
                found = _environments[key] = cls(path, databases, create=create, hint=hint)
            else:
                found._guard()
                found.require_in_place()
            found._users += 1
            return found

    def release(self) -> None:
        """Give up one use; the last one closes the environment when no thread is inside it.

        Raises Unavailable, and gives up nothing, in a transaction of this thread's own.
        """
        if self._pid != os.getpid():
            # What a forked child has is the parent's, locks and all.
            return
        self.require_outside()
        with _environments_lock:
            self._users -= 1
        while not self._is_settled():
            with self._gate:
                while self._is_busy() and not self._users:
                    self._gate.wait()

    def require_outside(self) -> None:
        """Raise Unavailable in a transaction of this thread's own: it would wait for itself."""
        if get_ident() in self._readers or get_ident() in self._writers:
            raise Unavailable(
                "this store cannot be closed inside a call of its own",
                where=str(self.path),
                hint="close it when that call has returned",
            )

    def _is_settled(self) -> bool:
        """Whether somebody uses the environment, or else it is closed: now, if nothing runs."""
        with _environments_lock, self._gate:
            if self._users or self._is_closed:
                return True
            if self._is_busy():
                return False
            if self._is_open:
                self._close_files()
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

    def follow(self) -> bool:
        """Open the files that are in place now, if they were replaced; whether they were.

        A private copy that is old is replaced as well.  For readers: what they look for may have
        moved where only the new index tells.  Waits for transactions of other threads; not for one
        that is inside a transaction itself.
        """
        self._guard()
        if _file_id(self.path) == self._file_id:
            return self.refresh()
        self._reopen()
        return True

    def refresh(self) -> bool:
        """Have a private copy be of the newest commit, whatever it costs; whether that changed it.

        For whoever compares the index with what others have written.  Does nothing in a transaction
        of this thread's own; waits for those of others.
        """
        self._guard()
        copy = self._copy
        if copy is None or get_ident() in self._readers or not copy.is_old():
            return False
        with self._exclusively():
            if self._copy is copy:
                self._renew(copy, PATIENCE)
            return self._copy is not copy

    @property
    def data(self) -> Path:
        """The file that is read: LMDB's own, or a private copy."""
        copy = self._copy
        return self.path / "data.mdb" if copy is None else copy.path

    @contextmanager
    def read(self) -> Iterator[Any]:
        """A short read transaction: copy what is needed, leave, then do I/O.

        Raises Unavailable once the environment is closed, Corrupt, StorageFailed.
        """
        self._guard()
        self._enter()
        try:
            with self._errors_translated():
                transaction = self._begin_reading()
                try:
                    yield transaction
                finally:
                    self._drop(transaction)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Count this thread among the readers."""
        thread = get_ident()
        with self._gate:
            # New readers let a change to writing pass; one inside another is part of that.
            inside = thread in self._readers or thread in self._writers
            while self._changing and not inside:
                self._gate.wait()
            if not inside:
                self._require_users()
            if not self._is_open:
                self._open(writable=False)
            elif self._copy is not None and not (inside or self._is_busy()):
                is_dear = self._copy.seconds > _CHEAP_COPY
                if not is_dear or self._copy.age() > _COPY_SHARE * self._copy.seconds:
                    self._renew(self._copy, RENEWAL_PATIENCE)
            self._readers[thread] = self._readers.get(thread, 0) + 1

    def _leave(self) -> None:
        thread = get_ident()
        with self._gate:
            self._readers[thread] -= 1
            if not self._readers[thread]:
                del self._readers[thread]
                self._gate.notify_all()

    def _require_users(self) -> None:
        if not self._users:
            raise closed(self.path)

    def _begin_reading(self) -> Any:
        while True:
            try:
                return self._patiently(self._env.begin)
            except lmdb.MapResizedError:
                # Another process, which has more address space, let the file grow.
                if self._readers[get_ident()] > 1 or get_ident() in self._writers:
                    raise
                self._leave()
                try:
                    self._reopen()
                finally:
                    self._enter()

    def _reopen(self) -> None:
        """Map the file anew, with no thread inside."""
        with self._exclusively():
            writable = self._writable
            self._close_files()
            self._open(writable=writable)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Holding the gate, with no thread inside; new ones wait.  Not for one that is inside."""
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
    def write(self) -> Iterator[Any]:
        """The one write transaction; committed and synced on leaving, dropped on an exception."""
        self._guard()
        self.require_writable()
        self._make_writable()
        try:
            with self._errors_translated():
                # Killed readers would hold on to old pages for ever.
                self._env.reader_check()
                transaction = self._env.begin(write=True)
                try:
                    # What goes into the file of an index that was made anew meanwhile is lost.
                    self.require_in_place()
                    self._trusting.before(transaction.id())
                    yield transaction
                    self._commit(transaction)
                except BaseException:
                    self.epoch += 1
                    raise
                finally:
                    # Does nothing after a commit.
                    self._drop(transaction)
        finally:
            with self._gate:
                self._writers.discard(get_ident())
                self._gate.notify_all()

    @property
    def _trusting(self) -> Trust:
        if self._trust is None:
            # One that was just made; nobody has looked at it yet.
            self._trust = Trust(self.path, b"")
        return self._trust

    def _commit(self, transaction: Any) -> None:
        number = transaction.id()
        try:
            with fs.index_commit(self.path):
                transaction.commit()
            self._trusting.after(number)
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
        """Open for writing, if need be, with room to write, and count this thread as a writer."""
        with self._gate:
            inside = get_ident() in self._readers
            if not inside:
                self._require_users()
            if self._writable and (inside or not self._is_narrow()):
                self._writers.add(get_ident())
                return
            if inside:
                raise RuntimeError("a write transaction asked for inside a read transaction")
        with self._exclusively():
            if not self._writable or self._is_narrow():
                self._close_files()
                try:
                    self._open(writable=True)
                except BaseException:
                    # What cannot be written may still be read, now or when all is well again.
                    with suppress(MstoreError):
                        self._open(writable=False)
                    raise
            self._writers.add(get_ident())

    def _is_narrow(self) -> bool:
        return address_space.is_narrow(self._mapped, self._data_bytes())

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error

    def may_write(self) -> bool:
        """Whether this user may write here, by what he reads: a copy, or the file itself."""
        return self._copy is None or not self._is_foreign()

    def file_bytes(self) -> int:
        """Size of the data file on disk."""
        with fs.translated(self.path):
            return (self.path / "data.mdb").stat().st_size


def is_open(path: Path) -> bool:
    """Whether this process has the environment of this path open."""
    with _environments_lock:
        return os.path.realpath(path) in _environments


def closed(path: Path) -> Unavailable:
    """The error for a use of a store after `close`."""
    return Unavailable("this store was closed", where=str(path), hint="open it again")


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


def _translated(error: Any, path: Path, hint: str) -> StorageFailed | Corrupt:
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return Corrupt(f"damaged index: {error}", where=str(path), hint=hint)
    if isinstance(error, lmdb.MapFullError | lmdb.MapResizedError):
        if address_space.limit() is None:
            size = address_space.MAP_SIZE >> 30
            what, hint = f"the index has grown to the {size} GiB that it may have", "mstore gc"
        else:
            what = "the index outgrew its share of the address space, which ulimit -v bounds"
            hint = "ulimit -v unlimited"
        return StorageFailed(what, where=str(path), hint=hint, errno=errno.ENOSPC)
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
