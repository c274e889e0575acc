"""Pin and unpin: write the blocks of a snapshot raw and in file order, or code them again.

Threads read groups of neighbouring blocks, and check or encode them; the calling thread writes the
groups in file order. Memory: a few groups per thread, and about 400 bytes for each block written.

Unpin codes blocks as adding them would: by the store's policy, and against the base that the
snapshot's lineage names. A block that another pinned snapshot has stays raw.

Packs are written and published in the order that `mstore.store.transaction` promises
(`Rewriting`). Its index transaction points rows at the copies, and sets or removes the mark of the
pin: a crash before it leaves only garbage, and after it all is done. Old payloads are garbage that
gc frees, once those who may be reading them have ended. The lock of garbage collection is held
throughout, as by all who change rows of stored blocks: so no row changes under a copy, and no base
of a difference is collected before the difference is published. `add` and `merge` do not need it:
they only add rows.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from mstore.blocks.codecs import Codec, Encoded, encode
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location, Row, base_of, width
from mstore.blocks.packs import ENTRY, PAGE, Kind
from mstore.blocks.reader import ThreadBuffer
from mstore.blocks.schema import PINNED
from mstore.models.stats.analysis import BaseBlocks
from mstore.store import contents, leases, unnamed_packs
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog, now_ns
from mstore.store.leaning import leaning_of, require_here
from mstore.store.models import tensors_of
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.snapshot import BASE, SnapshotRecord
from mstore.store.objects.tensor import Tensor
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.terms.errors import BadRequest, Conflict, Corrupt, NotFound, StorageFailed
from mstore.terms.ids import BlockId, Buffer, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.terms.sizes import format_size
from mstore.upkeep.pins.positions import (
    GROUP_BYTES,
    LONG_RUN,
    FileRuns,
    Neighbours,
    Position,
    blocks_of_other_pins,
    neighbours,
    positions_in,
    runs_in,
    to_copy,
)

RESERVE_BYTES = 8 << 20
"""Free space, in bytes, that new packs leave to others."""


class Rewriting:
    """Blocks on the way to new places.  Nothing is visible before `publish` returns.

    blocks: how many it then moved.
    """

    def __init__(self, catalog: Catalog, lease: leases.Lease, max_pack: int) -> None:
        self._catalog = catalog
        self._lease = lease
        self._packs = NewPacks(catalog, lease.directory, prefix="p", max_pack=max_pack)
        self._rows: dict[Key, Row] = {}
        self._bases: set[bytes] = set()
        self._deltas: set[BlockId] = set()
        with catalog.index.env.read() as transaction:
            self._generation = catalog.index.generation(transaction)
        self.blocks = 0

    @classmethod
    @contextmanager
    def begin(
        cls, catalog: Catalog, purpose: str, *, max_pack: int = MAX_PACK_BYTES
    ) -> Iterator[Rewriting]:
        """Lock and take a lease; leaving the block without `publish` removes all that was written.

        Waits for a running collection or repair.  Raises StorageFailed.
        """
        with leases.collecting(catalog.layout):
            with catalog.publishing(packs=True):
                leases.sweep(catalog.layout, catalog.index)
                unnamed_packs.sweep(catalog.layout, catalog.index, catalog.places)
            lease = leases.Lease(catalog.layout, catalog.index, purpose)
            try:
                own = cls(catalog, lease, max_pack)
                try:
                    yield own
                finally:
                    own._packs.abandon()
            finally:
                lease.release()

    def require_room(self, positions: int, plain_bytes: int) -> None:
        """Raise StorageFailed unless the disk has room for so many blocks, stored raw."""
        directory = self._catalog.layout.packs
        packs = 1 + plain_bytes // MAX_PACK_BYTES
        # With footers and alignment.
        needed = plain_bytes + positions * ENTRY.size + packs * 4 * PAGE if positions else 0
        free = max(0, self._catalog.packs.free_bytes() - RESERVE_BYTES)
        if needed > free:
            raise StorageFailed(
                f"the copies take {format_size(needed)}, and the disk has {format_size(free)} free",
                where=str(directory),
                hint=phrase("{gc} frees what nothing needs", gc=call("gc")),
                errno=errno.ENOSPC,
            )

    def put(self, position: Position, row: Row, encoded: Encoded, file: str) -> None:
        """Store a block at a new place; blocks of one file come in file order.

        row: the one that it has now. encoded: decodes to bytes that the caller has checked.
        """
        self._packs.writer.append_encoded(position.block, encoded, file, position.offset)
        self._rows[Kind.BLOCK, position.block] = row
        if encoded.base is not None:
            self._bases.add(encoded.base)
            self._deltas.add(position.block)

    @property
    def bytes_written(self) -> int:
        """Bytes of the packs that are sealed by now."""
        return self._packs.bytes_written

    def publish(self, also: Callable[[IndexTransaction], None]) -> None:
        """Point the rows of all these blocks at their new places, in one index transaction.

        also: changes further rows there.  Raises Conflict, StorageFailed; then nothing is changed.
        """
        catalog = self._catalog
        with self._packs.committing() as transaction:
            for block in self._became_bases(transaction):
                del self._rows[Kind.BLOCK, block]
            moved = 0
            for pack in self._packs.sealed:
                moved += catalog.index.move_into(transaction, pack, self._rows).total()
            if moved != len(self._rows):
                raise Conflict(
                    f"{len(self._rows) - moved} blocks moved while this command was running",
                    hint="run the command again",
                )
            self._require_bases(transaction)
            also(transaction)
            self._lease.drop_row(transaction)
        self.blocks = moved

    def _became_bases(self, transaction: IndexTransaction) -> set[BlockId]:
        """Return blocks that are differences now, and that others refer to since we looked."""
        index = self._catalog.index
        # This very commit is the next generation.
        if not self._deltas or index.generation(transaction) == self._generation + 1:
            return set()
        bases = {place.base for _, place in index.blocks(transaction)}
        return {block for block in self._deltas if block in bases}

    def _require_bases(self, transaction: IndexTransaction) -> None:
        """Raise Conflict unless the base of every new difference is stored, and is none itself."""
        for base in self._bases:
            place = self._catalog.index.block(transaction, BlockId(base))
            if place is None or Codec(place.codec).is_delta:
                raise Conflict(
                    "the base of a difference changed while this command was running",
                    where=f"block {base.hex()}",
                    hint="run the command again",
                )


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
class _PinPlan:
    """What to copy, and sums over the snapshot's different blocks."""

    groups: list[Neighbours]
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
    require_here(leaning_of(catalog, manifest), "pin what is not here", snapshot.short)
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
        lies = _runs_now(catalog, manifest.files)
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


def _runs_now(catalog: Catalog, files: Sequence[File]) -> FileRuns:
    """Return how the files lie now that they are pinned.  Errors say so."""
    runs = unmapped = 0
    for file in files:
        try:
            found = list(positions_in(catalog, file))
            lies = runs_in(found, catalog.locate([position.block for position in found]))
        except (NotFound, Corrupt, StorageFailed) as error:
            kind = StorageFailed if isinstance(error, StorageFailed) else Corrupt
            raise kind(
                f"it is pinned now, but reading it back failed: {error.what}",
                where=error.where,
                hint=error.hint,
            ) from error
        runs += lies.runs
        unmapped += lies.unmapped_bytes
    return FileRuns(runs, unmapped)


def _plan(catalog: Catalog, snapshot: SnapshotId, files: Sequence[File], long_run: int) -> _PinPlan:
    others = blocks_of_other_pins(catalog, snapshot)
    plan = _PinPlan([])
    seen: set[BlockId] = set()
    for file in files:
        positions = list(positions_in(catalog, file))
        places = catalog.locate([position.block for position in positions])
        taken = {
            position.block
            for position, place in zip(positions, places, strict=True)
            if position.block in seen or (position.block in others and place.codec == Codec.RAW)
        }
        chosen = to_copy(positions, places, taken, long_run=long_run)
        plan.groups += neighbours(file.path, chosen)
        plan.copied += len(chosen)
        plan.copied_bytes += sum(position.length for position in chosen)
        copied = {position.block for position in chosen}
        _count(plan, positions, places, seen, copied)
    return plan


def _count(
    plan: _PinPlan,
    positions: Sequence[Position],
    places: Sequence[Location],
    seen: set[BlockId],
    copied: set[BlockId],
) -> None:
    """Add the blocks of a file that are in no earlier one to the sums, and to `seen`."""
    for position, place in zip(positions, places, strict=True):
        if position.block not in seen:
            seen.add(position.block)
            plan.blocks += 1
            plan.bytes_before += place.stored_length
            plan.bytes_after += position.length if position.block in copied else place.stored_length


def _copy(
    catalog: Catalog,
    rewriting: Rewriting,
    plan: _PinPlan,
    threads: int,
    progress: ProgressCallback | None,
) -> None:
    # Buffers of earlier groups: reused, so that the kernel need not zero new pages.
    spare: deque[bytearray] = deque()

    def load(group: Neighbours) -> _Loaded:
        try:
            buffer = spare.pop()
        except IndexError:
            buffer = bytearray(max(GROUP_BYTES, catalog.block_size))
        return _Loaded(_read(catalog, group.positions, memoryview(buffer)), buffer)

    tick = ProgressCounter("pin", plan.copied_bytes, progress)
    with ThreadPoolExecutor(threads, "pin") as pool:
        loading = in_order(lambda group: pool.submit(load, group), plan.groups, ahead=2 * threads)
        with closing(loading):
            for group, (rows, buffer) in loading:
                at = 0
                for position, row in zip(group.positions, rows, strict=True):
                    payload = memoryview(buffer)[at : at + position.length]
                    raw = Encoded(Codec.RAW, width(row), payload, position.length, None)
                    rewriting.put(position, row, raw, group.file)
                    at += position.length
                spare.append(buffer)
                tick(at)


def _read(catalog: Catalog, positions: Sequence[Position], room: memoryview) -> list[Row]:
    """Fill `room` with the checked bytes of these blocks; return the rows that they have."""
    rows, places = catalog.rows_of([position.block for position in positions])
    at = 0
    for position, place in zip(positions, places, strict=True):
        catalog.read_block_into(position.block, place, room[at : at + position.length])
        at += position.length
    return rows


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
        after = int(catalog.stored_lengths(b"".join(work.blocks)).sum())
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
        self._room = ThreadBuffer(catalog.block_size)
        self.base, self._base_tensors = _base_of(catalog, record, manifest)
        self.blocks: set[BlockId] = set()
        self.bytes_before = 0
        self.kept = 0
        self._candidates: set[BlockId] = set()
        self._needed = 0
        self._find(blocks_of_other_pins(catalog, snapshot))
        # What others are differences to must not become a difference itself.
        self._referred = _referred(catalog, self._candidates)

    def _find(self, others: set[BlockId]) -> None:
        for file in self._files:
            new = {
                position.block: position
                for position in positions_in(self._catalog, file)
                if position.block not in self.blocks
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
        tick = ProgressCounter("unpin", self._needed, progress)
        with ThreadPoolExecutor(threads, "unpin") as pool:
            loading = in_order(
                lambda one: pool.submit(self._code, one[1]), self._groups(), ahead=2 * threads
            )
            with closing(loading):
                for (file, positions), coded in loading:
                    for position, row, encoded in zip(positions, *coded, strict=True):
                        if encoded is not None:
                            rewriting.put(position, row, encoded, file)
                    tick(sum(position.length for position in positions))

    def _groups(self) -> Iterator[Neighbours]:
        seen: set[BlockId] = set()
        for file in self._files:
            yield from neighbours(file.path, self._own_positions(file, seen))

    def _own_positions(self, file: File, seen: set[BlockId]) -> Iterator[Position]:
        for position in positions_in(self._catalog, file):
            if position.block in self._candidates and position.block not in seen:
                seen.add(position.block)
                yield position

    # -- in the threads of a pool --------------------------------------------------------------

    def _code(self, positions: Sequence[Position]) -> _Coded:
        rows, places = self._catalog.rows_of([position.block for position in positions])
        bases = self._bases.locate_stored([self._base_block(position) for position in positions])
        return _Coded(
            rows,
            [
                self._encoded(position, place, base)
                for position, place, base in zip(positions, places, bases, strict=True)
            ],
        )

    def _encoded(self, position: Position, place: Location, at: Location | None) -> Encoded | None:
        data = self._room(position.length)
        self._catalog.read_block_into(position.block, place, data)
        encoded = encode(data, position.elements, self._policy, self._delta_base(position, at))
        # Of all codecs only raw has the bytes themselves for a payload.
        return None if encoded.codec is Codec.RAW else encoded

    def _base_block(self, position: Position) -> BlockId | None:
        """Return the base's block at the same place, if this block may be a difference to it."""
        tensor = None if position.tensor is None else self._base_tensors.get(position.tensor)
        if tensor is None or position.block in self._referred:
            return None
        block = tensor.block(position.number)
        return None if block == position.block else block

    def _delta_base(self, position: Position, at: Location | None) -> tuple[BlockId, Buffer] | None:
        block = self._base_block(position)
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
