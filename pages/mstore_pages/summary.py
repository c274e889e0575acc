"""Summaries: what a page shows of a snapshot, or of two, gathered from what the store reports.

Every number on a page is in one of these structs; `mstore report --json` prints them.  What a store
cannot tell is None, and `gaps` says why, by section.
"""

from __future__ import annotations

from mstore.api.reports import (
    ComparedPart,
    CompareReport,
    DiffReport,
    PlanReport,
    ReuseReport,
    SearchedReport,
    SnapshotReport,
    SweepReport,
)
from mstore.terms.phrases import Text
from mstore.terms.report import Report

Numbers = tuple[tuple[float | None, ...], ...]
"""Of a map: a tuple for each part, in it a number for each layer; None if unknown or not there."""
OUTSIDE = "outside of layers"


class ModelMap(Report, frozen=True):
    """What one model changes, in each part of each layer."""

    model: str
    """the model, as it was named; of a merge, the result comes first"""
    change: Numbers
    """norm of its difference from the base / norm of the base; by part, then by layer"""
    share: Numbers | None
    """its share of what the merge changed; negative where it worked against the result; None if
    that was not measured, or it is no expert"""
    left_out: Numbers | None
    """share of its blocks that differ from the base's and that the merge left out for its limits"""
    equal: Numbers
    """share of its blocks that are the base's"""


class LayerMap(Report, frozen=True):
    """Changes by layers and parts, of all layers of one kind."""

    kind: str
    """what the names of these layers begin with; `outside of layers` for all other tensors"""
    layers: tuple[str, ...]
    """the layers' numbers, in order; one empty text outside of layers"""
    parts: tuple[str, ...]
    """parts of a layer, or names of tensors outside of layers"""
    models: tuple[ModelMap, ...]
    """the result of a merge, then each expert; else the compared model"""


class LayerShare(Report, frozen=True):
    """How much of what a merge changed in one layer came from each expert."""

    layer: str
    """the layer"""
    shares: tuple[float | None, ...]
    """of each expert, in the order of the plan; None where nothing changed"""
    left_out: tuple[float | None, ...]
    """share of its own blocks that the merge left out for its limits; None if it has none"""


class ChangedTensor(Report, frozen=True):
    """One tensor that changed."""

    name: str
    """the tensor"""
    layer: str
    """its layer"""
    dtype: str | None
    """as safetensors spells it; None of an adapter, which has factors instead"""
    shape: tuple[int, ...] | None
    """elements in each dimension; None of an adapter"""
    change: float | None
    """norm of its change / norm of the base's tensor"""
    blocks: int | None
    """blocks in all; None if not known"""
    blocks_changed: int | None
    """blocks that are not the base's; None if not known"""
    expert: str | None
    """the expert with the largest share of it; None if that was not measured"""
    share: float | None
    """that share"""


class Ancestor(Report, frozen=True):
    """A snapshot of the lineage, with what its model card states."""

    snapshot: SnapshotReport
    """the snapshot"""
    licence: str | None
    """the licence that its card states; None if it states none"""


class ExpertSummary(Report, frozen=True):
    """One expert of a merge: what of it the merge has."""

    expert: str
    """the ref or id it was given by"""
    weight: float
    """its weight"""
    change: float | None
    """norm of its change / norm of the base"""
    share: float | None
    """its share of what the merge changed; None if that was not measured"""
    chunks: int
    """chunks that differ from the base's"""
    chunks_used: int
    """of these, those that the merge read, or shares with another expert"""
    chunks_not_needed: int
    """of these, those of which the method takes nothing: trimmed away, or of factor 0"""
    chunks_left_out: int
    """of these, those that were left out for the budget, or another limit"""
    chunks_equal_base: int
    """chunks equal to the base's"""


class SnapshotSummary(Report, frozen=True):
    """All that the page of one snapshot shows."""

    name: str
    """the snapshot as it was named"""
    snapshot: SnapshotReport
    """the snapshot, its notes and signatures"""
    lineage: tuple[Ancestor, ...]
    """it and what it was made from, children before parents"""
    lineage_complete: bool
    """whether nothing of the lineage was left out"""
    plan: PlanReport | None
    """of a merge"""
    base: str | None
    """what changes are relative to; None if there is none"""
    change: float | None
    """norm of the change / norm of the base, of the whole model"""
    maps: tuple[LayerMap, ...]
    """changes by layers and parts; empty if they are not known"""
    layers: tuple[LayerShare, ...]
    """shares of experts by layer, of a merge"""
    experts: tuple[ExpertSummary, ...]
    """the experts of a merge"""
    sweep: SweepReport | None
    """budgets and errors of the same merge"""
    tensors: tuple[ChangedTensor, ...]
    """the tensors that changed most"""
    similarity: ComparedPart | None
    """cosines of the changes of the result and of the experts"""
    blocks: ReuseReport | None
    """blocks by origin and codec"""
    search: SearchedReport | None
    """the search that it won, as its notes tell; None if none did"""
    culprit: str | None
    """what a bisection found to be to blame for a bad merge, in words; None if none did"""
    recipe: str | None
    """the recipe of a merge, as mergekit reads it"""
    warnings: tuple[Text, ...]
    """what is likely to be a mistake, and remarks"""
    gaps: dict[str, Text]
    """by section: why it has no numbers"""


class ComparisonSummary(Report, frozen=True):
    """All that the page of two snapshots shows."""

    name_a: str
    """the first snapshot as it was named"""
    name_b: str
    """the second one"""
    a: SnapshotReport
    """the first snapshot"""
    b: SnapshotReport
    """the second one"""
    lineage: tuple[Ancestor, ...]
    """both and what they were made from, children before parents"""
    lineage_complete: bool
    """whether nothing of the lineage was left out"""
    diff: DiffReport
    """files, tensors and blocks that differ"""
    change: float | None
    """norm of (b - a) / norm of a, over the tensors of both"""
    maps: tuple[LayerMap, ...]
    """the same by layers and parts"""
    tensors: tuple[ChangedTensor, ...]
    """the tensors that changed most"""
    similarity: CompareReport | None
    """of models with one base: how far each moved from it, and how alike"""
    gaps: dict[str, Text]
    """by section: why it has no numbers"""
