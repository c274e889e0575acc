"""Rights: whose the files of a store are, who else may use them, and who may write them.

Owns the modes and owners of what is created in a store. What root creates there belongs to the
owner of the store's directory: otherwise a command by root would leave files that the owner's
commands cannot change.

Who besides its creator may use a file of a store is like git's core.sharedRepository:

    umask   what the creator's umask leaves
    group   its group may also read and write it, whatever the umask; directories are setgid, so
            that what is created in them later belongs to the same group
    all     the same, and everyone may read it

A *private* file or directory (a lock, or one being written) is only for users who may also write
it: a user who may open a lock can hold it. A *sealed* file is written by no one.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from mstore.fs.roots import identity, listed, parent, root_of, status_of, translated
from mstore.terms.errors import StorageFailed
from mstore.terms.phrases import Text, call, phrase

FILE: Final = 0o666
SEALED: Final = 0o444
DIRECTORY: Final = 0o777
_SETGID: Final = 0o2000


class Sharing(StrEnum):
    """Who besides its creator may use what is created in a store."""

    UMASK = "umask"
    GROUP = "group"
    ALL = "all"


def mode_of(sharing: Sharing, kind: int, umask: int, *, private: bool = False) -> int:
    """Return the mode of something new; `kind` is FILE, SEALED or DIRECTORY."""
    allowed = kind & ~umask
    if sharing is not Sharing.UMASK:
        allowed |= kind & 0o660
        if kind == DIRECTORY:
            allowed |= 0o070 | _SETGID
    if sharing is Sharing.ALL:
        allowed |= kind & 0o555
    if private:
        # Exactly those who may write may read.
        allowed &= 0o2700 | (0o070 if allowed & 0o020 else 0) | (0o007 if allowed & 0o002 else 0)
    return allowed


def require_giving(path: Path) -> None:
    """Raise StorageFailed if root may not give away what it creates at `path`."""
    root = root_of(path)
    if root is not None and root.owner is not None and root.descriptor is not None:
        # The owner has it already: this changes nothing, and fails where giving would fail.
        _give(root.descriptor.fd, path, root.owner)


def settle(descriptor: int, path: Path, kind: int, *, private: bool) -> None:
    """Give something new the owner and the mode of the store that contains it.

    Uses its descriptor, because others may replace any name. Raises StorageFailed.
    """
    root = root_of(path)
    if root is not None and root.owner is not None:
        _give(descriptor, path, root.owner)
    sharing = sharing_of(path)
    if sharing is not Sharing.UMASK:
        with translated(path):
            os.fchmod(descriptor, mode_of(sharing, kind, umask(), private=private))


def are_special(path: Path) -> bool:
    """Return whether what is created at `path` needs another owner or mode than the umask gives."""
    root = root_of(path)
    return sharing_of(path) is not Sharing.UMASK or (root is not None and root.owner is not None)


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
    for path in _below(root):
        is_private = any(path == one or one in path.parents for one in private)
        # Other processes may remove files meanwhile.
        with translated(path), suppress(FileNotFoundError):
            status = path.stat() if path == root else status_of(path)
            now = stat.S_IMODE(status.st_mode)
            wanted = now | _shared_bits(status, sharing, is_private=is_private)
            if wanted != now and os.geteuid() not in (0, status.st_uid):
                raise StorageFailed(
                    f"this is user {user_name(status.st_uid)}'s, who has to share it, or root",
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
        with translated(path), suppress(FileNotFoundError), _opened(path, root) as descriptor:
            os.fchmod(descriptor, wanted)


def _below(root: Path) -> list[Path]:
    """Return `root` and all paths below it that can be listed, reached without following a link."""
    found = [root]
    for path in found:
        # Other processes may remove files meanwhile, and other users' may be closed.
        with translated(path), suppress(FileNotFoundError, PermissionError):
            if path == root:
                found += [path / name for name in sorted(os.listdir(path))]
            elif stat.S_ISDIR(status_of(path).st_mode):
                found += [path / name for name in listed(path)]
    return found


@contextmanager
def _opened(path: Path, root: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if path == root else os.O_NOFOLLOW)
    with parent(path) as (above, name):
        descriptor = os.open(name, flags, dir_fd=above)
    try:
        yield descriptor
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
    return mode_of(sharing, kind, 0o777 & ~now, private=is_private)


def sharing_of(path: Path) -> Sharing:
    """Return who may use what is created at `path`."""
    if not _shared:
        return Sharing.UMASK
    absolute = os.path.abspath(path)
    roots = [root for root in _shared if absolute == root or absolute.startswith(root + os.sep)]
    return _shared[max(roots, key=len)] if roots else Sharing.UMASK


def first_mode(path: Path, kind: int, *, private: bool) -> int:
    """Return the mode to create something with: never more than its final mode."""
    return mode_of(sharing_of(path), kind, umask(), private=True) & 0o777 if private else kind


def umask() -> int:
    """Return this process's umask, without the side effect of umask(2)."""
    try:
        status = _STATUS.read_text(errors="replace")
    except OSError:
        return 0o077
    line = next((line for line in status.splitlines() if line.startswith("Umask:")), "Umask: 077")
    return int(line.split()[1], 8)


_STATUS = Path("/proc/self/status")


def owners(store: Path) -> list[int]:
    """Return who owns the directory of a store and its format file; if they are links, also those.

    Raises OSError.
    """
    found = [os.lstat(store).st_uid, os.stat(store).st_uid]
    # An unfinished store has no format file, and nobody sees that of a closed directory.
    with suppress(FileNotFoundError, PermissionError):
        found.append(os.lstat(store / "format").st_uid)
        found.append(os.stat(store / "format").st_uid)
    return found


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
    names = user_name(me), user_name(owner)
    what = "this store can be read and not written by user {}: it is user {}'s".format(*names)
    advice: Text = phrase(
        "sudo -u {owner} ...    (the same command as the store's owner)\n"
        "or its owner shares it: chgrp -R GROUP {store} && {share}",
        owner=shlex.quote(user_name(owner)),
        store=shlex.quote(str(root)),
        share=call("configure", "shared", "group"),
    )
    if owner == me:
        what = "this store can be read and not written: somebody took the right to write from it"
        advice = f"chmod -R u+w {shlex.quote(str(root))}"
    raise StorageFailed(what, where=str(path), hint=advice, errno=code)


def user_name(number: int) -> str:
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
            asked = identity(there)
            code = _refused(there)
            if code is None:
                break
            # Else another process has moved it away or replaced it while we asked.
            if asked is not None and identity(there) == asked:
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
