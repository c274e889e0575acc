"""The engine: runs a plan into a sink, and reads and writes only what does not exist yet.

Goes over the plan's tensors in file order.  A chunk needs only its ids if its output is the base's
own, is in the memo table, or was finished by an interrupted run.  The others are cut into slices
and computed (`mstore.merge.running.slices`): on threads of this process, where one slice's pack is
sealed while the next is computed, or by any executor.  The records of the output come last.

Budget-sound: a task names planned blocks only, and every read of an expert byte is charged before
the `pread` to a meter whose limit is the size of those blocks in this store.  A slice that runs
elsewhere is charged whole before it is submitted, and refuses to read more than that.
Deterministic: the outcome is a function of the plan alone, for any number of threads, any executor,
any memo table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mstore.blocks import codecs
from mstore.blocks.codecs import Encoded, Policy
from mstore.blocks.meter import Meter
from mstore.blocks.packs import Kind, PackWriter, SealedPack
from mstore.checkpoint.partition import block_count, partition
from mstore.errors import BudgetExceeded, Corrupt
from mstore.ids import ID_BYTES, BlockId, Id
from mstore.merge.planning.costs import Costs, costs_of
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.memo_hits import TOGETHER, Hits, Shape, find_hits
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.memory import MEMORY, bounds
from mstore.merge.running.output import Layout, is_safetensors, tensor_bytes
from mstore.merge.running.overflow import Tally
from mstore.merge.running.papers import Papers
from mstore.merge.running.resume import Leftovers, write_receipt
from mstore.merge.running.slices import (
    SLICE_BYTES,
    Computer,
    Receipt,
    Result,
    Run,
    Slice,
    SliceWriter,
    Stream,
    execute,
)
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.objects.canonical import Record
from mstore.objects.coverage import Coverage, TensorCoverage, bitmap
from mstore.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.objects.plan import Plan
from mstore.objects.tensor import BYTES, Tensor
from mstore.reports import Progress
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo

_SEALING = 2
"""Number of packs that may be syncing while the next one is filled."""

_HANDED_OUT = 64
"""Number of slices that an executor has at a time."""


class Sink(Protocol):
    """Where output goes.  Called from one thread."""

    @property
    def directory(self) -> Path:
        """The directory for packs that `adopt` takes."""

    def has_blocks(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return which blocks are already stored."""

    def put_block(self, block: BlockId, encoded: Encoded, file: str, file_offset: int) -> bool:
        """Store a block; return True if it was new."""

    def put_records(self, records: Sequence[Record]) -> list[Id]:
        """Store records."""

    def adopt(self, pack: SealedPack) -> int:
        """Add a sealed pack; return how many of its blocks are new."""

    def go_on_with(self, writer: PackWriter, blocks: Sequence[BlockId]) -> None:
        """Continue an unfinished pack that holds these blocks, all of them new."""


@dataclass(frozen=True, slots=True)
class Means:
    """The resources of a run.

    threads: in this process. memory: most anonymous bytes. executor: runs the slices instead of the
    threads. slice_bytes: plain bytes of output per slice.
    """

    threads: int
    memory: int = MEMORY
    executor: Executor | None = None
    slice_bytes: int = SLICE_BYTES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run produced and what it cost (bytes).

    tensors: the merged ones, by the name they are planned under. memo_rows: rows for the memo
    table, to add once the output is published. costs: of the plan in this store.
    resumed_expert_bytes: read by an interrupted run whose work this one reused. overflow: elements
    that became infinite.
    """

    manifest: Manifest
    coverage: Coverage
    tensors: dict[str, Tensor]
    memo_rows: tuple[tuple[bytes, bytes], ...]
    costs: Costs
    expert_bytes_read: int
    memo_expert_bytes: int
    resumed_expert_bytes: int
    base_bytes_read: int
    blocks_total: int
    blocks_reused: int
    overflow: Tally


@dataclass(slots=True)
class _Job:
    """One tensor in progress: its task, and the ids of its output blocks found so far."""

    tensor: TensorTask
    members: Members
    shape: Shape
    ids: bytearray

    def put(self, number: int, blocks: Sequence[BlockId]) -> None:
        """Set the blocks of a chunk."""
        at = number * self.shape.per_chunk * ID_BYTES
        self.ids[at : at + len(blocks) * ID_BYTES] = b"".join(blocks)


@dataclass(slots=True)
class _Pending:
    """A slice being assembled."""

    runs: list[Run] = field(default_factory=list)
    length: int = 0


class Engine:
    """One run of one plan.

    sink: None to compute the outcome without storing it. memo: None to use no memo table. policy:
    how the output is coded, None for the store's own. papers: whether the output has its own model
    card (`merge.running.papers`); merges of earlier versions have the base's.
    """

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        sink: Sink | None,
        *,
        means: Means,
        policy: Policy | None = None,
        memo: Memo | None = None,
        papers: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        check_fits(catalog, plan)
        self._catalog = catalog
        self._plan = plan
        self._papers = papers
        self._sink = sink
        self._means = means
        self._policy = catalog.config.codec if policy is None else policy
        self._memo = memo
        self._progress = progress
        self._tasks = Tasks(catalog, plan)
        self._layout = Layout(catalog, self._tasks)
        self._bounds = bounds(self._tasks, memory=means.memory, threads=means.threads)
        self._keys = MemoKeys(self._tasks)
        self._costs = costs_of(catalog, plan)
        self._expert_meter = Meter("expert", self._costs.planned)
        self._base_meter = Meter("base")
        self._leftovers = None if sink is None else Leftovers(sink.directory, catalog)
        self._jobs: dict[str, _Job] = {}
        self._headers: dict[str, bytes] = {}
        self._slices = 0
        self._generation = catalog.next_generation()
        self._adopted: set[Path] = set()
        self._written: set[BlockId] = set()
        self._rows: list[tuple[bytes, bytes]] = []
        self._expected: dict[bytes, tuple[BlockId, ...]] = {}
        self._hits = 0
        self._resumed_bytes = 0
        self._overflow = Tally()
        self._blocks_total = 0
        self._blocks_new = 0
        self._done = 0
        self._total = sum(tensor_bytes(f) for f in self._layout.base.files if is_safetensors(f))

    def run(self) -> Outcome:
        """Compute everything.  Raises BadRequest, BudgetExceeded, Corrupt, StorageFailed."""
        try:
            if self._means.executor is None:
                self._run_here()
            else:
                self._run_elsewhere(self._means.executor)
        except BudgetExceeded as error:
            # Usually a plan from a store where the same blocks have other sizes at rest.
            hint = "mstore plan makes one for the blocks as they are stored here"
            where = f"plan {self._plan.id().short}"
            raise BudgetExceeded(error.what, where=where, hint=hint) from error
        tensors = {
            name: Tensor(
                job.tensor.out_dtype, job.tensor.shape, job.tensor.out_bytes, bytes(job.ids)
            )
            for name, job in self._jobs.items()
        }
        manifest = self._manifest(tensors)
        coverage = Coverage(
            self._plan.id(), tuple(self._cover(self._jobs[t.name]) for t in self._plan.tensors)
        )
        read = self._expert_meter.total
        saved = self._costs.planned - read - self._resumed_bytes
        return Outcome(
            manifest=manifest,
            coverage=coverage,
            tensors=tensors,
            memo_rows=tuple(self._rows),
            costs=self._costs,
            expert_bytes_read=read,
            memo_expert_bytes=saved if self._hits else 0,
            resumed_expert_bytes=self._resumed_bytes,
            base_bytes_read=self._base_meter.total,
            blocks_total=self._blocks_total,
            blocks_reused=self._blocks_total - self._blocks_new,
            overflow=self._overflow,
        )

    # -- what is to be computed ----------------------------------------------------------------

    def _slices_to_do(self) -> Iterator[Slice]:
        """Yield the work in file order; fill in jobs with every chunk that needs none."""
        pending = _Pending()
        jobs: list[_Job] = []
        for file in self._layout.base.files:
            if not is_safetensors(file):
                continue
            header = self._layout.new_bytes(file)
            if header is not None:
                self._headers[file.path] = header
            offset = file.parts[0].nbytes if header is None else len(header)
            for part in file.tensors():
                name = self._layout.planned_name(part)
                if name is not None and name not in self._jobs:
                    jobs.append(self._job(name, file.path, offset))
                    if self._is_enough(jobs):
                        yield from self._cut_all(jobs, pending)
                        jobs = []
                else:
                    self._tick(part.nbytes)
                offset += part.nbytes if name is None else self._jobs[name].tensor.out_bytes
            for new in self._layout.added(file):
                jobs.append(self._job(new.name, file.path, offset))
                offset += new.nbytes
                if self._is_enough(jobs):
                    yield from self._cut_all(jobs, pending)
                    jobs = []
        yield from self._cut_all(jobs, pending)
        if pending.runs:
            yield self._slice(pending)

    def _is_enough(self, jobs: Sequence[_Job]) -> bool:
        """Return whether to look these up now: many jobs, or one large one, which must not wait."""
        return len(jobs) >= TOGETHER or jobs[-1].shape.blocks > 1

    def _cut_all(self, jobs: Sequence[_Job], pending: _Pending) -> Iterator[Slice]:
        for run in self._runs_of(jobs):
            yield from self._cut(run, pending)

    def _job(self, name: str, file: str, offset: int) -> _Job:
        tensor = self._tasks.tensor(name, file, offset)
        members = self._tasks.members(name)
        shape = Shape(tensor, members, self._catalog.block_size)
        job = _Job(tensor, members, shape, bytearray(shape.blocks * ID_BYTES))
        self._jobs[name] = job
        return job

    def _runs_of(self, jobs: Sequence[_Job]) -> list[Run]:
        """Return what to compute of these tensors, with one memo table and index lookup for all."""
        keys = [self._keys_of(job) for job in jobs]
        known = self._known(jobs, keys)
        wanted = []
        for job, named, rows in zip(jobs, keys, known, strict=True):
            for number in rows:
                self._tick_chunk(job.tensor, number)
            missing = [number for number in named if number not in rows]
            if missing:
                wanted.append((job.tensor, missing, named, rows))
        tasks = self._tasks.chunks_of([(tensor, missing) for tensor, missing, _, _ in wanted])
        return [
            Run(
                tensor,
                tuple(chunks),
                tuple(named[number] for number in missing),
                tuple(rows.items()) if tensor.limited else (),
            )
            for (tensor, missing, named, rows), chunks in zip(wanted, tasks, strict=True)
        ]

    def _keys_of(self, job: _Job) -> dict[int, bytes]:
        """Return memo keys by chunk number, and fill in the chunks that are the base's own."""
        tensor = job.tensor
        reused = self._tasks.reused(tensor).tolist()
        base = job.members.base.blocks
        span = job.shape.per_chunk * ID_BYTES
        numbers = []
        for number, is_own in enumerate(reused):
            if not is_own:
                numbers.append(number)
                continue
            job.ids[number * span : (number + 1) * span] = base[number * span : (number + 1) * span]
            self._tick_chunk(tensor, number)
        if self._sink is None:
            return dict.fromkeys(numbers, b"")
        return dict(zip(numbers, self._keys.chunks(tensor, numbers), strict=True))

    def _known(
        self, jobs: Sequence[_Job], keys: Sequence[dict[int, bytes]]
    ) -> list[dict[int, tuple[int, ...]]]:
        """Fill in chunks with a known outcome, and return the ties per expert that each took."""
        if self._sink is None:
            return [{} for _ in jobs]
        hits = [Hits({}, {}) for _ in jobs]
        if self._memo is not None:
            wanted = [(job.shape, named) for job, named in zip(jobs, keys, strict=True)]
            hits = find_hits(self._memo, self._sink.has_blocks, wanted)
        return [
            self._known_of(job, named, found)
            for job, named, found in zip(jobs, keys, hits, strict=True)
        ]

    def _known_of(
        self, job: _Job, keys: dict[int, bytes], hits: Hits
    ) -> dict[int, tuple[int, ...]]:
        rows: dict[int, Remembered] = dict(hits.known)
        self._hits += len(hits.known)
        # gc deleted their blocks: recomputing them must give the same ids.
        self._expected.update((keys[number], row.blocks) for number, row in hits.gone.items())
        if self._leftovers:
            assert self._sink is not None
            for number in sorted(keys.keys() - rows.keys()):
                found = self._leftovers.find(keys[number])
                if found is None or not job.shape.fits(number, found.row):
                    continue
                self._adopt(found.pack)
                if all(self._sink.has_blocks(found.row.blocks)):
                    rows[number] = found.row
                    self._resumed_bytes += found.expert_bytes
                    self._rows.append((keys[number], found.row.encode()))
        for number, row in rows.items():
            job.put(number, row.blocks)
        made = {number: row.blocks for number, row in rows.items()}
        self._overflow.leave(job.tensor, job.members, made)
        return {number: job.shape.ties(number, rows[number]) for number in sorted(rows)}

    def _adopt(self, path: Path) -> None:
        assert self._leftovers is not None
        assert self._sink is not None
        pack = self._leftovers.pack(path)
        if pack is not None and path not in self._adopted:
            self._adopted.add(path)
            self._written.update(
                BlockId(entry.id) for entry in pack.entries if entry.kind == Kind.BLOCK
            )
            self._blocks_new += self._sink.adopt(pack)

    def _cut(self, run: Run, pending: _Pending) -> Iterator[Slice]:
        """Add a run to the slice being assembled, and yield the slices that are full."""
        limit = self._means.slice_bytes
        length = sum(task.out_bytes for task in run.chunks)
        if run.tensor.limited:
            if pending.runs and pending.length + length > limit:
                yield self._slice(pending)
            pending.runs.append(run)
            pending.length += length
            if pending.length >= limit:
                yield self._slice(pending)
            return
        start = 0
        for number, task in enumerate(run.chunks, start=1):
            pending.length += task.out_bytes
            if pending.length >= limit or number == len(run.chunks):
                part = slice(start, number)
                pending.runs.append(Run(run.tensor, run.chunks[part], run.keys[part]))
                start = number
            if pending.length >= limit:
                yield self._slice(pending)

    def _slice(self, pending: _Pending) -> Slice:
        directory = Path() if self._sink is None else self._sink.directory
        made = Slice(
            packs=self._catalog.layout.packs,
            target=directory / f"{self._slices}.pack",
            store=self._catalog.layout.uuid.bytes,
            generation=self._generation,
            block_size=self._catalog.block_size,
            policy=None if self._sink is None else self._policy,
            runs=tuple(pending.runs),
        )
        self._slices += 1
        pending.runs, pending.length = [], 0
        return made

    # -- computing -----------------------------------------------------------------------------

    def _run_here(self) -> None:
        computer = Computer(
            self._catalog.packs,
            self._expert_meter,
            self._base_meter,
            self._catalog.has_blocks,
            self._tasks.moved,
        )
        with (
            ThreadPoolExecutor(1, "seal") as sealer,
            ThreadPoolExecutor(self._bounds.threads, "merge") as pool,
        ):
            sealing: deque[Future[SealedPack | None]] = deque()
            writer: SliceWriter | None = None
            stream = Stream(
                computer, pool, ahead=self._bounds.ahead, together=self._bounds.together
            ).run(self._slices_to_do())
            try:
                for computed in stream:
                    self._take(computed.results)
                    if self._sink is not None:
                        if writer is None or writer.slice is not computed.slice:
                            full, writer = writer, SliceWriter(computed.slice, self._written)
                            if full is not None:
                                sealing.append(sealer.submit(_seal, full))
                            while len(sealing) > _SEALING:
                                self._publish(sealing.popleft().result())
                        writer.put(computed)
                    computer.recycle(computed)
                while sealing:
                    self._publish(sealing.popleft().result())
                if writer is not None:
                    self._keep_open(writer)
            except BaseException:
                # Before the pool ends: it would run everything queued first.
                stream.close()
                if writer is not None:
                    writer.abandon()
                raise

    def _publish(self, pack: SealedPack | None) -> None:
        if pack is not None:
            assert self._sink is not None
            self._blocks_new += self._sink.adopt(pack)

    def _keep_open(self, writer: SliceWriter) -> None:
        """Put the records into the last pack, too: one file less to sync and to open."""
        pack = writer.release()
        if pack is not None:
            assert self._sink is not None
            self._sink.go_on_with(pack, writer.new)
            self._blocks_new += len(writer.new)

    def _run_elsewhere(self, executor: Executor) -> None:
        waiting: set[Future[Receipt]] = set()
        try:
            for work in self._slices_to_do():
                # Before submission: no worker knows what the others read.
                self._expert_meter.charge(work.expert_bytes)
                waiting.add(executor.submit(execute, work))
                if len(waiting) >= _HANDED_OUT:
                    self._receive_some(waiting)
            while waiting:
                self._receive_some(waiting)
        except BaseException:
            for future in waiting:
                future.cancel()
            for future in waiting:
                # The slice writes into a directory that is about to be deleted.
                if not future.cancelled():
                    future.exception()
            raise

    def _receive_some(self, waiting: set[Future[Receipt]]) -> None:
        """Take all available receipts, at least one, in any order."""
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            waiting.remove(future)
            self._receive(future.result())

    def _receive(self, receipt: Receipt) -> None:
        self._take(receipt.results)
        self._base_meter.charge(receipt.base_bytes)
        if receipt.pack is not None:
            write_receipt(receipt.pack, receipt.results)
            self._publish(receipt.pack)

    def _take(self, results: Sequence[Result]) -> None:
        for result in results:
            job = self._jobs[result.tensor]
            expected = self._expected.get(result.key)
            if expected is not None and expected != result.blocks:
                raise Corrupt(
                    "the recomputed chunk differs from the memo table",
                    where=f"{result.tensor}, chunk {result.number}",
                    hint="mstore fsck --read-data",
                )
            job.put(result.number, result.blocks)
            self._overflow.add(job.tensor, result.infinite)
            self._tick_chunk(job.tensor, result.number)
            if result.key:
                self._rows.append((result.key, result.value))

    # -- the output's records ------------------------------------------------------------------

    def _manifest(self, tensors: dict[str, Tensor]) -> Manifest:
        files, new = self._layout.base.files, dict[str, bytes]()
        if self._papers:
            files, new = Papers(self._catalog, self._plan).files()
        found = [self._file(file, tensors) for file in files]
        for path, data in new.items():
            part = self._put_bytes(data, path)
            found.append(File(path, OPAQUE, part.nbytes, (part,)))
        return Manifest(tuple(sorted(found, key=lambda file: file.path)))

    def _file(self, file: File, tensors: dict[str, Tensor]) -> File:
        if not is_safetensors(file):
            changed = self._layout.new_bytes(file)
            if changed is None:
                self._count_blocks(file.parts)
                return file
            part = self._put_bytes(changed, file.path)
            return File(file.path, file.form, part.nbytes, (part,))
        parts = list(file.parts)
        if file.path in self._headers:
            parts[0] = self._put_bytes(self._headers[file.path], file.path)
        else:
            self._count_blocks(parts[:1])
        records: dict[int, Tensor] = {}
        for number, part in enumerate(file.parts[1:], start=1):
            name = self._layout.planned_name(part)
            record = self._layout.retyped_empty(part) if name is None else tensors[name]
            if record is not None:
                records[number] = record
        for (number, record), id in zip(
            records.items(), self._put_records(list(records.values())), strict=True
        ):
            parts[number] = Part(parts[number].name, id, record.nbytes)
        names = [new.name for new in self._layout.added(file)]
        added = [tensors[name] for name in names]
        for name, record, id in zip(names, added, self._put_records(added), strict=True):
            parts.append(Part(name, id, record.nbytes))
        self._count_blocks(parts[1:])
        return File(file.path, file.form, sum([part.nbytes for part in parts]), tuple(parts))

    def _count_blocks(self, parts: Sequence[Part]) -> None:
        size = self._catalog.block_size
        self._blocks_total += sum([block_count(part.nbytes, size) for part in parts])

    def _put_bytes(self, data: bytes, path: str) -> Part:
        ids = []
        for start, length in partition(len(data), self._catalog.block_size):
            block = data[start : start + length]
            ids.append(BlockId.of(block))
            if self._sink is not None and not self._sink.has_blocks(ids[-1:])[0]:
                encoded = codecs.encode(block, codecs.PLAIN_BYTES, self._policy)
                self._blocks_new += self._sink.put_block(ids[-1], encoded, path, start)
        self._blocks_total += len(ids)
        tensor = Tensor(BYTES, (len(data),), len(data), b"".join(ids))
        return Part(None, self._put_records([tensor])[0], len(data))

    def _put_records(self, records: Sequence[Tensor]) -> Sequence[Id]:
        if self._sink is None:
            return [record.id() for record in records]
        return self._sink.put_records(records)

    def _cover(self, job: _Job) -> TensorCoverage:
        count = len(job.ids) // ID_BYTES
        if count == 1:
            like_base = job.tensor.out_dtype == job.tensor.base_dtype
            is_base = like_base and job.ids == job.members.base.blocks
            there = job.members.present[:, 0].tolist()
            return TensorCoverage(
                job.tensor.name, 1, bitmap([is_base]), tuple(bitmap([flag]) for flag in there)
            )
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

    # -- progress ------------------------------------------------------------------------------

    def _tick_chunk(self, tensor: TensorTask, number: int) -> None:
        self._tick(tensor.chunk_length(number) * item_size(tensor.base_dtype))

    def _tick(self, length: int) -> None:
        self._done += length
        if self._progress is not None:
            self._progress(Progress("merge", self._done, max(self._total, self._done)))


def _seal(writer: SliceWriter) -> SealedPack | None:
    """Sync a slice's pack and record its purpose, in a thread of its own."""
    pack = writer.seal()
    if pack is not None:
        write_receipt(pack, writer.results)
    return pack
