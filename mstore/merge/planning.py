"""From a request to a stored plan: survey, select, refine thresholds, write the record."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mstore.blocks.meter import Meter
from mstore.merge.kernels import UNLIMITED
from mstore.merge.operators import keep_count, needs_thresholds
from mstore.merge.planner import Planner, Selection
from mstore.merge.request import Request
from mstore.merge.survey import ExpertTensor, Survey, SurveyedTensor, Surveyor, refine
from mstore.objects.plan import Plan, PlanExpert, PlanTensor, Threshold
from mstore.reports import Progress
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog


def make_plan(
    catalog: Catalog,
    statistics: StatsStore,
    request: Request,
    *,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Plan, int]:
    """The plan, and the expert bytes that were read for statistics.

    Raises BadRequest, Incompatible, Corrupt, StorageFailed.
    """
    surveyor = Surveyor(catalog, statistics, request, threads=threads, progress=progress)
    survey = surveyor.survey()
    selection = Planner(survey, request).select()
    notes = list(selection.notes)
    thresholds: list[tuple[Threshold, ...]] = [() for _ in survey.tensors]
    if needs_thresholds(request.method, request.parameters):
        exact = selection.full and request.analyze
        if selection.full and not request.analyze:
            notes.append("trim thresholds are bin edges of the magnitude histograms (--no-analyze)")
        with ThreadPoolExecutor(threads, "refine") as pool:
            thresholds = [
                tuple(
                    _threshold(
                        catalog, statistics, request, tensor, expert, exact, pool, surveyor.analyzed
                    )
                    for expert in tensor.experts
                )
                for tensor in survey.tensors
            ]
    return _record(survey, request, selection, thresholds, notes), surveyor.analyzed.total


def _threshold(
    catalog: Catalog,
    statistics: StatsStore,
    request: Request,
    tensor: SurveyedTensor,
    expert: ExpertTensor,
    exact: bool,
    pool: ThreadPoolExecutor,
    meter: Meter,
) -> Threshold:
    """What the engine is to cut at.

    Under a budget the bin's edge serves, with all elements on it: how many of them lie in
    blocks that are not read is not known.
    """
    found = expert.threshold
    assert found is not None
    if not exact:
        return Threshold(found.value, UNLIMITED)
    if not found.exact:
        keep = keep_count(float(request.parameters["density"]), tensor.elements)
        value, quota = refine(catalog, statistics, tensor, expert, keep, pool, meter)
        return Threshold(value, quota)
    on_edge = found.in_bin - found.inexact
    return Threshold(found.value, UNLIMITED if found.quota == on_edge else found.quota)


def _record(
    survey: Survey,
    request: Request,
    selection: Selection,
    thresholds: list[tuple[Threshold, ...]],
    notes: list[str],
) -> Plan:
    tensors = tuple(
        PlanTensor(
            tensor.name,
            tensor.chunk_elements,
            tuple(state.tobytes() for state in states),
            cut,
            omitted,
        )
        for tensor, states, cut, omitted in zip(
            survey.tensors, selection.states, thresholds, selection.omitted, strict=True
        )
    )
    return Plan(
        method=request.method,
        parameters=tuple(sorted(request.parameters.items())),
        base=survey.base,
        experts=tuple(
            PlanExpert(manifest, weight)
            for manifest, weight in zip(survey.experts, request.weights, strict=True)
        ),
        dtype=request.dtype,
        block_size=survey.block_size,
        budget=selection.budget,
        full_expert_bytes=selection.full_expert_bytes,
        planned_expert_bytes=selection.planned_expert_bytes,
        error_bound=selection.error_bound,
        error_estimate=selection.error_estimate,
        tensors=tensors,
        copied=survey.copied,
        notes=tuple(notes),
    )
