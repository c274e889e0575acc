"""The index as a file: whether it is safe to open with LMDB.

Checks every page and the form of every row without LMDB (`blocks.lmdb_pages`), because some damage
makes LMDB end the process. Other modules compare the rows with the packs.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from mstore.blocks.lmdb_check import at_most
from mstore.blocks.lmdb_pages import LmdbFile
from mstore.blocks.schema import DATABASES, TABLES
from mstore.store.layout import Layout
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.phrases import call

_LENGTHS = {
    table.name.encode(): (table.key.lengths, table.row_lengths())
    for table in TABLES
    if table.key.lengths or table.row_lengths()
}
_ATTEMPTS = 20
_PAUSE = 0.01


def faults(layout: Layout, descriptor: int | None = None) -> list[str]:
    """Return what is wrong with the index file, at most twenty faults; changes nothing.

    Raises StorageFailed if it cannot be read now.

    Call it inside a read transaction of the index: LMDB does not reuse the pages that this may see.
    descriptor: of the file that this transaction reads (`Environment.opened`), which this closes.
    """
    try:
        with _opened(layout.index / "data.mdb", descriptor) as file:
            return _faults(file)
    except Corrupt as error:
        return [error.what]


def _opened(path: Path, descriptor: int | None = None) -> LmdbFile:
    try:
        return LmdbFile(path, descriptor)
    except StorageFailed as error:
        if error.errno != errno.ENOENT:
            raise
        raise Corrupt("there is no file", where=str(path)) from error


def _faults_from_outside(layout: Layout) -> list[str]:
    """Return the faults before the index is opened; none if others commit continuously."""
    for _ in range(_ATTEMPTS):
        found = faults(layout)
        if not found:
            break
        with suppress(Corrupt), _opened(layout.index / "data.mdb") as file:
            time.sleep(_PAUSE)
            if file.moved():
                continue
            # No commit is running: what is still wrong is damage.
            found = _faults(file)
            if file.moved():
                continue
        return found
    return []


def _faults(file: LmdbFile) -> list[str]:
    found: list[str] = []
    tell = at_most(found)

    def look(database: bytes, key: bytes, value: bytes) -> None:
        keys, rows = _LENGTHS.get(database, (None, None))
        if (keys and len(key) not in keys) or (rows and len(value) not in rows):
            tell(f"{database.decode()}: the row {key.hex()[:16]} has another form")

    names = file.check(tell, look)
    for name in DATABASES:
        if name.encode() not in names:
            tell(f"the database {name} is missing")
    return found


def require_sound(layout: Layout) -> None:
    """Raise Corrupt if the index cannot be trusted, before LMDB opens it."""
    refuse(layout, _faults_from_outside(layout))


def refuse(layout: Layout, found: list[str]) -> None:
    """Raise Corrupt if there are faults."""
    if found:
        raise Corrupt(
            f"the index is damaged: {found[0].removeprefix('damaged index: ')}",
            where=str(layout.index),
            hint=call("reindex"),
        )
