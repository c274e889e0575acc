"""The sweep: cost and error of one merge for a range of budgets.

One survey and one ranking serve all budgets. A point of the sweep is exactly the plan that the same
request with that budget makes. No plan is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from mstore.merge.analysis.distance import distances
from mstore.merge.planning.report import share_of
from mstore.merge.planning.session import Planned, Planning
from mstore.terms.errors import BadRequest
from mstore.terms.report import ProgressCallback, Report

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
    memo_expert_bytes: Callable[[Planned], int],
    measure: bool,
    threads: int,
    progress: ProgressCallback | None = None,
) -> SweepReport:
    """Return a point for each share of the full cost; `shares` as from check_shares.

    memo_expert_bytes: returns how much of a plan's reads the memo table currently saves. measure:
    also run the merges in memory and compare them; that reads all experts once. Raises as planning
    does, and Corrupt.
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
            unread_expert_bytes=planned.costs.planned - memo_expert_bytes(planned),
            error_bound=planned.plan.error_bound,
            error_estimate=planned.plan.error_estimate,
            error_share_estimate=share_of(planned.plan.error_estimate, planning.change),
            measured_error=error,
            measured_error_share=share_of(error, whole),
        )
        for share, planned, error in zip(shares, plans, measured, strict=True)
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
        companions=planning.request.told_companions(),
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
