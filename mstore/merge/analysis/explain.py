"""Explain: from a merge's plan and coverage to who contributed what, and what was left out.

Reads records and statistics only, never a block.  Counts are of (expert, chunk) pairs; where all
dtypes are one, a chunk is a block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from mstore.blocks.schema import PlanInputs
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.cosines import known_cosines
from mstore.merge.planning.costs import costs_to_report
from mstore.merge.planning.report import PlanReport, companions_of, plan_report
from mstore.merge.planning.tensors import names_of_plan, phrased
from mstore.models.adapters.inputs import Inputs, Names
from mstore.models.stats.chunks import blocks_per_chunk
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.not_finite import of_merge
from mstore.store.objects.plan import (
    BELOW,
    DROPPED,
    EQUAL,
    EXPERT,
    OMITTED,
    READ,
    SHARED,
    Coverage,
    Plan,
    PlanTensor,
    Taken,
    TensorCoverage,
    bit,
)
from mstore.store.objects.shapes import layers_of
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.plans import plan_of, sources_of_merge
from mstore.store.refs import is_pattern
from mstore.terms.errors import Corrupt, NotFound, did_you_mean
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import Report

STATE_NAMES = {
    READ: "read",
    SHARED: "shared",
    EQUAL: "equal to base",
    BELOW: "not needed",
    OMITTED: "over budget",
    DROPPED: "outside the top-p share",
}


class ExpertShare(Report, frozen=True):
    """What one expert contributed, and what was left out of it and why.

    Of a companion: what was read to weigh an expert.  Counts are chunks; if all dtypes are equal, a
    chunk is a block.
    """

    expert: str
    """the ref or id it was given by"""
    role: str
    """expert, or of a companion its role and what it belongs to"""
    weight: float | None
    """the expert's weight; None for a companion"""
    chunks_read: int
    """chunks read; if all dtypes are equal, a chunk is a block"""
    chunks_shared: int
    """chunks that another expert shares: read once"""
    chunks_equal_base: int
    """chunks equal to the base's: nothing to read"""
    chunks_not_needed: int
    """chunks of which the method takes nothing: trimmed away, or of factor 0"""
    chunks_over_budget: int
    """chunks left out because of the budget"""
    chunks_outside_top_p: int
    """chunks left out because of top_p"""
    omitted_norm: float | None
    """norm of the deltas left out; None if unknown"""
    chunks: tuple[str, ...] | None
    """one word per chunk; None unless a single tensor was requested"""


class TensorExplanation(Report, frozen=True):
    """Where one merged tensor came from."""

    name: str
    """the tensor"""
    layer: str
    """its layer"""
    treatment: str
    """how the merge treated it"""
    tied_to: str | None
    """the tied tensor that it was merged as; None if it was merged by itself"""
    method: str | None
    """the method that merged it; None if it was not merged"""
    parameters: dict[str, float | int | bool | str | tuple[float, ...]] | None
    """of that method; None if it was not merged"""
    sources: tuple[str, ...]
    """the tensors that it is made of, in the base and in each expert; empty if all have its name"""
    dtype: str
    """of the output, as safetensors spells it"""
    blocks_total: int
    """blocks in all"""
    blocks_reused: int
    """blocks reused from the base"""
    not_finite: int
    """elements that are infinite or NaN, and are finite in the base"""
    cosine: float | None
    """of a method that compares one with a threshold, the cosine; None if there is none, or it is
    not known here any more"""
    mixture: tuple[float, ...] | None
    """what each expert was multiplied by, where that followed from the tensor; else None"""
    experts: tuple[ExpertShare, ...]
    """what each expert contributed"""


class LayerExplanation(Report, frozen=True):
    """Sums over the tensors of one layer.  A tied tensor's blocks count where it was merged."""

    name: str
    """the layer"""
    tensors: int
    """number of tensors"""
    blocks_total: int
    """blocks in all"""
    blocks_reused: int
    """blocks reused from the base"""
    experts: tuple[ExpertShare, ...]
    """what each expert contributed"""


class Explanation(Report, frozen=True):
    """Where a merge came from: by tensor, by layer, and by expert over all requested tensors."""

    snapshot: SnapshotId
    """the snapshot's id"""
    plan: PlanReport
    """the merge plan"""
    tensors: tuple[TensorExplanation, ...]
    """where each tensor came from"""
    layers: tuple[LayerExplanation, ...]
    """the same, summed by layer; a tied tensor counts once"""
    experts: tuple[ExpertShare, ...]
    """the same, summed over all requested tensors"""


class _Side(msgspec.Struct, frozen=True):
    """An expert, or a companion."""

    name: str
    role: str
    weight: float | None


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

    def share(self, of: _Side, chunks: tuple[str, ...] | None = None) -> ExpertShare:
        """Return the sums as a report."""
        return ExpertShare(
            expert=of.name,
            role=of.role,
            weight=of.weight,
            chunks_read=self.counts[READ],
            chunks_shared=self.counts[SHARED],
            chunks_equal_base=self.counts[EQUAL],
            chunks_not_needed=self.counts[BELOW],
            chunks_over_budget=self.counts[OMITTED],
            chunks_outside_top_p=self.counts[DROPPED],
            omitted_norm=math.sqrt(self.squares) if self.known else None,
            chunks=chunks,
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
        self,
        catalog: Catalog,
        statistics: StatsStore,
        record: SnapshotRecord,
        plan: Plan,
        sources: PlanInputs,
    ) -> None:
        self._catalog = catalog
        self._plan = plan
        self._parts = tensors_of(catalog, catalog.manifest(record.manifest_id()))
        self._base = tensors_of(catalog, catalog.manifest(plan.base_id()))
        self._sources = (sources.base.name, *(source.name for source in sources.experts))
        experts = zip(sources.experts, plan.weights, strict=False)
        self._experts = [
            *(_Side(source.name, EXPERT, weight) for source, weight in experts),
            *(_Side(name, role, None) for role, name in companions_of(plan, sources)),
        ]
        coverage = record.coverage_id()
        # A virtual merge has no coverage: its plan is the only source.
        self._coverage: dict[str, TensorCoverage] = {}
        self._not_finite: dict[str, int] = {}
        if coverage is not None:
            found = catalog.record(Coverage, coverage)
            self._coverage = {item.name: item for item in found.tensors}
            self._not_finite = dict(found.not_finite)
        self._planned = {item.name: item for item in plan.tensors}
        self._taken = {item.name: item for item in plan.taken}
        self._operations = Operations(plan)
        # What a run does not read of companions is in no chunk.
        read = self._operations.read(plan)
        self._read = [number + 1 in read for number in range(len(self._experts))]
        self._cosines = known_cosines(catalog, statistics, plan)
        self._copied = dict(plan.copied)
        self._first = names_of_plan(
            catalog,
            plan,
            self._base,
            _experts_of(catalog, plan),
            lenient=True,
        )
        self._layers = layers_of(self._parts)

    def tensor(self, name: str, *, detailed: bool) -> TensorExplanation:
        """Explain one tensor; with `detailed` the fate of every chunk."""
        planned = self.planned(name)
        content = self._catalog.content(self._parts[name])
        blocks = -(-content.nbytes // self._catalog.block_size)
        first = self._first.get(name, name)
        taken = self._taken.get(name)
        if taken is not None:
            treatment, reused = self._from(taken), 0 if taken.member else blocks
        elif planned is None:
            why = self._copied.get(first)
            treatment, reused = _copied(why) if why else "unchanged", blocks
        else:
            treatment, reused = "merged", self._reused(planned, content.dtype, blocks)
        shares = []
        if planned is not None:
            own = self._plan.operation_of(planned).weights
            weights = (*own, *(None for _ in self._plan.companions))
            for is_read, side, weight, states, omitted in zip(
                *(self._read, self._experts, weights, planned.states, planned.omitted), strict=True
            ):
                if not is_read:
                    continue
                tally = _Tally()
                tally.add(states, omitted)
                words = tuple(STATE_NAMES[state] for state in states) if detailed else None
                shares.append(tally.share(replace(side, weight=weight), words))
        mixture = None if planned is None else planned.mixture
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
            dtype=content.dtype,
            blocks_total=blocks,
            blocks_reused=reused,
            not_finite=0 if planned is None else self._not_finite.get(planned.name, 0),
            cosine=self._cosines.get(first),
            mixture=None if mixture is None else mixture.experts,
            experts=tuple(shares),
        )

    def planned(self, name: str) -> PlanTensor | None:
        """Return the plan's entry for a tensor, or for the one that it is tied to."""
        return self._planned.get(self._first.get(name, name))

    def _from(self, taken: Taken) -> str:
        return f"{taken.source} of {self._sources[taken.member]}"

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
            tally.share(side)
            for is_read, side, tally in zip(self._read, self._experts, sums.experts, strict=True)
            if is_read
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


def _experts_of(catalog: Catalog, plan: Plan) -> tuple[Names, ...]:
    """Return the tensors of each expert; those of an adapter that was pruned are its own."""
    try:
        return Inputs.of(catalog, plan).experts
    except (NotFound, Corrupt):
        return tuple(
            tensors_of(catalog, catalog.manifest(one.manifest_id())) for one in plan.inputs[1:]
        )


def _copied(why: str) -> str:
    return phrase("copied: {why}", why=phrased(why))


def require_tensor(tensor: str, names: Collection[str], snapshot: SnapshotId) -> None:
    """Raise NotFound, with what was probably meant, unless the snapshot has this tensor."""
    if tensor not in names:
        listed = call("tensors", snapshot.short)
        what = "takes one tensor, not a pattern" if is_pattern(tensor) else "no such tensor"
        raise NotFound(what, where=tensor, hint=did_you_mean(tensor, names, listed))


def explain(
    catalog: Catalog, statistics: StatsStore, snapshot: SnapshotId, tensor: str | None
) -> Explanation:
    """Explain where a merged snapshot, or one tensor of it, came from.

    Raises BadRequest for a snapshot that no merge made, NotFound for an unknown tensor.
    """
    record = catalog.snapshot(snapshot)
    plan_id = plan_of(snapshot, record, so="there is nothing to explain")
    names = tensors_of(catalog, catalog.manifest(record.manifest_id()))
    if tensor is not None:
        require_tensor(tensor, names, snapshot)
    plan = catalog.record(Plan, plan_id)
    sources = sources_of_merge(catalog, plan_id, plan, record)
    explainer = _Explainer(catalog, statistics, record, plan, sources)
    wanted = [tensor] if tensor is not None else explainer.names()
    tensors = [explainer.tensor(name, detailed=tensor is not None) for name in wanted]
    layers, experts = explainer.sums(tensors)
    return Explanation(
        snapshot=snapshot,
        plan=plan_report(
            *(plan, plan_id, sources, costs_to_report(catalog, plan)),
            not_finite=of_merge(catalog, record),
        ),
        tensors=tuple(tensors),
        layers=layers,
        experts=experts,
    )
