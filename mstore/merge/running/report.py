"""The report of a merge: what it read, wrote and published."""

from __future__ import annotations

from mstore.frozen import frozen
from mstore.ids import ManifestId, PlanId, SnapshotId
from mstore.merge.planning.report import PlanReport
from mstore.merge.planning.warnings import MergeWarning
from mstore.merge.running.engine import Outcome
from mstore.store.not_finite import NotFiniteTensor


@frozen
class MergeReport:
    """What a merge read, wrote and published.

    expert_bytes_read = planned_expert_bytes - memo_expert_bytes - resumed_expert_bytes.
    """

    name: str
    """the ref"""
    plan: PlanId
    """the plan's id"""
    snapshot: SnapshotId
    """the snapshot's id"""
    manifest: ManifestId
    """id of the content: same bytes, same id"""
    new_snapshot: bool
    """false if the ref already held this merge"""
    was: SnapshotId | None
    """where the branch pointed before, which `move` expects; None for a new branch"""
    virtual: bool
    """whether only the plan was committed; blocks are computed on read"""
    method: str
    """the merge method"""
    budget_bytes: int | None
    """most bytes that may be read from experts; None: no budget"""
    max_error: float | None
    """the requested error limit; None: none"""
    full_expert_bytes: int
    """bytes that a merge without a budget would read from experts"""
    planned_expert_bytes: int
    """bytes that the plan reads from experts"""
    expert_bytes_read: int
    """bytes read from experts, counted at pread"""
    memo_expert_bytes: int
    """planned bytes not read because an earlier merge computed the output"""
    resumed_expert_bytes: int
    """planned bytes that an interrupted run had already read"""
    analyze_bytes_read: int
    """bytes of experts read to plan: for missing statistics, and adapters for the norms of their
    products"""
    base_bytes_read: int
    """bytes read from the base"""
    bytes_written: int
    """bytes added to the store"""
    blocks_total: int
    """blocks in all"""
    blocks_reused: int
    """output blocks that the store already had"""
    error_bound: float | None
    """certified bound on the norm of (merged - full-read merge) / norm of base, before rounding to
    the output dtype; None if the method has none"""
    error_estimate: float | None
    """estimate of the same error, not certified; None if there is none"""
    error_share_estimate: float | None
    """estimate of the norm of (merged - full-read merge) / norm of (full-read merge - base), the
    share of the change that is lost; None if unknown"""
    not_finite: tuple[NotFiniteTensor, ...]
    """tensors with elements that are, or may be, infinite or NaN, and are finite in the base, worst
    first"""
    warnings: tuple[MergeWarning, ...]
    """likely mistakes: idle experts, elements that are not finite, licences that differ or forbid
    merging"""
    remarks: tuple[str, ...]
    """remarks of the planner, as text"""
    seconds: float
    """how long it took"""


def merge_report(
    planned: PlanReport,
    outcome: Outcome | None,
    *,
    name: str,
    snapshot: SnapshotId,
    manifest: ManifestId,
    is_new: bool,
    was: SnapshotId | None,
    is_virtual: bool,
    analyzed: int,
    bytes_written: int,
    blocks_total: int,
    blocks_reused: int,
    seconds: float,
) -> MergeReport:
    """Return the report of a merge of a plan; outcome: what its run read, None if it read nothing.

    analyzed: what planning read for missing statistics.
    """
    return MergeReport(
        name=name,
        plan=planned.plan,
        snapshot=snapshot,
        manifest=manifest,
        new_snapshot=is_new,
        was=was,
        virtual=is_virtual,
        method=planned.method,
        budget_bytes=planned.budget_bytes,
        max_error=planned.max_error,
        full_expert_bytes=planned.full_expert_bytes,
        planned_expert_bytes=planned.planned_expert_bytes,
        expert_bytes_read=0 if outcome is None else outcome.expert_bytes_read,
        memo_expert_bytes=0 if outcome is None else outcome.memo_expert_bytes,
        resumed_expert_bytes=0 if outcome is None else outcome.resumed_expert_bytes,
        analyze_bytes_read=analyzed,
        base_bytes_read=0 if outcome is None else outcome.base_bytes_read,
        bytes_written=bytes_written,
        blocks_total=blocks_total,
        blocks_reused=blocks_reused,
        error_bound=planned.error_bound,
        error_estimate=planned.error_estimate,
        error_share_estimate=planned.error_share_estimate,
        not_finite=planned.not_finite,
        warnings=planned.warnings,
        remarks=planned.remarks,
        seconds=seconds,
    )
