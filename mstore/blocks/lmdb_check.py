"""Is an LMDB file one that LMDB can be trusted with?  Looked at before LMDB maps it.

LMDB trusts its file: one that was cut short, or a page number that points nowhere, ends the
process with a signal.  So a file is walked page by page (`lmdb_pages`) when it is opened; a large
one only where that has not been done since it last changed.  Of a large file the *stamp* says so,
a small file beside it:

    checked   magic "MSTORECK", u64 device, inode, size, mtime (ns), ctime (ns), transaction

Whoever has walked the file writes the stamp; whoever commits writes it anew, if it was right
before the commit.  A stamp that is missing, torn or of another state means a walk, so it is
advice: it is not synced, and that it cannot be written is no error.

A byte that turned on the disk leaves the stamp right.  Then `fsck` finds it, which always walks.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mstore import fs
from mstore.blocks.lmdb_copy import PrivateCopy
from mstore.blocks.lmdb_pages import LmdbFile
from mstore.errors import Corrupt, StorageFailed

SMALL_BYTES = 1 << 20
"""Up to this size a file is walked at each opening, which takes about 10 ms."""
DATA = "data.mdb"
STAMP = "checked"
_MAGIC = b"MSTORECK"
_STATE = struct.Struct("<8sQQQqqQ")
_TELL_AT_MOST = 20
_ATTEMPTS = 20
_PAUSE = 0.01


def require_sound(directory: Path, hint: str) -> bytes:
    """Raise Corrupt with this hint where the environment's file cannot be trusted.

    Returns the state in which it was found sound, for `Trust`.  Raises StorageFailed.
    """
    found, state = _looked_at(directory, always=False)
    if found:
        what = found[0].removeprefix("damaged index: ")
        raise Corrupt(f"damaged index: {what}", where=str(directory), hint=hint)
    return state


def require_sound_copy(directory: Path, copy: PrivateCopy, hint: str) -> None:
    """The same of a copy of the environment's file, which stays as it is.  Writes nothing."""
    if copy.status.st_size > SMALL_BYTES and _stamp(directory) == _state(
        copy.status, copy.transaction
    ):
        return
    try:
        with LmdbFile(copy.path) as file:
            found = _walked(file)
    except Corrupt as error:
        found = [error.what]
    if found:
        what = found[0].removeprefix("damaged index: ")
        raise Corrupt(f"damaged index: {what}", where=str(directory), hint=hint)


def faults(directory: Path) -> list[str]:
    """What is wrong with an environment's file, at most twenty things; [] where there is none.

    Reads every page.  One that LMDB never wrote a head to has none: whoever opens it makes it.
    Raises StorageFailed.
    """
    if not is_born(directory / DATA):
        return []
    try:
        return _looked_at(directory, always=True)[0]
    except StorageFailed as error:
        if error.errno != errno.ENOENT:
            raise
        return []


def is_born(data: Path) -> bool:
    """Whether LMDB ever got as far as a header here; a crash may leave no byte, or only zeros."""
    try:
        with fs.translated(data), data.open("rb") as file:
            return any(file.read(4096))
    except StorageFailed as error:
        if error.errno == errno.ENOENT:
            return False
        raise


class Trust:
    """What one open environment knows of its file, and tells those who open it later.

    `before` and `after` surround a commit, each under LMDB's own write lock or right after it.
    """

    def __init__(self, directory: Path, state: bytes) -> None:
        self._directory = directory
        self._state = state
        self._is_right = False

    def before(self, transaction: int) -> None:
        """A write transaction of this number has begun: is the file the one that was checked?"""
        now = _state(os.stat(self._directory / DATA), transaction - 1)
        self._is_right = now in (self._state, _stamp(self._directory))
        self._state = now

    def after(self, transaction: int) -> None:
        """It was committed."""
        status = os.stat(self._directory / DATA)
        now = _state(status, transaction)
        # A transaction that changed nothing leaves no trace, not even its number.
        if self._is_right and _state(status, transaction - 1) != self._state:
            self._state = now
            if status.st_size > SMALL_BYTES:
                _put_stamp(self._directory, now)


def _looked_at(directory: Path, *, always: bool) -> tuple[list[str], bytes]:
    """The faults of a file, and its state.  What looks wrong while others commit is none."""
    found: list[str] = []
    state = b""
    for _ in range(_ATTEMPTS):
        try:
            with LmdbFile(directory / DATA) as file:
                status = file.status()
                state = _state(status, file.transaction)
                is_small = status.st_size <= SMALL_BYTES
                if not always and not is_small and _stamp(directory) == state:
                    return [], state
                found = _walked(file)
                if not found:
                    if not is_small and _state(file.status(), file.transaction) == state:
                        _put_stamp(directory, state)
                    return [], state
                # Pages are only used again once two transactions were committed.
                time.sleep(_PAUSE)
                if not file.moved() and (found := _walked(file)) and not file.moved():
                    return found, state
        except Corrupt as error:
            # The heads; somebody may have been writing one.
            if found == [error.what]:
                return found, state
            found = [error.what]
            time.sleep(_PAUSE)
    # Others commit all the time: LMDB is at work in it.
    return [], state


def _walked(file: LmdbFile) -> list[str]:
    found: list[str] = []
    file.check_pages(at_most(found))
    return found


def at_most(found: list[str]) -> Callable[[str], None]:
    """Adds what is told to a list, until that has twenty lines."""

    def tell(what: str) -> None:
        if len(found) < _TELL_AT_MOST:
            found.append(what)

    return tell


def _state(status: os.stat_result, transaction: int) -> bytes:
    return _STATE.pack(
        _MAGIC,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        transaction,
    )


def _stamp(directory: Path) -> bytes:
    try:
        with (directory / STAMP).open("rb") as file:
            return file.read(_STATE.size)
    except OSError:
        return b""


def _put_stamp(directory: Path, state: bytes) -> None:
    with suppress(StorageFailed):
        fs.overwrite(directory / STAMP, state)
