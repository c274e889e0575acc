"""The record cache: decoded records of an open store, bounded by the memory that they take.

Owns which records are kept and for how long: the ones that were asked for last.  Does not read
them.  By bytes and not by count, because a checkpoint may be a few hundred records or tens of
thousands of small ones, and one that does not fit is read anew by every pass over it.

Safe for any number of threads.  What is in it is nobody's word but a copy of what the packs say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Final

from mstore.blocks.packs import Kind
from mstore.objects.canonical import Record

CACHE_BYTES: Final = 64 << 20
"""About five checkpoints of 20,000 small tensors, or five of 500 GB."""

_OF_RECORD: Final = 512
"""What a record takes in memory beside its bytes: objects, a key, a place in the table."""

_OF_LIST: Final = 6
"""Memory for a byte of a record that is a list of objects, and of what it looks them up by."""

Key = bytes
"""The kind, one byte, and the id."""


class RecordCache:
    """Records by kind and id, at most about `limit` bytes of them, but for one that is larger."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._lock = Lock()
        self._size = 0
        self._kept: OrderedDict[Key, tuple[Record, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Record | None:
        """A record that is kept."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Record]:
        """Those of these that are kept."""
        found = {}
        with self._lock:
            for key in keys:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    found[key] = kept[0]
        return found

    def put(self, records: Iterable[tuple[Key, Record, int]]) -> None:
        """Keep records; with each the bytes that it was decoded from."""
        with self._lock:
            for key, record, length in records:
                size = _OF_RECORD + length * (1 if record.kind == Kind.TENSOR else _OF_LIST)
                replaced = self._kept.pop(key, None)
                self._size += size - (0 if replaced is None else replaced[1])
                self._kept[key] = record, size
            while self._size > self._limit and len(self._kept) > 1:
                _, (_, size) = self._kept.popitem(last=False)
                self._size -= size
