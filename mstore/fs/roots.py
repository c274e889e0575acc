"""Roots: directories of mstore's own, opened once; what lies in them is reached from there.

Whoever may write a store may replace any entry of it: by a symbolic link to somebody else's
directory, by a fifo that makes its reader wait for ever. So a store's root is opened once, by the
path that the user named, and each path below it is walked from that descriptor, directory by
directory, without following a link. What is opened must be a regular file. Paths outside of every
open root are the caller's to trust: only their last part is checked.

This module changes nothing. Safe for any number of threads: a descriptor stays open while a call
uses it, whoever closes its root meanwhile.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mstore.terms.errors import Conflict, StorageFailed, Unreadable
from mstore.terms.phrases import Text

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a fifo waits for a writer for ever.
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
}

_HINTS = {
    errno.ENOSPC: "free some space on this disk and run the command again",
    errno.EDQUOT: "the quota of this user is used up; free some space and run the command again",
    errno.EROFS: "this filesystem is mounted read-only",
    errno.EACCES: "check the owner and mode of this path",
    errno.EPERM: "check the owner and mode of this path",
    errno.EMFILE: "let this process open more files: ulimit -n 4096",
    errno.ENFILE: "this machine has too many files open: end some programs",
    errno.ENOMEM: "this machine, or what this process may use of it, is out of memory",
}


@contextmanager
def translated(path: Path | str) -> Iterator[None]:
    """Turn OSError into StorageFailed that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        raise refusal(error.errno or 0, path, str(error)) from error


_LOST: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""What a disk or filesystem answers that has lost what it had to keep.

EIO is the answer to a bad sector, and to contents that a filesystem checks and finds wrong; ext4
and XFS answer EUCLEAN and EBADMSG where their own structures are damaged.
"""


def unread(
    error: OSError, path: Path | str, hint: Text | None = None
) -> Unreadable | StorageFailed:
    """Build the error for bytes of the store that could not be read.

    The only place that tells damage from what this machine refuses: too few descriptors (EMFILE,
    ENFILE), no permission (EACCES, EPERM), no memory (ENOMEM) and all else say nothing about the
    bytes.  Never for what was written: a disk that fails then has lost nothing yet.
    """
    code = error.errno or 0
    if code in _LOST:
        return Unreadable(os.strerror(code).lower(), where=str(path), hint=hint)
    return refusal(code, path, str(error))


@contextmanager
def reading(path: Path | str, hint: Text | None = None) -> Iterator[None]:
    """Turn OSError into Unreadable if the disk has lost these bytes, else into StorageFailed."""
    try:
        yield
    except OSError as error:
        raise unread(error, path, hint) from error


def is_there(path: Path | str) -> bool:
    """Return whether there is a file; raises StorageFailed if that cannot be known."""
    with translated(path):
        try:
            status_of(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def refusal(code: int, path: Path | str, otherwise: str) -> StorageFailed:
    """Build the error for an errno; `otherwise` is the message if the errno is 0."""
    return StorageFailed(
        os.strerror(code).lower() if code else otherwise,
        where=str(path),
        hint=_HINTS.get(code),
        errno=code,
    )


class _Descriptor:
    """An open directory, closed with its last user."""

    def __init__(self, path: Path) -> None:
        # The user chose the path of the root, links included.
        self.fd = os.open(path, _DIRECTORY)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self.fd)


class Root:
    """An open directory of mstore's own; paths below it start at its descriptor.

    It serves all paths below `path`, whoever asks, until `close` or until nobody has it any more.
    Of several roots of one path the one opened last serves them.

    owner: user and group that everything must belong to that root creates in it: those of the
    directory. None for other users, and in directories of root's own.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageFailed."""
        self._key = os.path.abspath(path)
        with translated(path):
            self._open: _Descriptor | None = _Descriptor(path)
            status = os.fstat(self._open.fd)
        is_others = os.geteuid() == 0 and status.st_uid != 0
        self.owner = (status.st_uid, status.st_gid) if is_others else None
        _retire(self._key, status)
        _roots.setdefault(self._key, []).append(weakref.ref(self))

    @property
    def descriptor(self) -> _Descriptor | None:
        """The open directory; None after `close`."""
        return self._open

    def close(self) -> None:
        """Serve no further path; idempotent. The descriptor closes after the last call's use."""
        self._open = None
        _forget(self._key)

    def __del__(self) -> None:
        with suppress(AttributeError):
            _forget(self._key)


_roots: dict[str, list[weakref.ref[Root]]] = {}
"""By absolute path: the open roots, the last one opened at the end."""


def _retire(key: str, status: os.stat_result) -> None:
    """Close the roots of this path whose directory is another one than the path leads to now."""
    for root in [one() for one in _roots.get(key, ())]:
        descriptor = None if root is None else root.descriptor
        if descriptor is not None and not os.path.samestat(os.fstat(descriptor.fd), status):
            assert root is not None
            root.close()


def _forget(key: str) -> None:
    left = [one for one in _roots.get(key, ()) if (root := one()) and root.descriptor]
    if left:
        _roots[key] = left
    else:
        _roots.pop(key, None)


def root_of(path: Path | str) -> Root | None:
    """Return the open root that `path` lies in, if any."""
    found = _around(path)
    return None if found is None else found[0]


def _around(path: Path | str) -> tuple[Root, _Descriptor, str] | None:
    """Return the innermost open root around `path`, its descriptor, and the path from there."""
    if not _roots:
        return None
    absolute = os.path.abspath(path)
    # A copy: other threads open and close roots.
    for key in sorted(_roots.copy(), key=len, reverse=True):
        if absolute.startswith(key + os.sep):
            for one in reversed(_roots.get(key, ())):
                root = one()
                descriptor = None if root is None else root.descriptor
                if root is not None and descriptor is not None:
                    return root, descriptor, absolute[len(key) + 1 :]
    return None


@contextmanager
def parent(path: Path | str) -> Iterator[tuple[int | None, str]]:
    """Yield where to act on `path`: a descriptor of the directory above it, and its name there.

    Outside of all roots that is (None, the path), as the functions of `os` take them. Raises
    Conflict if a directory on the way from the root is something else, OSError.
    """
    found = _around(path)
    if found is None:
        yield None, os.fspath(path)
        return
    _, descriptor, relative = found
    *directories, name = relative.split(os.sep)
    here = above = descriptor.fd
    try:
        for number, part in enumerate(directories):
            below = _enter(part, here, path, len(directories) - number)
            if here != above:
                os.close(here)
            here = below
        yield here, name
    finally:
        if here != above:
            os.close(here)


def _enter(name: str, above: int | None, path: Path | str, up: int = 0) -> int:
    """Open the directory `name`, which is `path` or the one `up` steps above it."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                here = Path(path)
                where = here.parents[up - 1] if up else here
                raise unexpected(where, status.st_mode, "a directory") from error
        raise


@contextmanager
def directory(path: Path | str) -> Iterator[int]:
    """Yield a descriptor of a directory, which no link leads to.

    Raises OSError; Conflict if it is something else.
    """
    with parent(path) as (above, name):
        descriptor = _enter(name, above, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def listed(path: Path | str) -> list[str]:
    """Return the names in a directory, sorted. Raises as `directory` does."""
    with directory(path) as descriptor:
        return sorted(os.listdir(descriptor))


def listed_below(path: Path | str) -> Iterator[tuple[str, list[str]]]:
    """Yield each directory in a directory, by name, with the names in it, sorted.

    Passes over what is no directory, links too. Raises OSError, Conflict.
    """
    with directory(path) as above:
        for name in sorted(os.listdir(above)):
            try:
                descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            except (NotADirectoryError, FileNotFoundError):
                continue
            try:
                names = os.listdir(descriptor)
            finally:
                os.close(descriptor)
            yield name, sorted(names)


def status_of(path: Path | str) -> os.stat_result:
    """Return the status of `path` itself, whatever it is. Raises OSError, Conflict."""
    with parent(path) as (above, name):
        return os.stat(name, dir_fd=above, follow_symlinks=False)


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of what has this name now, a link itself; None if untold.

    That may be in another directory than an open root, which somebody has moved away.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def open_file(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, which no link leads to; return its descriptor.

    Raises OSError; Conflict if something else is there.
    """
    with parent(path) as (above, name):
        try:
            descriptor = os.open(name, flags | _PLAIN, dir_fd=above)
        except OSError as error:
            with suppress(OSError):
                there = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
                if not stat.S_ISREG(there):
                    raise unexpected(path, there) from error
            raise
    there = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(there):
        os.close(descriptor)
        raise unexpected(path, there)
    return descriptor


def read_file(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a regular file.

    Raises Unreadable, StorageFailed; Conflict if something else is there.
    """
    with reading(path), os.fdopen(open_file(path), "rb") as file:
        return file.read(limit)


def unexpected(path: Path | str, mode: int, wanted: str = "a regular file") -> Conflict:
    """Return the error for an entry of a store that is of another kind than a store has there."""
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return Conflict(
        f"this is {kind}, where a store has {wanted} of its own",
        where=str(path),
        hint=f"see what it is: ls -ld {shlex.quote(str(path))}; then put back what belongs there",
    )


def require_kinds(root: Path, directories: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Raise Conflict if one of these entries of an open root exists and is of another kind.

    The names are relative to `root`. A directory is checked before the files in it.
    """
    kinds = (
        (directories, stat.S_ISDIR, "a directory"),
        (files, stat.S_ISREG, "a regular file"),
    )
    for names, is_kind, wanted in kinds:
        for name in names:
            with translated(root / name):
                try:
                    mode = status_of(root / name).st_mode
                except FileNotFoundError:
                    continue
            if not is_kind(mode):
                raise unexpected(root / name, mode, wanted)


def strays(path: Path) -> list[str]:
    """Return the names in a directory that are no directories themselves, links too, sorted.

    Raises OSError, Conflict.
    """
    with directory(path) as descriptor, os.scandir(descriptor) as found:
        return sorted(one.name for one in found if not one.is_dir(follow_symlinks=False))
