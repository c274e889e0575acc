"""The work list: the tensors of a plan in file order, as slices of what must be computed.

A chunk needs only its ids if its output is the base's own or is known (`known`).  The others are
cut into slices (`cutting`).  Slices are made lazily, while others are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mstore.merge.running.cutting import Cutter
from mstore.merge.running.jobs import Job
from mstore.merge.running.known import KnownChunks
from mstore.merge.running.memo_hits import TOGETHER
from mstore.merge.running.output import Layout, is_safetensors, tensor_bytes
from mstore.merge.running.slices import Result, Run, Slice
from mstore.merge.running.task import Tasks, TensorTask, item_size
from mstore.progress import Progress, ProgressCallback
from mstore.store.catalog import Catalog


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
        layout: Layout,
        known: KnownChunks,
        cutter: Cutter,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._tasks = tasks
        self._files = [layout.file(file) for file in layout.base.files if is_safetensors(file)]
        self._layout = layout
        self._known = known
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
            header = self._layout.texts.get(file.path)
            offset = file.parts[0].nbytes if header is None else len(header)
            for part in file.tensors():
                name = self._layout.planned_name(file, part)
                if name is not None and name not in self.jobs:
                    jobs.append(self._job(name, file.path, offset))
                    if _is_enough(jobs):
                        yield from self._cut(jobs)
                        jobs = []
                else:
                    self._tick(part.nbytes)
                offset += part.nbytes if name is None else self.jobs[name].tensor.out_bytes
            for new in self._layout.added(file):
                jobs.append(self._job(new.name, file.path, offset))
                offset += new.nbytes
                if _is_enough(jobs):
                    yield from self._cut(jobs)
                    jobs = []
        yield from self._cut(jobs)
        yield from self._cutter.rest()

    def take(self, results: Sequence[Result]) -> None:
        """Add computed chunks, in any order.  Raises Corrupt (`KnownChunks.learn`)."""
        for result in results:
            self._known.learn(result)
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

    def _runs_of(self, jobs: Sequence[Job]) -> list[Run]:
        """Return what to compute of these tensors, with one memo table and index lookup for all."""
        keys = [self._keys_of(job) for job in jobs]
        found = self._known.find(jobs, keys)
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
            Run(
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
        return self._known.keys(job.tensor, numbers)

    def _tick_chunk(self, tensor: TensorTask, number: int) -> None:
        self._tick(tensor.chunk_length(number) * item_size(tensor.base_dtype))

    def _tick(self, length: int) -> None:
        self._done += length
        if self._progress is not None:
            self._progress(Progress("merge", self._done, max(self._total, self._done)))


def _is_enough(jobs: Sequence[Job]) -> bool:
    """Return whether to look these up now: many jobs, or one large one, which must not wait."""
    return len(jobs) >= TOGETHER or jobs[-1].shape.blocks > 1
