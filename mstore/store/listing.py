"""Which snapshots the index lists: by id, by content, by parent.

Owns what is written for a snapshot in the tables `snapshots`, `contents` and `children`.  Their
rows repeat what the snapshot's record says, so that content and children are found without reading
every record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import CHILDREN, CONTENTS, SNAPSHOTS
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ManifestId, SnapshotId


def _children(id: SnapshotId, record: SnapshotRecord) -> list[tuple[SnapshotId, SnapshotId, str]]:
    return [(parent.snapshot_id(), id, parent.role) for parent in record.parents]


def insert(index: Index, transaction: IndexTransaction, record: SnapshotRecord) -> None:
    """Insert the rows of a snapshot: its own, by its content, and as a child of its parents."""
    id, manifest = record.id(), record.manifest_id()
    index.put(transaction, SNAPSHOTS, id, (manifest, record.time_ns))
    index.put(transaction, CONTENTS, (manifest, id), None)
    for child in _children(id, record):
        index.put(transaction, CHILDREN, child, None)


def is_listed(index: Index, transaction: IndexTransaction, id: SnapshotId) -> bool:
    """Return whether the index lists a snapshot.  Raises Corrupt if its row is damaged."""
    return index.get(transaction, SNAPSHOTS, id) is not None


def agree(
    index: Index, transaction: IndexTransaction, id: SnapshotId, record: SnapshotRecord
) -> bool:
    """Return whether the rows of a snapshot match its record; True if it is not listed at all."""
    told = index.get(transaction, SNAPSHOTS, id)
    if told is None:
        return True
    return (
        told == (record.manifest_id(), record.time_ns)
        and index.has(transaction, CONTENTS, (record.manifest_id(), id))
        and all(index.has(transaction, CHILDREN, child) for child in _children(id, record))
    )


def ids(index: Index, transaction: IndexTransaction) -> Iterator[SnapshotId]:
    """Yield every listed snapshot, by id.  Raises Corrupt at a damaged row."""
    for id, _ in index.walk(transaction, SNAPSHOTS):
        yield id


def times(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId]
) -> dict[SnapshotId, int]:
    """Return the time of each of these snapshots that is listed, in ns since the epoch."""
    told = {id: index.get(transaction, SNAPSHOTS, id) for id in snapshots}
    return {id: found[1] for id, found in told.items() if found is not None}


def contents(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId]
) -> dict[SnapshotId, ManifestId]:
    """Return the content of each of these snapshots that is listed; leaves out damaged rows."""
    found = {}
    for id in snapshots:
        with suppress(Corrupt):
            told = index.get(transaction, SNAPSHOTS, id)
            if told is not None:
                found[id] = told[0]
    return found


def with_prefix(index: Index, transaction: IndexTransaction, digits: str) -> list[SnapshotId]:
    """Return the listed snapshots whose id starts with these hex digits, by id."""
    return [SnapshotId(key) for key in index.keys_with(transaction, SNAPSHOTS, digits)]


def children(index: Index, transaction: IndexTransaction, id: SnapshotId) -> set[SnapshotId]:
    """Return the listed snapshots that have this one as a parent."""
    return {child for (_, child, _), _ in index.walk(transaction, CHILDREN, id)}


def with_content(
    index: Index, transaction: IndexTransaction, manifest: ManifestId
) -> list[SnapshotId]:
    """Return the listed snapshots with this content, by id."""
    return [id for (_, id), _ in index.walk(transaction, CONTENTS, manifest)]


def unlist(index: Index, transaction: IndexTransaction, id: SnapshotId) -> None:
    """Remove the rows that list a snapshot whose record is lost; its place as a child stays."""
    told = index.get(transaction, SNAPSHOTS, id)
    if told is not None:
        index.delete(transaction, CONTENTS, (told[0], id))
        index.delete(transaction, SNAPSHOTS, id)


def remove(index: Index, transaction: IndexTransaction, gone: Collection[SnapshotId]) -> None:
    """Remove all rows of snapshots that are gone.  Raises Corrupt at a damaged row."""
    for id in gone:
        unlist(index, transaction, id)
    if gone:
        ids = frozenset(gone)
        children = map(CHILDREN.key_of, index.keys(transaction, CHILDREN))
        for child in [one for one in children if one[1] in ids]:
            index.delete(transaction, CHILDREN, child)
