"""What commands print of plans, sweeps and merges."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mstore_cli.output import Column, Screen
from mstore_cli.sizes import format_percent, format_seconds, format_share, format_size

if TYPE_CHECKING:
    from mstore.api.reports import MergeReport, MergeWarning, PlanReport, SweepReport


def plan_document(report: PlanReport, file: Path | None) -> dict[str, object]:
    """Return a plan as JSON: its report, and the keys of a merge that has not happened yet."""
    own = msgspec.structs.asdict(report)
    return own | {
        "snapshot": None,
        "manifest": None,
        "expert_bytes_read": 0,
        "resumed_expert_bytes": 0,
        "base_bytes_read": 0,
        "remote_bytes": 0,
        "remote_requests": 0,
        "bytes_written": 0,
        "blocks_total": None,
        "blocks_reused": None,
        "file": None if file is None else str(file),
    }


def draw_plan(screen: Screen, report: PlanReport) -> None:
    """Print a plan: inputs, what is read, what is left out, and the error."""
    from mstore.merge.methods.parameters import written

    assembled = report.assembled
    # What takes tensors as they are has no weights, and reads nothing.
    experts = ", ".join(
        name if assembled else f"{name}={weight:g}" for name, weight in report.experts
    )
    parameters = " ".join(f"{key}={written(value)}" for key, value in report.parameters.items())
    budget = "none" if report.budget_bytes is None else format_size(report.budget_bytes)
    screen.fields(
        [
            ("method", report.method if assembled else f"{report.method} {parameters}".rstrip()),
            ("base", report.base),
            ("experts", experts or None),
            ("with", ", ".join(f"{role}={name}" for role, name in report.companions) or None),
            ("layers", _layers(report)),
            ("ranked by", None if assembled else report.score),
            ("budget", None if assembled else budget),
            *_criteria(report),
            *([] if assembled else _reads(report)),
            ("to download", _to_download(report)),
            *_chunks(report),
            *([] if assembled else error_fields(report)),
            # A plan that is only displayed took no time.
            ("time", format_seconds(report.seconds) if report.seconds else None),
        ]
    )
    draw_remarks(screen, report.remarks, report.warnings)


def _reads(report: PlanReport) -> Iterable[tuple[str, str | None]]:
    yield "experts to read", of_full(report.planned_expert_bytes, report.full_expert_bytes)
    yield "  to read now", _to_read_now(report)
    yield "analysis read", format_size(report.analyze_bytes_read)


def _chunks(report: PlanReport) -> Iterable[tuple[str, int | None]]:
    """Yield what becomes of pairs of an expert and a chunk, not blocks of the output."""
    if report.assembled:
        return
    yield "expert chunks", report.chunks_total
    yield "  equal to base", report.chunks_equal_base
    yield "  shared", report.chunks_shared
    yield "  not needed", report.chunks_not_needed
    yield "  selected", report.chunks_selected
    yield "  left out", report.chunks_omitted
    yield "  outside top-p", report.chunks_outside_top_p or None


def _layers(report: PlanReport) -> str | None:
    """Format the runs of a stack's layers; None if there are none."""
    total = sum(end - first for _, first, end in report.layers)
    runs = ", ".join(f"{name} [{first}, {end}]" for name, first, end in report.layers)
    return f"{total}: {runs}" if report.layers else None


def _criteria(report: PlanReport) -> Iterable[tuple[str, str | None]]:
    """Yield the plan's other constraints; lines without a value are not printed."""
    cap, share = report.expert_budget_bytes, report.top_p
    yield "  of one expert", None if cap is None else format_size(cap)
    yield "max error", None if report.max_error is None else format_bound(report.max_error)
    yield "only", " ".join(report.only) or None
    yield "skip", " ".join(report.skip) or None
    yield "top-p", None if share is None else f"{share:.3g} of the blocks that would change"


def _to_download(report: PlanReport) -> str | None:
    if not report.bytes_not_here:
        return None
    return f"{format_size(report.bytes_not_here)}, of experts and of what the base has there"


def _to_read_now(report: PlanReport) -> str | None:
    """Format the bytes left to read after memo table hits, if fewer than planned."""
    if not report.memo_expert_bytes:
        return None
    return format_size(report.planned_expert_bytes - report.memo_expert_bytes)


def of_full(read: int, full: int) -> str:
    """Format what is read of experts, and its share of what a merge without a budget reads."""
    share = format_share(read, full)
    return f"{format_size(read)} ({share} of a full merge's {format_size(full)})"


class Link(NamedTuple):
    """What is between this store and its remotes: bytes a second, and seconds until an answer."""

    rate: int
    latency: float


def draw_sweep(screen: Screen, report: SweepReport, link: Link | None = None) -> None:
    """Print a sweep: one line per budget.  link: also print seconds of download."""
    measured = any(point.measured_error is not None for point in report.points)
    is_lazy = any(point.bytes_not_here for point in report.points)
    columns = [("BUDGET", True), ("READS", True), ("TO READ NOW", True)]
    columns += [("TO DOWNLOAD", True)] * is_lazy
    columns += [("TAKES", True)] * (link is not None)
    columns += [("LOST, ABOUT", True), ("BOUND", True)]
    columns += [("REALLY LOST", True), ("ERROR", True)] * measured
    rows = []
    for point in report.points:
        row = [
            format_percent(point.share, ".0f"),
            format_size(point.planned_expert_bytes),
            format_size(point.unread_expert_bytes),
            *([format_size(point.bytes_not_here)] if is_lazy else []),
            *([] if link is None else [format_seconds(point.download_seconds(*link))]),
            format_loss(point.error_share_estimate),
            format_bound(point.error_bound),
        ]
        if measured:
            row += [format_loss(point.measured_error_share), format_bound(point.measured_error)]
        rows.append(row)
    screen.table([Column(title, right=right) for title, right in columns], rows)
    screen.line(f"full cost {format_size(report.full_expert_bytes)}, ranked by {report.score}")
    if is_lazy:
        screen.line("to download: blocks of experts, and of what the base has there")
    screen.line("lost: of what the full merge changes; bound and error: of the base's norm")
    if measured:
        screen.line(f"measuring read {format_size(report.measure_bytes_read)} from experts")


def draw_remarks(
    screen: Screen, remarks: Iterable[str], warnings: Iterable[MergeWarning] = ()
) -> None:
    """Print warnings of likely mistakes, and the planner's remarks."""
    for warning in warnings:
        screen.line(f"warning: {screen.typed(warning.text)}", style="yellow")
    for remark in remarks:
        screen.line(f"remark: {screen.typed(remark)}")


def error_fields(report: PlanReport | MergeReport) -> Iterable[tuple[str, str]]:
    """Return a merge's errors: first what people can judge, then what is certified."""
    share, bound, estimate = report.error_share_estimate, report.error_bound, report.error_estimate
    yield "change lost", format_loss(share) if share is None else f"{format_loss(share)} (estimate)"
    yield (
        "error bound",
        "none" if bound is None else f"{format_bound(bound)} of the base's norm (certified)",
    )
    of_norm = "" if estimate is None else " of the base's norm"
    yield "error estimate", f"{format_bound(estimate)}{of_norm}"


def format_loss(value: float | None) -> str:
    """Format a share of what the full merge changes; more than 100 % is worse than the base."""
    if value is None:
        return "not known"
    return format_percent(value, ".3g")


def format_bound(value: float | None) -> str:
    """Format an error relative to the base's norm; `none` for None."""
    return "none" if value is None else f"{value:.3g}"
