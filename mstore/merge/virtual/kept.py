"""Computed blocks on disk: what one process computed, a later one reads.

A block in the cache on disk counts only where the memo table names its id, and its bytes hash to
that. So both are written for each chunk: its blocks once the reader has them, and the row, with
those of other chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from mstore.merge.running.memo_keys import Remembered
from mstore.store.disk_cache import ComputedBlock, DiskCache
from mstore.store.memo import Memo
from mstore.terms.errors import MstoreError
from mstore.terms.ids import Buffer

_FLUSH_ROWS: Final = 1024
_FLUSH_SECONDS: Final = 5.0
"""Rows of a process that is killed are lost for so long, and their blocks are computed again."""


class KeptBlocks:
    """What is remembered of computed chunks, and their blocks; for any number of threads."""

    def __init__(self, memo: Memo, cache: DiskCache) -> None:
        self._memo = memo
        self._cache = cache
        self._lock = threading.Lock()
        self._unflushed = 0
        self._flushed = time.monotonic()

    def row(self, key: bytes) -> Remembered | None:
        """Return what the memo table has of a chunk."""
        value = self._memo.outputs([key])[0]
        return None if value is None else Remembered.decode(value)

    def remember(self, key: bytes, row: Remembered) -> None:
        """Put what a chunk is into the memo table; it is written with others."""
        self._memo.put_outputs([(key, row.encode())])
        with self._lock:
            self._unflushed += 1

    def has(self, blocks: Iterable[ComputedBlock]) -> bool:
        """Return whether all of them seem to be in the cache."""
        return all(map(self._cache.has, blocks))

    def read(self, blocks: Iterable[ComputedBlock]) -> list[Buffer] | None:
        """Return these blocks, each compared with its id; None if one is missing or wrong."""
        found = []
        for block in blocks:
            data = self._cache.get(block)
            if data is None:
                return None
            found.append(data)
        return found

    def keep(self, blocks: Sequence[tuple[ComputedBlock, Buffer]]) -> None:
        """Put blocks that were compared with their ids into the cache."""
        for block, data in blocks:
            if not self._cache.has(block):
                self._cache.put(block, data)
        with self._lock:
            is_late = time.monotonic() - self._flushed >= _FLUSH_SECONDS
            is_due = self._unflushed >= _FLUSH_ROWS or (self._unflushed > 0 and is_late)
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write the rows of the memo table."""
        with self._lock:
            self._unflushed = 0
            self._flushed = time.monotonic()
        # The store may be another user's: without a memo row a block is computed again, unchecked.
        with suppress(MstoreError):
            self._memo.flush()
