"""The work list: the tensors of a plan in file order, as slices of what must be computed.

A chunk needs only its ids if its output is the base's own, or exists (`finished`).  The others are
cut into slices of about equal output.  Slices are made lazily, while others are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from mstore.merge.running.finished import TOGETHER, FinishedChunks, Shape
from mstore.merge.running.output import OutputFiles, is_safetensors, tensor_bytes
from mstore.merge.running.slices import ALL_FINITE, NotFinite, Result, Slice, TensorChunks
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Coverage, Plan, TensorCoverage, bitmap
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import ID_BYTES, BlockId
from mstore.terms.report import Progress, ProgressCallback


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

    first: the first slice, without its runs; the others are like it, each with a pack of its own.
    slice_bytes: plain bytes of output per slice.  A tensor whose tie quota ends within it is not
    cut.
    """

    def __init__(self, first: Slice, slice_bytes: int) -> None:
        self._first = first
        self._limit = slice_bytes
        self._count = 0
        self._runs: list[TensorChunks] = []
        self._length = 0

    def add(self, run: TensorChunks) -> Iterator[Slice]:
        """Add a run, and yield the slices that are full."""
        length = sum(task.out_bytes for task in run.chunks)
        if run.tensor.limited:
            if self._runs and self._length + length > self._limit:
                yield self._cut()
            self._runs.append(run)
            self._length += length
            if self._length >= self._limit:
                yield self._cut()
            return
        start = 0
        for number, task in enumerate(run.chunks, start=1):
            self._length += task.out_bytes
            if self._length >= self._limit or number == len(run.chunks):
                part = slice(start, number)
                self._runs.append(TensorChunks(run.tensor, run.chunks[part], run.keys[part]))
                start = number
            if self._length >= self._limit:
                yield self._cut()

    def rest(self) -> Iterator[Slice]:
        """Yield the last slice, unless all runs are in slices."""
        if self._runs:
            yield self._cut()

    def _cut(self) -> Slice:
        target = self._first.target.with_name(f"{self._count}.pack")
        made = replace(self._first, target=target, runs=tuple(self._runs))
        self._count += 1
        self._runs, self._length = [], 0
        return made


class WorkList:
    """All work of one run, and its results.  Belongs to one thread.

    Complete once `slices` is exhausted and `take` has had every result.

    jobs: the tensors, by the name they are planned under. headers: new headers of output files, by
    path.
    """

    def __init__(
        self,
        catalog: Catalog,
        tasks: Tasks,
        files: OutputFiles,
        finished: FinishedChunks,
        cutter: Cutter,
        progress: ProgressCallback | None = None,
    ) -> None:
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
        """Yield the work in file order; fill in jobs with every chunk that needs none."""
        jobs: list[Job] = []
        for file in self._files:
            header = self._output.texts.get(file.path)
            offset = file.parts[0].nbytes if header is None else len(header)
            for part in file.tensors():
                name = self._output.planned_name(file, part)
                if name is not None and name not in self.jobs:
                    jobs.append(self._job(name, file.path, offset))
                    if _is_enough(jobs):
                        yield from self._cut(jobs)
                        jobs = []
                else:
                    self._tick(part.nbytes)
                offset += part.nbytes if name is None else self.jobs[name].tensor.out_bytes
            for new in self._output.added(file):
                jobs.append(self._job(new.name, file.path, offset))
                offset += new.nbytes
                if _is_enough(jobs):
                    yield from self._cut(jobs)
                    jobs = []
        yield from self._cut(jobs)
        yield from self._cutter.rest()

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


def _is_enough(jobs: Sequence[Job]) -> bool:
    """Return whether to look these up now: many jobs, or one large one, which must not wait."""
    return len(jobs) >= TOGETHER or jobs[-1].shape.blocks > 1


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
    return TensorCoverage(
        job.tensor.name,
        count,
        bitmap(reused.tolist()),
        tuple(bitmap(row) for row in contributed.tolist()),
    )
