"""A private copy of an LMDB file, for readers that cannot hold a place among its readers.

LMDB lets a writer use pages again once no reader's place in the lock file says that they are
needed.  Whoever may not write the lock file (another user's store, a read-only filesystem) has no
place there: LMDB would read pages under his feet while they are written, which gives wrong rows or
ends the process.  So such a reader takes the file as of one commit into memory and gives LMDB that.

When a copy is whole: transaction N writes pages that transaction N - 2 or an earlier one freed, so
no page of the state after T is written before T + 2 is committed and T + 3 at work.  The head of
T + 2 takes the place of T's.  So the two heads are read first, twice alike, and go into the copy;
then the pages; then the heads again.  If they tell of T + 2 the copy is thrown away and taken anew.

Nothing is written, and nobody waits for such a reader.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mstore import fs
from mstore.blocks.lmdb_pages import PAGE, newest_transaction
from mstore.errors import Corrupt, Unavailable

_HEADS = 2 * PAGE
_PAUSE = 0.001
PATIENCE = 10.0
"""Seconds to try for, where others commit all the time."""


class PrivateCopy:
    """The data file of an environment as of one commit, in memory of this process.

    `path` is where LMDB finds it; `seconds` is what taking it took.
    """

    def __init__(self, data: Path, *, patience: float = PATIENCE) -> None:
        """Raises Unavailable where no copy is whole in `patience` seconds, StorageFailed."""
        self.data = data
        began = time.monotonic()
        with fs.translated(data):
            self._source = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while (copy := self._attempt()) is None:
                if time.monotonic() - began > patience:
                    raise Unavailable(
                        "it changes faster than it can be copied, and this user cannot hold a "
                        "place among its readers",
                        where=str(data),
                        hint="run the command again when less is written to the store",
                    )
        except BaseException:
            os.close(self._source)
            raise
        self._copy, self.status, self.transaction = copy
        self._open = [self._source, self._copy]
        self.taken = time.monotonic()
        self.seconds = self.taken - began

    def _attempt(self) -> tuple[int, os.stat_result, int] | None:
        with fs.translated(self.data):
            heads = self._heads()
            transaction = newest_transaction(heads)
            # After: the file may have grown for this transaction.
            status = os.fstat(self._source)
            copy = fs.in_memory(heads, self._source, max(status.st_size, _HEADS))
            if self._newest() <= transaction + 1:
                return copy, status, transaction
            os.close(copy)
        return None

    def _heads(self) -> bytes:
        """The two first pages, none of them half written."""
        while True:
            heads = os.pread(self._source, _HEADS, 0)
            if len(heads) < _HEADS:
                raise Corrupt("the file is cut short", where=str(self.data))
            if os.pread(self._source, _HEADS, 0) == heads:
                return heads
            time.sleep(_PAUSE)

    def _newest(self) -> int:
        return newest_transaction(self._heads())

    @property
    def path(self) -> Path:
        """A name of the copy, for as long as it is open."""
        return Path(f"/proc/self/fd/{self._copy}")

    def age(self) -> float:
        """Seconds since it was taken."""
        return time.monotonic() - self.taken

    def is_old(self) -> bool:
        """Whether something was committed since it was taken.  Raises StorageFailed, Corrupt."""
        with fs.translated(self.data):
            return self._newest() != self.transaction

    def close(self) -> None:
        """Give the memory back, once LMDB has closed it too; idempotent."""
        while self._open:
            os.close(self._open.pop())
