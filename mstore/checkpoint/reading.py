"""Opening files of a checkpoint: read-only, regular files only, with the library's errors.

Never blocks on a fifo and never opens a device. A file that was listed is opened again by its
*stamp*: without following links, and only if it is the same file in the same state.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from mstore import fs
from mstore.terms.errors import BadCheckpoint, MstoreError, NotFound, StorageFailed

_MISSING = "check the path"
# O_PATH: a directory on the way need not be listable.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: without it, opening a fifo waits for a writer for ever.
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_SOMETHING_ELSE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


def storage_error(error: OSError, where: str) -> MstoreError:
    """Translate an OSError: to NotFound if nothing is there, else to StorageFailed."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound("no such file or directory", where=where, hint=_MISSING)
    what = error.strerror or str(error)
    return StorageFailed(f"cannot be read: {what}", where=where, errno=error.errno)


class Stamp(NamedTuple):
    """One state of one file: any other file at its path, or any later state, has another stamp.

    `ctime_ns` ensures that: writing, renaming and linking change it, and no program can reset it.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a stat result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def changed(where: str) -> BadCheckpoint:
    """Build the error for a file that differs from when it was listed."""
    return BadCheckpoint(
        "the file changed while it was being read",
        where=where,
        hint="run the command again when nothing writes there",
    )


def open_unlinked(path: Path, flags: int) -> int:
    """Open an absolute path directory by directory, following no link.

    Raises OSError, with ELOOP or ENOTDIR if some part of the path is a link.
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
    """Open the file with this stamp at an absolute path without links; return its descriptor.

    Raises BadCheckpoint if something else or nothing is there, StorageFailed.
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


class OpenSource(Protocol):
    """A file of a checkpoint, open until `close`; any thread may read.

    Every call raises BadCheckpoint if the file is not as it was when it was listed, StorageFailed.
    """

    def __enter__(self) -> Self:
        """Return this."""

    def __exit__(self, *_: object) -> None:
        """Close it."""

    def close(self) -> None:
        """Close the file."""

    def read(self, offset: int, length: int) -> bytes:
        """Return all of these bytes."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on."""

    def require_start(self, start: bytes) -> None:
        """Require that the file begins so."""

    def require_unchanged(self) -> None:
        """Require that the file is as it was when it was listed."""


class StampedFile:
    """A file on this machine, opened by its stamp."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self._path = path
        self._stamp = stamp
        self._descriptor = open_stamped(path, stamp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """Return all of these bytes."""
        with fs.translated(self._path):
            data = read_range(self._descriptor, offset, length)
        if len(data) != length:
            raise changed(str(self._path))
        return data

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on."""
        with fs.translated(self._path):
            got = os.preadv(self._descriptor, [target], offset)
        if got != len(target):
            raise changed(str(self._path))

    def require_start(self, start: bytes) -> None:
        """Require that the file begins so.

        Two states within one tick of the kernel's clock may have the same stamp.
        """
        if self.read(0, len(start)) != start:
            raise changed(str(self._path))

    def require_unchanged(self) -> None:
        """Require that the file still has its stamp."""
        with fs.translated(self._path):
            require_stamp(self._descriptor, self._stamp, self._path)


@contextmanager
def open_regular(path: Path, stamp: Stamp | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file; yield its descriptor and the stat taken from that.

    With `stamp`, the file must have it before and after, and `path` must contain no link. Raises
    NotFound, StorageFailed, or BadCheckpoint if `path` is not a regular file or not the stamped
    one.
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
    """Read `length` bytes from `offset`, fewer only at the end of the file. Raises OSError."""
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


def read_part(path: Path, offset: int, length: int, stamp: Stamp | None = None) -> bytes:
    """Open a regular file, and read up to `length` bytes of it.  Raises as `open_regular`."""
    with open_regular(path, stamp) as (descriptor, _):
        return read_range(descriptor, offset, length)
