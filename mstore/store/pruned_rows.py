"""Rows that mark snapshots as pruned: the table `pruned`.

    pruned    SnapshotId -> time_ns u64

The only module that knows these bytes. What a mark means: `mstore.store.contents`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.ids import SnapshotId

_PRUNED = "pruned"
_TIME_BYTES = 8


def mark(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId], time_ns: int
) -> None:
    """Mark these snapshots as pruned; an older mark stays."""
    value = time_ns.to_bytes(_TIME_BYTES, "big")
    for id in snapshots:
        index.put(transaction, _PRUNED, id, value, overwrite=False)


def unmark(index: Index, transaction: IndexTransaction, id: SnapshotId) -> None:
    """Remove the mark of a snapshot, if it has one."""
    index.delete(transaction, _PRUNED, id)


def is_marked(index: Index, transaction: IndexTransaction, id: SnapshotId) -> bool:
    """Return whether a snapshot was pruned.  Raises Corrupt if its row is damaged."""
    return index.get(transaction, _PRUNED, id) is not None


def ids(index: Index, transaction: IndexTransaction) -> set[SnapshotId]:
    """Return the snapshots that were pruned.  Raises Corrupt at a damaged row."""
    return {SnapshotId(key) for key, _ in index.walk(transaction, _PRUNED)}


def parse(key: bytes, value: bytes) -> tuple[SnapshotId, int]:
    """Parse a row: the snapshot, and when it was pruned, in ns.  Raises ValueError."""
    return SnapshotId(key), int.from_bytes(value, "big")
