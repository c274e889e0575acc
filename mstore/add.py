"""Add: a checkpoint on disk becomes a snapshot.

Each file is cut into its parts (header, tensors) and those into blocks.  Threads read and hash
groups of neighbouring blocks; the calling thread takes the groups in file order, asks the
catalog which blocks are new and writes those.  With a base, the same pass compares each block
with the base's block at the same place and takes the statistics of their difference.

Memory: a few groups a thread, whatever the model's size.  Nothing is visible before the
transaction commits; a file that changes while it is read stops the add.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mstore import fs
from mstore.blocks.index import Location
from mstore.checkpoint.directory import SourceFile, scan, unchanged
from mstore.checkpoint.dtypes import DTYPES
from mstore.checkpoint.partition import partition
from mstore.errors import BadCheckpoint
from mstore.ids import BlockId, SnapshotId, TensorId
from mstore.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.objects.shapes import require_same_shapes
from mstore.objects.snapshot import BASE, PREVIOUS, Parent, SnapshotRecord
from mstore.objects.tensor import BYTES, Tensor
from mstore.reports import AddReport, Progress
from mstore.stats.store import StatsStore
from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.transaction import RefMove, Transaction, branch_to_move
from mstore.version import TOOL

if TYPE_CHECKING:
    from mstore.stats.streaming import PairMeasure

GROUP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _PartPlan:
    """A part before its blocks are known: where it lies in the file, and its base if it has one."""

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    base: Tensor | None
    base_id: TensorId | None


@dataclass(frozen=True, slots=True)
class _Span:
    """One block to be read: of part number `part`, block `number`, at `offset` of the file."""

    part: int
    number: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring blocks read with one `pread`, and their ids; `data` is a part of `buffer`."""

    spans: list[_Span]
    buffer: bytearray
    data: memoryview
    ids: list[BlockId]


class _FileReader:
    """Reads and hashes one file on a pool of threads; yields groups in file order."""

    def __init__(
        self,
        source: SourceFile,
        parts: list[_PartPlan],
        block_size: int,
        comparison: _Comparison | None,
        spare: deque[bytearray],
    ) -> None:
        self._source = source
        self._parts = parts
        self._block_size = block_size
        self._comparison = comparison
        self._spare = spare
        with fs.translated(source.absolute):
            self._fd = os.open(source.absolute, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def _groups(self) -> Iterator[list[_Span]]:
        group: list[_Span] = []
        size = 0
        for number, part in enumerate(self._parts):
            for block, (start, length) in enumerate(partition(part.nbytes, self._block_size)):
                if group and size + length > GROUP_BYTES:
                    yield group
                    group, size = [], 0
                group.append(_Span(number, block, part.begin + start, length))
                size += length
        if group:
            yield group

    def _load(self, spans: list[_Span]) -> _Group:
        begin = spans[0].offset
        length = spans[-1].offset + spans[-1].length - begin
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = bytearray(max(GROUP_BYTES, self._block_size))
        view = memoryview(buffer)[:length]
        with fs.translated(self._source.absolute):
            got = os.preadv(self._fd, [view], begin)
        if got != length:
            raise _changed(self._source)
        bases = None if self._comparison is None else self._comparison.locate(spans)
        ids = []
        for number, span in enumerate(spans):
            block = view[span.offset - begin : span.offset - begin + span.length]
            id = BlockId.of(block)
            if self._comparison is not None and bases is not None:
                # At once, while the block is in the processor's cache.
                self._comparison.take(span, block, id, bases[number])
            ids.append(id)
        return _Group(spans, buffer, view, ids)

    def release(self, group: _Group) -> None:
        """Use a group's memory again; the caller is done with it."""
        self._spare.append(group.buffer)

    def run(self, pool: ThreadPoolExecutor, ahead: int) -> Iterator[_Group]:
        """All groups in order, with at most `ahead` of them in memory."""
        waiting: deque[Future[_Group]] = deque()
        try:
            for spans in self._groups():
                waiting.append(pool.submit(self._load, spans))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()


class _Comparison:
    """One file's tensors against the base's, block by block, in the threads that read."""

    def __init__(
        self, catalog: Catalog, parts: list[_PartPlan], measures: list[PairMeasure | None]
    ) -> None:
        from mstore.stats.streaming import BaseBlocks

        self._parts = parts
        self._measures = measures
        self._bases = BaseBlocks(catalog)

    def _base(self, span: _Span) -> BlockId | None:
        base = self._parts[span.part].base
        if base is None or self._measures[span.part] is None:
            return None
        return base.block(span.number)

    def locate(self, spans: list[_Span]) -> list[Location | None]:
        """Where the base's blocks lie; None where nothing is measured."""
        return self._bases.locate([self._base(span) for span in spans])

    def take(self, span: _Span, data: memoryview, id: BlockId, at: Location | None) -> None:
        """Measure one block that was read."""
        measure, base = self._measures[span.part], self._base(span)
        if measure is not None and base is not None and at is not None:
            measure.take(span.number, data, id, base, at, self._bases)


def _changed(source: SourceFile) -> BadCheckpoint:
    return BadCheckpoint(
        "the file changed while it was being read",
        where=str(source.absolute),
        hint="run the command again when nothing writes there",
    )


class _Adder:
    """One running `add`: counters, and the comparison with the base."""

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        transaction: Transaction,
        base: Manifest | None,
    ) -> None:
        self.catalog = catalog
        self.statistics = statistics
        self.transaction = transaction
        self.base = {} if base is None else base.tensors()
        self.has_base = base is not None
        # Memory that groups were in before: the kernel need not clear it again.
        self.spare: deque[bytearray] = deque()
        self.blocks_total = 0
        self.blocks_equal_base = 0

    def parts(self, source: SourceFile) -> list[_PartPlan]:
        """Header and tensors of a file in data order, or the file as one part."""
        if source.header is None:
            return [_PartPlan(None, BYTES, (source.size,), 0, source.size, None, None)]
        start = source.header.data_start
        parts = [_PartPlan(None, BYTES, (start,), 0, start, None, None)]
        for slot in source.header.tensors:
            base_id = self.base.get(slot.name)
            base = None if base_id is None else self.catalog.tensor(base_id)
            parts.append(
                _PartPlan(
                    slot.name,
                    slot.dtype,
                    slot.shape,
                    start + slot.begin,
                    slot.end - slot.begin,
                    base,
                    base_id,
                )
            )
        return parts

    def add_file(
        self,
        source: SourceFile,
        pool: ThreadPoolExecutor,
        ahead: int,
        tick: Callable[[int], None],
    ) -> File:
        """Store one file's new blocks and its tensor records."""
        parts = self.parts(source)
        measures = self._measures(parts)
        if source.header is not None and source.header.raw != _head(source):
            raise _changed(source)

        comparison = None
        if any(measure is not None for measure in measures):
            comparison = _Comparison(self.catalog, parts, measures)
        ids: list[list[BlockId]] = [[] for _ in parts]
        reader = _FileReader(source, parts, self.catalog.block_size, comparison, self.spare)
        try:
            for group in reader.run(pool, ahead):
                length = len(group.data)
                self._store(source, parts, group, ids)
                reader.release(group)
                tick(length)
        finally:
            reader.close()
        if not unchanged(source):
            raise _changed(source)
        stored = []
        for part, blocks, measure in zip(parts, ids, measures, strict=True):
            tensor = Tensor(part.dtype, part.shape, part.nbytes, b"".join(blocks))
            id = tensor.id()
            self.transaction.put_record(tensor)
            stored.append(Part(part.name, id, part.nbytes))
            if measure is not None and part.base_id is not None:
                self.statistics.put_pair(measure.finish(part.base_id, id))
        form = OPAQUE if source.header is None else SAFETENSORS
        return File(source.path, form, source.size, tuple(stored))

    def _measures(self, parts: list[_PartPlan]) -> list[PairMeasure | None]:
        if not self.has_base:
            return [None] * len(parts)
        # Late: the compiled passes take longer to load than a small checkpoint to add.
        from mstore.stats.streaming import PairMeasure

        return [
            PairMeasure.begin(part.base, part.dtype, part.shape, self.catalog.block_size)
            for part in parts
        ]

    def _store(
        self,
        source: SourceFile,
        parts: list[_PartPlan],
        group: _Group,
        ids: list[list[BlockId]],
    ) -> None:
        begin = group.spans[0].offset
        for span, id in zip(group.spans, group.ids, strict=True):
            part = parts[span.part]
            ids[span.part].append(id)
            self.blocks_total += 1
            if part.base is not None and part.base.dtype == part.dtype:
                self.blocks_equal_base += id == part.base.block(span.number)
            data = group.data[span.offset - begin : span.offset - begin + span.length]
            self.transaction.put_block(
                id, data, element_width(part.dtype), source.path, span.offset
            )


def _head(source: SourceFile) -> bytes:
    assert source.header is not None
    with fs.translated(source.absolute), source.absolute.open("rb") as file:
        return file.read(source.header.data_start)


def element_width(dtype: str) -> int:
    """Bytes of an element, for codecs; 1 for plain bytes and sub-byte dtypes."""
    found = DTYPES.get(dtype)
    return found.bits // 8 if found is not None and found.bits % 8 == 0 else 1


def _require_fine_tune(
    base: Manifest, files: tuple[SourceFile, ...], catalog: Catalog, name: str
) -> None:
    slots = [slot for file in files if file.header for slot in file.header.tensors]
    require_same_shapes(
        {tensor: catalog.tensor(id).shape for tensor, id in base.tensors().items()},
        {slot.name: slot.shape for slot in slots},
        what="not a fine-tune of this base",
        where=name,
        hint=f"mstore add PATH --name {name}    (without --base)",
    )


def add(
    catalog: Catalog,
    statistics: StatsStore,
    path: Path,
    *,
    name: str,
    base: SnapshotId | None,
    message: str,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> AddReport:
    """Store a checkpoint directory, or a single .safetensors file, under a ref.

    Raises BadCheckpoint, BadName, Conflict (the name is a tag), Incompatible (the base has other
    tensors), StorageFailed.  On any error nothing is published.
    """
    began = time.monotonic()
    current = branch_to_move(catalog, name)
    checkpoint = scan(path)
    base_manifest = None
    if base is not None:
        base_manifest = catalog.manifest(catalog.snapshot(base).manifest_id())
        _require_fine_tune(base_manifest, checkpoint.files, catalog, name)
    total = sum(file.size for file in checkpoint.files)
    done = 0

    def tick(length: int) -> None:
        nonlocal done
        done += length
        if progress is not None:
            progress(Progress("add", done, total))

    with Transaction(catalog, f"add {name}") as transaction:
        adder = _Adder(catalog, statistics, transaction, base_manifest)
        with ThreadPoolExecutor(threads, "add") as pool:
            files = [adder.add_file(file, pool, 2 * threads + 1, tick) for file in checkpoint.files]
        manifest = Manifest(tuple(sorted(files, key=lambda file: file.path)))
        manifest_id = manifest.id()
        snapshot, is_new = _snapshot(catalog, current, manifest, base, message)
        # Before the commit: what fails after it would be an error of something that was done.
        statistics.flush()
        if is_new:
            transaction.put_record(manifest)
            new = refs.Ref(refs.BRANCH, snapshot.id())
            action = f"add: {message}" if message else "add"
            transaction.commit(snapshots=[snapshot], moves=[RefMove(name, current, new, action)])
    return AddReport(
        name=name,
        snapshot=snapshot.id(),
        manifest=manifest_id,
        new_snapshot=is_new,
        files=len(files),
        tensors=sum(1 for file in files for _ in file.tensors()),
        plain_bytes=total,
        bytes_written=transaction.bytes_written,
        blocks_total=adder.blocks_total,
        blocks_new=transaction.blocks_new,
        blocks_equal_base=adder.blocks_equal_base if base is not None else None,
        seconds=time.monotonic() - began,
    )


def _snapshot(
    catalog: Catalog,
    current: refs.Ref | None,
    manifest: Manifest,
    base: SnapshotId | None,
    message: str,
) -> tuple[SnapshotRecord, bool]:
    """The snapshot to publish; or the ref's own and False, where it says the same already."""
    parents = []
    if current is not None:
        tip = catalog.snapshot(current.snapshot_id())
        told = {parent.snapshot for parent in tip.parents if parent.role == BASE}
        if tip.manifest == manifest.id() and (base is None or base in told):
            return tip, False
        parents.append(Parent(PREVIOUS, current.snapshot))
    if base is not None:
        parents.append(Parent(BASE, base))
    record = SnapshotRecord(
        manifest=manifest.id(),
        parents=tuple(parents),
        origin="add",
        plan=None,
        coverage=None,
        message=message,
        time_ns=now_ns(),
        tool=TOOL,
    )
    return record, True
