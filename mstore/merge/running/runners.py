"""The runners: compute the slices of a work list, on threads of this process or on workers.

Here, one slice's pack is sealed while the next is computed.  The last pack stays open for the
records of the output.

Elsewhere, `execute` computes one slice in any process that can enter its workplace.  It needs no
index, no lease and no catalog, and publishes nothing: the merge that made the slice takes the
receipt, and the pack is garbage until then.  Receipts come in any order.  Workers share no meter: a
slice is charged whole before it is submitted, and refuses to read more than that.  A slice whose
worker dies runs again, if the engine says that nobody else does that.  If all its attempts fail,
the run ends as Interrupted; what was finished waits for the next run (`leftovers`).  At the end,
where workers are idle, a slice that takes much longer than others runs a second time elsewhere.

The work list has the tensors of a plan in file order, as slices of what must be computed.  A chunk
needs only its ids if its output is the base's own, or exists (`finished`).  The others are cut into
slices of about equal output.  Slices are made lazily, while others are computed.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from mstore.blocks.packs import PackWriter, SealedPack
from mstore.blocks.reader import Meter
from mstore.merge.running.compute import Computed, Computer, computed
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.finished import TOGETHER, FinishedChunks, Shape
from mstore.merge.running.leftovers import write_receipt
from mstore.merge.running.output import OutputFiles, is_safetensors, tensor_bytes
from mstore.merge.running.slices import (
    ALL_FINITE,
    Bounds,
    NotFinite,
    Receipt,
    Result,
    Slice,
    TensorChunks,
)
from mstore.merge.running.task import ChunkTask, Members, Tasks, TensorTask, item_size
from mstore.store.catalog import Catalog
from mstore.store.leases import PACK
from mstore.store.objects.plan import Coverage, Plan, TensorCoverage, bitmap, bitmaps
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import Interrupted, MstoreError
from mstore.terms.ids import ID_BYTES, BlockId
from mstore.terms.report import Progress, ProgressCallback, Report


class SliceWriter:
    """Takes the chunks of one slice in order and writes the new blocks into its pack.

    path: of the pack. written: the blocks in this pack or in another of the same run; grows.
    durable: as for `PackWriter`.  For one thread only.
    """

    def __init__(
        self, slice: Slice, path: Path, written: set[BlockId], *, durable: bool = True
    ) -> None:
        self.slice = slice
        self._path = path
        self._durable = durable
        self._written = written
        self._writer: PackWriter | None = None
        self.results: list[Result] = []
        self.new: list[BlockId] = []

    def put(self, computed: Computed) -> None:
        """Write a batch's new blocks.  Raises StorageFailed."""
        self.results += computed.results
        for output in computed.outputs:
            encoded = output.encoded
            if encoded is not None and output.id not in self._written:
                self._open().append_encoded(output.id, encoded, output.file, output.offset)
                self._written.add(output.id)
                self.new.append(output.id)

    def _open(self) -> PackWriter:
        if self._writer is None:
            self._writer = PackWriter(self._path, durable=self._durable)
        return self._writer

    def seal(self) -> SealedPack | None:
        """Finish the pack; None if no block was new.  May be called from another thread."""
        writer, self._writer = self._writer, None
        return None if writer is None else writer.seal()

    def release(self) -> PackWriter | None:
        """Return the unfinished pack for the caller to continue; None if no block was new."""
        writer, self._writer = self._writer, None
        return writer

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


_SEALING: Final = 2
"""Number of packs that may be syncing while the next one is filled."""


class LocalRunner:
    """Runs a work list here.

    sink: None to compute without storing. written: the blocks that this run has written; grows.
    """

    def __init__(
        self, computer: Computer, bounds: Bounds, sink: Transaction | None, written: set[BlockId]
    ) -> None:
        self._computer = computer
        self._bounds = bounds
        self._sink = sink
        self._written = written

    def run(self, work: WorkList) -> None:
        """Compute everything.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        with ThreadPoolExecutor(1, "seal") as sealer:
            sealing: deque[Future[SealedPack | None]] = deque()
            writer: SliceWriter | None = None
            stream = computed(self._computer, self._bounds, work.slices())
            try:
                for batch in stream:
                    work.take(batch.results)
                    if self._sink is not None:
                        if writer is None or writer.slice is not batch.slice:
                            path = self._sink.directory / f"{batch.slice.number}{PACK}"
                            full, writer = writer, SliceWriter(batch.slice, path, self._written)
                            if full is not None:
                                sealing.append(sealer.submit(_seal, full))
                            while len(sealing) > _SEALING:
                                self._publish(sealing.popleft().result())
                        writer.put(batch)
                    self._computer.recycle(batch)
                while sealing:
                    self._publish(sealing.popleft().result())
                if writer is not None:
                    self._keep_open(writer)
            except BaseException:
                stream.close()
                if writer is not None:
                    writer.abandon()
                raise

    def _publish(self, pack: SealedPack | None) -> None:
        if pack is not None:
            assert self._sink is not None
            self._sink.adopt(pack)

    def _keep_open(self, writer: SliceWriter) -> None:
        """Put the records into the last pack, too: one file less to sync and to open."""
        pack = writer.release()
        if pack is not None:
            assert self._sink is not None
            self._sink.go_on_with(pack, writer.new)


def _seal(writer: SliceWriter) -> SealedPack | None:
    """Sync a slice's pack and record its purpose, in a thread of its own."""
    pack = writer.seal()
    if pack is not None:
        write_receipt(pack.path, writer.results)
    return pack


# -- elsewhere ---------------------------------------------------------------------------------


def execute(slice: Slice) -> Receipt:
    """Compute a slice in its workplace and deliver its pack, within the bounds of the slice.

    For any process that can enter the workplace.  Each attempt writes a pack with a unique name, so
    a slice may run again after a worker died, or twice at once: one receipt counts, and the packs
    of other attempts are garbage.  Raises BudgetExceeded, Corrupt, StorageFailed, Unavailable, with
    the worker's name; then nothing is left behind.
    """
    began = time.monotonic()
    worker = worker_name()
    expert_meter, base_meter = Meter("expert", slice.expert_bytes), Meter("base")
    try:
        with slice.workplace.entered() as bench:
            path = bench.directory / f"{slice.number}-{os.urandom(4).hex()}.pack"
            writer = SliceWriter(slice, path, set(), durable=not bench.is_scratch)
            # What it reads is stored already.
            known = _inputs_of(slice)
            computer = Computer(
                *(bench.packs, expert_meter, base_meter),
                lambda blocks: [block in known for block in blocks],
            )
            try:
                with closing(computed(computer, slice.bounds, [slice])) as batches:
                    for one in batches:
                        writer.put(one)
                        computer.recycle(one)
                sealed = writer.seal()
            except BaseException:
                writer.abandon()
                raise
            pack = None if sealed is None else bench.deliver(sealed)
    except MstoreError as error:
        error.locate(f"{error.where}, on worker {worker}" if error.where else f"worker {worker}")
        raise
    return Receipt(
        pack=pack,
        results=tuple(writer.results),
        expert_bytes=expert_meter.total,
        base_bytes=base_meter.total,
        worker=worker,
        seconds=time.monotonic() - began,
    )


def worker_name() -> str:
    """Return what people call this process: its machine and its number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _inputs_of(slice: Slice) -> set[bytes]:
    return {
        source.id
        for run in slice.runs
        for task in run.chunks
        for row in (task.base, *task.rows)
        for source in row.sources
    }


class Workers(Protocol):
    """Who computes slices elsewhere: an engine that hands them out (`mstore.clusters`)."""

    def submit(self, slice: Slice) -> Future[Receipt]:
        """Have a slice computed. Raises BadRequest for what is no usable engine."""

    def slots(self) -> int:
        """Return how many slices they compute at a time, as far as that is known now."""

    def is_lost(self, error: Exception) -> bool:
        """Return whether a slice failed because its worker died, and nobody runs it again."""


class WorkerReport(Report, frozen=True):
    """What one worker did of a merge."""

    worker: str
    """its machine and process"""
    slices: int
    """slices that it computed"""
    bytes_read: int
    """bytes that it read, of experts and base"""
    seconds: float
    """how long it computed, all slices together"""


_AHEAD: Final = (2, 2)
"""Slices that are handed out at a time: so many for each that workers compute, and so many more."""
_MOST_ATTEMPTS: Final = 4
"""How often a slice is handed out whose workers die."""
_LATE: Final = 3.0
"""A slice that takes so many times as long as others is handed out once more, at the end."""
_LEAST_LATE: Final = 20.0
"""And at least so many seconds."""


class _Attempt(NamedTuple):
    slice: Slice
    began: float


class RemoteRunner:
    """Runs a work list on workers.  sink: None to compute without storing.

    threads: all in the one that calls `run`.
    """

    def __init__(
        self,
        workers: Workers,
        delivery: Delivery,
        sink: Transaction | None,
        expert_meter: Meter,
        base_meter: Meter,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._progress = progress
        self._workers = workers
        self._delivery = delivery
        self._sink = sink
        self._expert_meter = expert_meter
        self._base_meter = base_meter
        self._waiting: dict[Future[Receipt], _Attempt] = {}
        self._attempts: Counter[int] = Counter()
        self._seconds: list[float] = []
        self._reports: dict[str, WorkerReport] = {}

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """What each worker did, by name."""
        return tuple(self._reports[name] for name in sorted(self._reports))

    def run(self, work: WorkList) -> None:
        """Compute everything.

        Raises BadRequest (no usable engine), BudgetExceeded, Corrupt, Interrupted, StorageFailed,
        Unavailable.
        """
        try:
            for slice in work.slices():
                # Before submission: no worker knows what the others read.
                self._expert_meter.charge(slice.expert_bytes)
                self._submit(slice)
                # What is finished is kept at once: this process may die, too.
                while self._is_full() or any(one.done() for one in self._waiting):
                    self._receive_some(work)
            while self._waiting:
                self._receive_some(work, is_end=True)
        except BaseException:
            self._end()
            raise

    def _is_full(self) -> bool:
        return len(self._waiting) >= _AHEAD[0] * self._workers.slots() + _AHEAD[1]

    def _submit(self, slice: Slice) -> None:
        self._attempts[slice.number] += 1
        try:
            future = self._workers.submit(slice)
        except MstoreError:
            raise
        except Exception as error:
            raise _lost(error) from error
        self._waiting[future] = _Attempt(slice, time.monotonic())

    def _receive_some(self, work: WorkList, *, is_end: bool = False) -> None:
        done = wait(self._waiting, timeout=_LOOK, return_when=FIRST_COMPLETED).done
        for future in done:
            attempt = self._waiting.pop(future, None)
            if attempt is None:
                # Another attempt at its slice came first.
                continue
            try:
                receipt = future.result()
            except Exception as error:  # noqa: BLE001 -- raised there
                self._failed(attempt.slice, error)
            else:
                self._seconds.append(time.monotonic() - attempt.began)
                self._drop_others(attempt.slice)
                self._receive(work, receipt)
        if is_end and not done:
            self._hurry()

    def _failed(self, slice: Slice, error: Exception) -> None:
        """Hand a slice out again whose worker died; raise what else went wrong."""
        raised = _raised(error)
        if self._workers.is_lost(raised) and self._attempts[slice.number] < _MOST_ATTEMPTS:
            self._submit(slice)
            return
        if any(other.slice is slice for other in self._waiting.values()):
            return
        if raised is error and isinstance(error, MstoreError):
            raise error
        raise (raised if isinstance(raised, MstoreError) else _lost(raised)) from error

    def _drop_others(self, slice: Slice) -> None:
        for future, other in list(self._waiting.items()):
            if other.slice is slice:
                future.cancel()
                del self._waiting[future]

    def _hurry(self) -> None:
        """Where workers are idle at the end, hand out a slice again that takes too long."""
        if len(self._waiting) >= self._workers.slots() or not self._seconds:
            return
        late = max(_LEAST_LATE, _LATE * statistics.median(self._seconds))
        now = time.monotonic()
        for slice, began in list(self._waiting.values()):
            if now - began > late and self._attempts[slice.number] == 1:
                self._submit(slice)
                return

    def _receive(self, work: WorkList, receipt: Receipt) -> None:
        work.take(receipt.results)
        self._base_meter.charge(receipt.base_bytes)
        if receipt.pack is not None:
            assert self._sink is not None
            self._delivery.keep(self._sink.directory, receipt.pack, receipt.results)
            self._delivery.adopt(self._sink, receipt.pack)
        before = self._reports.get(receipt.worker, WorkerReport(receipt.worker, 0, 0, 0.0))
        self._reports[receipt.worker] = WorkerReport(
            worker=receipt.worker,
            slices=before.slices + 1,
            bytes_read=before.bytes_read + receipt.expert_bytes + receipt.base_bytes,
            seconds=before.seconds + receipt.seconds,
        )
        if self._progress is not None and len(self._reports) <= _MOST_SHOWN:
            most = max(one.bytes_read for one in self._reports.values())
            done = self._reports[receipt.worker].bytes_read
            self._progress(Progress(f"  {receipt.worker}", done, most))

    def _end(self) -> None:
        """Wait until no slice is running, and keep the packs of those that were finished.

        Futures that can be cancelled while they run (Dask's) are not waited for: such a slice
        delivers a pack without a receipt, which is garbage.
        """
        for future in self._waiting:
            future.cancel()
        for future in self._waiting:
            with suppress(Exception):
                receipt = future.result()
                if receipt.pack is not None and self._sink is not None:
                    self._delivery.keep(self._sink.directory, receipt.pack, receipt.results)


_MOST_SHOWN: Final = 16
"""Workers whose bytes progress tells one by one."""
_LOOK: Final = 1.0
"""Seconds between two looks at whether a slice takes too long."""


def _raised(error: Exception) -> Exception:
    """Return what the slice raised.  Ray puts a class around it whose text is a traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def _lost(error: Exception) -> Interrupted:
    """Return what to raise for an error that is not mstore's own: the engine's, or a bug's."""
    kind = type(error).__name__
    said = str(error).strip().partition("\n")[0]
    return Interrupted(
        "the workers did not return a slice: " + (f"{kind}: {said}" if said else kind),
        hint="check the workers (their memory, their logs), then run the same merge again: it "
        "reuses the finished slices",
    )


class Job(msgspec.Struct):
    """One tensor in progress.  `ids` is complete once every chunk was put.

    not_finite: new elements so far.
    """

    tensor: TensorTask
    members: Members
    shape: Shape
    ids: bytearray
    not_finite: NotFinite = ALL_FINITE

    @classmethod
    def of(cls, tensor: TensorTask, members: Members, block_size: int) -> Job:
        """Return a job without any output yet."""
        shape = Shape(tensor, members, block_size)
        return cls(tensor, members, shape, bytearray(shape.blocks * ID_BYTES))

    def put(self, number: int, blocks: Sequence[BlockId], not_finite: NotFinite) -> None:
        """Set the blocks of a chunk, with its new elements that are not finite."""
        if not_finite is not ALL_FINITE:
            self.not_finite += not_finite
        at = number * self.shape.per_chunk * ID_BYTES
        self.ids[at : at + len(blocks) * ID_BYTES] = b"".join(blocks)

    def put_base(self, number: int) -> None:
        """Set the blocks of a chunk to those of the base."""
        span = self.shape.per_chunk * ID_BYTES
        at = slice(number * span, (number + 1) * span)
        self.ids[at] = self.members.base.blocks[at]

    def record(self) -> Tensor:
        """Return the output tensor."""
        tensor = self.tensor
        return Tensor(tensor.out_dtype, tensor.shape, tensor.out_bytes, bytes(self.ids))


class Cutter:
    """Collects runs and cuts them.  Belongs to one thread.

    first: the first slice, without its runs; the others are like it, each with a number of its own.
    slice_bytes: plain bytes of output per slice. work: plain bytes that are read and made for a
    byte of output, on average: slices are cut by expected work.  A tensor whose tie quota ends
    within it is not cut.
    """

    def __init__(self, first: Slice, slice_bytes: int, work: float = 2.0) -> None:
        self._first = first
        self._limit = slice_bytes * work
        self._most = 2 * slice_bytes
        self._count = 0
        self._runs: list[TensorChunks] = []
        self._work = 0.0
        self._length = 0

    def add(self, run: TensorChunks) -> Iterator[Slice]:
        """Add a run, and yield the slices that are full."""
        if run.tensor.limited:
            if self._runs and self._work + sum(map(_work_of, run.chunks)) > self._limit:
                yield self._cut()
            self._runs.append(run)
            for task in run.chunks:
                self._count_in(task)
            if self._is_full:
                yield self._cut()
            return
        start = 0
        for number, task in enumerate(run.chunks, start=1):
            self._count_in(task)
            if self._is_full or number == len(run.chunks):
                part = slice(start, number)
                self._runs.append(TensorChunks(run.tensor, run.chunks[part], run.keys[part]))
                start = number
            if self._is_full:
                yield self._cut()

    def _count_in(self, task: ChunkTask) -> None:
        self._work += _work_of(task)
        self._length += task.out_bytes

    @property
    def _is_full(self) -> bool:
        return self._work >= self._limit or self._length >= self._most

    def rest(self) -> Iterator[Slice]:
        """Yield the last slice, unless all runs are in slices."""
        if self._runs:
            yield self._cut()

    def _cut(self) -> Slice:
        made = replace(self._first, number=self._count, runs=tuple(self._runs))
        self._count += 1
        self._runs, self._work, self._length = [], 0.0, 0
        return made


def _work_of(task: ChunkTask) -> int:
    """Return the plain bytes of all sides and of the output: each is read or made, and hashed."""
    sides = sum([item_size(row.dtype) for row in task.rows])
    return task.out_bytes + task.n * (item_size(task.base.dtype) + sides)


_BLOCKS_TOGETHER: Final = 1 << 10
"""Blocks of the output that are looked up together, or those of one tensor."""


class WorkList:
    """All work of one run, and its results.  Belongs to one thread.

    Complete once `slices` is exhausted and `take` has had every result.

    large: bytes of output from which a tensor that is not cut goes before all others; None: all go
    in file order. jobs: the tensors, by the name they are planned under.
    """

    def __init__(
        self,
        catalog: Catalog,
        tasks: Tasks,
        files: OutputFiles,
        finished: FinishedChunks,
        cutter: Cutter,
        progress: ProgressCallback | None = None,
        large: int | None = None,
    ) -> None:
        self._large = large
        self._tasks = tasks
        self._files = [files.file(file) for file in files.base.files if is_safetensors(file)]
        self._output = files
        self._finished = finished
        self._cutter = cutter
        self._block_size = catalog.block_size
        self._progress = progress
        self._done = 0
        self._total = sum(map(tensor_bytes, self._files))
        self.jobs: dict[str, Job] = {}

    def slices(self) -> Iterator[Slice]:
        """Yield the work, large tensors first; fill in jobs with every chunk that needs none.

        Tensors are looked up together: first few, for which the computing threads wait, then more.
        """
        jobs: list[Job] = []
        blocks, enough = 0, 2
        for job in self._ordered():
            jobs.append(job)
            blocks += job.shape.blocks
            if len(jobs) >= TOGETHER or blocks >= enough:
                yield from self._cut(jobs)
                jobs, blocks = [], 0
                enough = min(2 * enough, _BLOCKS_TOGETHER)
        yield from self._cut(jobs)
        yield from self._cutter.rest()

    def _ordered(self) -> Iterator[Job]:
        """Yield each tensor that is merged once: the large ones that are not cut, then the rest.

        A worker that begins with a large one at the end keeps all others waiting.
        """
        if self._large is None:
            yield from self._in_file_order()
            return
        every = list(self._in_file_order())
        first = [job for job in every if job.tensor.limited and job.tensor.out_bytes > self._large]
        yield from sorted(first, key=lambda job: -job.tensor.out_bytes)
        done = {job.tensor.name for job in first}
        yield from (job for job in every if job.tensor.name not in done)

    def _in_file_order(self) -> Iterator[Job]:
        for file in self._files:
            header = self._output.texts.get(file.path)
            offset = file.parts[0].nbytes if header is None else len(header)
            for part in file.tensors():
                name = self._output.planned_name(file, part)
                if name is not None and name not in self.jobs:
                    yield self._job(name, file.path, offset)
                else:
                    self._tick(part.nbytes)
                offset += part.nbytes if name is None else self.jobs[name].tensor.out_bytes
            for new in self._output.added(file):
                yield self._job(new.name, file.path, offset)
                offset += new.nbytes

    def take(self, results: Sequence[Result]) -> None:
        """Add computed chunks, in any order.  Raises Corrupt (`FinishedChunks.learn`)."""
        for result in results:
            self._finished.learn(result)
            job = self.jobs[result.tensor]
            job.put(result.number, result.blocks, result.not_finite)
            self._tick_chunk(job.tensor, result.number)

    def _job(self, name: str, file: str, offset: int) -> Job:
        tensor = self._tasks.tensor(name, file, offset)
        job = Job.of(tensor, self._tasks.members(name), self._block_size)
        self.jobs[name] = job
        return job

    def _cut(self, jobs: Sequence[Job]) -> Iterator[Slice]:
        for run in self._runs_of(jobs):
            yield from self._cutter.add(run)

    def _runs_of(self, jobs: Sequence[Job]) -> list[TensorChunks]:
        """Return what to compute of these tensors, with one memo table and index lookup for all."""
        keys = [self._keys_of(job) for job in jobs]
        found = self._finished.find([job.shape for job in jobs], keys)
        wanted = []
        for job, named, rows in zip(jobs, keys, found, strict=True):
            for number, row in rows.items():
                job.put(number, row.blocks, row.not_finite)
            ties = {number: job.shape.ties(number, rows[number]) for number in sorted(rows)}
            for number in ties:
                self._tick_chunk(job.tensor, number)
            missing = [number for number in named if number not in ties]
            if missing:
                wanted.append((job.tensor, missing, named, ties))
        tasks = self._tasks.chunks_of([(tensor, missing) for tensor, missing, _, _ in wanted])
        return [
            TensorChunks(
                tensor,
                tuple(chunks),
                tuple(named[number] for number in missing),
                tuple(ties.items()) if tensor.limited else (),
            )
            for (tensor, missing, named, ties), chunks in zip(wanted, tasks, strict=True)
        ]

    def _keys_of(self, job: Job) -> dict[int, bytes]:
        """Return memo keys by chunk number, and fill in the chunks that are the base's own."""
        numbers = []
        for number, is_own in enumerate(self._tasks.reused(job.tensor).tolist()):
            if is_own:
                job.put_base(number)
                self._tick_chunk(job.tensor, number)
            else:
                numbers.append(number)
        return self._finished.keys(job.tensor, numbers)

    def _tick_chunk(self, tensor: TensorTask, number: int) -> None:
        self._tick(tensor.chunk_length(number) * item_size(tensor.base_dtype))

    def _tick(self, length: int) -> None:
        self._done += length
        if self._progress is not None:
            self._progress(Progress("merge", self._done, max(self._total, self._done)))


def coverage(plan: Plan, jobs: Sequence[Job]) -> Coverage:
    """Return what became of each tensor. jobs: in the order of the plan's tensors."""
    odd = tuple((job.tensor.name, job.not_finite.new) for job in jobs if job.not_finite.new)
    return Coverage(plan.id(), tuple(_covered(job) for job in jobs), odd)


def _covered(job: Job) -> TensorCoverage:
    count = len(job.ids) // ID_BYTES
    ids = np.frombuffer(bytes(job.ids), dtype=np.uint8).reshape(count, ID_BYTES)
    reused = np.zeros(count, dtype=np.bool_)
    if job.tensor.out_dtype == job.tensor.base_dtype:
        base = np.frombuffer(job.members.base.blocks, dtype=np.uint8)
        reused = (ids == base.reshape(count, ID_BYTES)).all(axis=1)
    contributed = np.repeat(job.members.present, job.shape.per_chunk, axis=1)[:, :count]
    return TensorCoverage(job.tensor.name, count, bitmap(reused), bitmaps(contributed))
