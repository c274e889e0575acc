"""Explain: from a merge's plan and coverage to who contributed what, and what was left out.

Reads records only, never a block.  Counts are of (expert, chunk) pairs; where all dtypes are one,
a chunk is a block.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from mstore.errors import NotFound, did_you_mean
from mstore.ids import PlanId, SnapshotId
from mstore.merge.analysis.idle import idle_experts
from mstore.merge.analysis.layers import layers_of
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.costs import Costs, told_costs
from mstore.merge.planning.tied import names_of_plan
from mstore.merge.running.overflow import overflow_warnings
from mstore.objects.coverage import Coverage, TensorCoverage, bit
from mstore.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.objects.snapshot import SnapshotRecord
from mstore.reports import (
    ExpertShare,
    Explanation,
    LayerExplanation,
    MergeWarning,
    PlanReport,
    TensorExplanation,
)
from mstore.stats.chunks import blocks_per_chunk
from mstore.store.catalog import Catalog
from mstore.store.plans import Sources, plan_of, reported, sources_of_merge

STATE_NAMES = {
    READ: "read",
    SHARED: "shared",
    EQUAL: "equal to base",
    BELOW: "below threshold",
    OMITTED: "over budget",
    DROPPED: "outside the top-p share",
}


def plan_report(
    plan: Plan,
    id: PlanId,
    sources: Sources,
    costs: Costs,
    *,
    analyzed: int = 0,
    memo: int | None = None,
    warnings: tuple[MergeWarning, ...] = (),
    kept: bool = True,
    seconds: float = 0.0,
) -> PlanReport:
    """Return the report of a plan; counts are (expert, chunk) pairs, `costs` those in this store.

    warnings: additional warnings about experts that the plan itself shows to be idle.
    """
    counts: Counter[int] = Counter()
    for tensor in plan.tensors:
        for states in tensor.states:
            counts.update(states)
    notes = list(plan.notes)
    if analyzed:
        # Not a note of the plan: the next run of the same plan does not incur this cost.
        again = "and are not read for them again" if kept else "and what they told is not kept"
        notes.append(
            f"{analyzed} bytes of experts were read for statistics or exact thresholds that were "
            f"missing, apart from the budget, {again}"
        )
    if not kept:
        notes.append("this store can be read and not written: the plan is not kept in it")
    if plan.budget is not None and costs.planned > plan.budget:
        notes.append(
            f"the plan was made where its blocks lie otherwise: here they take {costs.planned} "
            f"bytes, more than its budget of {plan.budget}"
        )
    elects = any(operation.is_elected for operation in Operations(plan).used(plan))
    if elects and plan.error_estimate and counts[OMITTED] + counts[DROPPED]:
        # Figures of bench/estimates.py.
        notes.append(
            "the estimate is no bound: real errors were 0.1 to 1.7 times it where experts were "
            "trained or random, and can be far larger where heavy ones cancel; plan --sweep "
            "--measure tells"
        )
    notes += _copied_notes(plan)
    return PlanReport(
        plan=id,
        method=plan.method,
        base=sources.base.name,
        experts=tuple(
            (source.name, expert.weight)
            for source, expert in zip(sources.experts, plan.experts, strict=True)
        ),
        parameters=dict(plan.parameters),
        score=plan.criteria.score,
        budget_bytes=plan.budget,
        max_error=plan.criteria.max_error,
        expert_budget_bytes=plan.criteria.expert_budget,
        only=plan.criteria.only,
        skip=plan.criteria.skip,
        top_p=plan.criteria.top_p,
        full_expert_bytes=costs.full,
        planned_expert_bytes=costs.planned,
        memo_expert_bytes=memo,
        analyze_bytes_read=analyzed,
        blocks_total=sum(counts.values()),
        blocks_equal_base=counts[EQUAL],
        blocks_shared=counts[SHARED],
        blocks_below_threshold=counts[BELOW],
        blocks_selected=counts[READ] + counts[SHARED],
        blocks_omitted=counts[OMITTED],
        blocks_outside_top_p=counts[DROPPED],
        error_bound=plan.error_bound,
        error_estimate=plan.error_estimate,
        error_share_estimate=share_of(plan.error_estimate, sources.change),
        overflow=reported(sources.overflow),
        warnings=(
            *idle_experts(plan, sources),
            *overflow_warnings(plan, sources.overflow),
            *warnings,
        ),
        notes=tuple(notes),
        kept=kept,
        seconds=seconds,
    )


def share_of(error: float | None, change: float | None) -> float | None:
    """Return an error as a share of what the full merge changes, both relative to one norm.

    None if either is unknown, or the full merge changes nothing.
    """
    if error == 0:
        return 0.0
    return error / change if error is not None and change else None


def _copied_notes(plan: Plan) -> list[str]:
    """Return one line per tensor, but not hundreds of lines for hundreds of skipped tensors."""
    causes: dict[str, list[str]] = {}
    for name, why in plan.copied:
        causes.setdefault(why, []).append(name)
    notes = []
    for why, names in causes.items():
        shown = names if len(names) <= 3 else names[:2]
        notes += [f"{name} is the base's own: {why}" for name in shown]
        if len(names) > len(shown):
            notes.append(f"{len(names) - len(shown)} more tensors are the base's own: {why}")
    return notes


@dataclass(slots=True)
class _Tally:
    """Sums for one expert, over a tensor or over many."""

    counts: Counter[int] = field(default_factory=Counter)
    squares: float = 0.0
    known: bool = True

    def add(self, states: bytes, omitted: float) -> None:
        """Add one tensor; `omitted` is the norm left out, -1 if unknown."""
        self.counts.update(states)
        if omitted < 0 or not math.isfinite(omitted):
            self.known = False
        else:
            self.squares += omitted * omitted

    def share(
        self, expert: str, weight: float, blocks: tuple[str, ...] | None = None
    ) -> ExpertShare:
        """Return the sums as a report."""
        return ExpertShare(
            expert=expert,
            weight=weight,
            blocks_read=self.counts[READ],
            blocks_shared=self.counts[SHARED],
            blocks_equal_base=self.counts[EQUAL],
            blocks_below_threshold=self.counts[BELOW],
            blocks_over_budget=self.counts[OMITTED],
            blocks_outside_top_p=self.counts[DROPPED],
            omitted_norm=math.sqrt(self.squares) if self.known else None,
            blocks=blocks,
        )


@dataclass(slots=True)
class _Sums:
    """Sums over tensors."""

    experts: list[_Tally]
    tensors: int = 0
    blocks: int = 0
    reused: int = 0

    def add(self, item: TensorExplanation, planned: PlanTensor | None, *, counted: bool) -> None:
        """Add one tensor, whose blocks may already be `counted` under another name."""
        self.tensors += 1
        if counted:
            return
        self.blocks += item.blocks_total
        self.reused += item.blocks_reused
        if planned is not None:
            for tally, states, omitted in zip(
                self.experts, planned.states, planned.omitted, strict=True
            ):
                tally.add(states, omitted)


class _Explainer:
    """One merge being explained."""

    def __init__(
        self, catalog: Catalog, record: SnapshotRecord, plan: Plan, sources: Sources
    ) -> None:
        self._catalog = catalog
        self._plan = plan
        self._parts = catalog.manifest(record.manifest_id()).tensors()
        self._base = catalog.manifest(plan.base_id()).tensors()
        self._experts = [
            (source.name, expert.weight)
            for source, expert in zip(sources.experts, plan.experts, strict=True)
        ]
        coverage = record.coverage_id()
        # A virtual merge has no coverage: its plan is the only source.
        self._coverage: dict[str, TensorCoverage] = {}
        if coverage is not None:
            found = catalog.record(Coverage, coverage).tensors
            self._coverage = {item.name: item for item in found}
        self._planned = {item.name: item for item in plan.tensors}
        self._operations = Operations(plan)
        self._copied = dict(plan.copied)
        self._first = names_of_plan(
            catalog,
            plan,
            self._base,
            [catalog.manifest(expert.manifest_id()).tensors() for expert in plan.experts],
            lenient=True,
        )
        self._layers = layers_of(self._parts)

    def tensor(self, name: str, *, detailed: bool) -> TensorExplanation:
        """Explain one tensor; with `detailed` the fate of every chunk."""
        planned = self.planned(name)
        content = self._catalog.content(self._parts[name])
        blocks = -(-content.nbytes // self._catalog.block_size)
        first = self._first[name]
        if planned is None:
            why = self._copied.get(first)
            treatment, reused = f"copied: {why}" if why else "unchanged", blocks
        else:
            treatment, reused = "merged", self._reused(planned, content.dtype, blocks)
        shares = []
        if planned is not None:
            weights = self._plan.operation_of(planned).weights
            for (expert, _), weight, states, omitted in zip(
                self._experts, weights, planned.states, planned.omitted, strict=True
            ):
                tally = _Tally()
                tally.add(states, omitted)
                words = tuple(STATE_NAMES[state] for state in states) if detailed else None
                shares.append(tally.share(expert, weight, words))
        return TensorExplanation(
            name=name,
            layer=self._layers[name],
            treatment=treatment,
            tied_to=None if first == name else first,
            method=None if planned is None else self._plan.operation_of(planned).method,
            parameters=None
            if planned is None
            else dict(self._plan.operation_of(planned).parameters),
            sources=() if planned is None else planned.sources,
            blocks_total=blocks,
            blocks_reused=reused,
            experts=tuple(shares),
        )

    def planned(self, name: str) -> PlanTensor | None:
        """Return the plan's entry for a tensor, or for the one that it is tied to."""
        return self._planned.get(self._first[name])

    def names(self) -> list[str]:
        """All tensors, in file and data order."""
        return list(self._parts)

    def sums(
        self, tensors: list[TensorExplanation]
    ) -> tuple[tuple[LayerExplanation, ...], tuple[ExpertShare, ...]]:
        """Return the sums by layer, and by expert over all layers."""
        total = self._nothing()
        layers: dict[str, _Sums] = {}
        told = {item.name: item for item in tensors}
        for name, layer in self._layers.items():
            if name in told:
                sums = layers.setdefault(layer, self._nothing())
                for one in (sums, total):
                    one.add(told[name], self.planned(name), counted=told[name].tied_to in told)
        return (
            tuple(
                LayerExplanation(layer, one.tensors, one.blocks, one.reused, self._shares(one))
                for layer, one in layers.items()
            ),
            self._shares(total),
        )

    def _nothing(self) -> _Sums:
        return _Sums([_Tally() for _ in self._experts])

    def _shares(self, sums: _Sums) -> tuple[ExpertShare, ...]:
        return tuple(
            tally.share(expert, weight)
            for (expert, weight), tally in zip(self._experts, sums.experts, strict=True)
        )

    def _reused(self, planned: PlanTensor, dtype: str, blocks: int) -> int:
        """Return how many of a merged tensor's blocks are the base's own."""
        covered = self._coverage.get(planned.name)
        if covered is not None:
            return sum(bit(covered.reused, number) for number in range(covered.blocks))
        base = self._catalog.tensor(self._base[planned.source(0)])
        if base.dtype != dtype or not self._operations.of(planned).keeps_base:
            return 0
        per = blocks_per_chunk(dtype, planned.chunk_elements, self._plan.block_size)
        idle = [not {READ, SHARED} & set(states) for states in zip(*planned.states, strict=True)]
        return sum(idle[number // per] for number in range(blocks))


def explain(catalog: Catalog, snapshot: SnapshotId, tensor: str | None) -> Explanation:
    """Explain where a merged snapshot, or one tensor of it, came from.

    Raises BadRequest for a snapshot that no merge made, NotFound for an unknown tensor.
    """
    record = catalog.snapshot(snapshot)
    plan_id = plan_of(snapshot, record, so="there is nothing to explain")
    names = catalog.manifest(record.manifest_id()).tensors()
    if tensor is not None and tensor not in names:
        listed = f"mstore ls --tensors {snapshot.short}"
        raise NotFound("no such tensor", where=tensor, hint=did_you_mean(tensor, names, listed))
    plan = catalog.record(Plan, plan_id)
    sources = sources_of_merge(catalog, plan_id, plan, record)
    explainer = _Explainer(catalog, record, plan, sources)
    wanted = [tensor] if tensor is not None else explainer.names()
    tensors = [explainer.tensor(name, detailed=tensor is not None) for name in wanted]
    layers, experts = explainer.sums(tensors)
    return Explanation(
        snapshot=snapshot,
        plan=plan_report(plan, plan_id, sources, told_costs(catalog, plan)),
        tensors=tuple(tensors),
        layers=layers,
        experts=experts,
    )
