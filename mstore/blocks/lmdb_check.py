"""Checks whether an LMDB file is safe to map, before LMDB maps it.

LMDB trusts its file: a truncated file, or a page number that points nowhere, ends the process with
a signal. So a file is walked page by page (`lmdb_pages`) when it is opened; a large one only if it
changed since the last walk. For a large file the *stamp* records that, a small file beside it:

    checked   magic "MSTORECK", u64 device, inode, size, mtime (ns), ctime (ns), transaction

A process that has walked the file writes the stamp; a process that commits renews it, if it was
right before the commit. A stamp that is missing, torn or of another state causes a walk. So it is
only a hint: it is not synced, and failing to write it is no error.

A byte that flipped on the disk leaves the stamp valid. `fsck` finds that, because it always walks.
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
from mstore.terms.errors import Conflict, Corrupt, StorageFailed, Unreadable
from mstore.terms.phrases import Text

SMALL_BYTES = 1 << 20
"""Up to this size, in bytes, a file is walked at each opening, which takes about 10 ms."""
DATA = "data.mdb"
STAMP = "checked"
_MAGIC = b"MSTORECK"
_STATE = struct.Struct("<8sQQQqqQ")
_TELL_AT_MOST = 20
_ATTEMPTS = 20
_PAUSE = 0.01


def require_sound(directory: Path, hint: Text) -> bytes:
    """Raise Corrupt with this hint if the environment's file is not safe to map.

    Returns the state in which it was found sound, for `Trust`. Raises StorageFailed.
    """
    found, state = _looked_at(directory, always=False)
    _require_none(found, directory, hint)
    return state


def require_sound_copy(directory: Path, copy: PrivateCopy, hint: Text) -> None:
    """Like `require_sound`, for a private copy of the environment's file. Writes nothing."""
    state = _state(copy.status, copy.transaction)
    if copy.status.st_size > SMALL_BYTES and _stamp(directory) == state:
        return
    try:
        with LmdbFile(copy.path, copy.opened()) as file:
            found = _walked(file)
    except Corrupt as error:
        found = [error.what]
    _require_none(found, directory, hint)


def _require_none(found: list[str], directory: Path, hint: Text) -> None:
    if found:
        what = found[0].removeprefix("damaged index: ")
        raise Corrupt(f"damaged index: {what}", where=str(directory), hint=hint)


def faults(directory: Path) -> list[str]:
    """Return what is wrong with an environment's file, at most twenty faults; [] if it is missing.

    Reads every page. A file without a header yet has no faults: opening it initialises it. Raises
    StorageFailed.
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
    """Return whether LMDB has written a header; a crash may leave an empty or zeroed file."""
    try:
        return any(fs.read_file(data, 4096))
    except StorageFailed as error:
        if error.errno == errno.ENOENT:
            return False
        raise


class Trust:
    """What one open environment knows of its file, and records for later openings.

    `before` and `after` surround a commit, each under LMDB's own write lock or right after it.
    """

    def __init__(self, directory: Path, state: bytes) -> None:
        self._directory = directory
        self._state = state
        self._is_right = False

    def before(self, transaction: int) -> None:
        """Note at the start of a write transaction whether the file is still the one checked."""
        now = _state(os.stat(self._directory / DATA), transaction - 1)
        self._is_right = now in (self._state, _stamp(self._directory))
        self._state = now

    def after(self, transaction: int) -> None:
        """Renew the stamp after the transaction was committed."""
        status = os.stat(self._directory / DATA)
        now = _state(status, transaction)
        # A transaction that changed nothing leaves no trace, not even its number.
        if self._is_right and _state(status, transaction - 1) != self._state:
            self._state = now
            if status.st_size > SMALL_BYTES:
                _put_stamp(self._directory, now)


def _looked_at(directory: Path, *, always: bool) -> tuple[list[str], bytes]:
    """Return a file's faults and its state. Ignores what looks wrong only because others commit."""
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
                # Pages are only reused once two transactions were committed.
                time.sleep(_PAUSE)
                if not file.moved() and (found := _walked(file)) and not file.moved():
                    return found, state
        except Corrupt as error:
            # A damaged header, unless a writer was just updating it.
            if found == [error.what]:
                return found, state
            found = [error.what]
            time.sleep(_PAUSE)
    # Others commit continuously: LMDB is using the file successfully.
    return [], state


def _walked(file: LmdbFile) -> list[str]:
    found: list[str] = []
    file.check(at_most(found))
    return found


def at_most(found: list[str]) -> Callable[[str], None]:
    """Return a function that appends faults to a list, up to twenty."""

    def tell(what: str) -> None:
        if len(found) < _TELL_AT_MOST:
            found.append(what)

    return tell


def _state(status: os.stat_result, transaction: int) -> bytes:
    file = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _STATE.pack(_MAGIC, *file, transaction)


def _stamp(directory: Path) -> bytes:
    try:
        return fs.read_file(directory / STAMP, _STATE.size)
    except (StorageFailed, Conflict, Unreadable):
        return b""


def _put_stamp(directory: Path, state: bytes) -> None:
    with suppress(StorageFailed, Conflict):
        fs.overwrite(directory / STAMP, state)
