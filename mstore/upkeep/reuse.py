"""Reuse: which blocks a snapshot has from its parents, which are its own, and how they lie.

Reads records and rows of the index, and never a block.  A block counts once, however often the
snapshot has it; one that several parents have counts for the first: base, experts, previous.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.snapshots import lineage
from mstore.snapshots.lineage import ParentReport
from mstore.store.catalog import Catalog
from mstore.store.objects.snapshot import PREVIOUS
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import BlockId, ManifestId, SnapshotId, TensorId
from mstore.terms.report import Report
from mstore.upkeep.sharings import CodecUsage, Numbers, by_codec

_TOGETHER = 1 << 14
"""Blocks whose rows are read together."""


class ReusedBlocks(Report, frozen=True):
    """Blocks that a snapshot has from one of its parents."""

    parent: ParentReport
    """the parent"""
    blocks: int
    """blocks that it has, and no parent before it"""
    stored_bytes: int
    """their size at rest"""


class ReuseReport(Report, frozen=True):
    """The blocks of one snapshot: from its parents, its own, and by codec."""

    snapshot: SnapshotId
    """the snapshot's id"""
    blocks: int
    """different blocks that it has"""
    stored_bytes: int
    """their size at rest"""
    reused: tuple[ReusedBlocks, ...]
    """by parent: base, experts, then what was there before"""
    new_blocks: int
    """blocks that no parent has"""
    new_bytes: int
    """their size at rest"""
    tensors_computed: int
    """tensors of a virtual merge, which are computed on read and have no blocks"""
    blocks_not_here: int
    """blocks that are not stored here, and count nowhere else"""
    codecs: tuple[CodecUsage, ...]
    """all of them, by codec"""


def reuse(catalog: Catalog, snapshot: SnapshotId) -> ReuseReport:
    """Report the blocks of a snapshot.  Raises NotFound, Corrupt."""
    record = catalog.snapshot(snapshot)
    wanted, computed = _blocks(catalog, record.manifest_id())
    places = _places(catalog, wanted)
    names = lineage.names_of(catalog)
    parents = lineage.parents(record, names, lineage.plan_of(catalog, record))
    left = dict(places)
    reused: dict[SnapshotId, ReusedBlocks] = {}
    for parent in sorted(parents, key=lambda one: one.role == PREVIOUS):
        other = catalog.snapshot_if_there(parent.snapshot)
        # Of a parent that was pruned, the records may be gone.
        with suppress(NotFound, Corrupt):
            if other is not None and parent.snapshot not in reused:
                theirs, _ = _blocks(catalog, other.manifest_id())
                shared = [left.pop(block) for block in theirs if block in left]
                reused[parent.snapshot] = ReusedBlocks(parent, len(shared), _stored(shared))
    return ReuseReport(
        snapshot=snapshot,
        blocks=len(places),
        stored_bytes=_stored(places.values()),
        reused=tuple(reused.values()),
        new_blocks=len(left),
        new_bytes=_stored(left.values()),
        tensors_computed=computed,
        blocks_not_here=len(wanted) - len(places),
        codecs=by_codec(_sums(places.values())),
    )


def _blocks(catalog: Catalog, id: ManifestId) -> tuple[list[BlockId], int]:
    """Return the ids of a manifest's blocks, each once, and how many tensors have none."""
    tensors = {part.tensor for file in catalog.manifest(id).files for part in file.parts}
    found: dict[BlockId, None] = {}
    computed = 0
    for tensor in sorted(tensors):
        record = catalog.content(TensorId(tensor))
        if isinstance(record, Tensor):
            found.update(dict.fromkeys(record.block_ids()))
        else:
            computed += 1
    return list(found), computed


def _places(catalog: Catalog, blocks: list[BlockId]) -> dict[BlockId, Location]:
    """Return where each block lies that is stored here."""
    found: dict[BlockId, Location] = {}
    for start in range(0, len(blocks), _TOGETHER):
        some = blocks[start : start + _TOGETHER]
        here = [block for block, there in zip(some, catalog.has_blocks(some), strict=True) if there]
        found |= zip(here, catalog.locate(here), strict=True)
    return found


def _stored(places: Iterable[Location]) -> int:
    return sum(place.stored_length for place in places)


def _sums(places: Iterable[Location]) -> Numbers:
    """Return the numbers of blocks, their plain and their stored bytes: int64[codecs, 3]."""
    sums = np.zeros((len(Codec), 3), np.int64)
    for place in places:
        sums[place.codec] += (1, place.raw_length, place.stored_length)
    return sums
