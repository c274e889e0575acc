"""LMDB environments: one per path and process, closed by the last user.

Owns opening, map size and transactions; `index` and `stats` own what the rows mean. Always full
sync, never `writemap`: data that the disk has no room for is then an error and not a SIGBUS.

An existing environment is opened for reading first, and again for writing when a write transaction
is requested. LMDB opens named databases of a writable environment in a write transaction, and a
reader would have to wait there for the current writer.

LMDB trusts its file: some damage ends the process. So `lmdb_check` checks the file before LMDB maps
it. A commit that fails leaves the previous state; the environment is then reopened before the next
commit.

A user who may not write the lock file cannot register as a reader, and nobody can if the disk has
no room for what LMDB writes there (`lmdb_table`). Such a reader reads a private copy of the file
(`lmdb_copy`), which is renewed at the next read after a commit. An environment that was open when
the disk became full is abandoned, and closed when there is room again; reading then goes on as
before. Writers get an error.

A forked child may not use what it inherits: transactions and readers are the parent's. It opens
environments of its own beside those.

The last user's `release` waits until no thread is inside a transaction. Later requests are refused.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Condition, Lock, get_ident
from typing import Any, Final, TypeVar

import lmdb

from mstore import fs
from mstore.blocks import address_space, lmdb_check, lmdb_table
from mstore.blocks.lmdb_check import Trust
from mstore.blocks.lmdb_copy import PATIENCE, PrivateCopy
from mstore.blocks.lmdb_table import MAX_READERS, Abandoned, LockTable
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.terms.errors import Corrupt, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Text, call

_REINDEX: Final = call("reindex")
RENEWAL_PATIENCE = 0.1
"""Seconds to try for a newer copy, if there is an older one."""
_COPY_SHARE = 10
_CHEAP_COPY = 0.02
PID_PATIENCE = 5.0
"""Seconds to wait for a process with the same pid in another PID namespace."""
_PID_PAUSE = 0.02
_FULL_PATIENCE = 1.0
"""Seconds until a reader of a full disk looks again whether there is room."""
_MOST_REWRITTEN = 1 << 26
_FEW_PAGES = 1 << 20
_environments: dict[str, Environment] = {}
_environments_lock = Lock()
_abandoned: dict[tuple[int, int] | None, Abandoned] = {}
"""By device and inode of the lock file. LMDB cannot open one again that this process has open."""
T = TypeVar("T")


class Environment:
    """A shared LMDB environment with named databases.

    Readers see the state at which they began and never wait for a writer. LMDB admits one writer at
    a time, across all processes.
    """

    def __init__(
        self, path: Path, databases: tuple[str, ...], *, create: bool, hint: Text = _REINDEX
    ) -> None:
        self.path = path
        self._hint = hint
        self.databases: dict[str, Any] = {}
        self._names = databases
        self._pid = os.getpid()
        self._users = 0
        # Guards the change from reading to writing: which threads are inside a transaction.
        self._gate = Condition()
        self._readers: dict[int, list[IndexTransaction | None]] = {}
        self._writers: set[int] = set()
        self._changing = False
        self._is_open = False
        self._file_id: _FileId = (None, None)
        self.epoch = 0
        """Changes when data that was read before may be invalid.

        That is after a write transaction was dropped, or other files were opened.
        """
        self.files = 0
        """Changes when other files were opened: numbers of commits are comparable while it stays.

        A transaction that was dropped was never read from outside of it.
        """
        self._is_closed = False
        self._mapped = 0
        self._trust: Trust | None = None
        self._sound: tuple[int, int] | None = None
        self._copy: PrivateCopy | None = None
        self._newer: PrivateCopy | None = None
        self._full_since: float | None = None
        self._table: LockTable | None = None
        self._copies = False
        if not lmdb_check.is_born(path / "data.mdb"):
            if not create:
                raise self._damaged("the index is missing or empty")
            self._create()
            return
        try:
            self._open(writable=False)
        except lmdb.NotFoundError as error:
            if not create or self._is_foreign():
                raise self._damaged("a database of the index is missing") from error
            self._create()

    def _open(self, *, writable: bool) -> None:
        """Open data and lock file of one environment; `reindex` may exchange them in between."""
        while True:
            before = _file_id(self.path)
            self._open_once(writable=writable)
            now = _file_id(self.path)
            # LMDB creates a missing lock file.
            if now == before or (before[0] == now[0] and before[1] is None):
                if now != self._file_id:
                    self.epoch += 1
                    self.files += 1
                self._file_id = now
                return
            self._close_files()

    def _open_once(self, *, writable: bool) -> None:
        try:
            self._copy = None
            if writable:
                self._require_files()
            else:
                self._copy = self._private_copy()
            if self._copy is None:
                self._require_sound()
            try:
                self._env = self._lmdb(writable=writable)
                self._table = None if self._copy else LockTable(self.path, copies=self._copies)
            except BaseException:
                self._drop_copy()
                raise
            try:
                # Outside any transaction of ours: handles opened in a read transaction end with it.
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

    def _require_sound(self) -> None:
        """Raise Corrupt if the data file is not safe to map; one is checked when it is new here."""
        data = _identity(self.path / "data.mdb")
        if data != self._sound:
            self._trust = Trust(self.path, lmdb_check.require_sound(self.path, self._hint))
            self._sound = data

    def _close_files(self) -> None:
        self._is_open = False
        table, self._table = self._table, None
        # Closing writes the table.
        if table is None or (table.is_writable() and table.end_kept()):
            self._env.close()
        else:
            _abandoned[table.file] = Abandoned(self._env, table)
        self._drop_copy()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def require_writable(self) -> None:
        """Raise StorageFailed if this user may not write it."""
        if not self.may_write():
            fs.require_writable(self.path, [self.path / "lock.mdb", self.path / "data.mdb"])

    def _is_foreign(self) -> bool:
        """Return whether this user cannot register as a reader in the lock file."""
        return not fs.may_write(self.path / "lock.mdb")

    def _require_files(self) -> None:
        """Raise StorageFailed if LMDB cannot map its files as others will write them.

        Call while it has not opened them.
        """
        self._copies = fs.copies_on_write(self.path)
        lock = self.path / lmdb_table.NAME
        left = _abandoned.get(fs.identity(lock))
        if left is not None:
            if not left.close():
                raise fs.full(lock)
            _abandoned.pop(fs.identity(lock), None)
        if not lock.exists():
            # LMDB would create a sparse file.
            try:
                fs.create_whole(lock, bytes(lmdb_table.BYTES))
            except StorageFailed as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
                return
        fs.require_mappable(lock, lmdb_table.BYTES, copies=self._copies)
        data = self.path / "data.mdb"
        if data.exists() and fs.may_write(data):
            fs.copy_up(data)

    def _may_register(self) -> bool:
        """Return whether LMDB can register this process as a reader."""
        self._full_since = None
        if self._is_foreign():
            return False
        try:
            self._require_files()
        except StorageFailed:
            self._full_since = time.monotonic()
            return False
        return True

    def _private_copy(self) -> PrivateCopy | None:
        """Return a copy to read if LMDB cannot register this process as a reader; else None."""
        copy, self._newer = self._newer, None
        if copy is None and not self._may_register():
            copy = PrivateCopy(self.path / "data.mdb")
            try:
                lmdb_check.require_sound_copy(self.path, copy, self._hint)
            except BaseException:
                copy.close()
                raise
        return copy

    def _renew(self, copy: PrivateCopy, patience: float) -> None:
        """Renew the copy if something was committed since. Call with no thread inside.

        If no new copy can be taken within `patience` seconds, or the files are gone, readers keep
        the earlier state.
        """
        with suppress(MstoreError):
            if copy.is_old():
                self._newer = PrivateCopy(self.path / "data.mdb", patience=patience)
                self._close_files()
                self._open(writable=False)

    def _handle(self, name: str) -> Any:
        return self._patiently(lambda: self._env.open_db(name.encode(), create=False))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Make a call that needs this process's reader registration, and retry for a while.

        LMDB holds the registration by a lock on the byte whose offset is the pid.
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
        copy = self._copy
        try:
            return (self.path / "data.mdb" if copy is None else copy.path).stat().st_size
        except FileNotFoundError:
            return 0

    def _mapping(self, size: int, *, writable: bool) -> Any:
        copy = self._copy
        if copy is not None:
            return self._map(str(copy.path), size, is_copy=True, writable=writable)
        with fs.directory(self.path) as directory:
            # Whoever renames the directory now leads LMDB nowhere else.
            place = f"/proc/self/fd/{directory}"
            return self._map(place, size, is_copy=False, writable=writable)

    def _map(self, place: str, size: int, *, is_copy: bool, writable: bool) -> Any:
        return lmdb.open(
            place,
            subdir=not is_copy,
            lock=not is_copy,
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
        """Create what is missing; the files' names are durable on return."""
        data = self.path / "data.mdb"
        # Keep an empty file: another process may be about to fill it, and LMDB accepts it.
        if data.exists() and data.stat().st_size > 0 and not lmdb_check.is_born(data):
            fs.unlink(data)
        self._require_files()
        try:
            self._env = self._lmdb(writable=True)
            self._table = LockTable(self.path, copies=self._copies)
            self._file_id = _file_id(self.path)
            self._sound = self._file_id[0]
            try:
                self._make_databases()
            except BaseException:
                self._close_files()
                raise
        except lmdb.Error as error:
            raise _translated(error, self.path, self._hint) from error
        self._writable = self._is_open = True

    def _make_databases(self) -> None:
        transaction = self._env.begin(write=True)
        try:
            for name in self._names:
                self.databases[name] = self._env.open_db(name.encode(), txn=transaction)
            with fs.index_commit(self.path):
                transaction.commit()
        except BaseException:
            self._drop(transaction, is_write=True)
            raise
        fs.sync_directory(self.path)

    def _damaged(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self.path), hint=self._hint)

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
            before, _ = _named(path)
            try:
                return cls(path, databases, create=create, hint=hint)
            except (StorageFailed, Corrupt):
                now, _ = _named(path)
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
                hint="open the store in the child",
            )

    def require_in_place(self) -> None:
        """Raise Unavailable if the open files are no longer those of this path.

        Commits to them would be lost silently, and their content may be outdated: `reindex`
        replaces an environment.
        """
        if _named(self.path) != self._file_id:
            raise Unavailable(
                "this store was removed or replaced while this process has it open",
                where=str(self.path),
                hint="close the store first, and run the command again",
            )

    def is_replaced(self) -> bool:
        """Return whether there are other files now than those that are open."""
        now = _named(self.path)
        return now[0] is not None and now != self._file_id

    def follow(self) -> bool:
        """Open the current files if they were replaced; return whether anything changed.

        Also renews an outdated private copy. For readers whose block may have moved to where only
        the new index says. Waits for transactions of other threads; must not be called inside one.
        Raises Corrupt, and keeps the open files, if the new ones are damaged.
        """
        self._guard()
        if not self.is_replaced():
            return self.refresh()
        if self._copy is None:
            self._require_sound()
        self._reopen()
        return True

    def refresh(self) -> bool:
        """Renew a private copy to the newest commit; return whether it changed.

        Waits as long as that takes. For comparing the index with what others have written. Does
        nothing inside a transaction of this thread; waits for those of others.
        """
        self._guard()
        copy = self._copy
        if copy is None or get_ident() in self._readers or not copy.is_old():
            return False
        with self._exclusively():
            if self._copy is copy:
                self._renew(copy, PATIENCE)
            return self._copy is not copy

    def opened(self) -> int:
        """Open the file that is read once more: LMDB's own, or a private copy.

        Returns the descriptor, which is the caller's to close. Raises OSError, Conflict.
        """
        copy = self._copy
        return fs.open_file(self.path / "data.mdb") if copy is None else copy.opened()

    def mapped(self) -> mmap.mmap:
        """Map the file that is read once more, read-only; call inside a transaction.

        Raises OSError or ValueError if it cannot be mapped, or was replaced since it was opened.
        """
        fd = self.opened()
        try:
            status = os.fstat(fd)
            if self._copy is None and self._file_id[0] != (status.st_dev, status.st_ino):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            return mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    @contextmanager
    def read(self) -> Iterator[IndexTransaction]:
        """A short read transaction: copy what is needed, leave, then do I/O.

        Raises Unavailable once the environment is closed, Corrupt, StorageFailed.
        """
        self._guard()
        self._enter()
        try:
            with self._errors_translated():
                transaction = self._begin_reading()
                mine = self._readers[get_ident()]
                is_outer = transaction not in mine
                mine[-1] = transaction
                try:
                    yield transaction
                finally:
                    if is_outer:
                        self._drop(transaction)
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
            if not self._is_open:
                self._open(writable=False)
            elif self._copy is None or inside or self._is_busy():
                pass
            elif self._full_since is not None and self._has_room_again():
                self._close_files()
                self._open(writable=False)
            else:
                is_dear = self._copy.seconds > _CHEAP_COPY
                if not is_dear or self._copy.age() > _COPY_SHARE * self._copy.seconds:
                    self._renew(self._copy, RENEWAL_PATIENCE)
            self._readers.setdefault(thread, []).append(None)

    def _has_room_again(self) -> bool:
        since = self._full_since or 0.0
        return time.monotonic() - since > _FULL_PATIENCE and self._may_register()

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
            if not self._can_write_table():
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
                transaction: IndexTransaction = self._patiently(self._env.begin)
                return transaction
            except lmdb.MapResizedError:
                # Another process, which has more address space, let the file grow.
                if len(self._readers[get_ident()]) > 1 or get_ident() in self._writers:
                    raise
                self._leave()
                try:
                    self._reopen()
                finally:
                    self._enter()

    def _can_write_table(self) -> bool:
        """Return whether LMDB may begin or end a transaction now."""
        table = self._table
        return table is None or table.is_writable()

    def _abandon(self) -> None:
        """Leave an environment whose table cannot be written, and read a copy."""
        with self._exclusively():
            if not self._can_write_table():
                self._close_files()
                self._open(writable=False)

    def _reopen(self) -> None:
        """Map the file again, with no thread inside."""
        with self._exclusively():
            writable = self._writable
            self._close_files()
            self._open(writable=writable)

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
        self.require_writable()
        self._make_writable()
        try:
            with self._errors_translated():
                self._require_writable_table()
                # Registrations of killed readers would keep old pages for ever.
                self._env.reader_check()
                transaction = self._env.begin(write=True)
                try:
                    # Writes to files that a rebuilt index has replaced would be lost.
                    self.require_in_place()
                    self._trusting.before(transaction.id())
                    before = self._tree_bytes(transaction)
                    yield transaction
                    self._require_room(before, self._tree_bytes(transaction))
                    self._require_writable_table()
                    self._commit(transaction)
                except BaseException:
                    self.epoch += 1
                    # A no-op after a commit.
                    self._drop(transaction, is_write=True)
                    raise
        finally:
            with self._gate:
                self._writers.discard(get_ident())
                self._gate.notify_all()

    def _require_writable_table(self) -> None:
        """Raise StorageFailed if LMDB cannot lock, commit or unlock now."""
        table = self._table
        if table is None or not table.is_writable() or not table.end_kept():
            raise fs.full(self.path / lmdb_table.NAME)

    def _tree_bytes(self, transaction: IndexTransaction) -> int:
        stats = [transaction.stat(database) for database in self.databases.values()]
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        return sum(one["psize"] * sum(one[kind] for kind in pages) for one in stats)

    def _require_room(self, before: int, now: int) -> None:
        """Raise StorageFailed if the disk may get full inside of the commit.

        LMDB then fails and unlocks in one call, which needs room where writing copies.
        """
        most = max(0, now - before) + min(before, _MOST_REWRITTEN) + _FEW_PAGES
        if self._copies and not fs.has_room(self.path, most + fs.ROOM):
            raise fs.full(self.path)

    @property
    def _trusting(self) -> Trust:
        if self._trust is None:
            # Newly created; it has not been checked yet.
            self._trust = Trust(self.path, b"")
        return self._trust

    def _commit(self, transaction: IndexTransaction) -> None:
        number = transaction.id()
        try:
            with fs.index_commit(self.path):
                transaction.commit()
            self._trusting.after(number)
        except lmdb.Error:
            # LMDB makes an environment unusable if it could not write its meta page: the next
            # writer reopens it.
            self._writable = False
            raise

    def _drop(self, transaction: IndexTransaction, *, is_write: bool = False) -> None:
        # Not in a forked child: the transaction belongs to the parent.
        if self._pid != os.getpid():
            return
        if self._table is None:
            transaction.abort()
        else:
            self._table.end(transaction, is_write=is_write)

    def _make_writable(self) -> None:
        """Open for writing with enough room, if needed, and count this thread as a writer."""
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
                # What else is there now was not asked for, and may be another store's.
                self.require_in_place()
                self._close_files()
                try:
                    self._open(writable=True)
                except BaseException:
                    # A user who cannot write may still read, now or after the problem is solved.
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
        """Return whether this user may write here, judged by what it reads: a copy, or the file."""
        return self._copy is None or not self._is_foreign()

    def file_bytes(self) -> int:
        """Return the size of the data file on disk, in bytes."""
        with fs.translated(self.path):
            return (self.path / "data.mdb").stat().st_size


def is_open(path: Path) -> bool:
    """Return whether this process has the environment of this path open."""
    with _environments_lock:
        return os.path.realpath(path) in _environments


def closed(path: Path) -> Unavailable:
    """Build the error for using a store after `close`."""
    return Unavailable("this store was closed", where=str(path), hint="open it again")


_FileId = tuple[tuple[int, int] | None, tuple[int, int] | None]


def _named(path: Path) -> _FileId:
    """Return device and inode of what has the names of the two files by now."""
    return fs.identity(path / "data.mdb"), fs.identity(path / lmdb_table.NAME)


def _file_id(path: Path) -> _FileId:
    """Return device and inode of the data file and of the lock file.

    Two lock files for one data file would admit two writers that do not exclude each other.
    """
    return _identity(path / "data.mdb"), _identity(path / lmdb_table.NAME)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file that LMDB opens; raises Conflict for a link and the like.

    LMDB follows links, so this is asked before and after.
    """
    with fs.translated(path):
        try:
            status = fs.status_of(path)
        except FileNotFoundError:
            return None
    if not stat.S_ISREG(status.st_mode):
        raise fs.unexpected(path, status.st_mode)
    return status.st_dev, status.st_ino


def _keep_if_full() -> None:
    """Keep environments that nobody has closed when Python ends: freeing them writes the table."""
    for env in list(_environments.values()):
        if env._pid == os.getpid() and env._is_open and not env._can_write_table():
            lmdb_table.keep_for_ever(env._env)


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
        if env._is_open:
            lmdb_table.keep_for_ever(env._env)
    _environments.clear()
    _abandoned.clear()
    _environments_lock.release()


# No environment is half opened in a child: a fork waits until other threads have opened theirs.
os.register_at_fork(
    before=_environments_lock.acquire,
    after_in_parent=_environments_lock.release,
    after_in_child=_begin_anew,
)


def _translated(error: Any, path: Path, hint: Text) -> StorageFailed | Corrupt:
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return Corrupt(f"damaged index: {error}", where=str(path), hint=hint)
    if isinstance(error, lmdb.MapFullError | lmdb.MapResizedError):
        if address_space.limit() is None:
            size = address_space.MAP_SIZE >> 30
            what = f"the index has grown to the {size} GiB that it may have"
            hint = call("gc")
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
        # LMDB reports a short write as an I/O error.
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
