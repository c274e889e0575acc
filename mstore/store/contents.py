"""Whether a snapshot's contents are stored, or were pruned.

    pruned    SnapshotId -> time_ns u64

A pruned snapshot stays in the lineage, with its record, manifest, plan and coverage. The next
garbage collection may drop its contents; until then they can be read and kept. A stored tensor
record has all its blocks, so the tensor records tell whether contents are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.errors import Conflict, Corrupt, NotFound
from mstore.ids import SnapshotId
from mstore.objects.manifest import Manifest
from mstore.store import damage, leases
from mstore.store.catalog import Catalog


class Pruned(NotFound):
    """Raised where a snapshot's contents were pruned."""


def pruned(index: Index, transaction: IndexTransaction) -> set[SnapshotId]:
    """Return the snapshots that were pruned."""
    return {SnapshotId(key) for key, _ in index.walk(transaction, "pruned")}


def prune(
    index: Index, transaction: IndexTransaction, snapshots: Iterable[SnapshotId], time_ns: int
) -> None:
    """Mark these snapshots as pruned."""
    for id in snapshots:
        index.put(transaction, "pruned", id, time_ns.to_bytes(8, "big"), overwrite=False)


def require(catalog: Catalog, id: SnapshotId, called: str) -> None:
    """Raise Pruned (a NotFound) if a snapshot's contents were pruned and are gone."""
    with catalog.index.env.read() as transaction:
        if not _is_pruned(catalog.index, transaction, id):
            return
    manifest = catalog.manifest(catalog.snapshot(id).manifest_id())
    with catalog.index.env.read() as transaction:
        if not _is_whole(catalog.index, transaction, manifest):
            raise _gone(called)


def keep(catalog: Catalog, transaction: IndexTransaction, id: SnapshotId, name: str) -> None:
    """Unmark a snapshot as pruned, because a ref is about to name it.

    Call it within an open index transaction. Raises Conflict if the snapshot was collected
    meanwhile, NotFound if its contents were.
    """
    index = catalog.index
    if index.get(transaction, "snapshots", id) is None:
        raise _collected(id, name)
    if _is_pruned(index, transaction, id):
        manifest = catalog.manifest(catalog.snapshot(id).manifest_id())
        if not _is_whole(index, transaction, manifest):
            raise _gone(id.short)
        transaction.delete(id, db=index.db("pruned"))


@contextmanager
def held(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Pin these snapshots while the block runs.

    A pin that is created while gc publishes may be too late; missing data is then reported as by
    `or_collected`.
    """
    wanted = list(snapshots)
    with leases.pinned(catalog.layout, wanted), or_collected(catalog, wanted):
        yield


@contextmanager
def or_collected(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Raise Conflict instead, if data is missing because a snapshot was collected meanwhile.

    Data that is missing from a snapshot which was not collected is damage; its error passes
    through, and names the file and tensor of the damaged block.
    """
    snapshots = list(snapshots)
    try:
        with damage.placed(catalog, snapshots):
            yield
    except Pruned:
        raise
    except (Corrupt, NotFound) as error:
        gone = next((id for id in snapshots if _is_gone(catalog, id)), None)
        if gone is None:
            raise
        raise _collected(gone, gone.short) from error


def _is_gone(catalog: Catalog, id: SnapshotId) -> bool:
    """Return whether garbage collection removed a snapshot, or its contents."""
    with catalog.index.env.read() as transaction:
        if catalog.index.get(transaction, "snapshots", id) is None:
            return True
        if not _is_pruned(catalog.index, transaction, id):
            return False
    # A snapshot's tensor records are removed in the same transaction as its blocks.
    manifest = catalog.manifest(catalog.snapshot(id).manifest_id())
    with catalog.index.env.read() as transaction:
        return not _is_whole(catalog.index, transaction, manifest)


def _collected(id: SnapshotId, where: str) -> Conflict:
    return Conflict(
        f"snapshot {id.short} was collected while this command was running",
        where=where,
        hint="mstore refs shows what is there; then run the command again",
    )


def _is_pruned(index: Index, transaction: IndexTransaction, id: SnapshotId) -> bool:
    return index.get(transaction, "pruned", id) is not None


def _is_whole(index: Index, transaction: IndexTransaction, manifest: Manifest) -> bool:
    return all(
        index.record(transaction, Kind.TENSOR, part.tensor_id()) is not None
        or _has_virtual(index, transaction, part.tensor)
        for file in manifest.files
        for part in file.parts
    )


def _has_virtual(index: Index, transaction: IndexTransaction, id: bytes) -> bool:
    return transaction.get(bytes([Kind.VIRTUAL]) + id, db=index.db("records")) is not None


def _gone(called: str) -> Pruned:
    return Pruned(
        "its contents were pruned",
        where=called,
        hint="mstore log shows which snapshots have theirs",
    )
