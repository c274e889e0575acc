"""FUSE operations: paths, handles and errno on one side, a `MountTree` on the other.

Only translates, and owns only the table of open files. The mount is read-only: the kernel itself
answers writes with EROFS and checks permissions (`connection.mount`), so there is neither `access`
nor any writing operation here.

    NotFound -> ENOENT, ENAMETOOLONG where no filesystem here could have the name
    Corrupt -> EIO, with a line in the log
    StorageFailed -> what the system said of this machine (EMFILE, EACCES, ENOMEM), with such a line
    RemoteAway -> EIO, with such a line
    Unavailable -> EBUSY, Incompatible -> EOPNOTSUPP, MemoryError -> ENOMEM, with such a line
    anything else -> EIO, with a line in the log

So EIO means that bytes are damaged, lost or out of reach, or a bug; another error goes away with
its cause.

Extended attributes are `user.mstore.*`. Of the others, those of users are absent (ENODATA), and
those of the system are not supported (EOPNOTSUPP): `ls -l` asks for access lists once, and not
again for each file. Reading and stat(2) ask for none.

Threads: the connection calls from several at once.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import stat
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from mstore.terms.errors import (
    Incompatible,
    MstoreError,
    NotFound,
    RemoteAway,
    StorageFailed,
    Unavailable,
)
from mstore.terms.ids import Buffer
from mstore_fuse.connection import Opened
from mstore_fuse.protocol import Room, Status
from mstore_fuse.readahead import Sequence
from mstore_fuse.tree import BLOCK, NAME_MAX, Attributes, MountTree, OpenFile

_PREFERRED_READ = 1 << 20
_STATFS_UNIT = 4096
_SAID_AT_MOST = 1000
_LABEL = "user.mstore."
_OF_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)

log = logging.getLogger("mstore_fuse")

P = ParamSpec("P")
R = TypeVar("R")


def _answers_errno(
    operation: Callable[Concatenate[FuseOperations, str, P], R],
) -> Callable[Concatenate[FuseOperations, str, P], R]:
    """Turn the library's errors into errno."""

    @functools.wraps(operation)
    def wrapped(self: FuseOperations, path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(self, path, *args, **kwargs)
        except NotFound as error:
            is_long = any(len(os.fsencode(name)) > NAME_MAX for name in path.split("/"))
            code = errno.ENAMETOOLONG if is_long else errno.ENOENT
            raise OSError(code, str(error)) from error
        except _NoSuchLabel:
            raise
        except (MstoreError, MemoryError) as error:
            self.say_once(f"/{path}: {_said(error)}")
            raise OSError(_code(error), str(error)) from error
        except OSError as error:
            self.say_once(f"/{path}: {error}")
            raise
        except Exception as error:
            log.exception("/%s: %s failed", path, operation.__name__)
            raise OSError(errno.EIO, str(error)) from error

    return wrapped


def _said(error: MstoreError | MemoryError) -> str:
    return "out of memory" if isinstance(error, MemoryError) else str(error)


def _code(error: MstoreError | MemoryError) -> int:
    """Return the errno for an error of the store that is no answer."""
    match error:
        case MemoryError():
            return errno.ENOMEM
        case RemoteAway():
            return errno.EIO
        case Unavailable():
            return errno.EBUSY
        case Incompatible():
            return errno.EOPNOTSUPP
        case StorageFailed():
            # That something of the store is missing must not read as: there is no such file.
            return errno.EIO if error.errno in _OF_PATHS else error.errno or errno.EIO
    return errno.EIO


class _NoSuchLabel(OSError):
    """An extended attribute that is not there: an answer, not a failure."""


class _Handle:
    """An open file and what is known about how it is read."""

    __slots__ = ("file", "sequence", "settled")

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        continues_to = functools.partial(file.view.continues_to, file.path)
        self.sequence = Sequence(file.size, continues_to, file.view.read_ahead)
        self.settled = file.keep_cache


class FuseOperations:
    """What a connection asks of a tree (`connection.Filesystem`)."""

    def __init__(self, tree: MountTree) -> None:
        self._tree = tree
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(1)
        self._said: set[str] = set()
        self._owner = (os.getuid(), os.getgid())

    def say_once(self, message: str) -> None:
        """Log a failure once: one bad block is read many times."""
        if message not in self._said and len(self._said) < _SAID_AT_MOST:
            self._said.add(message)
            log.error("%s", message)

    @_answers_errno
    def status(self, path: str) -> Status:
        """stat(2)."""
        entry = self._tree.entry(path)
        stored = 0 if entry.is_directory else self._tree.stored(path)
        return self._status(path, entry, stored)

    def _status(self, path: str, entry: Attributes, stored: int) -> Status:
        return Status(
            entry.inode,
            _mode(entry),
            entry.size,
            # What the file takes at rest, as on any file system that compresses.
            -(-stored // BLOCK),
            entry.time_ns,
            self._owner,
            _PREFERRED_READ,
            self._tree.lasts(path),
        )

    def absent_for(self, path: str) -> float:
        """Return how long a name that is not there may be taken to stay away."""
        return self._tree.absent_for(path)

    @_answers_errno
    def listing(self, path: str) -> list[tuple[str, Status | None, int, int]]:
        """Return all names; of directories with attributes, because those of files are counted."""
        tree = self._tree
        prefix = f"{path}/" if path else ""
        listed: list[tuple[str, Status | None, int, int]] = [
            (name, None, entry.inode, _mode(entry))
            for name, entry in (
                (".", tree.entry(path)),
                ("..", tree.entry(path.rpartition("/")[0])),
            )
        ]
        for name, entry in tree.children(path):
            status = self._status(prefix + name, entry, 0) if entry.is_directory else None
            listed.append((name, status, entry.inode, _mode(entry)))
        return listed

    @_answers_errno
    def labels(self, path: str) -> list[str]:
        """Return the names of the extended attributes."""
        return [_LABEL + name for name in self._tree.labels(path)]

    @_answers_errno
    def label(self, path: str, name: str) -> bytes:
        """Return the value of an extended attribute: text, without a newline."""
        if not name.startswith("user."):
            raise _NoSuchLabel(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        value = None
        if name.startswith(_LABEL):
            value = self._tree.labels(path).get(name.removeprefix(_LABEL))
        if value is None:
            raise _NoSuchLabel(errno.ENODATA, os.strerror(errno.ENODATA))
        return value.encode()

    @_answers_errno
    def open(self, path: str, flags: int) -> Opened:
        """Open for reading; the kernel keeps cached pages unless they are of another snapshot."""
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        file = self._tree.open(path)
        number = next(self._numbers)
        self._handles[number] = _Handle(file)
        # Another look at a file that is made may find another text and another size: nothing of it
        # is kept.
        return Opened(number, file.keep_cache, direct=file.content is not None)

    @_answers_errno
    def read(self, path: str, number: int, offset: int, size: int) -> list[Buffer]:
        """Answer with verified bytes; fewer than requested only at the end of the file."""
        handle = self._handles[number]
        file = handle.file
        if not handle.settled:
            handle.settled = True
            self._tree.settled(file)
        size = max(0, min(size, file.size - offset))
        if file.content is not None:
            return [file.content[offset : offset + size]]
        ahead = handle.sequence.next_after(offset, size)
        if ahead is not None:
            file.view.prefetch(file.path, *ahead)
        pieces = file.view.pieces(file.path, offset, size)
        found = sum(map(len, pieces))
        if found != size:
            # The kernel would fill the gap with zeros, and they would be read as weights.
            raise OSError(errno.EIO, f"{found} bytes at {offset} instead of {size}")
        return pieces

    @_answers_errno
    def release(self, path: str, number: int) -> None:
        """Handle the last close of an open file."""
        handle = self._handles.pop(number)
        self._tree.release(handle.file)

    @_answers_errno
    def room(self, path: str) -> Room:
        """statvfs(3): a full file system, because nothing can be written."""
        totals = self._tree.totals()
        blocks = -(-totals.size // _STATFS_UNIT)
        return Room(_PREFERRED_READ, _STATFS_UNIT, blocks, totals.files, NAME_MAX)


def _mode(entry: Attributes) -> int:
    return stat.S_IFDIR | 0o555 if entry.is_directory else stat.S_IFREG | 0o444
