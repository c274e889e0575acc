"""Opening files of a checkpoint: read-only, regular files only, errors as the library's own.

Never blocks on a fifo and never opens a device.  Holds a descriptor no longer than the `with`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mstore.errors import BadCheckpoint, MstoreError, NotFound, StorageFailed

_MISSING = "check the path"


def storage_error(error: OSError, where: str) -> MstoreError:
    """The library's error for an OSError: NotFound where nothing is there, else StorageFailed."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound("no such file or directory", where=where, hint=_MISSING)
    what = error.strerror or str(error)
    return StorageFailed(f"cannot be read: {what}", where=where, errno=error.errno)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file and its stat, taken from that descriptor.

    Raises NotFound, StorageFailed, or BadCheckpoint where `path` is not a regular file.
    """
    where = str(path)
    try:
        # O_NONBLOCK: opening a fifo without it waits for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise BadCheckpoint("is not a regular file", where=where) from None
        raise storage_error(error, where) from error
    except ValueError:
        raise NotFound("no such file or directory", where=repr(where), hint=_MISSING) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint("is not a regular file", where=where)
        yield descriptor, status
    except OSError as error:
        raise storage_error(error, where) from error
    finally:
        os.close(descriptor)


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
