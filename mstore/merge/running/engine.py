"""The engine: runs a plan into a sink, and reads and writes only what does not exist yet.

Wires the parts of a run: the work list yields slices of what must be computed (`work_list`), a
runner computes them, on threads of this process or on any executor (`runners`), and the records of
the output come last (`output`).

Budget-sound: a task names planned blocks only, and every read of an expert byte is charged before
the `pread` to a meter whose limit is the size of those blocks in this store.  A slice that runs
elsewhere is charged whole before it is submitted, and refuses to read more than that.
Deterministic: the outcome is a function of the plan alone, for any number of threads, any executor,
any memo table.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.pack_store import HERE
from mstore.blocks.reader import Meter
from mstore.merge.planning.costs import Costs, costs_of
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.computer import Computer
from mstore.merge.running.known import KnownChunks, Ready
from mstore.merge.running.memory import MEMORY, bounds
from mstore.merge.running.output import Layout, Records
from mstore.merge.running.papers import Papers
from mstore.merge.running.runners import LocalRunner, RemoteRunner
from mstore.merge.running.slices import SLICE_BYTES, Slice
from mstore.merge.running.work_list import Cutter, WorkList, coverage
from mstore.models.made import blocks_of
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.objects.coverage import Coverage
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import BudgetExceeded
from mstore.terms.ids import BlockId
from mstore.terms.report import ProgressCallback


class Resources(msgspec.Struct, frozen=True):
    """The resources of a run.

    threads: most threads that compute. memory: most anonymous bytes. slice_bytes: plain bytes of
    output per slice. executor: computes the slices elsewhere; then threads and memory hold for each
    slice, and a process that computes several at a time may take as much for each.
    """

    threads: int
    memory: int = MEMORY
    executor: Executor | None = None
    slice_bytes: int = SLICE_BYTES


class Outcome(msgspec.Struct, frozen=True):
    """What a run produced and what it cost (bytes).

    tensors: the merged ones, by the name they are planned under. memo_rows: rows for the memo
    table, to add once the output is published. costs: of the plan in this store.
    resumed_expert_bytes: read by an interrupted run whose work this one reused. made:
    tensors with elements that are infinite or NaN, and are finite in every input, and how many.
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


def run_plan(
    catalog: Catalog,
    plan: Plan,
    sink: Transaction | None,
    *,
    resources: Resources,
    policy: Policy | None = None,
    memo: Memo | None = None,
    progress: ProgressCallback | None = None,
    ready: Ready | None = None,
) -> Outcome:
    """Compute everything.

    sink: None to compute the outcome without storing it. memo: None to use no memo table. policy:
    how the output is coded, None for the store's own. ready: the same plan, if it was made ready
    before.

    Raises BadRequest, BudgetExceeded, Corrupt, StorageFailed.
    """
    check_fits(catalog, plan)
    policy = catalog.config.codec if policy is None else policy
    costs = costs_of(catalog, plan)
    expert_meter, base_meter = Meter("expert", costs.planned), Meter("base")
    ready = ready or Ready(catalog, plan)
    tasks = ready.tasks
    tasks.charge(expert_meter)
    layout = Layout(catalog, tasks)
    limits = bounds(tasks, memory=resources.memory, threads=resources.threads)
    written: set[BlockId] = set()
    known = KnownChunks(catalog, ready, sink, memo, written)
    first = Slice(
        place=HERE,
        store=catalog.layout.root,
        target=(Path() if sink is None else sink.directory) / "0.pack",
        block_size=catalog.block_size,
        policy=None if sink is None else policy,
        bounds=limits,
        runs=(),
    )
    cutter = Cutter(first, resources.slice_bytes)
    work = WorkList(catalog, tasks, layout, known, cutter, progress)
    runner: LocalRunner | RemoteRunner
    if resources.executor is None:
        computer = Computer(
            *(catalog.packs, expert_meter, base_meter, catalog.has_blocks, tasks.moved)
        )
        runner = LocalRunner(computer, limits, sink, written)
    else:
        runner = RemoteRunner(resources.executor, sink, expert_meter, base_meter)
    try:
        runner.run(work)
    except BudgetExceeded as error:
        # The limit is what these blocks took when the run began: they were stored again since.
        hint = "run the command again"
        where = f"plan {plan.id().short}"
        raise BudgetExceeded(error.texts[0], where=where, hint=hint) from error
    jobs = work.jobs
    tensors = {name: job.record() for name, job in jobs.items()}
    records = Records(catalog.block_size, sink, policy)
    manifest = layout.manifest(
        Papers(catalog, plan),
        sum([job.not_finite.new for job in jobs.values()]),
        record_of=lambda name, *_: tensors[name],
        put_records=records.put_records,
        put_bytes=records.put_bytes,
    )
    total = blocks_of(manifest, plan.block_size)
    read, resumed = expert_meter.total, known.resumed_bytes
    return Outcome(
        manifest=manifest,
        coverage=coverage(plan, [jobs[t.name] for t in plan.tensors]),
        tensors=tensors,
        memo_rows=tuple(known.rows),
        costs=costs,
        expert_bytes_read=read,
        memo_expert_bytes=costs.planned - read - resumed if known.hits else 0,
        resumed_expert_bytes=resumed,
        base_bytes_read=base_meter.total,
        blocks_total=total,
        blocks_reused=total - (0 if sink is None else sink.blocks_new),
        made={name: job.not_finite.made for name, job in jobs.items() if job.not_finite.made},
    )
