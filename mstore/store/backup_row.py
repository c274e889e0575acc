"""The row of a backup: what the store was when it was copied.

    counters    "backup" -> generation u64 + the PackIds of packs that were damaged when copied

The only module that knows these bytes.  A store without this row is no backup; one whose generation
is another than the row's was written to since.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mstore.blocks.index import COUNTERS, Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.ids import ID_BYTES, PackId

_BACKUP = b"backup"
_GENERATION_BYTES = 8


class BackupRow(msgspec.Struct, frozen=True):
    """The generation of the copied state, and the packs that were damaged when they were copied."""

    generation: int
    damaged: tuple[PackId, ...] = ()


def get(index: Index, transaction: IndexTransaction) -> BackupRow | None:
    """Return the row; None if this index is not a backup's.  Raises Corrupt if it is damaged."""
    value = index.get(transaction, COUNTERS, _BACKUP)
    if value is None:
        return None
    starts = range(_GENERATION_BYTES, len(value), ID_BYTES)
    return BackupRow(
        int.from_bytes(value[:_GENERATION_BYTES], "big"),
        tuple(PackId(value[at : at + ID_BYTES]) for at in starts),
    )


def put(
    index: Index, transaction: IndexTransaction, generation: int, damaged: Sequence[PackId]
) -> None:
    """Mark an index as a backup's."""
    value = generation.to_bytes(_GENERATION_BYTES, "big") + b"".join(damaged)
    index.put(transaction, COUNTERS, _BACKUP, value)


def remove(index: Index, transaction: IndexTransaction) -> None:
    """Mark an index as a store's."""
    index.delete(transaction, COUNTERS, _BACKUP)
