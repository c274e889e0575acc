"""The table of a family's scores: how each model was made, and what evaluations say of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstore.snapshots import lineage, notes
from mstore.store.catalog import Catalog
from mstore.terms.ids import SnapshotId
from mstore.terms.report import Report


class MetricsRow(Report, frozen=True):
    """One snapshot in a table of scores."""

    name: str
    """the ref, or the revision that was asked for"""
    snapshot: SnapshotId
    """the snapshot's id"""
    method: str | None
    """the merge method; None if it was not merged"""
    parameters: dict[str, Any]
    """parameters of the method, by name"""
    weights: tuple[float, ...]
    """weights of the experts, in order"""
    budget_bytes: int | None
    """the budget of the merge; None without one"""
    planned_expert_bytes: int | None
    """bytes that the plan reads from experts; None if it was not merged"""
    full_expert_bytes: int | None
    """bytes that a merge without a budget reads from them; None if it was not merged"""
    scores: dict[str, float]
    """the scores of evaluations, by name"""
    culprit: str | None = None
    """what a bisection found to be to blame for a bad merge, in words"""


def metrics(catalog: Catalog, named: Iterable[tuple[str, SnapshotId]]) -> list[MetricsRow]:
    """Return a row for each of these snapshots.

    Evaluations of several keys may call their scores alike. Where that gives one snapshot different
    values of a name, these scores are called `KEY:NAME` in all rows. Raises NotFound, Corrupt.
    """
    found = [(name, id, dict(notes.scores_of(catalog, id))) for name, id in named]
    unclear: set[str] = set()
    for _, _, scores in found:
        values: dict[str, float] = {}
        unclear |= {
            name for (_, name), score in scores.items() if values.setdefault(name, score) != score
        }

    def called(key: str, name: str) -> str:
        return f"{key}:{name}" if name in unclear else name

    return [
        _row(catalog, name, id, {called(*one): score for one, score in scores.items()})
        for name, id, scores in found
    ]


def _row(catalog: Catalog, name: str, id: SnapshotId, scores: dict[str, float]) -> MetricsRow:
    plan = lineage.plan_of(catalog, catalog.snapshot(id))
    return MetricsRow(
        name=name,
        snapshot=id,
        method=None if plan is None else plan.method,
        parameters={} if plan is None else dict(plan.operation.parameters),
        weights=() if plan is None else plan.weights,
        budget_bytes=None if plan is None else plan.budget,
        planned_expert_bytes=None if plan is None else plan.planned_expert_bytes,
        full_expert_bytes=None if plan is None else plan.full_expert_bytes,
        scores=scores,
        culprit=notes.culprit_on(catalog, id),
    )
