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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from mstore.errors import Conflict, Incompatible, StorageFailed
from mstore.ids import Buffer
from mstore.neighbours import require_alone
from mstore.phrases import Text, call, phrase
from mstore.sharing import DIRECTORY, FILE, SEALED, Sharing, mode


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


def _announce(kind: str, path: Path | str, target: Path | str = "") -> None:
    if _observer is not None:
        _observer(Operation(kind, str(path), str(target)))


_HINTS = {
    errno.ENOSPC: "free some space on this disk and run the command again",
    errno.EDQUOT: "the quota of this user is used up; free some space and run the command again",
    errno.EROFS: "this filesystem is mounted read-only",
    errno.EACCES: "check the owner and mode of this path",
    errno.EPERM: "check the owner and mode of this path",
}


@contextmanager
def translated(path: Path | str) -> Iterator[None]:
    """Turn OSError into StorageFailed that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        raise refusal(error.errno or 0, path, str(error)) from error


def refusal(code: int, path: Path | str, otherwise: str) -> StorageFailed:
    """Build the error for an errno; `otherwise` is the message if the errno is 0."""
    return StorageFailed(
        os.strerror(code).lower() if code else otherwise,
        where=str(path),
        hint=_HINTS.get(code),
        errno=code,
    )


POPULATE_WRITE: Final = 23
"""madvise(2): prepare pages to be written through a map (Linux 5.14; Python has no name for it)."""
_LONG: Final = 0.001
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_NOCOW_FL: Final = 0x00800000
_FICLONERANGE: Final = 0x4020940D
_FILE_CLONE_RANGE: Final = struct.Struct("=qQQQ")


class NewFile:
    """A file being written, under a name that no one reads yet.

    Invariants: created exclusively; `size` is the end of what was written; after `abandon` or
    `close` no method may be called. Not for use from two threads, except `write_at`.

    The store that contains it decides its owner and its mode (`serve_owner`, `share`), else the
    umask does; a private file is only for users who may also write it. `beside` is a descriptor of
    the file's directory: the file is then created there, wherever the path may lead by now, with a
    mode that lets anyone read; and the owner of that directory is responsible for removing it.
    """

    def __init__(self, path: Path, *, private: bool = True, beside: int | None = None) -> None:
        self.path = path
        self.size = 0
        with translated(path):
            _announce("create", path)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            name = path if beside is None else path.name
            bits = 0o644 if beside is not None else _first_mode(path, FILE, private=private)
            self._fd = os.open(name, flags, bits, dir_fd=beside)
            self._is_beside = beside is not None
            self.made = _Made.of(os.fstat(self._fd))
        if _owners or _shared:
            try:
                _hand_over(self._fd, path)
                _settle(self._fd, path, FILE, private=private)
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

    def read_at(self, offset: int, length: int) -> bytes:
        """Read back what was written (to hash a footer, or to check a copy)."""
        with translated(self.path):
            return os.pread(self._fd, length, offset)

    def sync(self) -> None:
        """fsync. If it fails, abandon the file."""
        with translated(self.path):
            _announce("fsync", self.path)
            os.fsync(self._fd)

    def protect(self) -> None:
        """Make the file read-only, for all who may read the store; it never changes again."""
        with translated(self.path):
            os.fchmod(self._fd, mode(_sharing(self.path), SEALED, _umask()))

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
            if _Made.of(os.stat(self.path, follow_symlinks=False)) != self.made:
                return
        unlink(self.path, missing_ok=True)


class NewTree:
    """A directory of files being filled, under a name that no one reads yet.

    Every file is reached from the descriptors of the directories above it, following no symbolic
    link, so a planted link cannot lead a write out of the tree. Until `publish`, everything lies in
    a directory beside `target` that only its owner may enter. Files and directories are created
    exclusively, with the modes that the umask leaves of 0644 and 0755. Removal is by device and
    inode, of what was created here, wherever it was moved; files that others put there stay. Unless
    `shared`, others must not be able to rename in the directory above (`neighbours`).

    `create` may be called from any thread. `publish` or `abandon` ends it.
    """

    def __init__(self, target: Path, *, shared: bool = False) -> None:
        self.target = target
        self._staging = _temporary(target, None)
        self._path = self._staging / "tree"
        self._made: dict[Path, _Made] = {}
        self._lock = Lock()
        self._open: list[int] = []
        self._outer = self._root = -1
        self._is_published = False
        with translated(target.parent):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._above = os.open(target.parent, flags)
            self._open.append(self._above)
        try:
            with translated(target):
                if not shared:
                    require_alone(self._above, target.parent)
                self._outer = self._make(self._staging, 0o700, self._above)
                self._open.append(self._outer)
                _require_private(self._outer, self._staging)
                self._root = self._make(self._path, 0o755, self._outer)
                self._open.append(self._root)
        except BaseException:
            self.abandon()
            raise

    def _make(self, path: Path, mode: int, above: int) -> int:
        _announce("mkdir", path)
        os.mkdir(path.name, mode, dir_fd=above)
        try:
            return _open_directory(path.name, above)
        except BaseException:
            with suppress(OSError):
                os.rmdir(path.name, dir_fd=above)
            raise

    def create(self, relative: str) -> NewFile:
        """Create a file in the tree, and its missing directories.

        `relative` is a path without empty, `.` and `..` parts; the caller must ensure that.
        """
        path = self._path / relative
        with self._within(path.parent) as descriptor:
            file = NewFile(path, beside=descriptor)
            self._made[path] = file.made
            return file

    @contextmanager
    def _within(self, directory: Path) -> Iterator[int]:
        """Yield a descriptor of a directory of the tree, created if new."""
        at, here = self._path, self._root
        passed: list[int] = []
        try:
            for name in directory.relative_to(self._path).parts:
                at /= name
                with translated(at), self._lock:
                    is_new = at not in self._made
                    here = self._make(at, 0o755, here) if is_new else _open_directory(name, here)
                    passed.append(here)
                    made = _Made.of(os.fstat(here))
                    if self._made.setdefault(at, made) != made:
                        raise _displaced(at)
            yield here
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def publish(self) -> None:
        """Give the tree its final name, durably; its files must be synced before.

        Replaces an empty directory. Raises Conflict if something else was put in its place.
        """
        directories = (path for path, made in self._made.items() if made.is_directory)
        for directory in sorted(directories, reverse=True):
            with self._within(directory) as descriptor:
                self._sync(directory, descriptor)
        self._sync(self._path, self._root)
        name = self.target.name
        with translated(self.target):
            _announce("rename", self._path, self.target)
            os.rename(self._path.name, name, src_dir_fd=self._outer, dst_dir_fd=self._above)
            named = os.stat(name, dir_fd=self._above, follow_symlinks=False)
            if not os.path.samestat(named, os.fstat(self._root)):
                raise _displaced(self.target)
        self._is_published = True
        self._sync(self.target.parent, self._above)
        self.abandon()

    def _sync(self, path: Path, descriptor: int) -> None:
        with translated(path):
            _announce("syncdir", path)
            os.fsync(descriptor)

    def abandon(self) -> None:
        """Close, and remove what was created and not published; idempotent."""
        try:
            if self._outer >= 0:
                with translated(self._staging):
                    _announce("rmtree", self._staging)
                    self._clear()
                    _remove_wherever(self._staging.name, self._outer, self._above)
        finally:
            self._outer = self._root = -1
            while self._open:
                os.close(self._open.pop())

    def _clear(self) -> None:
        """Remove the tree and everything created in it, unless it is published."""
        if self._root < 0 or self._is_published:
            return
        below: dict[Path, list[Path]] = {}
        for path in self._made:
            below.setdefault(path.parent, []).append(path)
        for directory in sorted(below, key=lambda path: len(path.parts), reverse=True):
            with ExitStack() as stack:
                try:
                    descriptor = stack.enter_context(self._within(directory))
                except (Conflict, StorageFailed):
                    continue
                for path in below[directory]:
                    _remove_made(path.name, self._made[path], descriptor)
        # A neighbour may have renamed it.
        _remove_wherever(self._path.name, self._root, self._outer, self._above)


class _Made(NamedTuple):
    """Identifies a file or directory that was created, whatever its current name."""

    device: int
    inode: int
    is_directory: bool

    @classmethod
    def of(cls, status: os.stat_result) -> _Made:
        return cls(status.st_dev, status.st_ino, stat.S_ISDIR(status.st_mode))


def _remove_made(name: str, made: _Made, above: int) -> bool:
    """Remove a file or empty directory if this name is still its; return whether it was."""
    try:
        if _Made.of(os.stat(name, dir_fd=above, follow_symlinks=False)) != made:
            return False
        if made.is_directory:
            os.rmdir(name, dir_fd=above)
        else:
            os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return False
    except OSError as error:
        # Others' files inside stay.
        if error.errno != errno.ENOTEMPTY:
            raise
    return True


def _remove_wherever(name: str, descriptor: int, *places: int) -> None:
    """Remove an empty directory that was created here, even if it was renamed meanwhile."""
    made = _Made.of(os.fstat(descriptor))
    if not _remove_made(name, made, places[0]):
        any(_remove_made(each, made, place) for place in places for each in os.listdir(place))


def _open_directory(name: str, above: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=above)


def _require_private(descriptor: int, path: Path) -> None:
    """Raise Conflict unless this is the directory just created, which only its owner can enter."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise _displaced(path)


def _displaced(path: Path) -> Conflict:
    return Conflict("something else was put in its place", where=str(path))


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory to its final name, replacing a file or an empty directory."""
    with translated(target):
        _announce("rename", source, target)
        os.rename(source, target)


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(first: Path, second: Path) -> None:
    """Exchange the names of two directories in one step (renameat2(2)).

    If the kernel or the filesystem cannot, in three steps: then a crash may leave neither name.
    Durable after `sync_directory` of both directories above. Raises StorageFailed.
    """
    import ctypes  # late: rarely needed, and the import takes milliseconds

    with translated(second):
        _announce("exchange", first, second)
        library = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(first), os.fsencode(second)
        rename = getattr(library, "renameat2", None)
        if rename and not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            return
        code = ctypes.get_errno() if rename else errno.ENOSYS
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(second))
        aside = first.with_name(f"{first.name}.old")
        os.rename(second, aside)
        os.rename(first, second)
        os.rename(aside, first)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, unless that exists; durable after `sync_directory`."""
    with translated(target), suppress(FileExistsError):
        _announce("link", source, target)
        os.link(source, target, follow_symlinks=False)


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    with translated(path):
        _announce("unlink", path)
        path.unlink(missing_ok=missing_ok)


def make_directory(
    path: Path, *, private: bool = False, own: bool = False, exist_ok: bool = False
) -> bool:
    """Create one directory; return True if it is new. `sync_directory(parent)` makes it durable.

    private: only for users who may also write it. own: only for its creator, outside any store.
    """
    with translated(path):
        if exist_ok and path.is_dir():
            return False
        _announce("mkdir", path)
        try:
            os.mkdir(path, 0o700 if own else _first_mode(path, DIRECTORY, private=private))
        except FileExistsError:
            if not exist_ok:
                raise
            return False
    if _owners or _shared:
        try:
            with _directory(path) as descriptor:
                _hand_over(descriptor, path)
                _settle(descriptor, path, DIRECTORY, private=private)
        except BaseException:
            with translated(path):
                os.rmdir(path)
            raise
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
    _announce("rmtree", path)
    with suppress(OSError):
        path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a directory and everything below it; ignore a missing one.

    Only for directories of the store itself: removal is by path, so anyone who may rename there
    decides what is removed.
    """
    if not os.path.lexists(path):
        return
    with translated(path):
        _announce("rmtree", path)
        with suppress(OSError):
            path.rmdir()
            return
        # Imported late, as it imports every compression of Python; most directories are empty.
        import shutil

        shutil.rmtree(path)


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it are durable."""
    with translated(path):
        _announce("syncdir", path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_text(path: Path, text: str, *, staging: Path | None = None) -> None:
    """Replace a text file atomically and durably (temporary file, fsync, rename, fsync directory).

    staging: the directory of the temporary file, on the same filesystem; else that of `path`.
    """
    try:
        file = NewFile(_temporary(path, staging), private=False)
    except StorageFailed as error:
        if staging is None:
            # The caller does not know of the temporary file.
            error.locate(str(path))
            if error.errno == errno.ENOENT:
                error.advise(f"mkdir -p {shlex.quote(str(path.parent))}")
        raise
    try:
        file.append(text.encode())
        file.sync()
        file.close()
        rename(file.path, path)
    except BaseException:
        file.abandon()
        raise
    sync_directory(path.parent)


def create_whole(path: Path, data: Buffer) -> bool:
    """Create a file that only ever appears complete; return False if the name exists.

    For small files that are written through maps later (`require_mappable`).
    """
    file = NewFile(_temporary(path, None), private=False)
    try:
        file.stay_in_place()
        file.append(data)
        file.sync()
        with translated(path):
            _announce("link", file.path, path)
            try:
                os.link(file.path, path)
            except FileExistsError:
                return False
    finally:
        file.abandon()
    sync_directory(path.parent)
    return True


def require_mappable(path: Path, length: int) -> None:
    """Raise StorageFailed if others could not map a file shared and write it now.

    The file gets at least this length. Such a write ends the process if the filesystem has no room
    for it, so it is tried without changing a byte, and through a second map as well: with the room
    that the first one takes. Call only while this process has the file open nowhere else, as
    closing it ends this process's locks on it.
    """
    with translated(path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if size < length:
                if _observer is not None:
                    _observer(Operation("write", str(path), offset=size, data=bytes(length - size)))
                os.pwrite(fd, bytes(length - size), size)
            with mmap.mmap(fd, length) as first, mmap.mmap(fd, length) as second:
                for one in (first, second):
                    if not is_mappable(path, partial(_populated, one)):
                        raise full(path)
        finally:
            os.close(fd)


def copy_up(path: Path) -> None:
    """Have overlayfs copy a file of a lower layer into the upper one, as its first writer would.

    Whoever has mapped the lower one would never see what others write. Changes nothing elsewhere.
    Raises StorageFailed.
    """
    with translated(path):
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))


def _populated(shared: mmap.mmap) -> int:
    try:
        shared.madvise(POPULATE_WRITE)
    except OSError as error:
        return error.errno or 0
    return 0


def is_mappable(path: Path, populate: Callable[[], int]) -> bool:
    """Return whether a shared map of a file can be written now.

    populate: calls madvise(2) with POPULATE_WRITE and returns the errno. An older kernel does not
    know that; less than 1 MiB free then counts as full. The same if btrfs finds room only after a
    search: it would search at each write.
    """
    began = time.monotonic()
    code = populate()
    is_long = time.monotonic() - began > _LONG
    if code == errno.EINVAL or (is_long and not code and copies_on_write(path)):
        return has_room(path)
    return code != errno.EFAULT


def has_room(path: Path, size: int = 1 << 20) -> bool:
    """Return whether the filesystem has so many bytes free, or does not tell."""
    try:
        return free_bytes(path) >= size
    except StorageFailed:
        return True


def copies_on_write(path: Path) -> bool:
    """Return whether what is written at `path` takes new room each time, or may do so."""
    return filesystem_type(path) in {"btrfs", "zfs", "bcachefs", "overlay"}


def full(path: Path) -> StorageFailed:
    """Build the error for a full disk."""
    return refusal(errno.ENOSPC, path, "")


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


def unnamed(directory: Path, pieces: Iterable[Buffer]) -> memoryview:
    """Return these pieces, one after the other, as a mapped file that has no name.

    Its space on the disk is free again when the memory is.
    """
    import tempfile  # late, like `pwd`: what lists refs needs neither

    with translated(directory):
        _announce("create", directory / "unnamed")
        with tempfile.TemporaryFile(dir=directory) as file:
            file.writelines(pieces)
            file.flush()
            if not file.tell():
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def overwrite(path: Path, data: Buffer) -> None:
    """Write a few bytes at the start of a file, created if missing. Neither atomic nor durable.

    For data whose reader detects torn or outdated bytes, and can do without.
    """
    with translated(path):
        if _served(path) is not None or _sharing(path) is not Sharing.UMASK:
            _make_empty(path, private=False)
        if not os.path.lexists(path):
            _announce("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, FILE)
        try:
            if _observer is not None:
                _observer(Operation("write", str(path), offset=0, data=data))
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)


def _temporary(path: Path, staging: Path | None) -> Path:
    return (staging or path.parent) / f".{path.name}.{os.urandom(4).hex()}"


def about_to_map(path: Path, *, copied: bool = False) -> None:
    """Announce that an index is about to be opened and mapped, so that tests can make that fail.

    In a store that root serves for another user, or that is shared, creates the files first that
    LMDB would create. copied: LMDB creates none.
    """
    with translated(path):
        _announce("map", path)
    if not copied and (_served(path) is not None or _sharing(path) is not Sharing.UMASK):
        for name in ("data.mdb", "lock.mdb"):
            _make_empty(path / name, private=False)


@contextmanager
def index_commit(path: Path) -> Iterator[None]:
    """Surround the commit of an index transaction, which LMDB makes durable as one step."""
    with translated(path):
        _announce("commit", path)
    yield
    _announce("committed", path)


class LockFile:
    """An flock on a file of its own; the kernel drops it when the process ends in any way."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if create and _owners:
            # Every writer takes a lock first, so this refuses before anything is written.
            _require_giving(path)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if create else os.O_RDONLY)
        while True:
            if create:
                _make_empty(path, private=True)
            with translated(path):
                try:
                    self._fd = os.open(path, flags)
                    break
                except FileNotFoundError:
                    # Another process removed the name right after it was created.
                    if not create:
                        raise

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; return False if it is held elsewhere and `blocking` is off."""
        with translated(self.path):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
        return True

    def is_current(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def remove(self) -> None:
        """Remove the name while holding the lock, then unlock: no one takes it in between."""
        try:
            unlink(self.path, missing_ok=True)
        finally:
            self.release()

    def release(self) -> None:
        """Unlock and close; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -- whose files they are ----------------------------------------------------------------------

_owners: dict[str, tuple[int, int]] = {}
"""By directory: user and group of everything that root creates below it."""


def serve_owner(root: Path) -> None:
    """Give everything that root creates below `root` from now on to the owner of `root`.

    Otherwise a command by root would leave files that the owner's commands cannot change. Does
    nothing for other users. A file that cannot be given away is removed again, with StorageFailed.
    """
    if os.geteuid() != 0:
        return
    with translated(root):
        status = os.stat(root)
    key = os.path.abspath(root)
    if status.st_uid == 0:
        _owners.pop(key, None)
    else:
        _owners[key] = (status.st_uid, status.st_gid)


def _served(path: Path) -> str | None:
    """Return the directory whose owner must own what is created at `path`, if any."""
    if not _owners or os.geteuid() != 0:
        return None
    absolute = os.path.abspath(path)
    return next((root for root in _owners if absolute.startswith(root + os.sep)), None)


def _require_giving(path: Path) -> None:
    """Raise StorageFailed if root may not give away what it creates at `path`."""
    root = _served(path)
    if root is not None:
        # The owner has it already: this changes nothing, and fails where giving would fail.
        real = Path(os.path.realpath(root))
        with _directory(real) as descriptor:
            _give(descriptor, real, _owners[root])


def _hand_over(descriptor: int, path: Path) -> None:
    """Give a new file or directory to the owner of the store that contains it.

    Uses its descriptor, because the owner may replace any name.
    """
    root = _served(path)
    if root is not None:
        _give(descriptor, path, _owners[root])


def _give(descriptor: int, path: Path, owner: tuple[int, int]) -> None:
    try:
        os.fchown(descriptor, *owner)
    except OSError as error:
        raise StorageFailed(
            f"root cannot give it to user {owner[0]}, whose store this is: {error.strerror}",
            where=str(path),
            hint=f"sudo -u '#{owner[0]}' ...    (the same command as the store's owner)",
            errno=error.errno,
        ) from error


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    with translated(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _make_empty(path: Path, *, private: bool) -> None:
    """Create an empty file for another program to fill, unless the name exists."""
    if os.path.lexists(path):
        return
    try:
        NewFile(path, private=private).close()
    except StorageFailed as error:
        if error.errno != errno.EEXIST:
            raise


# -- who may use them --------------------------------------------------------------------------

_shared: dict[str, Sharing] = {}
"""By directory: who besides its creator may use what is created below it."""


def share(root: Path, sharing: Sharing) -> None:
    """Apply `sharing` to everything that is created below `root` from now on."""
    key = os.path.abspath(root)
    if sharing is Sharing.UMASK:
        _shared.pop(key, None)
    else:
        _shared[key] = sharing


def share_tree(root: Path, sharing: Sharing, *, private: Sequence[Path] = ()) -> None:
    """Apply `sharing` to everything that already exists; never removes a permission.

    private: files and directories, each with its contents, that are only for users who may write
    them. Changes modes only, and follows no link. Raises StorageFailed, and changes nothing, if
    another user owns something.
    """
    changes = []
    for path in (root, *sorted(root.rglob("*"))):
        is_private = any(path == one or one in path.parents for one in private)
        # Other processes may remove files meanwhile.
        with translated(path), suppress(FileNotFoundError):
            status = path.lstat()
            now = stat.S_IMODE(status.st_mode)
            wanted = now | _shared_bits(status, sharing, is_private=is_private)
            if wanted != now and os.geteuid() not in (0, status.st_uid):
                raise StorageFailed(
                    f"this is user {_user(status.st_uid)}'s, who has to share it, or root",
                    where=str(path),
                    hint=phrase(
                        "sudo {share}",
                        share=call("configure", "shared", str(sharing), store=str(root)),
                    ),
                    errno=errno.EPERM,
                )
            if wanted != now:
                changes.append((path, wanted))
    for path, wanted in changes:
        with translated(path), suppress(FileNotFoundError):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags)
            try:
                os.fchmod(descriptor, wanted)
            finally:
                os.close(descriptor)


def _shared_bits(status: os.stat_result, sharing: Sharing, *, is_private: bool) -> int:
    now = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        kind = DIRECTORY
    elif stat.S_ISREG(status.st_mode):
        kind = FILE if now & 0o200 else SEALED
    else:
        return 0
    return mode(sharing, kind, 0o777 & ~now, private=is_private)


def _sharing(path: Path) -> Sharing:
    if not _shared:
        return Sharing.UMASK
    absolute = os.path.abspath(path)
    roots = [root for root in _shared if absolute == root or absolute.startswith(root + os.sep)]
    return _shared[max(roots, key=len)] if roots else Sharing.UMASK


def _first_mode(path: Path, kind: int, *, private: bool) -> int:
    """Return the mode to create something with: never more than its final mode."""
    return mode(_sharing(path), kind, _umask(), private=True) & 0o777 if private else kind


def _settle(descriptor: int, path: Path, kind: int, *, private: bool) -> None:
    """Set the mode of something new to that of its store, whatever the umask left."""
    sharing = _sharing(path)
    if sharing is not Sharing.UMASK:
        with translated(path):
            os.fchmod(descriptor, mode(sharing, kind, _umask(), private=private))


def _umask() -> int:
    """Return this process's umask, without the side effect of umask(2)."""
    try:
        status = _STATUS.read_text(errors="replace")
    except OSError:
        return 0o077
    line = next((line for line in status.splitlines() if line.startswith("Umask:")), "Umask: 077")
    return int(line.split()[1], 8)


_STATUS = Path("/proc/self/status")


def may_write(*paths: Path) -> bool:
    """Return whether this user may write all of these paths, or their nearest existing parents."""
    return _unwritable(paths) is None


def require_writable(root: Path, paths: Sequence[Path]) -> None:
    """Raise StorageFailed if this user may not write one of these paths of the store at `root`."""
    found = _unwritable(paths)
    if found is None:
        return
    path, code = found
    if code == errno.EROFS:
        what = "this store can be read and not written: its filesystem is mounted read-only"
        hint = f"mount -o remount,rw ...    (or copy the store: cp -r {shlex.quote(str(root))} DIR)"
        raise StorageFailed(what, where=str(path), hint=hint, errno=code)
    with translated(path):
        owner = os.stat(path).st_uid
    me = os.geteuid()
    what = (
        f"this store can be read and not written by user {_user(me)}: it is user {_user(owner)}'s"
    )
    advice: Text = phrase(
        "sudo -u {owner} ...    (the same command as the store's owner)\n"
        "or its owner shares it: chgrp -R GROUP {store} && {share}",
        owner=shlex.quote(_user(owner)),
        store=shlex.quote(str(root)),
        share=call("configure", "shared", "group"),
    )
    if owner == me:
        what = "this store can be read and not written: somebody took the right to write from it"
        advice = f"chmod -R u+w {shlex.quote(str(root))}"
    raise StorageFailed(what, where=str(path), hint=advice, errno=code)


def _user(number: int) -> str:
    """Return a user's name, as sudo accepts it."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"#{number}"


_ASKED: Final = 10
"""How often a path is asked for that is replaced each time."""


def _unwritable(paths: Sequence[Path]) -> tuple[Path, int] | None:
    """Return the first path that this user may not write, with the errno; else None.

    For a missing path, checks its nearest existing parent. Opens nothing: closing a file that LMDB
    has locked would release its locks.
    """
    for path in paths:
        code = None
        for _ in range(_ASKED):
            there = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
            asked = identity(there, follow=False)
            code = _refused(there)
            if code is None:
                break
            # Else another process has moved it away or replaced it while we asked.
            if asked is not None and identity(there, follow=False) == asked:
                return there, code
        if code is not None:
            return there, code
    return None


def _refused(path: Path) -> int | None:
    """Return the errno with which writing a path would be refused; None if it would not be."""
    wanted = os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)
    with suppress(OSError):
        # Also needed where the kernel only checks real ids: the C library then ignores the
        # filesystem.
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return errno.EROFS
    return None if os.access(path, wanted, effective_ids=True) else errno.EACCES


NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "glusterfs"}
    | {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.glusterfs", "beegfs", "gpfs"}
)
MOUNTINFO = Path("/proc/self/mountinfo")


def filesystem_type(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the filesystem type at `path` (proc_pid_mountinfo(5)); '' if unknown."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # =: of two mounts on one point the later line is the visible one.
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind


def identity(path: Path, *, follow: bool = True) -> tuple[int, int] | None:
    """Return device and inode of what is at `path`; None if that cannot be told."""
    try:
        status = os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def free_bytes(path: Path) -> int:
    """Return the free space of the disk at `path` that this user may fill."""
    with translated(path):
        disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def block_bytes(path: Path) -> int:
    """Return the block size of the filesystem at `path`."""
    with translated(path):
        return os.statvfs(path).f_bsize


def require_local(path: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Raise Incompatible if LMDB's locks and memory map are unreliable on this filesystem."""
    kind = filesystem_type(path, mountinfo)
    if kind in NETWORK_FILESYSTEMS:
        raise Incompatible(
            f"a store cannot live on a network filesystem ({kind})",
            where=str(path),
            hint=call("init", store="/a/local/disk/.mstore"),
        )


def require_empty(directory: Path) -> None:
    """Raise Conflict unless `directory` is missing or an empty directory."""
    if not os.path.lexists(directory):
        return
    if directory.is_symlink() or not directory.is_dir():
        raise Conflict(
            "exists and is not a directory", where=str(directory), hint="name a new directory"
        )
    with translated(directory):
        if any(directory.iterdir()):
            raise Conflict(
                "the directory is not empty", where=str(directory), hint="name a new directory"
            )
