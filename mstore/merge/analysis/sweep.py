"""The sweep: cost and error of one merge for a range of budgets.

One survey and one ranking serve all budgets.  A point of the sweep is exactly the plan that the
same request with that budget makes.  No plan is stored.

To measure the real errors, the plans' outputs are compared with a merge that reads everything: the
kernels run, so every expert block that matters is read, once for any number of plans.  Results are
compared in float32, before rounding to the output's dtype; differences are squared and added in
float64, chunk by chunk in a fixed order.  Memory per thread: a chunk of the base, of each expert
and of two outputs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from mstore.blocks.elsewhere import REQUESTS
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.planning.report import share_of
from mstore.merge.planning.session import Planned, Planning
from mstore.merge.running.compute import PlanChunks, blend
from mstore.merge.running.loading import Loaded
from mstore.merge.running.outstanding import Outstanding
from mstore.merge.running.slices import TieLedger
from mstore.merge.running.task import ChunkTask, Tasks, TensorTask
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest
from mstore.terms.report import Progress, ProgressCallback, Report

SHARES = tuple(percent / 100 for percent in range(5, 101, 5))


class SweepPoint(Report, frozen=True):
    """The plan at one share of the full cost.

    Errors are relative to the base's norm, and `*_error_share*` to what the full merge changes.
    """

    share: float
    """the budget as a share of the full cost"""
    budget_bytes: int
    """the budget in bytes"""
    planned_expert_bytes: int
    """bytes that the plan reads from experts"""
    unread_expert_bytes: int
    """planned bytes that the memo table does not save"""
    bytes_not_here: int
    """bytes at rest that a merge of the plan has to download, as in a plan's report"""
    requests_not_here: int
    """about how many requests bring them"""
    error_bound: float | None
    """certified bound on the norm of (merged - full-read merge) / norm of base, before rounding to
    the output dtype; None if the method has none"""
    error_estimate: float | None
    """estimate of the same error, not certified; None if there is none"""
    error_share_estimate: float | None
    """estimate of the norm of (merged - full-read merge) / norm of (full-read merge - base), the
    share of the change that is lost; None if unknown"""
    measured_error: float | None
    """the real error, before rounding to the output dtype; None: not measured"""
    measured_error_share: float | None
    """the same as a share of what the full merge changes; None: not measured, or it changes
    nothing, or the method scales the base"""

    def download_seconds(self, rate: float, latency: float) -> float:
        """Return about how long it takes to bring what is not here, and nothing else.

        rate: bytes a second. latency: seconds from a request to its answer; several are under way
        at once.
        """
        return self.bytes_not_here / rate + latency * -(-self.requests_not_here // REQUESTS)


class SweepReport(Report, frozen=True):
    """Cost against error over many budgets of one request."""

    method: str
    """the merge method"""
    score: str
    """how blocks were ranked"""
    parameters: dict[str, float | int | bool | str | tuple[float, ...]]
    """every parameter of the method, defaults included"""
    base: str
    """the model merged into"""
    experts: tuple[tuple[str, float], ...]
    """pairs of ref and weight"""
    companions: tuple[tuple[str, str], ...]
    """further inputs, as pairs of role (`fisher:EXPERT`) and ref; empty for most methods"""
    full_expert_bytes: int
    """bytes that a merge without a budget would read from experts"""
    points: tuple[SweepPoint, ...]
    """the plan at each budget, the smallest first"""
    measure_bytes_read: int
    """bytes read from experts to measure errors; 0 if they were not measured"""
    analyze_bytes_read: int
    """bytes of experts read to plan: for missing statistics, and adapters for the norms of their
    products"""
    seconds: float
    """how long it took"""


def check_shares(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the shares in order, each once. Raises BadRequest."""
    if not len(shares) or not all(0 < share <= 1 for share in shares):
        raise BadRequest(
            "a sweep goes over shares of the full cost, above 0 and at most 1",
            hint="shares=(0.1, 0.5, 1.0)",
        )
    return tuple(sorted({float(share) for share in shares}))


def sweep(
    planning: Planning,
    shares: Sequence[float],
    *,
    outstanding: Callable[[Planned], Outstanding],
    measure: bool,
    threads: int,
    progress: ProgressCallback | None = None,
) -> SweepReport:
    """Return a point for each share of the full cost; `shares` as from check_shares.

    outstanding: returns what a merge of a plan would read now. measure: also run the merges in
    memory and compare them; that reads all experts once. Raises as planning does, and Corrupt.
    """
    began = time.monotonic()
    full = planning.full_expert_bytes
    plans = [planning.plan_within(int(share * full)) for share in shares]
    measured: list[float | None] = [None] * len(plans)
    whole: float | None = None
    read = 0
    if measure:
        # The last plan reads nothing: its distance from the full merge is the base's distance.
        found = distances(
            planning.catalog,
            planning.full_plan().plan,
            [planned.plan for planned in [*plans, planning.plan_within(0)]],
            threads=threads,
            progress=progress,
        )
        read = found.expert_bytes_read
        *measured, whole = (_relative(square, planning.base_squares) for square in found.squares)
    if not planning.request.operation.keeps_base:
        whole = None
    points = tuple(
        SweepPoint(
            share=share,
            budget_bytes=planned.plan.budget or 0,
            planned_expert_bytes=planned.costs.planned,
            unread_expert_bytes=planned.costs.planned - left.saved,
            bytes_not_here=left.not_here,
            requests_not_here=left.requests,
            error_bound=planned.plan.error_bound,
            error_estimate=planned.plan.error_estimate,
            error_share_estimate=share_of(planned.plan.error_estimate, planning.change),
            measured_error=error,
            measured_error_share=share_of(error, whole),
        )
        for share, planned, left, error in zip(
            shares, plans, map(outstanding, plans), measured, strict=True
        )
    )
    return SweepReport(
        method=planning.request.operation.method.name,
        score=planning.request.score,
        parameters=dict(planning.request.operation.parameters),
        base=planning.request.base.name,
        experts=tuple(
            (expert.name, weight)
            for expert, weight in zip(
                planning.request.experts, planning.request.operation.given, strict=False
            )
        ),
        companions=planning.request.named_companions(),
        full_expert_bytes=full,
        points=points,
        measure_bytes_read=read,
        analyze_bytes_read=planning.analyzed,
        seconds=time.monotonic() - began,
    )


def _relative(square: float, base_squares: float | None) -> float | None:
    if not base_squares or not math.isfinite(square):
        return None
    return math.sqrt(square) / math.sqrt(base_squares)


BATCH = 16
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PlanDistances(msgspec.Struct, frozen=True):
    """||merged - full||^2 for each plan, over all names of all tensors; expert bytes read."""

    squares: tuple[float, ...]
    expert_bytes_read: int


def distances(
    catalog: Catalog,
    full: Plan,
    plans: Sequence[Plan],
    *,
    threads: int,
    progress: ProgressCallback | None = None,
) -> PlanDistances:
    """Measure the distance of each of `plans` from `full`; they read parts of what `full` reads.

    All are plans of one request that differ in what they leave out.  Raises Corrupt, StorageFailed.
    """
    run = _SweepPass(catalog, full, plans)
    total, done = max(1, run.expert_meter.limit or 0), 0
    sums: list[list[float]] = [[] for _ in plans]
    with ThreadPoolExecutor(threads, "measure") as pool:
        for found in pool.map(run.tensor, range(len(full.tensors))):
            for parts, part in zip(sums, found, strict=True):
                parts.extend(part)
            if progress is not None:
                done = max(done, min(total, run.expert_meter.total))
                progress(Progress("measure", done, total))
    return PlanDistances(tuple(math.fsum(parts) for parts in sums), run.expert_meter.total)


class _SweepPass:
    def __init__(self, catalog: Catalog, full: Plan, plans: Sequence[Plan]) -> None:
        self._chunks = PlanChunks(catalog, _as_float32(full))
        self.expert_meter = self._chunks.expert_meter
        self._full = self._chunks.tasks
        self._cuts = [Tasks(catalog, _as_float32(cut)) for cut in plans]
        self._plan = full
        self._copies = Counter(self._full.first.values())

    def tensor(self, position: int) -> list[list[float]]:
        """Return, per plan, the squares of each chunk of one tensor, once for each of its names."""
        name = self._plan.tensors[position].name
        full = self._full.tensor(name)
        cuts = [tasks.tensor(name) for tasks in self._cuts]
        present = [tasks.members(name).present for tasks in self._cuts]
        there = self._full.members(name).present
        numbers = np.flatnonzero(there.any(axis=0)).tolist()
        ledger = TieLedger(full.quotas.tolist(), numbers)
        found: list[list[float]] = [[] for _ in cuts]
        for start in range(0, len(numbers), BATCH):
            for task in self._full.chunks(full, numbers[start : start + BATCH]):
                column = [
                    (cut, here[:, task.number]) for cut, here in zip(cuts, present, strict=True)
                ]
                for squares, square in zip(found, self._chunk(task, column, ledger), strict=True):
                    squares.extend([square] * self._copies[name])
        return found

    def _chunk(
        self, task: ChunkTask, cuts: Sequence[tuple[TensorTask, Any]], ledger: TieLedger
    ) -> list[float]:
        loaded, granted = self._chunks.load(task, ledger)
        whole = self._blended(loaded, granted)
        known: dict[tuple[bytes, tuple[int, ...], tuple[int, ...]], float] = {
            _key(task.tensor, granted, task.row_of): 0.0
        }
        squares = []
        for tensor, present in cuts:
            row_of = tuple(
                row if here else -1 for row, here in zip(task.row_of, present, strict=True)
            )
            # In a chunk that a plan reads, it keeps the same ties as the full plan.
            quotas = tuple(
                UNLIMITED if own == UNLIMITED else quota
                for own, quota in zip(tensor.quotas.tolist(), granted, strict=True)
            )
            key = _key(tensor, quotas, row_of)
            if key not in known:
                cut = msgspec.structs.replace(task, tensor=tensor, row_of=row_of)
                part = Loaded(cut, loaded.sides, loaded.plain)
                known[key] = _square(self._blended(part, quotas), whole)
            squares.append(known[key])
        return squares

    def _blended(self, loaded: Loaded, quotas: Any) -> Bytes:
        out = np.empty(loaded.task.out_bytes, dtype=np.uint8)
        blend(loaded, quotas, out)
        return out


def _as_float32(plan: Plan) -> Plan:
    """Return a plan for comparison only: its results before they are rounded to their type."""
    replace = msgspec.structs.replace
    if any(tensor.dtype is not None for tensor in plan.tensors):
        tensors = tuple(replace(tensor, dtype=None) for tensor in plan.tensors)
        plan = replace(plan, tensors=tensors)
    return replace(plan, dtype="F32")


def _key(
    tensor: TensorTask, quotas: tuple[int, ...], row_of: tuple[int, ...]
) -> tuple[bytes, tuple[int, ...], tuple[int, ...]]:
    """Return what determines a chunk's output among plans of one request."""
    return tensor.thresholds.tobytes(), quotas, row_of


def _square(a: Bytes, b: Bytes) -> float:
    """Return the sum of squares of a - b where their bits differ; both float32."""
    ours, theirs = a.view(np.float32), b.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = ours.astype(np.float64) - theirs.astype(np.float64)
        gap[a.view(np.uint32) == b.view(np.uint32)] = 0.0
        # Pairwise halving fixes the order of additions; numpy does not specify that of np.sum.
        squares = np.zeros(1 << max(0, len(gap) - 1).bit_length())
        squares[: len(gap)] = gap * gap
        while len(squares) > 1:
            half = len(squares) // 2
            squares = squares[:half] + squares[half:]
    return float(squares[0])
