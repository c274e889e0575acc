"""The files of one LMDB environment as this process has them open.

Owns opening and closing, what must hold before LMDB maps a file, the size of the map, and what each
begin, commit and end of a transaction needs. Whoever calls ensures that no thread is inside a
transaction while files are opened or closed (`lmdb_env`).

LMDB trusts its file: some damage ends the process. So `lmdb_check` checks it before LMDB maps it.

A user who may not write the lock file cannot register as a reader, and nobody can if the disk has
no room for what LMDB writes there (`lmdb_table`). Such a reader reads a private copy of the file
(`lmdb_copy`). An environment that was open when the disk became full is abandoned, and closed when
there is room again.

A map costs only addresses, so an environment maps more than its file will ever need. If `ulimit -v`
(RLIMIT_AS) limits the addresses of a process, it maps its file with room to grow, and again with
more before a later transaction when that room gets narrow.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from mstore import fs
from mstore.blocks import lmdb_check, lmdb_table
from mstore.blocks.lmdb_check import DATA, Trust
from mstore.blocks.lmdb_copy import PrivateCopy
from mstore.blocks.lmdb_table import MAX_READERS, Abandoned, LockTable
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.terms.errors import Corrupt, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Text, call

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
_FileId = tuple[tuple[int, int] | None, tuple[int, int] | None]
"""Device and inode of the data file and of the lock file.

Two lock files for one data file would admit two writers that do not exclude each other.
"""
abandoned: dict[tuple[int, int] | None, Abandoned] = {}
"""By device and inode of the lock file. LMDB cannot open one again that this process has open."""
T = TypeVar("T")


class LmdbFiles:
    """Data file and lock file, or a private copy, and LMDB's handles of them.

    epoch: changes when data that was read before may be invalid: after a write transaction was
    dropped, or other files were opened. times_replaced: changes when other files were opened;
    numbers of commits are comparable while it stays.
    """

    def __init__(self, path: Path, names: tuple[str, ...], hint: Text) -> None:
        """Open nothing yet. names: of the databases. hint: what to do if it is damaged."""
        self.path = path
        self.hint = hint
        self.databases: dict[str, Any] = {}
        self.epoch = self.times_replaced = 0
        self.is_open = self.is_writable = False
        self.env: Any = None
        self.copy: PrivateCopy | None = None
        self.table: LockTable | None = None
        self.mapped_bytes = 0
        self._names = names
        self._data = path / DATA
        self._lock = path / lmdb_table.NAME
        self._pid = os.getpid()
        self._id: _FileId = (None, None)
        # A newly created file has not been checked.
        self._trust = Trust(path, b"")
        self._sound: tuple[int, int] | None = None
        self._newer: PrivateCopy | None = None
        self._full_since: float | None = None
        self._copies = False

    # -- opening and closing -----------------------------------------------------------------

    def open_or_create(self, *, create: bool) -> None:
        """Open for reading; create what is missing, for writing. Raises Corrupt, StorageFailed."""
        if not lmdb_check.is_born(self._data):
            if not create:
                raise self._damaged("the index is missing or empty")
            self._create()
            return
        try:
            self.open(writable=False)
        except lmdb.NotFoundError as error:
            if not create or not self._may_lock():
                raise self._damaged("a database of the index is missing") from error
            self._create()

    def open(self, *, writable: bool) -> None:
        """Open data and lock file of one environment; `reindex` may exchange them in between."""
        while True:
            before = self._checked_id()
            self._open_once(writable=writable)
            now = self._checked_id()
            # LMDB creates a missing lock file.
            if now == before or (before[0] == now[0] and before[1] is None):
                if now != self._id:
                    self.epoch += 1
                    self.times_replaced += 1
                self._id = now
                return
            self.close()

    def _open_once(self, *, writable: bool) -> None:
        try:
            self.copy = None
            if writable:
                self._require_files()
            else:
                self.copy = self._private_copy()
            if self.copy is None:
                self.require_sound()
            try:
                self.env = self._lmdb(writable=writable)
                self.table = None if self.copy else LockTable(self.path, copies=self._copies)
            except BaseException:
                self._drop_copy()
                raise
            try:
                # Outside any transaction of ours: handles opened in a read transaction end with it.
                for name in self._names:
                    open_db = partial(self.env.open_db, name.encode(), create=False)
                    self.databases[name] = self._patiently(open_db)
            except BaseException:
                self.close()
                raise
        except lmdb.InvalidError as error:
            raise self._damaged("not an LMDB index") from error
        except lmdb.NotFoundError:
            raise
        except lmdb.Error as error:
            raise self._translated(error) from error
        self.is_writable = writable
        self.is_open = True

    def close(self) -> None:
        """Close them, or abandon what cannot be closed because the disk is full."""
        self.is_open = False
        table, self.table = self.table, None
        # Closing writes the table.
        if table is None or (table.is_writable() and table.end_kept()):
            self.env.close()
        else:
            abandoned[table.file] = Abandoned(self.env, table)
        self._drop_copy()

    def _drop_copy(self) -> None:
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.close()

    def _create(self) -> None:
        """Create what is missing; the files' names are durable on return."""
        # Keep an empty file: another process may be about to fill it, and LMDB accepts it.
        is_filled = self._data.exists() and self._data.stat().st_size > 0
        if is_filled and not lmdb_check.is_born(self._data):
            fs.unlink(self._data)
        self._require_files()
        with self.errors_translated():
            self.env = self._lmdb(writable=True)
            self.table = LockTable(self.path, copies=self._copies)
            self._id = self._checked_id()
            self._sound = self._id[0]
            try:
                self._make_databases()
            except BaseException:
                self.close()
                raise
        self.is_writable = self.is_open = True

    def _make_databases(self) -> None:
        transaction = self.env.begin(write=True)
        try:
            for name in self._names:
                self.databases[name] = self.env.open_db(name.encode(), txn=transaction)
            with fs.index_commit(self.path):
                transaction.commit()
        except BaseException:
            self.end(transaction, is_write=True)
            raise
        fs.sync_directory(self.path)

    # -- before LMDB maps a file -------------------------------------------------------------

    def require_sound(self) -> None:
        """Raise Corrupt if the data file is not safe to map; one is checked when it is new here."""
        data = _identity(self._data)
        if data != self._sound:
            self._trust = Trust(self.path, lmdb_check.require_sound(self.path, self.hint))
            self._sound = data

    def _require_files(self) -> None:
        """Raise StorageFailed if LMDB cannot map its files as others will write them.

        Call while it has not opened them.
        """
        self._copies = fs.copies_on_write(self.path)
        left = abandoned.get(fs.identity(self._lock))
        if left is not None:
            if not left.close():
                raise fs.full(self._lock)
            abandoned.pop(fs.identity(self._lock), None)
        if not self._lock.exists():
            # LMDB would create a sparse file.
            try:
                fs.create_whole(self._lock, bytes(lmdb_table.BYTES))
            except StorageFailed as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
                return
        fs.require_mappable(self._lock, lmdb_table.BYTES, copies=self._copies)
        if self._data.exists() and fs.may_write(self._data):
            fs.copy_up(self._data)

    def _may_lock(self) -> bool:
        return fs.may_write(self._lock)

    def _may_register(self) -> bool:
        """Return whether LMDB can register this process as a reader."""
        self._full_since = None
        if not self._may_lock():
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
            copy = PrivateCopy(self._data)
            try:
                lmdb_check.require_sound_copy(self.path, copy, self.hint)
            except BaseException:
                copy.close()
                raise
        return copy

    def renew(self, patience: float) -> None:
        """Renew the copy if something was committed since.

        If no new copy can be taken within `patience` seconds, or the files are gone, readers keep
        the earlier state.
        """
        with suppress(MstoreError):
            if self.copy is not None and self.copy.is_old():
                self._newer = PrivateCopy(self._data, patience=patience)
                self.close()
                self.open(writable=False)

    def renew_if_due(self) -> None:
        """Read the file itself if the disk has room again, or a newer copy if that costs little."""
        copy = self.copy
        if copy is None:
            return
        since = self._full_since
        if since is not None and time.monotonic() - since > _FULL_PATIENCE and self._may_register():
            self.close()
            self.open(writable=False)
        elif copy.seconds <= _CHEAP_COPY or copy.age() > _COPY_SHARE * copy.seconds:
            self.renew(RENEWAL_PATIENCE)

    # -- mapping -----------------------------------------------------------------------------

    def _lmdb(self, *, writable: bool) -> Any:
        fs.about_to_map(self.path, copied=self.copy is not None)
        sizes = map_sizes(self._data_bytes())
        for size in sizes:
            try:
                env = self._patiently(partial(self._mapping, size, writable=writable))
            except lmdb.Error as error:
                if size == sizes[-1] or getattr(error, "code", 0) != errno.ENOMEM:
                    raise
            else:
                self.mapped_bytes = size
                return env
        raise AssertionError

    def _data_bytes(self) -> int:
        try:
            return (self._data if self.copy is None else self.copy.path).stat().st_size
        except FileNotFoundError:
            return 0

    def is_narrow(self) -> bool:
        """Return whether less than half of the room is left that the file would now get."""
        size = self._data_bytes()
        room = _room(size)
        return room is not None and self.mapped_bytes - size < room // 2

    def _mapping(self, size: int, *, writable: bool) -> Any:
        if self.copy is not None:
            return self._map(str(self.copy.path), size, writable=writable)
        with fs.directory(self.path) as directory:
            # Whoever renames the directory now leads LMDB nowhere else.
            return self._map(f"/proc/self/fd/{directory}", size, writable=writable)

    def _map(self, place: str, size: int, *, writable: bool) -> Any:
        return lmdb.open(
            place,
            subdir=self.copy is None,
            lock=self.copy is None,
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

    def mapped(self) -> mmap.mmap:
        """Map the file that is read once more, read-only; call inside a transaction.

        Raises OSError or ValueError if it cannot be mapped, or was replaced since it was opened.
        """
        fd = self.opened()
        try:
            status = os.fstat(fd)
            if self.copy is None and self._id[0] != (status.st_dev, status.st_ino):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            return mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    def opened(self) -> int:
        """Open the file that is read once more: LMDB's own, or a private copy.

        Returns the descriptor, which is the caller's to close. Raises OSError, Conflict.
        """
        return fs.open_file(self._data) if self.copy is None else self.copy.opened()

    # -- which files those are ---------------------------------------------------------------

    def named(self) -> _FileId:
        """Return what has the names of the two files by now."""
        return fs.identity(self._data), fs.identity(self._lock)

    def _checked_id(self) -> _FileId:
        """Return what has the names of the two files; raises Conflict for a link and the like.

        LMDB follows links, so this is asked before and after it opens them.
        """
        return _identity(self._data), _identity(self._lock)

    def is_in_place(self) -> bool:
        """Return whether the open files still have their names."""
        return self.named() == self._id

    def is_replaced(self) -> bool:
        """Return whether there are other files now than those that are open."""
        now = self.named()
        return now[0] is not None and now != self._id

    # -- transactions ------------------------------------------------------------------------

    def begin(self) -> IndexTransaction:
        """Begin a read transaction. Raises lmdb's errors, Unavailable."""
        transaction: IndexTransaction = self._patiently(self.env.begin)
        return transaction

    def begin_writing(self) -> IndexTransaction:
        """Begin the write transaction. Raises lmdb's errors, StorageFailed."""
        self.require_writable_table()
        # Registrations of killed readers would keep old pages for ever.
        self.env.reader_check()
        transaction: IndexTransaction = self.env.begin(write=True)
        return transaction

    @contextmanager
    def changing(self, transaction: IndexTransaction) -> Iterator[None]:
        """Commit what the block writes; requires room for that first."""
        number = transaction.id()
        self._trust.before(number)
        before = self._tree_bytes(transaction)
        yield
        self._require_space(before, self._tree_bytes(transaction))
        self.require_writable_table()
        try:
            with fs.index_commit(self.path):
                transaction.commit()
            self._trust.after(number)
        except lmdb.Error:
            # LMDB makes an environment unusable if it could not write its meta page: the next
            # writer reopens it.
            self.is_writable = False
            raise

    def end(self, transaction: IndexTransaction, *, is_write: bool = False) -> None:
        """Abort a transaction; does nothing to one that was committed."""
        # Not in a forked child: the transaction belongs to the parent.
        if self._pid != os.getpid():
            return
        if self.table is None:
            transaction.abort()
        else:
            self.table.end(transaction, is_write=is_write)

    def can_write_table(self) -> bool:
        """Return whether LMDB may begin or end a transaction now."""
        return self.table is None or self.table.is_writable()

    def require_writable_table(self) -> None:
        """Raise StorageFailed if LMDB cannot lock, commit or unlock now."""
        table = self.table
        if table is None or not table.is_writable() or not table.end_kept():
            raise fs.full(self._lock)

    def _tree_bytes(self, transaction: IndexTransaction) -> int:
        stats = [transaction.stat(database) for database in self.databases.values()]
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        return sum(one["psize"] * sum(one[kind] for kind in pages) for one in stats)

    def _require_space(self, before: int, now: int) -> None:
        """Raise StorageFailed if the disk may get full inside of the commit.

        LMDB then fails and unlocks in one call, which needs room where writing copies.
        """
        most = max(0, now - before) + min(before, _MOST_REWRITTEN) + _FEW_PAGES
        if self._copies and not fs.has_free_bytes(self.path, most + fs.SPARE_BYTES):
            raise fs.full(self.path)

    def may_write(self) -> bool:
        """Return whether this user may write here, judged by what it reads: a copy, or the file."""
        return self.copy is None or self._may_lock()

    def require_writable(self) -> None:
        """Raise StorageFailed if this user may not write it."""
        if not self.may_write():
            fs.require_writable(self.path, [self._lock, self._data])

    # -- errors ------------------------------------------------------------------------------

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Turn errors of LMDB into errors of mstore."""
        try:
            yield
        except lmdb.Error as error:
            raise self._translated(error) from error

    def _damaged(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self.path), hint=self.hint)

    def _equal_pids(self) -> Unavailable:
        return Unavailable(
            f"another process numbered {self._pid} has this store open, in another container or "
            "PID namespace; LMDB cannot tell the two apart",
            where=str(self.path),
            hint="run the two one after the other, or with one PID namespace "
            "(docker run --pid=host, or --pid=container:NAME)",
        )

    def _translated(self, error: Any) -> StorageFailed | Corrupt:
        damage = lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError
        if isinstance(error, damage):
            return self._damaged(f"damaged index: {error}")
        where = str(self.path)
        hint: Text
        if isinstance(error, lmdb.MapFullError | lmdb.MapResizedError):
            if address_limit() is None:
                what = f"the index has grown to the {MAP_SIZE >> 30} GiB that it may have"
                hint = call("gc")
            else:
                what = "the index outgrew its share of the address space, which ulimit -v bounds"
                hint = "ulimit -v unlimited"
            return StorageFailed(what, where=where, hint=hint, errno=errno.ENOSPC)
        if isinstance(error, lmdb.ReadersFullError):
            what = f"{MAX_READERS} readers have the index open"
            hint = "let some of them end and run the command again"
            return StorageFailed(what, where=where, hint=hint, errno=errno.EAGAIN)
        # Positive codes are the system's, negative ones LMDB's own.
        code = max(0, int(getattr(error, "code", 0)))
        if code == errno.EIO and not fs.has_free_bytes(self.path, 1 << 20):
            # LMDB reports a short write as an I/O error.
            code = errno.ENOSPC
        if code == errno.ENOMEM:
            what = "the index could not be mapped: not enough address space"
            return StorageFailed(what, where=where, hint="ulimit -v unlimited", errno=code)
        return fs.refusal(code, self.path, f"the index could not be used: {error}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a regular file; None if there is none. Raises Conflict."""
    with fs.translated(path):
        try:
            status = fs.status_of(path)
        except FileNotFoundError:
            return None
    if not stat.S_ISREG(status.st_mode):
        raise fs.unexpected(path, status.st_mode)
    return status.st_dev, status.st_ino


# -- address space ---------------------------------------------------------------------------------

MAP_SIZE = 1 << 38
_UNIT = 1 << 24
# A process opens index, statistics and memo table, and other things need addresses too.
_LEAST_SHARE = 16
_MOST_SHARE = 4


def address_limit() -> int | None:
    """Return the bytes of address space this process may use; None if practically unlimited."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY or allowed >= 4 * MAP_SIZE else allowed


def map_sizes(file_bytes: int) -> list[int]:
    """Return sizes to try for mapping a file of so many bytes, best first."""
    room = _room(file_bytes)
    if room is None:
        return [max(MAP_SIZE, file_bytes)]
    rooms = [room]
    while rooms[-1] > _UNIT:
        rooms.append(rooms[-1] // 2)
    return [-(-(file_bytes + one) // _UNIT) * _UNIT for one in rooms]


def _room(file_bytes: int) -> int | None:
    allowed = address_limit()
    if allowed is None:
        return None
    # A transaction that touches every page of the file rewrites each one.
    return max(_UNIT, allowed // _LEAST_SHARE, min(file_bytes, allowed // _MOST_SHARE))
