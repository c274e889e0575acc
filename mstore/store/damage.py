"""Where a damaged block belongs: the ref, file and tensor that an error about it names.

Blocks know nothing of files. So the reader's errors carry the id of the block, and the calls that
know which snapshots they read look it up here. Costs nothing unless there is damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mstore.errors import Corrupt, MstoreError
from mstore.ids import BlockId, SnapshotId
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog


@contextmanager
def placed(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> Iterator[None]:
    """Name the file and tensor of a damaged block in its error, if one of the snapshots has it.

    Parents are searched too: a virtual merge computes from their blocks.
    """
    try:
        yield
    except Corrupt as error:
        error.locate(place_of(catalog, snapshots, error) or error.where)
        raise


def place_of(catalog: Catalog, snapshots: Iterable[SnapshotId], error: Corrupt) -> str | None:
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
