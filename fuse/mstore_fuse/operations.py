"""FUSE operations: paths, handles and errno on one side, a `MountTree` on the other.

Only translates, and owns only the table of open files. The mount is read-only: the kernel itself
answers writes with EROFS (`ro`) and checks permissions (`default_permissions`), so there is neither
`access` nor any writing operation here.

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

Threads: libfuse calls from several at once.
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
from mstore_fuse.libfuse import REQUESTS_AT_ONCE, FileInfo, FuseConfig, FuseConnection, answer
from mstore_fuse.readahead import Sequence
from mstore_fuse.tree import BLOCK, Attributes, MountTree, OpenFile

_AUTO_INVAL_DATA = 1 << 12
_PREFERRED_READ = 1 << 20
_STATFS_UNIT = 4096
_NAME_MAX = 255
_SAID_AT_MOST = 1000
_LABEL = "user.mstore."
_OF_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)

log = logging.getLogger("mstore_fuse")

P = ParamSpec("P")
R = TypeVar("R")


def _answers_errno(
    operation: Callable[Concatenate[FuseOperations, str, P], R],
) -> Callable[Concatenate[FuseOperations, str, P], R]:
    """Turn the library's errors into errno, and strip the leading slash of `path`."""

    @functools.wraps(operation)
    def wrapped(self: FuseOperations, path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(self, path.lstrip("/"), *args, **kwargs)
        except NotFound as error:
            is_long = any(len(os.fsencode(name)) > _NAME_MAX for name in path.split("/"))
            code = errno.ENAMETOOLONG if is_long else errno.ENOENT
            raise OSError(code, str(error)) from error
        except _NoSuchLabel:
            raise
        except (MstoreError, MemoryError) as error:
            self.say_once(f"{path}: {_said(error)}")
            raise OSError(_code(error), str(error)) from error
        except OSError as error:
            self.say_once(f"{path}: {error}")
            raise
        except Exception as error:
            log.exception("%s: %s failed", path, operation.__name__)
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
    """The operations that libfuse calls.

    `start` is called once, from the mount's own first request, and returns the tree; it creates
    whatever must not live through a fork (threads, LMDB). If `start` raises, every answer is EIO
    and `give_up` is called to end the mount.
    """

    use_ns = True  # read by mfusepy: times are integers in nanoseconds

    def __init__(self, start: Callable[[], MountTree], give_up: Callable[[], None]) -> None:
        self._start = start
        self._give_up = give_up
        self._tree: MountTree | None = None
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(1)
        self._said: set[str] = set()
        self._owner = (os.getuid(), os.getgid())

    def init_with_config(self, connection: FuseConnection, config: FuseConfig) -> None:
        """Handle the first request: open the store and tell the kernel what it may cache."""
        try:
            self._tree = self._start()
        except BaseException:  # noqa: BLE001 - `start` keeps what it raised; libfuse cannot carry it
            self._give_up()
            return
        seconds = self._tree.attributes_last_for
        config.entry_timeout = config.attr_timeout = config.negative_timeout = seconds
        config.use_ino = 1
        # Contents of a cached path never change, so the kernel need not check sizes at each read.
        connection.want &= ~_AUTO_INVAL_DATA
        # The kernel's 12 would be used up by one file on a disk that does not answer.
        connection.max_background = REQUESTS_AT_ONCE
        connection.congestion_threshold = REQUESTS_AT_ONCE * 3 // 4

    @property
    def tree(self) -> MountTree:
        """The tree. Raises EIO if there is none."""
        if self._tree is None:
            raise OSError(errno.EIO, "the store could not be opened")
        return self._tree

    def say_once(self, message: str) -> None:
        """Log a failure once: one bad block is read many times."""
        if message not in self._said and len(self._said) < _SAID_AT_MOST:
            self._said.add(message)
            log.error("%s", message)

    @_answers_errno
    def getattr(self, path: str, info: FileInfo | None = None) -> dict[str, int]:
        """stat(2)."""
        entry = self.tree.entry(path)
        stored = 0 if entry.is_directory else self.tree.stored(path)
        uid, gid = self._owner
        return {
            "st_ino": entry.inode,
            "st_mode": _mode(entry),
            # 1 for directories too: programs that infer subdirectories from it then do not.
            "st_nlink": 1,
            "st_uid": uid,
            "st_gid": gid,
            "st_size": entry.size,
            # What the file takes at rest, as on any file system that compresses.
            "st_blocks": -(-stored // BLOCK),
            "st_blksize": _PREFERRED_READ,
            "st_atime": entry.time_ns,
            "st_mtime": entry.time_ns,
            "st_ctime": entry.time_ns,
        }

    @_answers_errno
    def readdir(self, path: str, handle: int) -> list[tuple[str, dict[str, int], int]]:
        """Return all names with type and inode number; the kernel uses nothing else."""
        tree = self.tree
        listed = [(".", tree.entry(path)), ("..", tree.entry(path.rpartition("/")[0]))]
        listed += tree.children(path)
        return [
            (name, {"st_ino": entry.inode, "st_mode": _mode(entry)}, 0) for name, entry in listed
        ]

    @_answers_errno
    def listxattr(self, path: str) -> list[str]:
        """Return the names of the extended attributes."""
        return [_LABEL + name for name in self.tree.labels(path)]

    @_answers_errno
    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        """Return the value of an extended attribute: text, without a newline."""
        if not name.startswith("user."):
            raise _NoSuchLabel(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        value = None
        if name.startswith(_LABEL):
            value = self.tree.labels(path).get(name.removeprefix(_LABEL))
        if value is None:
            raise _NoSuchLabel(errno.ENODATA, os.strerror(errno.ENODATA))
        return value.encode()

    @_answers_errno
    def open(self, path: str, info: FileInfo) -> int:
        """Open for reading; the kernel keeps cached pages unless they are of another snapshot."""
        if info.flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        file = self.tree.open(path)
        number = next(self._numbers)
        self._handles[number] = _Handle(file)
        info.fh = number
        info.keep_cache = int(file.keep_cache)
        # Another look may find another text and another size: nothing of it is kept.
        info.direct_io = int(file.content is not None)
        return 0

    @_answers_errno
    def read_buf(self, path: str, out: object, size: int, offset: int, info: FileInfo) -> int:
        """Answer with verified bytes; fewer than requested only at the end of the file."""
        handle = self._handles[info.fh]
        file = handle.file
        if not handle.settled:
            handle.settled = True
            self.tree.settled(file)
        size = max(0, min(size, file.size - offset))
        content = file.content
        ahead = None if content is not None else handle.sequence.next_after(offset, size)
        if ahead is not None:
            file.view.prefetch(file.path, *ahead)

        def fill(target: memoryview) -> None:
            if content is not None:
                target[:] = content[offset : offset + size]
                return
            found = file.view.read_into(file.path, offset, target)
            if found != size:
                # The kernel would fill the gap with zeros, and they would be read as weights.
                raise OSError(errno.EIO, f"{found} bytes at {offset} instead of {size}")

        answer(out, size, fill)
        return 0

    @_answers_errno
    def release(self, path: str, info: FileInfo) -> int:
        """Handle the last close of an open file."""
        handle = self._handles.pop(info.fh)
        self.tree.release(handle.file)
        return 0

    @_answers_errno
    def statfs(self, path: str) -> dict[str, int]:
        """statvfs(3): a full file system, because nothing can be written."""
        totals = self.tree.totals()
        return {
            "f_bsize": _PREFERRED_READ,
            "f_frsize": _STATFS_UNIT,
            "f_blocks": -(-totals.size // _STATFS_UNIT),
            "f_files": totals.files,
            "f_namemax": _NAME_MAX,
        }


def _mode(entry: Attributes) -> int:
    return stat.S_IFDIR | 0o555 if entry.is_directory else stat.S_IFREG | 0o444
