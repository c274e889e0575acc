"""A private copy of an LMDB file, for readers that cannot register with LMDB.

LMDB lets a writer reuse pages once no reader registered in the lock file needs them. Where that
file cannot be written (another user's store, a read-only filesystem, a full disk), nobody can
register. LMDB would then read pages while they are being overwritten, which gives wrong rows or
ends the process. So such a reader copies the file as of one commit into memory and has LMDB open
that.

When a copy is consistent: transaction N writes pages that transaction N - 2 or an earlier one
freed. So no page of the state after T is overwritten before T + 2 is committed and T + 3 is
running. The meta page of T + 2 replaces T's. So the copy first takes the two meta pages, read twice
with the same result; then the other pages; then it reads the meta pages again. If they are of T + 2
or later, the copy is discarded and retaken. Nothing is written, and no one waits for such a reader.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mstore import fs
from mstore.blocks.lmdb_pages import HEAD_BYTES, newest_transaction, page_size
from mstore.terms.errors import Corrupt, Unavailable

_PAUSE = 0.001
PATIENCE = 10.0
"""Seconds to retry while others commit continuously."""


class PrivateCopy:
    """The data file of an environment as of one commit, in this process's memory.

    `path` is where LMDB finds it; `seconds` is how long the copy took.
    """

    def __init__(self, data: Path, *, patience: float = PATIENCE) -> None:
        """Take the copy.

        Raises Unavailable if no consistent copy can be taken in `patience` seconds, StorageFailed.
        """
        self.data = data
        began = time.monotonic()
        with fs.reading(data):
            self._source = fs.open_file(data)
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
        with fs.reading(self.data):
            heads = self._heads()
            transaction = newest_transaction(heads)
            # After the meta pages: the file may have grown for this transaction.
            status = os.fstat(self._source)
            copy = fs.in_memory(heads, self._source, max(status.st_size, len(heads)))
            if self._newest() <= transaction + 1:
                return copy, status, transaction
            os.close(copy)
        return None

    def _heads(self) -> bytes:
        """Return the first two pages (the meta pages), neither half written."""
        size = 2 * page_size(os.pread(self._source, HEAD_BYTES, 0), self.data)
        while True:
            heads = os.pread(self._source, size, 0)
            if len(heads) < size:
                raise Corrupt("the file is cut short", where=str(self.data))
            if os.pread(self._source, size, 0) == heads:
                return heads
            time.sleep(_PAUSE)

    def _newest(self) -> int:
        return newest_transaction(self._heads())

    @property
    def path(self) -> Path:
        """A path of the copy, valid while it is open."""
        return Path(f"/proc/self/fd/{self._copy}")

    def opened(self) -> int:
        """Open the copy once more; return the descriptor, which is the caller's to close."""
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def age(self) -> float:
        """Return the seconds since it was taken."""
        return time.monotonic() - self.taken

    def is_old(self) -> bool:
        """Return whether something was committed since. Raises StorageFailed, Corrupt."""
        with fs.reading(self.data):
            return self._newest() != self.transaction

    def close(self) -> None:
        """Free the memory, once LMDB has closed it too; idempotent."""
        while self._open:
            os.close(self._open.pop())
