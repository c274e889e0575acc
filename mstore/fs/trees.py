"""Trees: a directory of files that appears at once, outside of any store.

Other users who may write a directory may rename and remove every name in it, including directories
that they may not enter.  In a sticky directory, only the owners of the directory and of each name
may.  `require_alone` checks owner, mode and POSIX access list, as they are now.  Root may do
everything everywhere and does not count.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from mstore.fs.files import Made, NewFile, announce, temporary
from mstore.fs.roots import translated
from mstore.terms.errors import Conflict, StorageFailed
from mstore.terms.phrases import Option, phrase


class NewTree:
    """A directory of files being filled, under a name that no one reads yet.

    Every file is reached from the descriptors of the directories above it, following no symbolic
    link, so a planted link cannot lead a write out of the tree. Until `publish`, everything lies in
    a directory beside `target` that only its owner may enter. Files and directories are created
    exclusively, with the modes that the umask leaves of 0644 and 0755. Removal is by device and
    inode, of what was created here, wherever it was moved; files that others put there stay. Unless
    `shared`, others must not be able to rename in the directory above (`require_alone`).

    `create` may be called from any thread. `publish` or `abandon` ends it.
    """

    def __init__(self, target: Path, *, shared: bool = False) -> None:
        self.target = target
        self._staging = temporary(target, None)
        self._path = self._staging / "tree"
        self._made: dict[Path, Made] = {}
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
        announce("mkdir", path)
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
                    made = Made.of(os.fstat(here))
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
            announce("rename", self._path, self.target)
            os.rename(self._path.name, name, src_dir_fd=self._outer, dst_dir_fd=self._above)
            named = os.stat(name, dir_fd=self._above, follow_symlinks=False)
            if not os.path.samestat(named, os.fstat(self._root)):
                raise _displaced(self.target)
        self._is_published = True
        self._sync(self.target.parent, self._above)
        self.abandon()

    def publish_file(self, name: str) -> None:
        """Give one file of the tree the final name, durably, and drop the rest.

        Raises Conflict if something has that name.
        """
        with translated(self.target):
            announce("link", self._path / name, self.target)
            try:
                os.link(
                    *(name, self.target.name),
                    src_dir_fd=self._root,
                    dst_dir_fd=self._above,
                    follow_symlinks=False,
                )
            except FileExistsError:
                raise _taken(self.target) from None
        self._sync(self.target.parent, self._above)
        self.abandon()

    def _sync(self, path: Path, descriptor: int) -> None:
        with translated(path):
            announce("syncdir", path)
            os.fsync(descriptor)

    def abandon(self) -> None:
        """Close, and remove what was created and not published; idempotent."""
        try:
            if self._outer >= 0:
                with translated(self._staging):
                    announce("rmtree", self._staging)
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


def _remove_made(name: str, made: Made, above: int) -> bool:
    """Remove a file or empty directory if this name is still its; return whether it was."""
    try:
        if Made.of(os.stat(name, dir_fd=above, follow_symlinks=False)) != made:
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
    made = Made.of(os.fstat(descriptor))
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


def _taken(path: Path) -> Conflict:
    return Conflict("a file of this name is there", where=str(path), hint="choose another name")


def _displaced(path: Path) -> Conflict:
    return Conflict("something else was put in its place", where=str(path))


_ROOT = 0
_ACCESS_LIST = "system.posix_acl_access"


def require_alone(descriptor: int, path: Path) -> None:
    """Raise Conflict unless only this user and root may rename and remove in this directory.

    `path` is its name in the error.  Raises OSError.
    """
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), _ROOT):
        what = "the directory is another user's, who may rename and remove all that is in it"
    elif status.st_mode & stat.S_ISVTX or not _is_written_by_others(descriptor, status):
        return
    else:
        what = "others may write the directory, so they may rename and remove all that is in it"
    shared = Option("shared")
    hint = phrase(
        "name a new directory in one of your own, or add {shared} if you trust them", shared=shared
    )
    if status.st_uid == os.geteuid():
        hint = phrase(
            "chmod +t {path}    (or add {shared} if you trust them)",
            path=shlex.quote(str(path)),
            shared=shared,
        )
    raise Conflict(what, where=str(path), hint=hint)


def _is_written_by_others(descriptor: int, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    # With an access list, the group bits are the mask for everybody on it.
    return _has_access_list(descriptor) or not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether this user is alone in the group, as in a user-private group scheme.

    Such users usually have a umask of 002, so that their groups may write all their directories.
    """
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_first = user.pw_gid == group and entry.gr_name == user.pw_name
    return is_first and set(entry.gr_mem) <= {user.pw_name}


def _has_access_list(descriptor: int) -> bool:
    try:
        return bool(os.getxattr(descriptor, _ACCESS_LIST))
    except OSError:
        return False
