"""Files: the only module that changes anything on a disk.

Owns creation, writing, syncing, renaming, removing and locking of files, and the moment at which an
index commit becomes durable. Does not know what the bytes mean.

Every change is announced to the *observer* before it is made. Crash tests record these
announcements and rebuild the disk as a power loss would have left it; fault tests raise from them.
Nothing else in the library may open a file for writing (tests/test_house_rules.py).

Crash promise: a name given by `rename` holds complete contents if the file was synced before and
`sync_directory` came after. An `fsync` that failed is never retried: the caller discards the file
and writes a new one (the kernel may have dropped the dirty pages already).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shlex
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore.fs.rights import (
    DIRECTORY,
    FILE,
    SEALED,
    are_special,
    first_mode,
    mode_of,
    settle,
    sharing_of,
    umask,
)
from mstore.fs.roots import (
    directory,
    open_file,
    parent,
    root_of,
    status_of,
    translated,
    unexpected,
)
from mstore.terms.errors import Conflict, StorageFailed
from mstore.terms.ids import Buffer


class Operation(msgspec.Struct, frozen=True):
    """One change of the disk, before it is made.

    kind: create, write, clone, fsync, rename, exchange, link, unlink, mkdir, rmtree, syncdir,
    commit; or map. path: what it acts on. target: the new name of a rename or link, or what is
    exchanged with `path`. offset, data: of a write (the buffer is only valid during the call); a
    clone has only the offset. `commit` is announced before an index transaction is committed and
    `committed` right after. `map` changes nothing: it is announced before an index is opened and
    mapped, so that a test can make that fail.
    """

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: Buffer = b""


Observer = Callable[[Operation], None]
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Announce every change to `observer` while the block runs (the seam of the crash tests)."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


def announce(kind: str, path: Path | str, target: Path | str = "") -> None:
    if _observer is not None:
        _observer(Operation(kind, str(path), str(target)))


_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_NOCOW_FL: Final = 0x00800000
_FICLONERANGE: Final = 0x4020940D
_FILE_CLONE_RANGE: Final = struct.Struct("=qQQQ")


class Made(msgspec.Struct, frozen=True):
    """Identifies a file or directory that was created, whatever its current name."""

    device: int
    inode: int
    is_directory: bool

    @classmethod
    def of(cls, status: os.stat_result) -> Made:
        return cls(status.st_dev, status.st_ino, stat.S_ISDIR(status.st_mode))


class NewFile:
    """A file being written, under a name that no one reads yet.

    Invariants: created exclusively; `size` is the end of what was written; after `abandon` or
    `close` no method may be called. Not for use from two threads, except `write_at`.

    The store that contains it decides its owner and its mode (`rights`), else the
    umask does; a private file is only for users who may also write it. `beside` is a descriptor of
    the file's directory: the file is then created there, wherever the path may lead by now, with a
    mode that lets anyone read; and the owner of that directory is responsible for removing it.
    """

    def __init__(self, path: Path, *, private: bool = True, beside: int | None = None) -> None:
        self.path = path
        self.size = 0
        with translated(path):
            announce("create", path)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            if beside is None:
                bits = first_mode(path, FILE, private=private)
                with parent(path) as (above, name):
                    self._fd = os.open(name, flags, bits, dir_fd=above)
            else:
                self._fd = os.open(path.name, flags, 0o644, dir_fd=beside)
            self._is_beside = beside is not None
            self.made = Made.of(os.fstat(self._fd))
        try:
            settle(self._fd, path, FILE, private=private)
        except BaseException:
            self.abandon()
            raise

    def append(self, data: Buffer) -> int:
        """Append data; return the offset at which it begins."""
        start = self.size
        self.write_at(start, data)
        self.size = start + len(data)
        return start

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write at any offset, from any thread; does not change `size`."""
        view = memoryview(data)
        with translated(self.path):
            if _observer is not None:
                _observer(Operation("write", str(self.path), offset=offset, data=data))
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)

    def stay_in_place(self) -> None:
        """Ask btrfs to replace written bytes where they lie; a hint, for a file that is empty."""
        with suppress(OSError):
            (flags,) = struct.unpack_from("I", fcntl.ioctl(self._fd, _FS_IOC_GETFLAGS, bytes(8)))
            asked = struct.pack("Q", flags | _FS_NOCOW_FL)
            fcntl.ioctl(self._fd, _FS_IOC_SETFLAGS, asked)

    def clone(self, source: int, source_offset: int, length: int, offset: int) -> None:
        """Let a range be the extents of an open file's range: ioctl_ficlonerange(2).

        Changes `size` as little as `write_at` does.  Raises StorageFailed: with EOPNOTSUPP, ENOTTY
        or EXDEV if these filesystems cannot, with EINVAL if the ranges are not whole blocks.
        """
        with translated(self.path):
            if _observer is not None:
                _observer(Operation("clone", str(self.path), offset=offset))
            asked = _FILE_CLONE_RANGE.pack(source, source_offset, length, offset)
            fcntl.ioctl(self._fd, _FICLONERANGE, asked)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with what the file has from `offset` on; from any thread."""
        with translated(self.path):
            while target:
                got = os.preadv(self._fd, [target], offset)
                if got == 0:
                    raise StorageFailed("the file ends too early", where=str(self.path))
                target, offset = target[got:], offset + got

    def begin_writing_back(self, offset: int, length: int) -> None:
        """Ask the kernel to start writing these bytes to the disk; a hint that never raises.

        `sync` at the end then has little left to wait for. On Linux this advice does that to dirty
        pages, and they stay in the cache.
        """
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """fsync. If it fails, abandon the file."""
        with translated(self.path):
            announce("fsync", self.path)
            os.fsync(self._fd)

    def protect(self) -> None:
        """Make the file read-only, for all who may read the store; it never changes again."""
        with translated(self.path):
            os.fchmod(self._fd, mode_of(sharing_of(self.path), SEALED, umask()))

    def close(self) -> None:
        """Close; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Close and remove; ignores a file that is gone, and never removes another one."""
        self.close()
        if self._is_beside:
            return
        with translated(self.path), suppress(FileNotFoundError):
            if Made.of(status_of(self.path)) != self.made:
                return
        unlink(self.path, missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory to its final name, replacing a file or an empty directory."""
    with translated(target):
        announce("rename", source, target)
        with parent(source) as (above, name), parent(target) as (there, new):
            os.rename(name, new, src_dir_fd=above, dst_dir_fd=there)


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(first: Path, second: Path) -> None:
    """Exchange the names of two directories in one step (renameat2(2)).

    If the kernel or the filesystem cannot, in three steps: then a crash may leave neither name.
    Durable after `sync_directory` of both directories above. Raises StorageFailed.
    """
    import ctypes  # late: rarely needed, and the import takes milliseconds

    with translated(second):
        announce("exchange", first, second)
        library = ctypes.CDLL(None, use_errno=True)
        rename_at = getattr(library, "renameat2", None)
        with parent(first) as (above, name), parent(second) as (there, other):
            places = (_fd(above), os.fsencode(name), _fd(there), os.fsencode(other))
            if rename_at and not rename_at(*places, _RENAME_EXCHANGE):
                return
        code = ctypes.get_errno() if rename_at else errno.ENOSYS
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(second))
    aside = first.with_name(f"{first.name}.old")
    rename(second, aside)
    rename(first, second)
    rename(aside, first)


def _fd(above: int | None) -> int:
    return _AT_FDCWD if above is None else above


def link(source: Path, target: Path) -> None:
    """Give a file a second name, unless that exists; durable after `sync_directory`."""
    with translated(target), suppress(FileExistsError):
        announce("link", source, target)
        _link(source, target)


def _link(source: Path, target: Path) -> None:
    with parent(source) as (above, name), parent(target) as (there, new):
        os.link(name, new, src_dir_fd=above, dst_dir_fd=there, follow_symlinks=False)


def rename_new(source: Path, target: Path) -> bool:
    """Rename a file, unless the new name exists; return False then."""
    with translated(target):
        announce("link", source, target)
        try:
            _link(source, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            # A filesystem without second names (FAT): of two at once, the later one replaces.
            with parent(target) as (above, name), suppress(FileNotFoundError):
                os.stat(name, dir_fd=above, follow_symlinks=False)
                return False
            rename(source, target)
            return True
    unlink(source)
    return True


def mark_used(path: Path) -> None:
    """Set the times of a file to now, for whoever removes what was used longest ago."""
    with translated(path), parent(path) as (above, name):
        os.utime(name, dir_fd=above, follow_symlinks=False)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    with translated(path):
        announce("unlink", path)
        try:
            with parent(path) as (above, name):
                os.unlink(name, dir_fd=above)
        except FileNotFoundError:
            if not missing_ok:
                raise


def make_directory(path: Path, *, private: bool = False, exist_ok: bool = False) -> bool:
    """Create one directory; return True if it is new. `sync_directory(parent)` makes it durable.

    private: only for users who may also write it. Raises StorageFailed; Conflict if something else
    has that name.
    """
    with translated(path):
        if exist_ok and _is_directory(path):
            return False
        announce("mkdir", path)
        bits = first_mode(path, DIRECTORY, private=private)
        try:
            with parent(path) as (above, name):
                os.mkdir(name, bits, dir_fd=above)
        except FileExistsError:
            if not exist_ok:
                raise
            return False
    if are_special(path):
        try:
            with translated(path), directory(path) as descriptor:
                settle(descriptor, path, DIRECTORY, private=private)
        except BaseException:
            with translated(path), parent(path) as (above, name):
                os.rmdir(name, dir_fd=above)
            raise
    return True


def _is_directory(path: Path) -> bool:
    """Return whether there is a directory; raises Conflict for a link in a store, as for a file."""
    if root_of(path) is None:
        return path.is_dir()
    try:
        mode = status_of(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise unexpected(path, mode, "a directory")
    return True


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, durably."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    if make_directory(path, exist_ok=True):
        sync_directory(path.parent)


def remove_empty(path: Path) -> None:
    """Remove a directory if it is empty; ignore one that is not, or is missing."""
    announce("rmtree", path)
    with suppress(OSError), parent(path) as (above, name):
        os.rmdir(name, dir_fd=above)


_REMOVALS: Final = 10


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; ignore a missing one.

    Only for directories of the store itself. Follows no link: a link in it is removed, and one in
    its place is refused.
    """
    with translated(path):
        try:
            mode = status_of(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            raise unexpected(path, mode, "a directory")
        announce("rmtree", path)
        with parent(path) as (above, name):
            with suppress(OSError):
                os.rmdir(name, dir_fd=above)
                return
            # Imported late, as it imports every compression of Python; most directories are empty.
            import shutil

            for left in reversed(range(_REMOVALS)):
                try:
                    shutil.rmtree(name, dir_fd=above)
                    return
                except OSError as error:
                    # Who had it open may have put a file there meanwhile: LMDB does so.
                    if error.errno != errno.ENOTEMPTY or not left:
                        raise


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it are durable."""
    with translated(path):
        announce("syncdir", path)
        if root_of(path) is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        else:
            with directory(path) as descriptor:
                os.fsync(descriptor)


def replace_file(path: Path, content: str | bytes, *, staging: Path | None = None) -> None:
    """Replace a small file atomically and durably (temporary file, fsync, rename, fsync directory).

    staging: the directory of the temporary file, on the same filesystem; else that of `path`.
    """
    try:
        file = NewFile(temporary(path, staging), private=False)
    except StorageFailed as error:
        if staging is None:
            # The caller does not know of the temporary file.
            error.locate(str(path))
            if error.errno == errno.ENOENT:
                error.advise(f"mkdir -p {shlex.quote(str(path.parent))}")
        raise
    try:
        file.append(content.encode() if isinstance(content, str) else content)
        file.sync()
        file.close()
        rename(file.path, path)
    except BaseException:
        file.abandon()
        raise
    sync_directory(path.parent)


def create_whole(path: Path, data: Buffer) -> bool:
    """Create a file that only ever appears complete; return False if the name exists.

    For small files that are written through maps later (`fs.disks`).
    """
    file = NewFile(temporary(path, None), private=False)
    try:
        file.stay_in_place()
        file.append(data)
        file.sync()
        with translated(path):
            announce("link", file.path, path)
            try:
                _link(file.path, path)
            except FileExistsError:
                return False
    finally:
        file.abandon()
    sync_directory(path.parent)
    return True


def in_memory(head: bytes, descriptor: int, size: int) -> int:
    """Return a descriptor of a private in-memory file: `head`, then the rest of a file.

    size: copy up to this offset, or less if the file ends before.
    """
    with translated("memory"):
        made = os.memfd_create("mstore", os.MFD_CLOEXEC)
        try:
            os.lseek(made, os.write(made, head), os.SEEK_SET)
            at = len(head)
            while at < size and (sent := os.sendfile(made, descriptor, at, size - at)):
                at += sent
        except BaseException:
            os.close(made)
            raise
    return made


def zeros_in_memory(size: int) -> int:
    """Return a descriptor of a private in-memory file of so many zeros, to be mapped and filled."""
    with translated("memory"):
        made = os.memfd_create("mstore", os.MFD_CLOEXEC)
        try:
            os.truncate(made, size)
        except BaseException:
            os.close(made)
            raise
    return made


def name_in_memory(path: Path, descriptor: int) -> None:
    """Give a file in memory a name for this process, below a `scratch` directory.

    The name leads nowhere when the descriptor is closed.
    """
    with translated(path):
        announce("link", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(f"/proc/self/fd/{descriptor}")


def unnamed(place: Path, pieces: Iterable[Buffer]) -> memoryview:
    """Return these pieces, one after the other, as a mapped file that has no name.

    Its space on the disk is free again when the memory is.
    """
    import tempfile  # late, like `pwd`: what lists refs needs neither

    with translated(place):
        announce("create", place / "unnamed")
        with (
            directory(place) as above,
            tempfile.TemporaryFile(dir=_path(above)) as file,
        ):
            file.writelines(pieces)
            file.flush()
            if not file.tell():
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _path(descriptor: int) -> str:
    """Return a path of this open directory, wherever its name may lead by now."""
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for the time of the block, outside of any store."""
    import tempfile  # late, as above

    with tempfile.TemporaryDirectory(prefix="mstore-") as name:
        announce("mkdir", name)
        yield Path(name)


def private_directory(above: Path, prefix: str) -> Path:
    """Make a directory with a new name for this user alone, whatever the umask; in no store."""
    import tempfile  # late, as above

    with translated(above):
        announce("mkdir", above)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=above))


def overwrite(path: Path, data: Buffer) -> None:
    """Write a few bytes at the start of a file, created if missing. Neither atomic nor durable.

    For data whose reader detects torn or outdated bytes, and can do without.
    """
    make_empty(path, private=False)
    with translated(path):
        descriptor = open_file(path, os.O_WRONLY)
        try:
            write_at(descriptor, path, 0, data)
        finally:
            os.close(descriptor)


def write_at(descriptor: int, path: Path, offset: int, data: Buffer) -> None:
    """Write a few bytes to an open file, which is at `path`. Raises OSError."""
    if _observer is not None:
        _observer(Operation("write", str(path), offset=offset, data=data))
    os.pwrite(descriptor, data, offset)


def make_empty(path: Path, *, private: bool) -> None:
    """Create an empty file for another program to fill, unless the name exists."""
    with translated(path), suppress(FileNotFoundError):
        status_of(path)
        return
    try:
        NewFile(path, private=private).close()
    except StorageFailed as error:
        if error.errno != errno.EEXIST:
            raise


def make_hole(path: Path, size: int) -> None:
    """Create a file of this size without bytes: it reads as zeros, and takes no room.

    Neither atomic nor durable.  Raises StorageFailed if the name exists.
    """
    NewFile(path, private=True).close()
    with translated(path):
        descriptor = open_file(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)


def temporary(path: Path, staging: Path | None) -> Path:
    return (staging or path.parent) / f".{path.name}.{os.urandom(4).hex()}"


def about_to_map(path: Path, *, copied: bool = False) -> None:
    """Announce that an index is about to be opened and mapped, so that tests can make that fail.

    In a store that root serves for another user, or that is shared, creates the files first that
    LMDB would create. copied: LMDB creates none.
    """
    with translated(path):
        announce("map", path)
    if not copied and are_special(path):
        for name in ("data.mdb", "lock.mdb"):
            make_empty(path / name, private=False)


@contextmanager
def index_commit(path: Path) -> Iterator[None]:
    """Surround the commit of an index transaction, which LMDB makes durable as one step."""
    with translated(path):
        announce("commit", path)
    yield
    announce("committed", path)


def require_empty(path: Path) -> None:
    """Raise Conflict unless `path` is missing or an empty directory."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise Conflict(
            "exists and is not a directory", where=str(path), hint="name a new directory"
        )
    with translated(path):
        if any(path.iterdir()):
            raise Conflict(
                "the directory is not empty", where=str(path), hint="name a new directory"
            )
