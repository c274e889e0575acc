"""The record cache: decoded records of an open store, bounded by the memory that they take.

Owns which records are kept: the most recently used. Does not read records. The bound is in bytes,
not in records, because a checkpoint may have a few hundred records or tens of thousands of small
ones, and every pass decodes one that does not fit again. Safe for any number of threads. An entry
is only a copy of what the packs say.
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
"""Memory that a record takes beside its bytes: objects, a key, a table entry."""

_OF_LIST: Final = 6
"""Memory for a byte of a record that is a list of objects, and of what it looks them up by."""

Key = bytes
"""The kind (one byte), then the id."""


class RecordCache:
    """Records by kind and id, at most about `limit` bytes; a single larger record is kept alone."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._lock = Lock()
        self._size = 0
        self._kept: OrderedDict[Key, tuple[Record, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Record | None:
        """Return a cached record, or None."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Record]:
        """Return those of these records that are cached."""
        found = {}
        with self._lock:
            for key in keys:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    found[key] = kept[0]
        return found

    def put(self, records: Iterable[tuple[Key, Record, int]]) -> None:
        """Cache records, each with the length in bytes that it was decoded from."""
        with self._lock:
            for key, record, length in records:
                size = _OF_RECORD + length * (1 if record.kind == Kind.TENSOR else _OF_LIST)
                replaced = self._kept.pop(key, None)
                self._size += size - (0 if replaced is None else replaced[1])
                self._kept[key] = record, size
            while self._size > self._limit and len(self._kept) > 1:
                _, (_, size) = self._kept.popitem(last=False)
                self._size -= size
