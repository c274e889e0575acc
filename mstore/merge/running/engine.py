"""The engine: runs a plan into a sink, and reads and writes only what does not exist yet.

Wires the parts of a run: the work list yields slices of what must be computed and a runner computes
them, on threads of this process or on workers (`runners`), and the records of the output come last
(`output`).

Budget-sound: a task names planned blocks only, and every read of an expert byte is charged before
the `pread` to a meter whose limit is the size of those blocks in this store.  A slice that runs
elsewhere is charged whole before it is submitted, and refuses to read more than that.
Deterministic: the outcome is a function of the plan alone, for any number of threads, any workers,
any memo table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.reader import Meter
from mstore.merge.planning.costs import Costs, wanted_of
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.compute import Computer
from mstore.merge.running.delivery import Delivery, InStoreDelivery
from mstore.merge.running.finished import FinishedChunks
from mstore.merge.running.loading import SPARE_SIDES
from mstore.merge.running.output import OutputFiles, Records, is_safetensors, tensor_bytes
from mstore.merge.running.runners import (
    Cutter,
    LocalRunner,
    RemoteRunner,
    WorkerReport,
    Workers,
    WorkList,
    coverage,
)
from mstore.merge.running.slices import BATCH_BYTES, SLICE_BYTES, Bounds, Slice, batch_chunks
from mstore.merge.running.task import Tasks, item_size
from mstore.models.made import blocks_of
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Coverage, Plan
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import BadRequest, BudgetExceeded, Corrupt, NotFound, Unavailable
from mstore.terms.ids import BlockId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback
from mstore.terms.sizes import format_size

MEMORY: Final = 512 << 20
"""Default limit of anonymous memory, in bytes: of a merge, or of a slice computed elsewhere."""

RESERVE: Final = 128 << 20
"""The part of it that is not for chunks: the fixed working memory of the process."""


_SLICES_EACH: Final = 8
_LEAST_SLICE: Final = 16 << 20
"""Slices for each that workers compute at a time, if none has less output than so many bytes."""


class Resources(msgspec.Struct, frozen=True):
    """The resources of a run.

    threads: most threads that compute. memory: most anonymous bytes. slice_bytes: plain bytes of
    output per slice. workers: compute the slices elsewhere; then threads and memory hold for each
    slice, and a process that computes several at a time may take as much for each. delivery: how
    what they make comes into the merge; None: through the store's directory.
    """

    threads: int
    memory: int = MEMORY
    workers: Workers | None = None
    delivery: Delivery | None = None
    slice_bytes: int = SLICE_BYTES


class Outcome(msgspec.Struct, frozen=True):
    """What a run produced and what it cost (bytes).

    tensors: the merged ones, by the name they are planned under. memo_rows: rows for the memo
    table, to add once the output is published. costs: of the plan in this store.
    resumed_expert_bytes: read by an interrupted run whose work this one reused. made:
    tensors with elements that are infinite or NaN, and are finite in every input, and how many.
    workers: what each of them did.
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
    made: Mapping[str, int]
    workers: tuple[WorkerReport, ...]


def run_plan(
    catalog: Catalog,
    plan: Plan,
    sink: Transaction | None,
    *,
    resources: Resources,
    policy: Policy | None = None,
    memo: Memo | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Compute everything.

    sink: None to compute the outcome without storing it. memo: None to use no memo table. policy:
    how the output is coded, None for the store's own.

    Raises BadRequest, BudgetExceeded, Corrupt, StorageFailed.
    """
    check_fits(catalog, plan)
    policy = catalog.config.codec if policy is None else policy
    delivery = resources.delivery or InStoreDelivery(catalog)
    wanted = wanted_of(catalog, plan)
    planned = wanted.read_bytes(delivery.places)
    # Without a budget there is no limit: gc may store blocks in another way meanwhile.
    has_budget = plan.budget is not None or plan.criteria.expert_budget is not None
    expert_meter = Meter("expert", planned if has_budget else None)
    base_meter = Meter("base")
    tasks = Tasks(catalog, plan, expert_meter, delivery.places)
    files = OutputFiles(catalog, tasks)
    limits = bounds(tasks, memory=resources.memory, threads=resources.threads)
    written: set[BlockId] = set()
    finished = FinishedChunks(tasks, sink, memo, delivery, written)
    first = Slice(
        number=0,
        workplace=delivery.workplace(Path() if sink is None else sink.directory),
        block_size=catalog.block_size,
        policy=None if sink is None else policy,
        bounds=limits,
        runs=(),
    )
    about = max(1, sum(tensor_bytes(file) for file in files.base.files if is_safetensors(file)))
    slice_bytes, large = resources.slice_bytes, None
    if resources.workers is not None:
        # Enough of them that the last ones keep nobody waiting for long.
        share = about // (_SLICES_EACH * resources.workers.slots())
        large = slice_bytes = min(slice_bytes, max(share, _LEAST_SLICE))
    cutter = Cutter(first, slice_bytes, 2 + plan.planned_expert_bytes / about)
    work = WorkList(catalog, tasks, files, finished, cutter, progress, large)
    runner: LocalRunner | RemoteRunner
    if resources.workers is None:
        computer = Computer(
            *(catalog.packs, expert_meter, base_meter, catalog.has_blocks, tasks.moved)
        )
        runner = LocalRunner(computer, limits, sink, written)
    else:
        runner = RemoteRunner(
            *(resources.workers, delivery, sink, expert_meter, base_meter, progress)
        )

    def left_bytes() -> int:
        # Nobody needs these blocks: they may have gone, or never came where workers read.
        with suppress(Corrupt, NotFound, Unavailable):
            return wanted.left_bytes(delivery.places)
        return max(0, plan.full_expert_bytes - planned)

    # With many experts and a small budget these are most of the blocks, and only the report asks.
    with ThreadPoolExecutor(1, "costs") as beside:
        left = beside.submit(left_bytes)
        try:
            runner.run(work)
        except BudgetExceeded as error:
            # The limit is what these blocks took when the run began: they were stored again since.
            hint = "run the command again"
            where = f"plan {plan.id().short}"
            raise BudgetExceeded(error.texts[0], where=where, hint=hint) from error
        costs = Costs(planned + left.result(), planned)
    jobs = work.jobs
    tensors = {name: job.record() for name, job in jobs.items()}
    records = Records(catalog.block_size, sink, policy)
    manifest = files.manifest(
        sum([job.not_finite.new for job in jobs.values()]),
        record_of=lambda name, *_: tensors[name],
        put_records=records.put_records,
        put_bytes=records.put_bytes,
    )
    total = blocks_of(manifest, plan.block_size)
    read, resumed = expert_meter.total, finished.resumed_bytes
    return Outcome(
        manifest=manifest,
        coverage=coverage(plan, [jobs[t.name] for t in plan.tensors]),
        tensors=tensors,
        memo_rows=tuple(finished.rows),
        costs=costs,
        expert_bytes_read=read,
        memo_expert_bytes=costs.planned - read - resumed if finished.hits else 0,
        resumed_expert_bytes=resumed,
        base_bytes_read=base_meter.total,
        blocks_total=total,
        # Packs of an interrupted merge may have more than this one needs.
        blocks_reused=max(0, total - (0 if sink is None else sink.blocks_new)),
        made={name: job.not_finite.made for name, job in jobs.items() if job.not_finite.made},
        workers=runner.reports if isinstance(runner, RemoteRunner) else (),
    )


# -- memory ------------------------------------------------------------------------------------
# The process is that of the merge, or a worker: each slice carries the result
# (`slices.Bounds`), and one that computes several slices at a time may take the bound for each.
#
# The chunks in flight grow with a merge: each thread holds one batch of the base and of every
# participating expert, plus decoding buffers, and a few outputs wait to be written.  The rest (the
# interpreter, compiled kernels, a codec's buffers for its current block, records of the plan's
# tensors) is a reserve that does not grow with experts.


class _Need(msgspec.Struct, frozen=True):
    """Bytes for one thread's inputs and for one output, of the largest tensor; shared: by all."""

    sides: int
    output: int
    largest: str
    shared: int = 0

    def of(self, threads: int) -> int:
        """Return the bytes for this many threads."""
        # Outputs, plain and encoded: those waiting, one per thread, and the one being written.
        return RESERVE + self.shared + threads * self.sides + 2 * (2 * threads + 2) * self.output

    def fitting(self, memory: int, threads: int) -> int:
        """Return how many of these threads fit, perhaps none."""
        return next((count for count in range(threads, 0, -1) if self.of(count) <= memory), 0)


def bounds(tasks: Tasks, *, memory: int, threads: int) -> Bounds:
    """Fit as many of `threads` as possible.  Raises BadRequest if the largest chunk is too big."""
    shapes, elements = _shapes(tasks)
    alone = _need(shapes, elements, 0)
    count = alone.fitting(memory, threads)
    if not count:
        least = alone.of(1)
        raise BadRequest(
            f"{format_size(memory)} of memory is too little: {format_size(RESERVE)} is the fixed "
            "working memory of the process, and one chunk of the base and of each expert takes "
            f"{format_size(least - RESERVE)} more",
            where=alone.largest,
            hint=phrase(
                "the least that works: {memory}",
                memory=Option("memory", -(-least >> 20) << 20),
            ),
        )
    # Small tensors share a batch as long as that costs no thread.
    shared = (BATCH_BYTES, BATCH_BYTES // 4, BATCH_BYTES // 16)
    fits = (size for size in shared if _need(shapes, elements, size).of(count) <= memory)
    return Bounds(count, 2 * count, next(fits, 0))


class _Shape(msgspec.Struct, frozen=True):
    """What decides the memory that a tensor needs.

    rows: held of each chunk. elements: of a batch of its chunks. narrow, wide, out: bytes of an
    element of the narrower of base and output, of the widest side, of the output. shared: bytes
    for all threads.
    """

    rows: int
    elements: int
    narrow: int
    wide: int
    out: int
    shared: int


def _shapes(tasks: Tasks) -> tuple[dict[_Shape, str], int]:
    """Return the distinct shapes with the first tensor of each, and the elements of all tensors."""
    first: dict[_Shape, str] = {}
    # Many tensors are alike: what they need is found once.
    alike: set[tuple[object, ...]] = set()
    total = 0
    for planned in tasks.plan.tensors:
        members, operation = tasks.members(planned.name), tasks.operation(planned.name)
        own, output = members.base, tasks.out_dtype(planned)
        dtypes = {expert.dtype for expert in members.experts}
        there = int(members.present.sum(axis=0).max(initial=0))
        count, chunk = math.prod(own.shape), planned.chunk_elements
        total += count
        mixed = planned.operation if planned.mixture is None else planned.name
        key = (mixed, own.dtype, output, frozenset(dtypes), there, own.shape, chunk)
        if key in alike:
            continue
        alike.add(key)
        base, out = item_size(own.dtype), item_size(output)
        wide = max([base, *map(item_size, dtypes)])
        elements = min(count, chunk * batch_chunks(chunk, own.dtype, output))
        beside, shared = operation.selection.mask_bytes(there), 0
        if operation.chunk_factors is not None:
            beside += operation.chunk_factors.bytes_each(len(members.experts))
            shared = operation.chunk_factors.tensor_bytes(own.shape, len(members.experts))
        masks = -(-beside // wide)
        rows = 1 + SPARE_SIDES + there + masks
        shape = _Shape(rows, elements, min(base, out), wide, out, shared)
        first.setdefault(shape, planned.name)
    return first, total


def _need(shapes: Mapping[_Shape, str], total: int, together: int) -> _Need:
    """Return the largest need.  total: elements of all tensors. together: as in Bounds."""
    sides, output, largest = 0, 0, ""
    for one, name in shapes.items():
        elements = max(one.elements, min(total, together // one.narrow))
        needed = one.rows * elements * one.wide
        if needed > sides:
            sides, largest = needed, name
        output = max(output, elements * one.out)
    return _Need(sides, output, largest, max([one.shared for one in shapes], default=0))
