"""The engine: runs a plan, block by block, into a sink.

Streams: a chunk's base and planned expert blocks are read, mixed by one kernel call, hashed and
handed to the sink in file order.  Chunks run side by side on a pool of threads; a worker holds
one chunk of the base, of each expert and of the output, and nothing ever holds a tensor.

Budget-sound: every read of an expert byte is charged to a meter whose limit is the plan's own
figure, before the `pread`; a read beyond it raises.  Deterministic: the outcome is a function
of the plan alone, for any number of threads.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mstore.blocks.index import Location
from mstore.blocks.meter import Meter
from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.checkpoint.partition import partition
from mstore.ids import BlockId, Buffer, Id, TensorId
from mstore.merge.fitting import check_fits
from mstore.merge.kernels import UNLIMITED, Mix, count_ties, mix_chunk
from mstore.merge.operators import OPERATORS, needs_thresholds, reuses_base
from mstore.merge.output import is_safetensors, retyped_file, retyped_header, tensor_bytes
from mstore.merge.random import mask_keys
from mstore.merge.tied import first_names
from mstore.merge.ties import TieLedger
from mstore.objects.canonical import Record
from mstore.objects.coverage import Coverage, TensorCoverage, bitmap
from mstore.objects.manifest import File, Manifest, Part
from mstore.objects.plan import READ, SHARED, Plan, PlanTensor
from mstore.objects.tensor import BYTES, Tensor
from mstore.reports import Progress
from mstore.stats.chunks import chunk_blocks
from mstore.store.catalog import Catalog

_ROW_ALIGNMENT = 64


class Sink(Protocol):
    """Where output goes.  Called from one thread, blocks in file order."""

    def put_block(
        self, block: BlockId, data: Buffer, width: int, file: str, file_offset: int
    ) -> bool:
        """Keep a block; True if it was not there before."""

    def put_record(self, record: Record) -> Id:
        """Keep a record."""


class Discard:
    """A sink that keeps nothing: for replaying a plan just to learn its ManifestId."""

    def put_block(
        self, block: BlockId, data: Buffer, width: int, file: str, file_offset: int
    ) -> bool:
        """Forget the block."""
        return False

    def put_record(self, record: Record) -> Id:
        """Forget the record."""
        return record.id()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run produced and what it cost."""

    manifest: Manifest
    coverage: Coverage
    expert_bytes_read: int
    base_bytes_read: int
    blocks_total: int
    blocks_reused: int


@dataclass(slots=True)
class _Chunk:
    """A chunk computed: output blocks and their ids."""

    number: int
    ids: list[BlockId]
    data: list[Buffer]


@dataclass(slots=True)
class _Job:
    """One tensor on its way: what stays the same for all its chunks."""

    plan: PlanTensor
    base: Tensor
    experts: list[Tensor]
    out_dtype: str
    elements: int
    thresholds: Any
    keys: Any
    ledger: TieLedger
    ids: list[BlockId] = field(default_factory=list)

    def chunk_length(self, number: int) -> int:
        """Elements of chunk `number`."""
        return min(self.plan.chunk_elements, self.elements - number * self.plan.chunk_elements)


class _Scratch(threading.local):
    """A worker's own buffers, grown to the largest chunk that it has seen."""

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0), dtype=np.uint8)

    def rows(self, count: int, length: int) -> Any:
        """uint8[>= count, >= length], rows aligned."""
        if self._rows.shape[0] < count or self._rows.shape[1] < length:
            stride = -(-length // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
            shape = (max(count, self._rows.shape[0]), max(stride, self._rows.shape[1]))
            # From anonymous pages that start aligned; np.empty alone promises 16 bytes.
            flat = np.empty(shape[0] * shape[1] + _ROW_ALIGNMENT, dtype=np.uint8)
            start = -flat.ctypes.data % _ROW_ALIGNMENT
            self._rows = flat[start : start + shape[0] * shape[1]].reshape(shape)
        return self._rows


class Engine:
    """One run of one plan."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        sink: Sink,
        *,
        threads: int,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        check_fits(catalog, plan)
        self._catalog = catalog
        self._plan = plan
        self._sink = sink
        self._threads = threads
        self._progress = progress
        self._parameters = dict(plan.parameters)
        self._mix = Mix.build(plan.method, self._parameters, [e.weight for e in plan.experts])
        self._expert_meter = Meter("expert", plan.planned_expert_bytes)
        self._base_meter = Meter("base")
        self._scratch = _Scratch()
        self._base = catalog.manifest(plan.base_id())
        self._experts = [
            catalog.manifest(expert.manifest_id()).tensors() for expert in plan.experts
        ]
        self._planned = {tensor.name: tensor for tensor in plan.tensors}
        self._names = self._base.tensors()
        self._first = first_names(self._names, self._experts)
        self._retypes = any(
            self._is_retyped(part)
            for file in self._base.files
            if is_safetensors(file)
            for part in file.tensors()
        )
        self._merged: dict[str, tuple[TensorId, int]] = {}
        self._coverage: dict[str, TensorCoverage] = {}
        self._blocks_total = 0
        self._blocks_new = 0
        self._done = 0
        self._total = sum(tensor_bytes(f) for f in self._base.files if is_safetensors(f))

    def run(self) -> Outcome:
        """Compute everything.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        with ThreadPoolExecutor(self._threads, "merge") as pool:
            files = tuple(self._file(file, pool) for file in self._base.files)
        manifest = Manifest(files)
        coverage = Coverage(
            self._plan.id(), tuple(self._coverage[t.name] for t in self._plan.tensors)
        )
        return Outcome(
            manifest=manifest,
            coverage=coverage,
            expert_bytes_read=self._expert_meter.total,
            base_bytes_read=self._base_meter.total,
            blocks_total=self._blocks_total,
            blocks_reused=self._blocks_total - self._blocks_new,
        )

    # -- files -------------------------------------------------------------------------------

    def _file(self, file: File, pool: ThreadPoolExecutor) -> File:
        if not is_safetensors(file):
            return self._other_file(file)
        parts = list(file.parts)
        retyped = {
            part.name: self._plan.dtype
            for part in parts
            if part.name is not None and self._plan.dtype is not None and self._is_retyped(part)
        }
        if retyped:
            raw = self._plain(parts[0])
            parts[0] = self._put_bytes(retyped_header(raw, retyped, file.path), file.path)
        else:
            self._blocks_total += self._catalog.tensor(parts[0].tensor_id()).block_count()
        offset = parts[0].nbytes
        for number, part in enumerate(parts[1:], start=1):
            if self._is_planned(part):
                parts[number] = self._tensor(part, file.path, offset, pool)
            else:
                self._blocks_total += self._catalog.tensor(part.tensor_id()).block_count()
                self._tick(part.nbytes)
            offset += parts[number].nbytes
        return File(file.path, file.form, sum(part.nbytes for part in parts), tuple(parts))

    def _is_planned(self, part: Part) -> bool:
        # A second tensor of the same name (a consolidated copy) is merged only if it is the same.
        assert part.name is not None
        return self._first[part.name] in self._planned and part.tensor == self._names[part.name]

    def _is_retyped(self, part: Part) -> bool:
        if self._plan.dtype is None or not self._is_planned(part):
            return False
        return self._catalog.tensor(part.tensor_id()).dtype != self._plan.dtype

    def _other_file(self, file: File) -> File:
        if self._plan.dtype is not None and self._retypes:
            changed = retyped_file(
                file.path, lambda: self._plain(file.parts[0]), self._plan.dtype, self._out_bytes
            )
            if changed is not None:
                part = self._put_bytes(changed, file.path)
                return File(file.path, file.form, part.nbytes, (part,))
        for part in file.parts:
            self._blocks_total += self._catalog.tensor(part.tensor_id()).block_count()
        return file

    def _out_bytes(self, path: str) -> int:
        """Bytes that the tensors of a file take in the output."""
        file = self._base.file(path)
        if file is None:
            return 0
        total = tensor_bytes(file)
        for part in file.tensors():
            if self._plan.dtype is not None and self._is_retyped(part):
                shape = self._catalog.tensor(part.tensor_id()).shape
                total += nbytes(self._plan.dtype, shape) - part.nbytes
        return total

    def _plain(self, part: Part) -> bytes:
        tensor = self._catalog.tensor(part.tensor_id())
        return b"".join(self._catalog.read_block(block) for block in tensor.block_ids())

    def _put_bytes(self, data: bytes, path: str) -> Part:
        ids = []
        for start, length in partition(len(data), self._catalog.block_size):
            ids.append(self._put(data[start : start + length], 1, path, start))
        tensor = Tensor(BYTES, (len(data),), len(data), b"".join(ids))
        return Part(None, self._sink.put_record(tensor), len(data))

    def _put(self, data: bytes, width: int, path: str, offset: int) -> BlockId:
        id = BlockId.of(data)
        self._blocks_new += self._sink.put_block(id, data, width, path, offset)
        self._blocks_total += 1
        return id

    # -- tensors -----------------------------------------------------------------------------

    def _tensor(self, part: Part, path: str, offset: int, pool: ThreadPoolExecutor) -> Part:
        assert part.name is not None
        name = self._first[part.name]
        known = self._merged.get(name)
        if known is not None:
            self._blocks_total += -(-known[1] // self._catalog.block_size)
            self._tick(part.nbytes)
            return Part(part.name, *known)
        job = self._job(name)
        width = DTYPES[job.out_dtype].bits // 8
        for chunk in self._chunks(job, pool):
            for id, data in zip(chunk.ids, chunk.data, strict=True):
                job.ids.append(id)
                self._blocks_total += 1
                if data:
                    where = offset + (len(job.ids) - 1) * self._catalog.block_size
                    self._blocks_new += self._sink.put_block(id, data, width, path, where)
            self._tick(job.chunk_length(chunk.number) * (DTYPES[job.base.dtype].bits // 8))
        tensor = Tensor(
            job.out_dtype,
            job.base.shape,
            nbytes(job.out_dtype, job.base.shape),
            b"".join(job.ids),
        )
        stored = TensorId(self._sink.put_record(tensor))
        self._merged[name] = stored, tensor.nbytes
        self._coverage[name] = self._cover(job)
        return Part(part.name, stored, tensor.nbytes)

    def _job(self, name: str) -> _Job:
        planned = self._planned[name]
        base = self._catalog.tensor(self._names[name])
        experts = [self._catalog.tensor(found[name]) for found in self._experts]
        count = len(experts)
        thresholds = np.zeros(count, dtype=np.float32)
        quotas = [UNLIMITED] * count
        if needs_thresholds(self._plan.method, self._parameters):
            thresholds[:] = [threshold.value for threshold in planned.thresholds]
            quotas = [threshold.quota for threshold in planned.thresholds]
        keys = np.zeros((count, 2), dtype=np.uint32)
        if OPERATORS[self._plan.method].random:
            keys = mask_keys(int(self._parameters["seed"]), count, name)
        return _Job(
            plan=planned,
            base=base,
            experts=experts,
            out_dtype=self._plan.dtype or base.dtype,
            elements=math.prod(base.shape),
            thresholds=thresholds,
            keys=keys,
            ledger=TieLedger(quotas),
        )

    def _chunks(self, job: _Job, pool: ThreadPoolExecutor) -> Iterator[_Chunk]:
        """The chunks of a tensor in order; the pool works a few ahead of the one yielded."""
        waiting: deque[Future[_Chunk]] = deque()
        try:
            for number in range(-(-job.elements // job.plan.chunk_elements)):
                waiting.append(pool.submit(self._chunk, job, number))
                if len(waiting) > 2 * self._threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            job.ledger.fail(-1)
            for future in waiting:
                if not future.cancel():
                    future.exception()

    def _chunk(self, job: _Job, number: int) -> _Chunk:
        try:
            return self._compute(job, number)
        except BaseException:
            job.ledger.fail(number)
            raise

    def _compute(self, job: _Job, number: int) -> _Chunk:
        size = self._catalog.block_size
        chunk = job.plan.chunk_elements
        present = [k for k, state in enumerate(job.plan.states) if state[number] in (READ, SHARED)]
        base_blocks = chunk_blocks(job.base, chunk, number, size)
        reuse = job.out_dtype == job.base.dtype and reuses_base(self._plan.method, self._parameters)
        if not present and reuse:
            job.ledger.take(number, [0] * len(job.experts))
            return _Chunk(number, base_blocks, [b""] * len(base_blocks))
        n = job.chunk_length(number)
        widths = [DTYPES[job.experts[k].dtype].bits // 8 for k in present]
        base_width = DTYPES[job.base.dtype].bits // 8
        rows = self._scratch.rows(len(present) + 1, n * max([base_width, *widths]))
        base, experts = rows[0], rows[1 : 1 + len(present)]
        sources = [chunk_blocks(job.experts[k], chunk, number, size) for k in present]
        # One look into the index for the whole chunk.
        blocks = list(dict.fromkeys(itertools.chain(base_blocks, *sources)))
        places = dict(zip(blocks, self._catalog.locate(blocks), strict=True))
        self._read(base_blocks, places, base, self._base_meter)
        # Only blocks of one dtype are planned as shared: equal bytes of another one are read again.
        read: dict[tuple[str, tuple[BlockId, ...]], int] = {}
        for row, (k, width, source) in enumerate(zip(present, widths, sources, strict=True)):
            twin = read.setdefault((job.experts[k].dtype, tuple(source)), row)
            if twin == row:
                self._read(source, places, experts[row], self._expert_meter)
            else:
                experts[row, : n * width] = experts[twin, : n * width]
        dtypes = [job.experts[k].dtype for k in present]
        quotas = self._quotas(job, number, n, base, experts, present)
        # Not scratch: the sink gets the output as it is, while this thread goes on.
        out = np.empty(n * DTYPES[job.out_dtype].bits // 8, dtype=np.uint8)
        mix_chunk(
            self._mix,
            base,
            job.base.dtype,
            experts,
            dtypes,
            np.array(present, dtype=np.int64),
            n,
            number * chunk,
            job.thresholds,
            quotas,
            job.keys,
            out,
            job.out_dtype,
        )
        ids, data = [], []
        for start, length in partition(len(out), size):
            block: Buffer = out.data[start : start + length]
            ids.append(BlockId.of(block))
            data.append(block)
        return _Chunk(number, ids, data)

    def _quotas(
        self, job: _Job, number: int, n: int, base: Any, experts: Any, present: list[int]
    ) -> Any:
        counted = job.ledger.open
        ties = [0] * len(job.experts)
        for row, k in enumerate(present):
            if counted[k]:
                ties[k] = count_ties(
                    base, job.base.dtype, experts[row], job.experts[k].dtype, n, job.thresholds[k]
                )
        return np.array(job.ledger.take(number, ties), dtype=np.int64)

    def _read(
        self, blocks: list[BlockId], places: Mapping[BlockId, Location], row: Any, meter: Meter
    ) -> None:
        target = memoryview(row)
        done = 0
        for block in blocks:
            location = places[block]
            self._catalog.read_block_into(
                block, location, target[done : done + location.raw_length], meter
            )
            done += location.raw_length

    def _cover(self, job: _Job) -> TensorCoverage:
        same = job.out_dtype == job.base.dtype
        reused = [same and id == job.base.block(number) for number, id in enumerate(job.ids)]
        width = DTYPES[job.out_dtype].bits // 8
        per_chunk = job.plan.chunk_elements * width // self._plan.block_size
        contributed = tuple(
            bitmap([state[number // per_chunk] in (READ, SHARED) for number in range(len(job.ids))])
            for state in job.plan.states
        )
        return TensorCoverage(job.plan.name, len(job.ids), bitmap(reused), contributed)

    def _tick(self, length: int) -> None:
        self._done += length
        if self._progress is not None:
            self._progress(Progress("merge", self._done, max(self._total, self._done)))
