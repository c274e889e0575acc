"""Unpin: code the blocks of a pinned snapshot again, as adding it would code them.

Threads read groups of neighbouring blocks and encode them by the store's policy, against the
snapshot's base where its lineage names one.  A block that another pinned snapshot has stays raw.
Memory: a few groups per thread, and about 400 bytes for each block that is coded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import NamedTuple

from mstore.blocks.codecs import Codec, Encoded, encode
from mstore.blocks.location import Location, Row, base_of
from mstore.blocks.reader import Room
from mstore.blocks.schema import PINNED
from mstore.models.stats.analysis import BaseBlocks
from mstore.store import contents
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.snapshot import BASE, SnapshotRecord
from mstore.store.objects.tensor import Tensor
from mstore.store.publishing import MAX_PACK_BYTES
from mstore.terms.errors import BadRequest, Corrupt, NotFound
from mstore.terms.ids import BlockId, Buffer, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import Progress, ProgressCallback, Report
from mstore.upkeep.pins import spots as places_of
from mstore.upkeep.pins.rewriting import Rewriting
from mstore.upkeep.pins.spots import Group, Spot


class UnpinReport(Report, frozen=True):
    """What `unpin` coded again."""

    snapshot: SnapshotId
    """the snapshot's id"""
    base: SnapshotId | None
    """the base whose blocks it was compared with; None: its lineage names none that is stored"""
    blocks: int
    """different blocks in its files"""
    blocks_coded: int
    """those that were coded again; the others are best stored raw, or needed so"""
    blocks_kept: int
    """those that stay raw because another pinned snapshot has them"""
    bytes_before: int
    """size of all these blocks in packs before"""
    bytes_after: int
    """size of all these blocks in packs now"""
    bytes_written: int
    """bytes added to the store; garbage collection frees what they replace"""
    seconds: float
    """how long it took"""


class _Coded(NamedTuple):
    """Blocks with their rows and their new form; None for one that stays raw."""

    rows: list[Row]
    encoded: list[Encoded | None]


def unpin(
    catalog: Catalog,
    snapshot: SnapshotId,
    called: str,
    *,
    threads: int,
    max_pack: int = MAX_PACK_BYTES,
    progress: ProgressCallback | None = None,
) -> UnpinReport:
    """Code the raw blocks of a snapshot by the store's policy, and remove the mark of its pin.

    Publishes everything in one transaction.  Raises BadRequest if it is not pinned, NotFound,
    Corrupt, Conflict, StorageFailed; then nothing is changed.
    """
    began = time.monotonic()
    record = catalog.snapshot(snapshot)
    manifest = catalog.manifest(record.manifest_id())
    with (
        contents.held(catalog, [snapshot]),
        Rewriting.begin(catalog, f"unpin {snapshot.short}", max_pack=max_pack) as rewriting,
    ):
        _require_pinned(catalog, snapshot, called)
        work = _Unpinning(catalog, snapshot, record, manifest)
        work.run(rewriting, threads, progress)
        rewriting.publish(lambda transaction: catalog.index.delete(transaction, PINNED, snapshot))
        blocks = list(work.blocks)
        after = int(catalog.stored_lengths(blocks).sum()) if blocks else 0
    return UnpinReport(
        snapshot=snapshot,
        base=work.base,
        blocks=len(work.blocks),
        blocks_coded=rewriting.blocks,
        blocks_kept=work.kept,
        bytes_before=work.bytes_before,
        bytes_after=after,
        bytes_written=rewriting.bytes_written,
        seconds=time.monotonic() - began,
    )


def _require_pinned(catalog: Catalog, snapshot: SnapshotId, called: str) -> None:
    with catalog.index.env.read() as transaction:
        if catalog.index.get(transaction, PINNED, snapshot) is not None:
            return
    raise BadRequest(
        "is not pinned",
        where=called,
        hint=phrase("{refs} says which branches and tags are", refs=call("refs")),
    )


class _Unpinning:
    """One unpin: which blocks to code, and against what.

    blocks: all different ones.  A *candidate* is raw, and no other pinned snapshot has it.
    """

    def __init__(
        self,
        catalog: Catalog,
        snapshot: SnapshotId,
        record: SnapshotRecord,
        manifest: Manifest,
    ) -> None:
        self._catalog = catalog
        self._files = manifest.files
        self._policy = catalog.config.codec
        self._bases = BaseBlocks(catalog)
        self._room = Room(catalog.block_size)
        self.base, self._base_tensors = _base_of(catalog, record, manifest)
        self.blocks: set[BlockId] = set()
        self.bytes_before = 0
        self.kept = 0
        self._candidates: set[BlockId] = set()
        self._needed = 0
        self._find(places_of.of_others(catalog, snapshot))
        # What others are differences to must not become a difference itself.
        self._referred = _referred(catalog, self._candidates)

    def _find(self, others: set[BlockId]) -> None:
        for file in self._files:
            new = {
                spot.block: spot
                for spot in places_of.of_file(self._catalog, file)
                if spot.block not in self.blocks
            }
            self.blocks.update(new)
            for place, block in zip(self._catalog.locate(new), new, strict=True):
                self.bytes_before += place.stored_length
                if place.codec == Codec.RAW and block in others:
                    self.kept += 1
                elif place.codec == Codec.RAW:
                    self._candidates.add(block)
                    self._needed += place.stored_length

    def run(self, rewriting: Rewriting, threads: int, progress: ProgressCallback | None) -> None:
        """Code the candidates in file order."""
        done = 0
        with ThreadPoolExecutor(threads, "unpin") as pool:
            loading = in_order(
                lambda one: pool.submit(self._code, one[1]), self._groups(), ahead=2 * threads
            )
            with closing(loading):
                for (file, spots), coded in loading:
                    for spot, row, encoded in zip(spots, *coded, strict=True):
                        if encoded is not None:
                            rewriting.put(spot, row, encoded, file)
                        done += spot.length
                    if progress is not None:
                        progress(Progress("unpin", done, self._needed))

    def _groups(self) -> Iterator[Group]:
        seen: set[BlockId] = set()
        for file in self._files:
            yield from places_of.groups(file.path, self._own_spots(file, seen))

    def _own_spots(self, file: File, seen: set[BlockId]) -> Iterator[Spot]:
        for spot in places_of.of_file(self._catalog, file):
            if spot.block in self._candidates and spot.block not in seen:
                seen.add(spot.block)
                yield spot

    # -- in the threads of a pool --------------------------------------------------------------

    def _code(self, spots: Sequence[Spot]) -> _Coded:
        rows, places = self._catalog.rows_of([spot.block for spot in spots])
        bases = self._bases.locate_stored([self._base_block(spot) for spot in spots])
        return _Coded(
            rows,
            [
                self._encoded(spot, place, base)
                for spot, place, base in zip(spots, places, bases, strict=True)
            ],
        )

    def _encoded(self, spot: Spot, place: Location, at: Location | None) -> Encoded | None:
        data = self._room(spot.length)
        self._catalog.read_block_into(spot.block, place, data)
        encoded = encode(data, spot.elements, self._policy, self._delta_base(spot, at))
        # Of all codecs only raw has the bytes themselves for a payload.
        return None if encoded.codec is Codec.RAW else encoded

    def _base_block(self, spot: Spot) -> BlockId | None:
        """Return the base's block at the same place, if this block may be a difference to it."""
        tensor = None if spot.tensor is None else self._base_tensors.get(spot.tensor)
        if tensor is None or spot.block in self._referred:
            return None
        block = tensor.block(spot.number)
        return None if block == spot.block else block

    def _delta_base(self, spot: Spot, at: Location | None) -> tuple[BlockId, Buffer] | None:
        block = self._base_block(spot)
        if block is None or at is None:
            return None
        try:
            found, data = self._bases.delta_base(block, at, self._bases.read(block, at))
        except Corrupt:
            # As in `add`: what cannot be read is no base.
            return None
        # It may become a difference itself, in this same commit.
        return None if found in self._candidates else (found, data)


def _base_of(
    catalog: Catalog, record: SnapshotRecord, own: Manifest
) -> tuple[SnapshotId | None, dict[str, Tensor]]:
    """Return the base that the lineage names, and its tensors of equal name, type and shape."""
    for parent in record.parents:
        if parent.role == BASE:
            id = parent.snapshot_id()
            base = catalog.snapshot_if_there(id)
            manifest = None if base is None else catalog.manifest_if_there(base.manifest_id())
            if manifest is not None:
                return id, dict(_alike(catalog, own, manifest))
    return None, {}


def _alike(catalog: Catalog, own: Manifest, base: Manifest) -> Iterator[tuple[str, Tensor]]:
    bases = tensors_of(catalog, base)
    for name, id in tensors_of(catalog, own).items():
        # What of the base is virtual, pruned or damaged is no base.
        with suppress(NotFound, Corrupt, BadRequest):
            if name in bases:
                mine, theirs = catalog.tensor(id), catalog.tensor(bases[name])
                if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
                    yield name, theirs


def _referred(catalog: Catalog, candidates: set[BlockId]) -> set[bytes]:
    """Return those of these blocks that any stored block is a difference to."""
    found: set[bytes] = set()
    for batch in catalog.index.block_batches():
        bases = (base_of(row) for _, row in batch)
        found.update(base for base in bases if base is not None and base in candidates)
    return found
