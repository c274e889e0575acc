"""Disposable LMDB environments: a damaged one is moved away and replaced.

The whole directory is renamed, with data and lock file: a process that has it open continues with
both, and no two processes ever have different data under one lock file. The directory's own lock
(flock) lets one process at a time do so, and a second one that saw the damage finds a new
directory.

A user without write access works without: if the environment is missing, damaged, or too large to
copy into memory (`lmdb_copy`), that reader gets none.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from mstore import fs
from mstore.blocks import lmdb_check
from mstore.blocks.lmdb_env import Environment
from mstore.errors import Corrupt, StorageFailed

Tell = Callable[[str], None]
_ATTEMPTS = 10
COPIED_BYTES = 1 << 28
"""A larger environment is not copied: its content is not worth so much memory."""


def silent(remark: str) -> None:
    """Ignore a remark."""


def acquire(path: Path, databases: tuple[str, ...], what: str, tell: Tell) -> Environment | None:
    """Open the environment at this path; create a missing one, replace a damaged one.

    what: the name of its contents, for people. `tell` is called if a damaged one was moved, with
    its new path. Returns None if this user has no write access and there is none to read. Raises
    Corrupt if a damaged one cannot be moved away, StorageFailed.
    """
    if not fs.may_write(path, path / "lock.mdb"):
        return _as_it_is(path, databases, what, tell)
    refused = ""
    for _ in range(_ATTEMPTS):
        # The user may have deleted it: a rebuild only takes time.
        if fs.make_directory(path, exist_ok=True):
            fs.sync_directory(path.parent)
        found = _inode(path)
        try:
            env = Environment.acquire(path, databases, hint=f"rm -r {path}")
            if _inode(path) == found:
                return env
            # Another process moved one away just now: the two open files may be of different
            # directories.
            env.release()
        except (StorageFailed, FileNotFoundError):
            # Where there was none, another process had just moved it away.
            if found is not None and _inode(path) == found:
                raise
        except Corrupt as error:
            # LMDB may reject a file that passes our page checks: believe it the second time.
            is_sure = refused == error.what
            refused = error.what
            try:
                aside = _set_aside(path, is_sure=is_sure)
            except StorageFailed as refusal:
                if refusal.errno == errno.ENOENT:
                    # Another process is moving it away.
                    continue
                break
            if aside is not None:
                why = error.what.removeprefix("damaged index: ")
                tell(
                    f"the {what} was damaged ({why}) and is replaced by a new one; nothing in it "
                    f"is needed, and {aside} can be deleted"
                )
    raise Corrupt(
        f"the {what} is damaged; nothing in it is needed", where=str(path), hint=f"rm -r {path}"
    )


def _as_it_is(path: Path, databases: tuple[str, ...], what: str, tell: Tell) -> Environment | None:
    """Open the environment for a reader who cannot create one; None if that fails."""
    try:
        if (path / lmdb_check.DATA).stat().st_size > COPIED_BYTES:
            return None
        return Environment.acquire(path, databases, create=False)
    except FileNotFoundError:
        return None
    except Corrupt as error:
        tell(f"the {what} is not used: {error.what}")
    except PermissionError:
        tell(f"the {what} is not used: this user may not read it")
    except StorageFailed as error:
        if error.errno not in (errno.EACCES, errno.ENOENT):
            raise
        tell(f"the {what} is not used: this user may not read it")
    return None


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _set_aside(path: Path, *, is_sure: bool) -> Path | None:
    """Rename the directory if it is still damaged; return its new name.

    is_sure: it is damaged even if its pages look sound.
    """
    lock = fs.LockFile(path, create=False)
    try:
        lock.acquire()
        if not lock.is_current() or not (is_sure or lmdb_check.faults(path)):
            return None
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = path.with_name(f"{path.name}.damaged-{moment}-{time.time_ns() % 10**6:06d}")
        fs.rename(path, aside)
        fs.sync_directory(path.parent)
        return aside
    finally:
        lock.release()
