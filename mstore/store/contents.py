"""Whether a snapshot's contents are stored, or were pruned.

A pruned snapshot (one in the table `pruned`) stays in the lineage, with its record, manifest, plan
and coverage. The next garbage collection may drop its contents; until then they can be read and
kept. A stored tensor record has all its blocks, so the tensor records tell whether contents are
stored.

Blocks know nothing of files. So errors about damaged blocks carry their ids, and the calls that
know which snapshots they read look up ref, file and tensor here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.blocks.schema import PRUNED
from mstore.store import leases, listing, refs
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.tensor import Tensor
from mstore.store.refs import refs_in
from mstore.terms.errors import Conflict, Corrupt, MstoreError, NotFound, StorageFailed
from mstore.terms.ids import BlockId, SnapshotId
from mstore.terms.phrases import call, phrase


class Pruned(NotFound):
    """Raised where a snapshot's contents were pruned."""


def require(catalog: Catalog, id: SnapshotId, called: str) -> None:
    """Raise Pruned (a NotFound) if a snapshot's contents were pruned and are gone."""
    if _are_dropped(catalog, id):
        raise _gone(called)


def _are_dropped(catalog: Catalog, id: SnapshotId) -> bool:
    """Return whether a snapshot was pruned, and its contents are gone."""
    with catalog.index.env.read() as transaction:
        if catalog.index.get(transaction, PRUNED, id) is None:
            return False
    # A snapshot's tensor records are removed in the same transaction as its blocks.
    manifest = catalog.manifest_of(id)
    with catalog.index.env.read() as transaction:
        return not _is_whole(catalog.index, transaction, manifest)


def keep(catalog: Catalog, transaction: IndexTransaction, id: SnapshotId, name: str) -> None:
    """Unmark a snapshot as pruned, in the transaction in which a ref comes to name it.

    Raises Conflict if the snapshot was collected meanwhile, NotFound if its contents were.
    """
    index = catalog.index
    if not listing.is_listed(index, transaction, id):
        raise _collected(id, name)
    if index.get(transaction, PRUNED, id) is not None:
        manifest = catalog.manifest_of(id)
        if not _is_whole(index, transaction, manifest):
            raise _gone(id.short)
        index.delete(transaction, PRUNED, id)


@contextmanager
def held(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Hold these snapshots while the block runs.

    A hold that is taken while gc publishes may be too late; missing data is then reported as by
    `or_collected`.
    """
    wanted = list(snapshots)
    with leases.holding(catalog.layout, wanted), or_collected(catalog, wanted):
        yield


@contextmanager
def or_collected(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Raise Conflict instead, if data is missing because a snapshot was collected meanwhile.

    Data that is missing from a snapshot which was not collected is damage; its error passes
    through, and names the file and tensor of the damaged block.
    """
    snapshots = list(snapshots)
    try:
        with placing_damage(catalog, snapshots):
            yield
    except Pruned:
        raise
    except (Corrupt, NotFound) as error:
        gone = next((id for id in snapshots if _is_gone(catalog, id)), None)
        if gone is None:
            raise
        raise _collected(gone, gone.short) from error


def require_held(catalog: Catalog, id: SnapshotId) -> None:
    """Make sure that a hold, which the caller has just taken, is not too late.

    Waits for a publisher that may not have seen the hold, unless a ref names the snapshot, and
    where this user may lock the store. Raises Conflict if the snapshot is gone.
    """
    # A ref that cannot be read is no obstacle: waiting is always right.
    with suppress(Corrupt), catalog.index.env.read() as transaction:
        # Whoever publishes now sees the same refs, because there is one publisher at a time.
        # An old candidate may be dropped with its snapshot.
        named = (ref for _, ref in refs_in(catalog.index, transaction).walk())
        if any(ref.snapshot_id() == id and ref.kind != refs.CANDIDATE for ref in named):
            return
    # Who may not lock a store can take no hold either.
    with suppress(StorageFailed), fs.locked(catalog.layout.lock, create=False):
        pass
    if _is_gone(catalog, id):
        raise _collected(id, id.short)


def _is_gone(catalog: Catalog, id: SnapshotId) -> bool:
    """Return whether garbage collection removed a snapshot, or its contents."""
    with catalog.index.env.read() as transaction:
        is_listed = listing.is_listed(catalog.index, transaction, id)
    return not is_listed or _are_dropped(catalog, id)


def _collected(id: SnapshotId, where: str) -> Conflict:
    return Conflict(
        f"snapshot {id.short} was collected while this command was running",
        where=where,
        hint=phrase("{refs} shows what is there; then run the command again", refs=call("refs")),
    )


def _is_whole(index: Index, transaction: IndexTransaction, manifest: Manifest) -> bool:
    return all(
        index.has_record(transaction, Kind.TENSOR, part.tensor)
        or index.row(transaction, (Kind.VIRTUAL, part.tensor)) is not None
        for file in manifest.files
        for part in file.parts
    )


def _gone(called: str) -> Pruned:
    return Pruned(
        "its contents were pruned, or never came here",
        where=called,
        hint=phrase(
            "{log} shows which snapshots have theirs; from a remote that has them: {fetch}",
            log=call("log"),
            fetch=call("fetch", "NAME", ancestors=True),
        ),
    )


@contextmanager
def placing_damage(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Name the file and tensor of a damaged block in its error, if one of the snapshots has it.

    Parents are searched too: a virtual merge computes from their blocks.
    """
    try:
        yield
    except Corrupt as error:
        error.locate(place_of_damage(catalog, snapshots, error) or error.where)
        raise


def place_of_damage(
    catalog: Catalog, snapshots: Iterable[SnapshotId], error: Corrupt
) -> str | None:
    """Return `REF:FILE, tensor NAME, block ID` of a damaged block; None if it is not found."""
    if error.block is None:
        return None
    block = BlockId(error.block)
    try:
        # A delta needs its base too.
        needing = {block} | _deltas_to(catalog, block)
        found = next(_users(catalog, _with_parents(catalog, snapshots), needing), None)
        if found is None:
            return None
        id, path, tensor = found
        called = sorted(name for name, ref in catalog.refs().items() if ref.snapshot == id)
    except MstoreError:
        # What would name the block is damaged too.
        return None
    inside = "" if tensor is None else f", tensor {tensor}"
    return f"{called[0] if called else id.short}:{path}{inside}, block {block}"


def _with_parents(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> list[SnapshotId]:
    own = list(dict.fromkeys(snapshots))
    parents = (parent.snapshot_id() for id in own for parent in catalog.snapshot(id).parents)
    return list(dict.fromkeys([*own, *parents]))


def _users(
    catalog: Catalog, snapshots: Iterable[SnapshotId], blocks: set[BlockId]
) -> Iterator[tuple[SnapshotId, str, str | None]]:
    """Yield snapshot, path and tensor wherever one of the blocks is used."""
    for id in snapshots:
        for file in catalog.manifest_of(id).files:
            for part in file.parts:
                content = catalog.content(part.tensor_id())
                if isinstance(content, Tensor) and not blocks.isdisjoint(content.block_ids()):
                    yield id, file.path, part.name


def _deltas_to(catalog: Catalog, base: BlockId) -> set[BlockId]:
    """Return the blocks stored as a difference to this one."""
    with catalog.index.env.read() as transaction:
        return {id for id, at in catalog.index.blocks(transaction) if at.base == base}
