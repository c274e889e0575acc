"""Pin: rewrite the blocks of a snapshot raw and in file order.

Threads read and check groups of neighbouring blocks; the calling thread writes the groups in file
order.  Memory: a few groups per thread, and about 300 bytes for each block that is copied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from mstore.blocks.codecs import Codec, Encoded
from mstore.blocks.location import Location, Row, width
from mstore.blocks.schema import PINNED
from mstore.store import contents
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.manifest import File
from mstore.store.publishing import MAX_PACK_BYTES
from mstore.terms.errors import Corrupt, NotFound, StorageFailed
from mstore.terms.ids import BlockId, SnapshotId
from mstore.terms.report import Progress, ProgressCallback, Report
from mstore.upkeep.pins import spots as places_of
from mstore.upkeep.pins.rewriting import Rewriting
from mstore.upkeep.pins.spots import GROUP_BYTES, LONG_RUN, Group, Layout, Spot, layout, to_copy


class PinReport(Report, frozen=True):
    """What `pin` rewrote."""

    snapshot: SnapshotId
    """the snapshot's id"""
    files: int
    """number of files"""
    plain_bytes: int
    """size of the files as checked out"""
    blocks: int
    """different blocks in them"""
    blocks_copied: int
    """those that were rewritten; the others already lay raw and in file order"""
    bytes_before: int
    """size of all these blocks in packs before"""
    bytes_after: int
    """size of all these blocks in packs now"""
    bytes_written: int
    """bytes added to the store; garbage collection frees what they replace"""
    runs: int
    """pieces of files that lie in one piece in a pack"""
    unmapped_bytes: int
    """bytes of files at positions where their block cannot be mapped: it lies elsewhere too"""
    seconds: float
    """how long it took"""


class _Loaded(NamedTuple):
    rows: list[Row]
    buffer: bytearray


@dataclass(slots=True)
class _Plan:
    """What to copy, and sums over the snapshot's different blocks."""

    groups: list[Group]
    blocks: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    copied: int = 0
    copied_bytes: int = 0


def pin(
    catalog: Catalog,
    snapshot: SnapshotId,
    *,
    threads: int,
    max_pack: int = MAX_PACK_BYTES,
    long_run: int = LONG_RUN,
    progress: ProgressCallback | None = None,
) -> PinReport:
    """Rewrite the blocks of a snapshot raw and in file order, and mark it as pinned.

    Blocks that lie so already stay where they are, and raw blocks of other pinned snapshots too.
    Publishes everything in one transaction.  Raises NotFound, Corrupt, Conflict, StorageFailed;
    then nothing is changed, unless the error says that it is pinned: then reading it back failed.
    """
    began = time.monotonic()
    manifest = catalog.manifest_of(snapshot)
    with (
        contents.held(catalog, [snapshot]),
        Rewriting.begin(catalog, f"pin {snapshot.short}", max_pack=max_pack) as rewriting,
    ):
        plan = _plan(catalog, snapshot, manifest.files, long_run)
        rewriting.require_room(plan.copied, plan.copied_bytes)
        _copy(catalog, rewriting, plan, threads, progress)
        rewriting.publish(
            lambda transaction: catalog.index.put(
                transaction, PINNED, snapshot, now_ns(), overwrite=False
            )
        )
        lies = _layout(catalog, manifest.files)
    return PinReport(
        snapshot=snapshot,
        files=len(manifest.files),
        plain_bytes=manifest.plain_bytes(),
        blocks=plan.blocks,
        blocks_copied=plan.copied,
        bytes_before=plan.bytes_before,
        bytes_after=plan.bytes_after,
        bytes_written=rewriting.bytes_written,
        runs=lies.runs,
        unmapped_bytes=lies.unmapped_bytes,
        seconds=time.monotonic() - began,
    )


def _layout(catalog: Catalog, files: Sequence[File]) -> Layout:
    """Return how the files lie now that they are pinned.  Errors say so."""
    runs = unmapped = 0
    for file in files:
        try:
            found = list(places_of.of_file(catalog, file))
            lies = layout(found, catalog.locate([spot.block for spot in found]))
        except (NotFound, Corrupt, StorageFailed) as error:
            kind = StorageFailed if isinstance(error, StorageFailed) else Corrupt
            raise kind(
                f"it is pinned now, but reading it back failed: {error.what}",
                where=error.where,
                hint=error.hint,
            ) from error
        runs += lies.runs
        unmapped += lies.unmapped_bytes
    return Layout(runs, unmapped)


def _plan(catalog: Catalog, snapshot: SnapshotId, files: Sequence[File], long_run: int) -> _Plan:
    others = places_of.of_others(catalog, snapshot)
    plan = _Plan([])
    seen: set[BlockId] = set()
    for file in files:
        spots = list(places_of.of_file(catalog, file))
        places = catalog.locate([spot.block for spot in spots])
        taken = {
            spot.block
            for spot, place in zip(spots, places, strict=True)
            if spot.block in seen or (spot.block in others and place.codec == Codec.RAW)
        }
        chosen = to_copy(spots, places, taken, long_run=long_run)
        plan.groups += places_of.groups(file.path, chosen)
        plan.copied += len(chosen)
        plan.copied_bytes += sum(spot.length for spot in chosen)
        copied = {spot.block for spot in chosen}
        _count(plan, spots, places, seen, copied)
    return plan


def _count(
    plan: _Plan,
    spots: Sequence[Spot],
    places: Sequence[Location],
    seen: set[BlockId],
    copied: set[BlockId],
) -> None:
    """Add the blocks of a file that are in no earlier one to the sums, and to `seen`."""
    for spot, place in zip(spots, places, strict=True):
        if spot.block not in seen:
            seen.add(spot.block)
            plan.blocks += 1
            plan.bytes_before += place.stored_length
            plan.bytes_after += spot.length if spot.block in copied else place.stored_length


def _copy(
    catalog: Catalog,
    rewriting: Rewriting,
    plan: _Plan,
    threads: int,
    progress: ProgressCallback | None,
) -> None:
    # Buffers of earlier groups: reused, so that the kernel need not zero new pages.
    spare: deque[bytearray] = deque()

    def load(group: Group) -> _Loaded:
        try:
            buffer = spare.pop()
        except IndexError:
            buffer = bytearray(max(GROUP_BYTES, catalog.block_size))
        return _Loaded(_read(catalog, group.spots, memoryview(buffer)), buffer)

    done = 0
    with ThreadPoolExecutor(threads, "pin") as pool:
        loading = in_order(lambda group: pool.submit(load, group), plan.groups, ahead=2 * threads)
        with closing(loading):
            for group, (rows, buffer) in loading:
                at = 0
                for spot, row in zip(group.spots, rows, strict=True):
                    payload = memoryview(buffer)[at : at + spot.length]
                    raw = Encoded(Codec.RAW, width(row), payload, spot.length, None)
                    rewriting.put(spot, row, raw, group.file)
                    at += spot.length
                spare.append(buffer)
                done += at
                if progress is not None:
                    progress(Progress("pin", done, plan.copied_bytes))


def _read(catalog: Catalog, spots: Sequence[Spot], room: memoryview) -> list[Row]:
    """Fill `room` with the checked bytes of these blocks; return the rows that they have."""
    rows, places = catalog.rows_of([spot.block for spot in spots])
    at = 0
    for spot, place in zip(spots, places, strict=True):
        catalog.read_block_into(spot.block, place, room[at : at + spot.length])
        at += spot.length
    return rows
