"""Rows that mark snapshots as pinned: keys of the table `counters`.

    counters    "pinned" + SnapshotId -> time_ns u64

The only module that knows these bytes.  They are rows of an older table because versions that know
nothing of pins open an index only with the tables that they know, and pass over other keys of this
one.  What a mark means: `mstore.pins`.
"""

from __future__ import annotations

from mstore.blocks.index import COUNTERS, Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.ids import ID_BYTES, SnapshotId

_PINNED = b"pinned"
_TIME_BYTES = 8


def mark(index: Index, transaction: IndexTransaction, id: SnapshotId, time_ns: int) -> None:
    """Mark a snapshot as pinned; an older mark stays."""
    value = time_ns.to_bytes(_TIME_BYTES, "big")
    index.put(transaction, COUNTERS, _PINNED + id, value, overwrite=False)


def unmark(index: Index, transaction: IndexTransaction, id: SnapshotId) -> None:
    """Remove the mark of a snapshot, if it has one."""
    index.delete(transaction, COUNTERS, _PINNED + id)


def is_marked(index: Index, transaction: IndexTransaction, id: SnapshotId) -> bool:
    """Return whether a snapshot is pinned.  Raises Corrupt if its row is damaged."""
    return index.get(transaction, COUNTERS, _PINNED + id) is not None


def ids(index: Index, transaction: IndexTransaction) -> set[SnapshotId]:
    """Return the snapshots that are marked; some may be gone.  Raises Corrupt at a damaged row."""
    return {
        SnapshotId(key.removeprefix(_PINNED))
        for key, _ in index.walk(transaction, COUNTERS, _PINNED)
    }


def parse(key: bytes, value: bytes) -> tuple[SnapshotId, int] | None:
    """Parse a row of the table: the snapshot, and since when, in ns; None for another row."""
    if not key.startswith(_PINNED) or len(key) != len(_PINNED) + ID_BYTES:
        return None
    return SnapshotId(key.removeprefix(_PINNED)), int.from_bytes(value, "big")
