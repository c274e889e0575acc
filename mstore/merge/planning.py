"""From a request to a stored plan: survey, select, refine thresholds, write the record."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mstore.merge.operators import needs_thresholds
from mstore.merge.planner import Planner, Selection
from mstore.merge.request import Request
from mstore.merge.survey import Survey, Surveyor
from mstore.merge.thresholds import Thresholds
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
        density = float(request.parameters["density"])
        with ThreadPoolExecutor(threads, "second look") as pool:
            cut = Thresholds(
                catalog,
                statistics,
                density,
                full=selection.full,
                analyze=request.analyze,
                pool=pool,
                meter=surveyor.analyzed,
            )
            thresholds = [
                tuple(cut.of(tensor, expert) for expert in tensor.experts)
                for tensor in survey.tensors
            ]
        if cut.at_edges:
            notes.append(
                "some trim thresholds are bin edges of the magnitude histograms (--no-analyze)"
            )
    statistics.flush()
    return _record(survey, request, selection, thresholds, notes), surveyor.analyzed.total


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
