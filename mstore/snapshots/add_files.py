"""The files of a checkpoint as blocks and records: read, hashed, compared and encoded.

Each file is cut into its parts (header, tensors) and those into blocks.  Threads read and hash
groups of neighbouring blocks, ask the catalog which of them are new, and encode those; the calling
thread takes the groups in file order and writes them.  With a base, the same pass compares each
block with the base's block at the same place: it takes the statistics of their difference, and may
store the block as that difference.  Without one it takes the sums of squares of the tensors: what
plans ask of a base, which this may become.

Memory: a few groups per thread, whatever the model's size.  A file is opened once, and must still
have the stamp that it had when it was listed; a file that is replaced or changes while it is read
stops the add.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from mstore.blocks.codecs import Elements, Encoded, Policy, elements_of, encode
from mstore.blocks.location import Location
from mstore.checkpoint.directory import SourceFile
from mstore.checkpoint.models import full_name
from mstore.checkpoint.reading import OpenSource
from mstore.models.stats.store import StatsStore
from mstore.numeric.codes import ITEMSIZES
from mstore.store.ahead import in_groups, in_order
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Part
from mstore.store.objects.shapes import matching
from mstore.store.objects.tensor import BYTES, Tensor, partition
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt, NotFound, Unavailable
from mstore.terms.ids import BlockId, TensorId

if TYPE_CHECKING:
    from mstore.models.differences import Differences, DifferenceTensor, SummedBlocks
    from mstore.models.stats.analysis import PairMeasure


GROUP_BYTES = 4 << 20


class _PartPlan(msgspec.Struct, frozen=True):
    """A part before its blocks are known: its place in the file, and its base tensor if any."""

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    base: Tensor | None
    base_id: TensorId | None

    @property
    def elements(self) -> Elements:
        """How codecs see the elements of its blocks."""
        return elements_of(self.dtype)

    def base_block(self, number: int) -> BlockId | None:
        """Return the base's block at this place, if dtype and shape are equal."""
        base = self.base
        if base is None or base.dtype != self.dtype or base.shape != self.shape:
            return None
        return base.block(number)


class _Span(msgspec.Struct, frozen=True):
    """One block to read: block `number` of part `part`, at `offset` of the file."""

    part: int
    number: int
    offset: int
    length: int


class _NeighbouringBlocks(msgspec.Struct, frozen=True):
    """Neighbouring blocks read with one `pread` into `buffer`, and their ids.

    encoded: the payloads to store, possibly views of `buffer`; None for a stored block.
    """

    spans: list[_Span]
    buffer: bytearray
    ids: list[BlockId]
    encoded: list[Encoded | None]


class _Bytes(Protocol):
    """Where the blocks of a file come from, in any thread."""

    def fill(self, spans: Sequence[_Span], room: memoryview) -> None:
        """Fill `room` with these blocks, one after the other."""

    def require_unchanged(self) -> None:
        """Raise BadCheckpoint unless what was read still has the stamps from when it was listed."""


class _FileBytes:
    """The bytes of an open file of the checkpoint."""

    def __init__(self, file: OpenSource) -> None:
        self._file = file

    def fill(self, spans: Sequence[_Span], room: memoryview) -> None:
        self._file.read_into(spans[0].offset, room)

    def require_unchanged(self) -> None:
        self._file.require_unchanged()


class _SumBytes:
    """The sums of some tensors of a file of the base; slots: of each part, in order."""

    def __init__(self, sums: SummedBlocks, slots: Sequence[DifferenceTensor]) -> None:
        self._sums = sums
        self._slots = slots

    def fill(self, spans: Sequence[_Span], room: memoryview) -> None:
        at = 0
        for span in spans:
            room[at : at + span.length] = self._sums.block(self._slots[span.part], span.number)
            at += span.length

    def require_unchanged(self) -> None:
        self._sums.require_unchanged()


class _FileReader:
    """Reads, hashes and encodes one file on a pool of threads; yields groups in file order."""

    def __init__(
        self,
        source: _Bytes,
        parts: list[_PartPlan],
        block_size: int,
        known: Callable[[Sequence[BlockId]], list[bool]],
        policy: Policy,
        comparison: _Comparison | _Squares,
        spare: deque[bytearray],
    ) -> None:
        self._source = source
        self._parts = parts
        self._block_size = block_size
        self._known = known
        self._policy = policy
        self._comparison = comparison
        self._spare = spare

    def _groups(self) -> Iterator[list[_Span]]:
        spans = (
            _Span(number, block, part.begin + start, length)
            for number, part in enumerate(self._parts)
            for block, (start, length) in enumerate(partition(part.nbytes, self._block_size))
        )
        return in_groups(spans, lambda span: span.length, GROUP_BYTES)

    def _load(self, spans: list[_Span]) -> _NeighbouringBlocks:
        length = sum(span.length for span in spans)
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = bytearray(max(GROUP_BYTES, self._block_size))
        view = memoryview(buffer)[:length]
        self._source.fill(spans, view)
        ends = itertools.accumulate(span.length for span in spans)
        blocks = [view[end - span.length : end] for span, end in zip(spans, ends, strict=True)]
        ids = [BlockId.of(block) for block in blocks]
        known = self._known(ids)
        places = self._comparison.locate(spans)
        encoded: list[Encoded | None] = []
        for span, block, id, is_known, at in zip(spans, blocks, ids, known, places, strict=True):
            base = self._comparison.take(span, block, id, at, is_known=is_known)
            # A block that occurs twice in concurrent groups is encoded twice, and stored once.
            elements = self._parts[span.part].elements
            encoded.append(None if is_known else encode(block, elements, self._policy, base))
        return _NeighbouringBlocks(spans, buffer, ids, encoded)

    def release(self, group: _NeighbouringBlocks) -> None:
        """Recycle the memory of a group that the caller is done with."""
        self._spare.append(group.buffer)

    def run(self, pool: ThreadPoolExecutor, ahead: int) -> Iterator[_NeighbouringBlocks]:
        """Yield all groups in order, with at most `ahead` of them in memory."""
        loading = in_order(
            lambda spans: pool.submit(self._load, spans), self._groups(), ahead=ahead - 1
        )
        # Close it here, not at garbage collection: the caller frees what the threads write into.
        with closing(loading):
            for _, group in loading:
                yield group


class _Comparison:
    """Compares one file's tensors with the base's, block by block, in the reading threads.

    An unreadable block of the base is skipped without stopping the add: its id goes to `lost`, and
    the measure of its tensor becomes None.
    """

    def __init__(
        self,
        catalog: Catalog,
        parts: list[_PartPlan],
        measures: list[PairMeasure | None],
        policy: Policy,
        lost: set[BlockId],
    ) -> None:
        from mstore.models.stats.analysis import BaseBlocks

        self._parts = parts
        self._measures = measures
        self._encodes = policy is not Policy.RAW
        self._lost = lost
        self._bases = BaseBlocks(catalog)

    def _base(self, span: _Span) -> BlockId | None:
        if self._measures[span.part] is None and not self._encodes:
            return None
        return self._parts[span.part].base_block(span.number)

    def locate(self, spans: list[_Span]) -> list[Location | None]:
        """Return where the base's blocks lie; None where they are not needed or not stored."""
        wanted = [self._base(span) for span in spans]
        found = self._bases.locate_stored(wanted)
        for span, base, at in zip(spans, wanted, found, strict=True):
            if base is not None and at is None:
                self._lose(span, base)
        return found

    def _lose(self, span: _Span, base: BlockId) -> None:
        self._lost.add(base)
        self._measures[span.part] = None

    def take(
        self, span: _Span, data: memoryview, id: BlockId, at: Location | None, *, is_known: bool
    ) -> tuple[BlockId, memoryview] | None:
        """Measure one block; return the base block to encode it against, if any.

        The result is valid until this thread's next call.
        """
        measure, base = self._measures[span.part], self._base(span)
        if base is None or at is None:
            return None
        import numpy as np  # late: without a base, adding needs none

        expert = np.frombuffer(data, dtype=np.uint8)
        if id == base:
            if measure is not None:
                measure.take_equal(span.number, expert)
            return None
        is_encoded = self._encodes and not is_known
        if measure is None and not is_encoded:
            return None
        try:
            plain = self._bases.read(base, at)
            delta_base = self._bases.delta_base(base, at, plain) if is_encoded else None
        except Corrupt:
            self._lose(span, base)
            return None
        if measure is not None:
            measure.take_chunk(span.number, plain, expert)
        return delta_base


class _Squares:
    """Adds up the squares of a file's tensors, block by block, in the reading threads.

    A block is a chunk, so these are the sums that planning would measure.  It does so where this
    program cannot: adding raw blocks needs no kernel.
    """

    def __init__(self, parts: list[_PartPlan]) -> None:
        self._sums: list[list[float]] = [[] for _ in parts]
        self._parts = parts
        self._is_able = True

    def locate(self, spans: list[_Span]) -> list[None]:
        """Return that no block of a base is needed."""
        return [None] * len(spans)

    def take(
        self, span: _Span, data: memoryview, id: BlockId, at: Location | None, *, is_known: bool
    ) -> None:
        """Measure one block."""
        dtype = self._parts[span.part].dtype
        if dtype not in ITEMSIZES or not self._is_able:
            return
        import numpy as np

        from mstore.models.stats.deltas import base_squares

        stored = np.frombuffer(data, dtype=np.uint8)
        try:
            square = base_squares(stored, dtype, span.length // ITEMSIZES[dtype])
        except Unavailable:
            self._is_able = False
        else:
            self._sums[span.part].append(square)

    def totals(self) -> list[float | None]:
        """Return the sum of each part, None of one that was not measured."""
        return [math.fsum(sums) if sums and self._is_able else None for sums in self._sums]


class FileAdder:
    """One running `add`: counters, and the comparison with the base.

    `write_to` says where to store.  base: the base's tensors by what the checkpoint calls those
    that are compared with them.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        base: Mapping[str, TensorId] | None,
        policy: Policy,
        *,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> None:
        self.catalog = catalog
        self.policy = policy
        self.statistics = statistics
        self._transactions: list[Transaction] = []
        tensors = base or {}
        compared = set(tensors) if not only else matching(tensors, only)
        compared -= matching(tensors, skip)
        self.base = {name: id for name, id in tensors.items() if name in compared}
        self.has_base = base is not None
        # Buffers of earlier groups: reused, so that the kernel need not zero new pages.
        self.spare: deque[bytearray] = deque()
        self.blocks_total = 0
        self.blocks_equal_base = 0
        self.lost: set[BlockId] = set()
        self.not_finite: list[str] = []
        self.lost_tensors = 0
        self.digests: dict[str, str] = {}
        """SHA-256 of files that were digested, by path."""

    def write_to(self, transaction: Transaction) -> None:
        """Store what follows in this transaction."""
        self._transactions.append(transaction)

    @property
    def transaction(self) -> Transaction:
        """The one that stores what is read now."""
        return self._transactions[-1]

    @property
    def blocks_new(self) -> int:
        """Blocks that the store did not have."""
        return sum(one.blocks_new for one in self._transactions)

    @property
    def bytes_written(self) -> int:
        """Bytes of the packs that are sealed by now."""
        return sum(one.bytes_written for one in self._transactions)

    def parts(self, source: SourceFile, model: str | None) -> list[_PartPlan]:
        """Return header and tensors of a file, or the file as one part.

        model: the one that the file is of, None if no loader reads it.
        """
        start = source.data_start
        parts = [_PartPlan(None, BYTES, (start,), 0, start, None, None)]
        base_ids = [
            None if model is None else self.base.get(full_name(model, slot.name))
            for slot in source.slots
        ]
        bases = readable_tensors(self.catalog, {id for id in base_ids if id is not None})
        for slot, id in zip(source.slots, base_ids, strict=True):
            base = None if id is None else bases[id]
            self.lost_tensors += id is not None and base is None
            # A base that was found may have a few of other shapes.
            is_alike = base is not None and base.shape == slot.shape
            parts.append(
                _PartPlan(
                    slot.name,
                    slot.dtype,
                    slot.shape,
                    start + slot.begin,
                    slot.end - slot.begin,
                    base if is_alike else None,
                    id if is_alike else None,
                )
            )
        return parts

    def add_file(
        self,
        source: SourceFile,
        model: str | None,
        pool: ThreadPoolExecutor,
        ahead: int,
        tick: Callable[[int], None],
        *,
        digested: bool = False,
    ) -> File:
        """Store a file's new blocks and its tensor records.

        digested: whether to take the digest of its bytes, for `digests`.
        """
        parts = self.parts(source, model)
        digest = hashlib.sha256() if digested else None

        def take(data: memoryview) -> None:
            tick(len(data))
            if digest is not None:
                digest.update(data)

        with source.open() as own:
            if source.header is not None:
                own.require_start(source.header.raw)
            stored = self._add_parts(_FileBytes(own), source.path, parts, pool, ahead, take)
        if digest is not None:
            self.digests[source.path] = digest.hexdigest()
        form = OPAQUE if source.header is None else SAFETENSORS
        return File(source.path, form, source.size, tuple(stored))

    def add_sums(
        self,
        file: File,
        differences: Differences,
        pool: ThreadPoolExecutor,
        ahead: int,
        tick: Callable[[int], None],
    ) -> File:
        """Store the sums of a file of the base; what does not change stays as it is."""
        parts: list[_PartPlan] = []
        slots: list[DifferenceTensor] = []
        places: list[int] = []
        begin = 0
        for place, part in enumerate(file.parts):
            slot = differences.changes(file, part)
            if slot is not None:
                base = slot.base
                plan = _PartPlan(
                    part.name, base.dtype, base.shape, begin, part.nbytes, base, slot.base_id
                )
                parts.append(plan)
                slots.append(slot)
                places.append(place)
            elif part.name is not None:
                self._count_equal(part.tensor_id())
            begin += part.nbytes
        if not parts:
            return file
        from mstore.models.differences import SummedBlocks

        with SummedBlocks(differences, slots) as sums:
            own = _SumBytes(sums, slots)
            stored = self._add_parts(
                own, file.path, parts, pool, ahead, lambda data: tick(len(data))
            )
        changed = dict(zip(places, stored, strict=True))
        return replace(
            file, parts=tuple(changed.get(place, part) for place, part in enumerate(file.parts))
        )

    def _count_equal(self, id: TensorId) -> None:
        """Count the blocks of a tensor that is the base's own."""
        count = self.catalog.tensor(id).block_count()
        self.blocks_total += count
        self.blocks_equal_base += count

    def _add_parts(
        self,
        own: _Bytes,
        path: str,
        parts: list[_PartPlan],
        pool: ThreadPoolExecutor,
        ahead: int,
        take: Callable[[memoryview], None],
    ) -> list[Part]:
        """Store new blocks of some parts of a file, and their records.

        take: is given the bytes, in the order of the file.
        """
        measures = self._measures(parts)
        squares = _Squares(parts)
        comparison: _Comparison | _Squares = squares
        if any(part.base is not None for part in parts):
            comparison = _Comparison(self.catalog, parts, measures, self.policy, self.lost)
        ids: list[list[BlockId]] = [[] for _ in parts]
        reader = _FileReader(
            own,
            parts,
            self.catalog.block_size,
            self.transaction.has_blocks,
            self.policy,
            comparison,
            self.spare,
        )
        for group in reader.run(pool, ahead):
            self._store(path, parts, group, ids)
            take(memoryview(group.buffer)[: sum(span.length for span in group.spans)])
            reader.release(group)
        own.require_unchanged()
        tensors = [
            Tensor(part.dtype, part.shape, part.nbytes, b"".join(blocks))
            for part, blocks in zip(parts, ids, strict=True)
        ]
        stored = []
        put = self.transaction.put_records(tensors)
        for part, id, measure, square in zip(parts, put, measures, squares.totals(), strict=True):
            stored.append(Part(part.name, id, part.nbytes))
            if square is not None:
                self.statistics.put_squares(TensorId(id), square)
            if measure is not None and part.base_id is not None:
                if not measure.is_finite():
                    self.not_finite.append(part.name or "")
                self.statistics.put_pair(measure.finish(part.base_id, TensorId(id)))
        return stored

    def _measures(self, parts: list[_PartPlan]) -> list[PairMeasure | None]:
        if not self.has_base:
            return [None] * len(parts)
        # Imported late: loading the compiled passes takes longer than adding a small checkpoint.
        from mstore.models.stats.analysis import PairMeasure

        return [
            PairMeasure.begin(part.base, part.dtype, part.shape, self.catalog.block_size)
            for part in parts
        ]

    def _store(
        self,
        path: str,
        parts: list[_PartPlan],
        group: _NeighbouringBlocks,
        ids: list[list[BlockId]],
    ) -> None:
        for span, id in zip(group.spans, group.ids, strict=True):
            part = parts[span.part]
            ids[span.part].append(id)
            if part.base is not None and part.base.dtype == part.dtype:
                self.blocks_equal_base += id == part.base.block(span.number)
        self.blocks_total += len(group.spans)
        offsets = (span.offset for span in group.spans)
        blocks = list(zip(group.ids, group.encoded, offsets, strict=True))
        self.transaction.put_blocks(blocks, path)


def readable_tensors(catalog: Catalog, ids: Collection[TensorId]) -> dict[TensorId, Tensor | None]:
    """Return records of the base, read together unless one is damaged."""
    wanted = list(ids)
    try:
        return dict(zip(wanted, catalog.tensors(wanted), strict=True))
    except (NotFound, Corrupt):
        return {id: _readable_tensor(catalog, id) for id in wanted}


def _readable_tensor(catalog: Catalog, id: TensorId) -> Tensor | None:
    """Return a record of the base; None if it is damaged: this add may be what heals it."""
    try:
        return catalog.tensor(id)
    except (NotFound, Corrupt):
        return None
