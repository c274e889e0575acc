"""Rows that give snapshots their signatures: the table `signatures`.

    signatures   SnapshotId + SignatureId   -> empty

The only module that knows these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstore.blocks import row_batches
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.ids import ID_BYTES, SignatureId, SnapshotId

_SIGNATURES = "signatures"


def insert(
    index: Index, transaction: IndexTransaction, snapshot: bytes, signature: SignatureId
) -> None:
    """Give a stored signature to its snapshot."""
    index.put(transaction, _SIGNATURES, snapshot + signature, b"")


def of(index: Index, transaction: IndexTransaction, snapshot: SnapshotId) -> list[SignatureId]:
    """Return the signatures of a snapshot, by id.  Raises Corrupt at a damaged row."""
    rows = index.walk(transaction, _SIGNATURES, snapshot)
    return [SignatureId(key[ID_BYTES:]) for key, _ in rows]


def remove(index: Index, transaction: IndexTransaction, snapshot: SnapshotId) -> None:
    """Remove the signatures of a snapshot."""
    with transaction.cursor(db=index.db(_SIGNATURES)) as cursor:
        while cursor.set_range(snapshot) and cursor.key().startswith(snapshot):
            cursor.delete()


def all_rows(index: Index) -> Iterator[tuple[SnapshotId, SignatureId] | bytes]:
    """Yield snapshot and signature of every row, or the key of a row that has another form."""
    for batch in row_batches.of_table(index, _SIGNATURES):
        for key, _ in batch:
            if len(key) == 2 * ID_BYTES:
                yield SnapshotId(key[:ID_BYTES]), SignatureId(key[ID_BYTES:])
            else:
                yield key
