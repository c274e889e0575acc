"""Runs of stored plans: published as a commit, or nothing; or repeated, to compare the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.schema import PlanInputs
from mstore.merge.methods.registry import changed
from mstore.merge.planning.costs import costs_of
from mstore.merge.planning.report import PlanReport
from mstore.merge.planning.warnings import MergeWarning, not_finite_text
from mstore.merge.running.delivery import Delivery, InStoreDelivery
from mstore.merge.running.engine import MEMORY, Outcome, Resources, run_plan
from mstore.merge.running.runners import WorkerReport, Workers
from mstore.merge.running.slices import SLICE_BYTES
from mstore.models.made import Publication, made_of
from mstore.store import contents, refs
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.models import tensors_of
from mstore.store.not_finite import NotFiniteTensor, counted
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import READ, SHARED, Coverage, Plan
from mstore.store.objects.snapshot import BASE, COMPANION, EXPERT, MERGE, Parent, SnapshotRecord
from mstore.store.plans import plan_of
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import Incompatible, NotFound, StorageFailed
from mstore.terms.ids import ManifestId, PlanId, SnapshotId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback, Report


class MergeReport(Report, frozen=True):
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
    pushed_to: str | None
    """the remote whose branch now is the result, and which has its packs; None: they are here"""
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
    remote_bytes: int
    """of both, bytes that came from lazy remotes now; what was cached came before"""
    remote_requests: int
    """requests for them"""
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
    workers: tuple[WorkerReport, ...]
    """what each worker of a cluster did"""
    seconds: float
    """how long it took"""


class Published(msgspec.Struct, frozen=True):
    """A published merge, real or virtual.

    is_new: False if the ref already was that merge; then is_virtual says whether it still is.
    blocks_reused: output blocks that the store already had. was: where the branch pointed.
    """

    snapshot: SnapshotId
    manifest: ManifestId
    is_new: bool
    is_virtual: bool
    bytes_written: int
    blocks_total: int
    blocks_reused: int
    was: SnapshotId | None


class Merged(Published, frozen=True):
    """A merge that was run.

    not_finite: tensors with elements that are infinite or NaN, and are finite in the base.
    """

    outcome: Outcome
    not_finite: tuple[NotFiniteTensor, ...]


def merge_report(
    planned: PlanReport,
    made: Published,
    *,
    name: str,
    analyzed: int,
    seconds: float,
    remote: tuple[int, int] = (0, 0),
    pushed_to: str | None = None,
) -> MergeReport:
    """Return the report of a merge of a plan.

    analyzed: what planning read for missing statistics. remote: requests, and bytes.
    """
    # A virtual merge read nothing.
    outcome = made.outcome if isinstance(made, Merged) else None
    return MergeReport(
        name=name,
        plan=planned.plan,
        snapshot=made.snapshot,
        manifest=made.manifest,
        new_snapshot=made.is_new,
        was=made.was,
        virtual=made.is_virtual,
        pushed_to=pushed_to,
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
        remote_bytes=remote[1],
        remote_requests=remote[0],
        bytes_written=made.bytes_written,
        blocks_total=made.blocks_total,
        blocks_reused=made.blocks_reused,
        error_bound=planned.error_bound,
        error_estimate=planned.error_estimate,
        error_share_estimate=planned.error_share_estimate,
        not_finite=planned.not_finite,
        warnings=planned.warnings,
        remarks=planned.remarks,
        workers=() if outcome is None else outcome.workers,
        seconds=seconds,
    )


def run_merge(
    catalog: Catalog,
    plan: Plan,
    sources: PlanInputs,
    *,
    name: str,
    message: str,
    threads: int,
    candidate: str | None = None,
    allow_nonfinite: bool = False,
    progress: ProgressCallback | None = None,
    memo: Memo | None = None,
    memory: int | None = None,
    workers: Workers | None = None,
    delivery: Delivery | None = None,
    slice_bytes: int = SLICE_BYTES,
    policy: Policy | None = None,
    materialized: refs.Ref | None = None,
    made: str = MERGE,
) -> Merged:
    """Run a stored plan and publish the result under a ref.

    candidate: a run whose candidate for the branch `name` will point at the result, in its place.
    allow_nonfinite: also publish a result with elements that are infinite or NaN, and are finite in
    every input.
    memo: the memo table to use and extend, None for none. memory, workers, delivery, slice_bytes:
    as in engine.Resources. policy: how to encode the output, None for the store's own.
    materialized: the current value of a ref that holds the virtual merge of this plan, to be made
    real; if it has moved, nothing is published. made: one of `snapshot.PLANNED`.

    Raises Conflict (the name is a tag, or moved meanwhile), BadName, BadRequest (too little
    memory), NotFound (an input was pruned), Incompatible (elements that are not finite),
    BudgetExceeded, Corrupt, StorageFailed; then nothing is published.
    """
    delivery = delivery or InStoreDelivery(catalog)
    resources = Resources(
        *(threads, MEMORY if memory is None else memory, workers, delivery, slice_bytes)
    )
    inputs = (sources.base, *sources.experts)
    with (
        contents.held(catalog, (source.snapshot_id() for source in inputs)),
        Transaction(catalog, f"merge {name}", resumes=True) as transaction,
    ):
        current = materialized or branch_to_move(catalog, name, candidate)
        for source in inputs:
            contents.require(catalog, source.snapshot_id(), source.name)
        # Elsewhere, what this store has does not count.
        remembered = None if memo is None or workers else _remembered(catalog, plan, memo)
        outcome = remembered or run_plan(
            catalog,
            plan,
            transaction,
            resources=resources,
            policy=policy,
            memo=memo,
            progress=progress,
        )
        if outcome.made and not allow_nonfinite:
            raise _not_finite(counted(outcome.made, outcome.tensors), plan, sources)
        found = counted(dict(outcome.coverage.not_finite), outcome.tensors)
        word = made if materialized is None else "materialize"
        publication = Publication(catalog, transaction)
        record, is_new = publication.put(
            name,
            current,
            outcome.manifest,
            made,
            parents_of(plan, sources),
            message=message,
            action=f"{word}: {plan.made_by}" + (f": {message}" if message else ""),
            plan=plan,
            coverage=outcome.coverage,
            candidate=candidate,
        )
        written = delivery.publish(publication)
    if memo is not None:
        # Only now are the blocks published. Outputs that cannot be remembered are computed again.
        with suppress(StorageFailed):
            memo.put_outputs(outcome.memo_rows)
            if remembered is None and not outcome.made:
                memo.put_outcome(plan.id(), record.manifest_id(), outcome.coverage.id())
            memo.flush()
    return Merged(
        snapshot=record.id(),
        manifest=record.manifest_id(),
        is_new=is_new,
        is_virtual=False,
        bytes_written=written,
        blocks_total=outcome.blocks_total,
        blocks_reused=outcome.blocks_reused,
        was=None if current is None else current.snapshot_id(),
        outcome=outcome,
        not_finite=found,
    )


def _remembered(catalog: Catalog, plan: Plan, memo: Memo) -> Outcome | None:
    """Return what an earlier merge of this plan made, if all of it is still stored."""
    known = memo.outcome(plan.id())
    if known is None:
        return None
    with suppress(NotFound):
        manifest, coverage = catalog.manifest(known[0]), catalog.record(Coverage, known[1])
        parts = [part.tensor_id() for file in manifest.files for part in file.parts]
        blocks = [block for one in catalog.tensors(parts) for block in one.block_ids()]
        if not all(catalog.has_blocks(blocks)):
            return None
        costs = costs_of(catalog, plan)
        odd = [name for name, _ in coverage.not_finite]
        named = tensors_of(catalog, manifest) if odd else {}
        return Outcome(
            manifest=manifest,
            coverage=coverage,
            tensors={name: catalog.tensor(named[name]) for name in odd},
            memo_rows=(),
            costs=costs,
            expert_bytes_read=0,
            memo_expert_bytes=costs.planned,
            resumed_expert_bytes=0,
            base_bytes_read=0,
            blocks_total=len(blocks),
            blocks_reused=len(blocks),
            made={},
            workers=(),
        )
    return None


def _not_finite(found: Sequence[NotFiniteTensor], plan: Plan, sources: PlanInputs) -> Incompatible:
    names = {one.tensor for one in found}
    takes = {
        k
        for tensor in plan.tensors
        if tensor.name in names
        for k, states in enumerate(tensor.states)
        if READ in states or SHARED in states
    }
    experts = [sources.experts[k].name for k in sorted(takes)]
    return Incompatible(
        not_finite_text(found, "all models"),
        where=", ".join(experts) or sources.base.name,
        hint=phrase(
            "smaller weights or a wider dtype avoid them; {allow} publishes it as it is",
            allow=Option("allow_nonfinite", True),
        ),
    )


def parents_of(plan: Plan, sources: PlanInputs) -> tuple[Parent, ...]:
    """Return the parents of a merge: its base, experts and companions."""
    roles = [EXPERT] * len(plan.experts) + [COMPANION] * len(plan.companions)
    inputs = zip(roles, sources.experts, strict=True)
    others = (Parent(role, source.snapshot) for role, source in inputs)
    return (Parent(BASE, sources.base.snapshot), *others)


@contextmanager
def inputs_held(catalog: Catalog, snapshot: SnapshotId, record: SnapshotRecord) -> Iterator[None]:
    """Protect a merge and its inputs from garbage collection while its plan is run again.

    Raises NotFound if the contents of an input were pruned.
    """
    inputs = made_of(record)
    with contents.held(catalog, (snapshot, *(one.snapshot_id() for one in inputs))):
        for one in inputs:
            contents.require(catalog, one.snapshot_id(), f"{one.role} {one.snapshot_id().short}")
        yield


def is_merge_of(tip: SnapshotRecord, plan: Plan, parents: tuple[Parent, ...]) -> bool:
    """Return whether a snapshot is the merge, real or virtual, of these parents by this plan."""
    return tip.plan == plan.id() and made_of(tip) == parents


class ReplayReport(Report, frozen=True):
    """A recorded plan run again."""

    snapshot: SnapshotId
    """the snapshot's id"""
    plan: PlanId
    """the plan's id"""
    manifest: ManifestId
    """the recorded content"""
    replayed: ManifestId
    """the content of this run"""
    same: bool
    """whether the two are equal"""
    first_difference: str | None
    """where they first differ; None if they do not"""
    remarks: tuple[str, ...]
    """what may have changed since, where they differ: methods of other packages"""
    seconds: float
    """how long it took"""


def replay(
    catalog: Catalog,
    snapshot: SnapshotId,
    *,
    threads: int,
    progress: ProgressCallback | None = None,
) -> ReplayReport:
    """Compute everything again, without the memo table, and compare ManifestIds.

    Raises BadRequest for a snapshot that no plan made, or that is virtual, NotFound if an input was
    pruned.
    """
    record = catalog.snapshot(snapshot)
    plan_id = plan_of(snapshot, record, so="there is no plan to replay")
    catalog.require_real(snapshot, snapshot.short)
    began = time.monotonic()
    plan = catalog.record(Plan, plan_id)
    with inputs_held(catalog, snapshot, record):
        outcome = run_plan(
            catalog,
            plan,
            None,
            resources=Resources(threads),
            progress=progress,
        )
    manifest = outcome.manifest
    same = manifest.id() == record.manifest_id()
    methods = sorted({one.method for one in plan.operations})
    return ReplayReport(
        snapshot=snapshot,
        plan=plan_id,
        manifest=record.manifest_id(),
        replayed=manifest.id(),
        same=same,
        first_difference=None
        if same
        else _first_difference(catalog, catalog.manifest(record.manifest_id()), outcome),
        remarks=() if same else tuple(filter(None, map(changed, methods))),
        seconds=time.monotonic() - began,
    )


def _first_difference(catalog: Catalog, recorded: Manifest, outcome: Outcome) -> str:
    fresh = {tensor.id(): tensor for tensor in outcome.tensors.values()}
    for ours, theirs in zip(recorded.files, outcome.manifest.files, strict=False):
        for part, other in zip(ours.parts, theirs.parts, strict=False):
            if part == other:
                continue
            if part.name is None or part.name != other.name:
                return ours.path
            where = f"{ours.path}: {part.name}"
            mine = catalog.tensor(part.tensor_id())
            replayed = fresh.get(other.tensor_id()) or catalog.tensor(other.tensor_id())
            for number, (a, b) in enumerate(
                zip(mine.block_ids(), replayed.block_ids(), strict=False)
            ):
                if a != b:
                    return f"{where}, block {number}"
            return where
        if ours != theirs:
            return ours.path
    return "the lists of files"
