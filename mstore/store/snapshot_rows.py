"""Rows that list snapshots: the tables `snapshots` and `edges`.

    snapshots   SnapshotId                   -> ManifestId + time_ns u64
    edges       "m" ManifestId SnapshotId    -> empty
                "p" parent child role        -> empty

The only module that knows these bytes.  The rows repeat what the snapshot's record says, so that
content and children are found without reading every record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Final

from mstore.blocks.checked_rows import CHECK_BYTES
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, ManifestId, SnapshotId
from mstore.objects.snapshot import SnapshotRecord

_SNAPSHOTS = "snapshots"
_EDGES = "edges"
_CONTENT = b"m"
_PARENT = b"p"
_TIME_BYTES = 8
_CHILD = slice(1 + ID_BYTES, 1 + 2 * ID_BYTES)

FORM: Final = frozenset({ID_BYTES}), frozenset({ID_BYTES + _TIME_BYTES + CHECK_BYTES})
"""The lengths that keys and rows of `snapshots` may have."""


def _value(record: SnapshotRecord) -> bytes:
    return record.manifest + record.time_ns.to_bytes(_TIME_BYTES, "big")


def _edges(id: SnapshotId, record: SnapshotRecord) -> Iterator[bytes]:
    yield _CONTENT + record.manifest + id
    for parent in record.parents:
        yield _PARENT + parent.snapshot + id + parent.role.encode()


def insert(index: Index, transaction: IndexTransaction, record: SnapshotRecord) -> None:
    """Insert the rows of a snapshot: its own, content -> snapshot, and parent -> child edges."""
    id = record.id()
    index.put(transaction, _SNAPSHOTS, id, _value(record))
    for edge in _edges(id, record):
        index.put(transaction, _EDGES, edge, b"")


def is_listed(index: Index, transaction: IndexTransaction, id: bytes) -> bool:
    """Return whether the index lists a snapshot.  Raises Corrupt if its row is damaged."""
    return index.get(transaction, _SNAPSHOTS, id) is not None


def agree(
    index: Index, transaction: IndexTransaction, id: SnapshotId, record: SnapshotRecord
) -> bool:
    """Return whether the rows of a snapshot match its record; True if it is not listed at all."""
    value = index.get(transaction, _SNAPSHOTS, id)
    if value is None:
        return True
    edges = index.db(_EDGES)
    return value == _value(record) and all(
        transaction.get(edge, db=edges) is not None for edge in _edges(id, record)
    )


def ids(index: Index, transaction: IndexTransaction) -> Iterator[SnapshotId]:
    """Yield every listed snapshot, by id.  Raises Corrupt at a damaged row."""
    for key, _ in index.walk(transaction, _SNAPSHOTS):
        yield SnapshotId(key)


def times(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId]
) -> dict[SnapshotId, int]:
    """Return the time of each of these snapshots that is listed, in ns since the epoch."""
    values = {id: index.get(transaction, _SNAPSHOTS, id) for id in snapshots}
    return {
        id: int.from_bytes(value[ID_BYTES:], "big")
        for id, value in values.items()
        if value is not None
    }


def contents(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId]
) -> dict[SnapshotId, ManifestId]:
    """Return the content of each of these snapshots that is listed; leaves out damaged rows."""
    found = {}
    for id in snapshots:
        with suppress(Corrupt):
            value = index.get(transaction, _SNAPSHOTS, id)
            if value is not None:
                found[id] = ManifestId(value[:ID_BYTES])
    return found


def with_prefix(index: Index, transaction: IndexTransaction, digits: str) -> list[SnapshotId]:
    """Return the listed snapshots whose id starts with these hex digits, by id."""
    start = bytes.fromhex(digits.ljust(2 * ID_BYTES, "0"))
    keys = index.keys(transaction, _SNAPSHOTS, start)
    return [SnapshotId(key) for key in takewhile(lambda key: key.hex().startswith(digits), keys)]


def children(index: Index, transaction: IndexTransaction, id: SnapshotId) -> set[SnapshotId]:
    """Return the listed snapshots that have this one as a parent."""
    edges = index.walk(transaction, _EDGES, _PARENT + id)
    return {SnapshotId(key[_CHILD]) for key, _ in edges}


def with_content(
    index: Index, transaction: IndexTransaction, manifest: ManifestId
) -> list[SnapshotId]:
    """Return the listed snapshots with this content, by id."""
    prefix = _CONTENT + manifest
    edges = index.walk(transaction, _EDGES, prefix)
    return [SnapshotId(key[len(prefix) :]) for key, _ in edges]


def unlist(index: Index, transaction: IndexTransaction, id: SnapshotId) -> None:
    """Remove the rows that list a snapshot whose record is lost; its place as a child stays."""
    row = transaction.pop(id, db=index.db(_SNAPSHOTS))
    if row is not None:
        index.delete(transaction, _EDGES, _CONTENT + row[:ID_BYTES] + id)


def remove(index: Index, transaction: IndexTransaction, gone: Collection[SnapshotId]) -> None:
    """Remove all rows of snapshots that are gone.  Raises Corrupt at a damaged row."""
    for id in gone:
        value = index.get(transaction, _SNAPSHOTS, id)
        if value is not None:
            index.delete(transaction, _EDGES, _CONTENT + value[:ID_BYTES] + id)
            index.delete(transaction, _SNAPSHOTS, id)
    if not gone:
        return
    ids = frozenset(gone)
    with transaction.cursor(db=index.db(_EDGES)) as cursor:
        more = cursor.set_range(_PARENT)
        while more and cursor.key().startswith(_PARENT):
            # Deleting moves the cursor to the next key; the key is empty at the end.
            is_gone = SnapshotId(cursor.key()[_CHILD]) in ids
            more = bool(cursor.delete() and cursor.key()) if is_gone else cursor.next()
