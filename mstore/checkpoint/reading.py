"""Opening files of a checkpoint: read-only, regular files only, errors as the library's own.

Never blocks on a fifo and never opens a device.  What was listed once is opened again by its
*stamp*: without following a link, and only if it is that very file in that very state.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mstore.errors import BadCheckpoint, MstoreError, NotFound, StorageFailed

_MISSING = "check the path"
# O_PATH: a directory on the way need not be one that may be listed.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a fifo without it waits for a writer for ever.
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_SOMETHING_ELSE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


def storage_error(error: OSError, where: str) -> MstoreError:
    """The library's error for an OSError: NotFound where nothing is there, else StorageFailed."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound("no such file or directory", where=where, hint=_MISSING)
    what = error.strerror or str(error)
    return StorageFailed(f"cannot be read: {what}", where=where, errno=error.errno)


class Stamp(NamedTuple):
    """One state of one file: what else may lie at its path, or be in it later, has another.

    `ctime_ns` makes it so.  Writing, renaming and linking move it, and nobody sets it back.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp of a file that `stat` was asked about."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def changed(where: str) -> BadCheckpoint:
    """The error for a file that is not, or not any more, what it was when it was listed."""
    return BadCheckpoint(
        "the file changed while it was being read",
        where=where,
        hint="run the command again when nothing writes there",
    )


def open_unlinked(path: Path, flags: int) -> int:
    """Open an absolute path from directory to directory, following no link.

    Raises OSError, with ELOOP or ENOTDIR where some part of it is one.
    """
    *above, name = path.parts[1:] or (".",)
    here = os.open("/", _STEP)
    try:
        for part in above:
            below = os.open(part, _STEP, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def open_stamped(path: Path, stamp: Stamp) -> int:
    """A descriptor of the file that has this stamp, at an absolute path without links.

    Raises BadCheckpoint where something else is there or nothing, StorageFailed.
    """
    try:
        descriptor = open_unlinked(path, _READING)
    except OSError as error:
        if error.errno in _SOMETHING_ELSE:
            raise changed(str(path)) from None
        raise storage_error(error, str(path)) from error
    try:
        require_stamp(descriptor, stamp, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_stamp(descriptor: int, stamp: Stamp, path: Path) -> None:
    """Raise BadCheckpoint unless an open file still has this stamp."""
    if Stamp.of(os.fstat(descriptor)) != stamp:
        raise changed(str(path))


@contextmanager
def open_regular(path: Path, stamp: Stamp | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file and its stat, taken from that descriptor.

    With `stamp` it is the file that has it, before and after, and `path` holds no link.  Raises
    NotFound, StorageFailed, or BadCheckpoint where `path` is not a regular file or not that one.
    """
    where = str(path)
    descriptor = _open(path) if stamp is None else open_stamped(path, stamp)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint("is not a regular file", where=where)
        yield descriptor, status
        if stamp is not None:
            require_stamp(descriptor, stamp, path)
    except OSError as error:
        raise storage_error(error, where) from error
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    where = str(path)
    try:
        return os.open(path, _READING | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise BadCheckpoint("is not a regular file", where=where) from None
        raise storage_error(error, where) from error
    except ValueError:
        raise NotFound("no such file or directory", where=repr(where), hint=_MISSING) from None


def read_range(descriptor: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes from `offset`; fewer only where the file ends.  Raises OSError."""
    pieces: list[bytes] = []
    missing = length
    while missing:
        piece = os.pread(descriptor, missing, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
