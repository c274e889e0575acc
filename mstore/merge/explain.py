"""Explain: from a merge's plan and coverage to who contributed what, and what was left out."""

from __future__ import annotations

from collections import Counter

from mstore.errors import NotFound
from mstore.ids import PlanId, SnapshotId
from mstore.merge.tied import first_names
from mstore.objects.coverage import Coverage, TensorCoverage, bit
from mstore.objects.plan import BELOW, EQUAL, OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.reports import ExpertShare, Explanation, PlanReport, TensorExplanation
from mstore.store.catalog import Catalog
from mstore.store.plans import Sources, sources_of

STATE_NAMES = {
    READ: "read",
    SHARED: "shared",
    EQUAL: "equal to base",
    BELOW: "below threshold",
    OMITTED: "over budget",
}


def plan_report(
    plan: Plan, id: PlanId, sources: Sources, *, analyzed: int = 0, seconds: float = 0.0
) -> PlanReport:
    """A plan as people see it; counts are of (expert, chunk) pairs."""
    counts: Counter[int] = Counter()
    for tensor in plan.tensors:
        for states in tensor.states:
            counts.update(states)
    notes = list(plan.notes)
    if analyzed:
        # Not a note of the plan: the same plan costs nothing of the kind the next time.
        notes.append(
            f"{analyzed} bytes of experts were read for statistics that were missing, apart from "
            "the budget; add --base takes them on the way"
        )
    notes += [f"{name} is the base's own: {why}" for name, why in plan.copied]
    return PlanReport(
        plan=id,
        method=plan.method,
        base=sources.base.name,
        experts=tuple(
            (source.name, expert.weight)
            for source, expert in zip(sources.experts, plan.experts, strict=True)
        ),
        parameters=dict(plan.parameters),
        budget_bytes=plan.budget,
        full_expert_bytes=plan.full_expert_bytes,
        planned_expert_bytes=plan.planned_expert_bytes,
        analyze_bytes_read=analyzed,
        blocks_total=sum(counts.values()),
        blocks_equal_base=counts[EQUAL],
        blocks_shared=counts[SHARED],
        blocks_below_threshold=counts[BELOW],
        blocks_selected=counts[READ] + counts[SHARED],
        blocks_omitted=counts[OMITTED],
        error_bound=plan.error_bound,
        error_estimate=plan.error_estimate,
        notes=tuple(notes),
        seconds=seconds,
    )


def explain(catalog: Catalog, snapshot: SnapshotId, tensor: str | None) -> Explanation:
    """Where a snapshot, or one tensor of it, came from.  Raises NotFound for an unknown tensor."""
    record = catalog.snapshot(snapshot)
    names = catalog.manifest(record.manifest_id()).tensors()
    if tensor is not None and tensor not in names:
        raise NotFound("no such tensor", where=tensor, hint=f"mstore ls --tensors {snapshot.short}")
    plan_id, coverage_id = record.plan_id(), record.coverage_id()
    if plan_id is None or coverage_id is None:
        return Explanation(snapshot, record.origin, None, ())
    plan = catalog.record(Plan, plan_id)
    sources = sources_of(catalog, plan_id, plan)
    coverage = {item.name: item for item in catalog.record(Coverage, coverage_id).tensors}
    planned = {item.name: item for item in plan.tensors}
    copied = dict(plan.copied)
    first = first_names(
        catalog.manifest(plan.base_id()).tensors(),
        [catalog.manifest(expert.manifest_id()).tensors() for expert in plan.experts],
    )
    wanted = [tensor] if tensor is not None else list(names)
    tensors = []
    for name in wanted:
        if first[name] in planned:
            item = _merged(
                name,
                planned[first[name]],
                coverage[first[name]],
                plan,
                sources,
                detailed=tensor is not None,
            )
        else:
            blocks = catalog.tensor(names[name]).block_count()
            why = copied.get(first[name])
            treatment = f"copied: {why}" if why else "unchanged"
            item = TensorExplanation(name, treatment, blocks, blocks, ())
        tensors.append(item)
    report = plan_report(plan, plan_id, sources)
    return Explanation(snapshot, record.origin, report, tuple(tensors))


def _merged(
    name: str,
    planned: PlanTensor,
    covered: TensorCoverage,
    plan: Plan,
    sources: Sources,
    *,
    detailed: bool,
) -> TensorExplanation:
    shares = []
    for k, states in enumerate(planned.states):
        counts = Counter(states)
        shares.append(
            ExpertShare(
                expert=sources.experts[k].name,
                weight=plan.experts[k].weight,
                blocks_read=counts[READ],
                blocks_equal_base=counts[EQUAL],
                blocks_shared=counts[SHARED],
                blocks_below_threshold=counts[BELOW],
                blocks_over_budget=counts[OMITTED],
                omitted_norm=planned.omitted[k],
                blocks=tuple(STATE_NAMES[state] for state in states) if detailed else None,
            )
        )
    reused = sum(bit(covered.reused, number) for number in range(covered.blocks))
    return TensorExplanation(name, "merged", covered.blocks, reused, tuple(shares))
