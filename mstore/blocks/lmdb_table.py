"""LMDB's lock table: whether it can be written now, found out without a signal.

Every process that has an environment open maps its `lock.mdb` and writes it there: readers, too, at
the begin and the end of each transaction and when they close. A write through a map has no error:
where the filesystem finds no room for it, the process gets SIGBUS. btrfs, ZFS and bcachefs may need
room for each such write, XFS for the first one after a reflink, and every filesystem in a hole.

`madvise(MADV_POPULATE_WRITE)` (Linux 5.14) does what such a write would do, except that it changes
no byte and that it fails. So the table is asked right before LMDB writes it (`fs.is_mappable`).

The answer holds for microseconds: whoever fills the disk then, while the kernel writes the table
back, can still end the process. So a filesystem that copies on write counts as full a few MiB
before it is (`fs.SPARE_BYTES`). mstore asks btrfs to write its lock files in place, which in newer
kernels needs no room; a copy of the file has lost that.

What LMDB could not end is kept for ever, also when Python ends: closing it, or losing it, writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from threading import get_ident
from typing import Any, Final

from mstore import fs

MAX_READERS = 1024
NAME = "lock.mdb"
BYTES = 4096 + 64 * MAX_READERS
"""LMDB's lock file: a header and 64 bytes per reader."""
_TAIL = b"/" + NAME.encode()
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class LockTable:
    """The lock file of one environment as LMDB has mapped it in this process."""

    def __init__(self, directory: Path, *, copies: bool) -> None:
        """Find the map. Call once LMDB has opened the environment.

        copies: whether the filesystem copies on write (`fs.copies_on_write`).
        """
        self._directory = directory
        self.file = fs.identity(directory / NAME)
        self._copies = copies
        self._advice: tuple[Any, ...] | None = None
        place = _mapped(directory / NAME)
        if place is not None:
            begin, end = place
            size = ctypes.c_size_t(end - begin)
            self._advice = ctypes.c_void_p(begin), size, ctypes.c_int(fs.POPULATE_WRITE)
        # Of a write transaction, the thread that must end it.
        self._kept: list[tuple[Any, int | None]] = []

    def is_writable(self) -> bool:
        """Return whether LMDB may write it now."""
        return fs.is_mappable(self._directory, self._populate, copies=self._copies)

    def _populate(self) -> int:
        if self._advice is None:
            return errno.EINVAL
        return ctypes.get_errno() if _LIBC.madvise(*self._advice) else 0

    def end(self, transaction: Any, *, is_write: bool = False) -> None:
        """Abort a transaction now, or later if the table cannot be written."""
        if self.is_writable():
            transaction.abort()
            if self._kept:
                self.end_kept()
        else:
            keep_for_ever(transaction)
            self._kept.append((transaction, get_ident() if is_write else None))

    def end_kept(self) -> bool:
        """End what could not be ended before; return whether nothing is left.

        Call when the table can be written. Another thread cannot unlock what a write transaction
        has locked.
        """
        kept, self._kept = self._kept, []
        for transaction, thread in kept:
            if thread in (None, get_ident()):
                transaction.abort()
            else:
                self._kept.append((transaction, thread))
        return not self._kept


class Abandoned:
    """An environment of LMDB that could not be closed, because the disk is full."""

    def __init__(self, env: Any, table: LockTable) -> None:
        keep_for_ever(env)
        self._env = env
        self._table = table

    def close(self) -> bool:
        """Close it if that is possible now; return whether it was."""
        if not self._table.is_writable() or not self._table.end_kept():
            return False
        self._env.close()
        return True


def keep_for_ever(what: Any) -> None:
    """Keep an object of LMDB from being freed, also at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _mapped(path: Path) -> tuple[int, int] | None:
    """Return begin and end of the shared map of a lock file in this process; None if not found."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
        inode = b"%d" % os.stat(path).st_ino
    except OSError:
        return None
    name = os.fsencode(os.path.realpath(path)).replace(b"\n", b"\\012")
    found = [line.split(None, 5) for line in maps.split(b"\n") if line.endswith(_TAIL)]
    shared = [fields for fields in found if fields[1] == b"rw-s"]
    # The kernel may know the file by another name, or by another number.
    for fields in sorted(shared, key=lambda fields: fields[5] != name):
        if fields[5] == name or fields[4] == inode:
            begin, _, end = fields[0].partition(b"-")
            return int(begin, 16), int(end, 16)
    return None
