"""LMDB environments that can be thrown away: a damaged one is set aside and replaced.

The whole directory is renamed, with data and lock file: whoever has it open goes on with both, and
no two processes ever have different data under one lock file.  The directory's own lock (flock)
lets one process at a time do so, and a second one that saw the damage finds a new directory.

Whoever may not write it does without: where it is missing, damaged, or too large to be copied into
memory (`lmdb_copy`), there is none for that reader.
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
"""Of a larger one no copy is taken: what it tells is not worth so much memory."""


def silent(note: str) -> None:
    """Tell nobody."""


def acquire(path: Path, databases: tuple[str, ...], what: str, tell: Tell) -> Environment | None:
    """The environment of this path, made if it is missing; a damaged one is set aside first.

    what: the name of its contents, for people; `tell` hears of what was set aside, and where.
    None where there is none that this user, who may not write it, could read.  Raises Corrupt where
    it cannot be set aside, StorageFailed.
    """
    if not fs.may_write(path, path / "lock.mdb"):
        return _as_it_is(path, databases, what, tell)
    refused = ""
    for _ in range(_ATTEMPTS):
        # Somebody may have deleted it, which costs nothing but time.
        if fs.make_directory(path, exist_ok=True):
            fs.sync_directory(path.parent)
        found = _inode(path)
        try:
            env = Environment.acquire(path, databases, hint=f"rm -r {path}")
            if _inode(path) == found:
                return env
            # Its two files may be of two directories: somebody set one aside just now.
            env.release()
        except (StorageFailed, FileNotFoundError):
            if _inode(path) == found:
                raise
        except Corrupt as error:
            # LMDB may refuse what looks whole page by page: then its word counts, the second time.
            is_sure = refused == error.what
            refused = error.what
            try:
                aside = _set_aside(path, is_sure=is_sure)
            except StorageFailed as refusal:
                if refusal.errno == errno.ENOENT:
                    # Another process is just setting it aside.
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
    """The environment for a reader who can make nothing."""
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
    """Rename the directory if it still is damaged; returns its new name.

    is_sure: it is, whatever its pages look like.
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
