"""The report of a plan: its identity, its costs in this store, and its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mstore.blocks.schema import PlanInputs
from mstore.checkpoint.models import place_of, split_name
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.costs import Costs, costs_to_report
from mstore.merge.planning.tensors import phrased
from mstore.merge.planning.warnings import MergeWarning, idle_experts, not_finite_warnings
from mstore.store.catalog import Catalog
from mstore.store.not_finite import NotFiniteTensor, may_be
from mstore.store.objects.plan import (
    BASE,
    BELOW,
    DROPPED,
    EQUAL,
    OMITTED,
    READ,
    SHARED,
    Plan,
    PlanInput,
)
from mstore.store.plans import plan_ids, sources_of
from mstore.terms.errors import BadRequest, NotFound, Unavailable
from mstore.terms.ids import PlanId
from mstore.terms.phrases import call, few, phrase
from mstore.terms.report import Report
from mstore.terms.sizes import exact_size, format_size


class PlanReport(Report, frozen=True):
    """A plan's identity, costs and bounds.

    Counts are of (expert, chunk) pairs; if all dtypes are equal, a chunk is a block.
    """

    plan: PlanId
    """the plan's id"""
    method: str
    """the merge method; `moe` for a mixture of experts, and for a dense model of one of them"""
    base: str
    """the model merged into"""
    experts: tuple[tuple[str, float], ...]
    """pairs of ref and weight"""
    companions: tuple[tuple[str, str], ...]
    """further inputs, as pairs of role (`fisher:EXPERT`) and ref; empty for most methods"""
    parameters: dict[str, float | int | bool | str | tuple[float, ...]]
    """every parameter of the method, defaults included"""
    layers: tuple[tuple[str, int, int], ...]
    """of a stack: runs of layers, as ref, first layer, last layer + 1; empty: nothing is stacked"""
    assembled: bool
    """whether tensors are taken as they are, and none is merged"""
    score: str
    """how blocks were ranked"""
    budget_bytes: int | None
    """most bytes that may be read from experts; None: no budget"""
    max_error: float | None
    """the requested error limit; None: none"""
    expert_budget_bytes: int | None
    """most bytes that may be read from any one expert; None: no limit"""
    only: tuple[str, ...]
    """patterns of the tensors to merge; empty: all"""
    skip: tuple[str, ...]
    """patterns of the tensors left as they are in the base"""
    top_p: float | None
    """share of the output's blocks that may differ from the base's; None: all"""
    full_expert_bytes: int
    """bytes that a merge without a budget would read from experts"""
    planned_expert_bytes: int
    """bytes that the plan reads from experts"""
    memo_expert_bytes: int | None
    """planned bytes that the memo table saves; None if not looked up"""
    bytes_not_here: int | None
    """bytes at rest that a merge of the plan needs and that are neither stored here nor in the
    cache: of experts, of the base, and of what these are differences to; None if not looked up"""
    analyze_bytes_read: int
    """bytes of experts read to plan: for missing statistics, and adapters for the norms of their
    products"""
    chunks_total: int
    """expert chunks in total; if all dtypes are equal, a chunk is a block"""
    chunks_equal_base: int
    """chunks equal to the base's: nothing to read"""
    chunks_shared: int
    """chunks that another expert shares: read once"""
    chunks_not_needed: int
    """chunks of which the method takes nothing: trimmed away, or of factor 0"""
    chunks_selected: int
    """chunks to read, or shared"""
    chunks_omitted: int
    """chunks left out because of the budget"""
    chunks_outside_top_p: int
    """chunks left out because of top_p"""
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
    kept: bool
    """whether the plan is stored and can be found by its id; false if the store is read-only"""
    seconds: float
    """how long it took"""


def companions_of(plan: Plan, sources: PlanInputs) -> tuple[tuple[str, str], ...]:
    """Return what each companion of a plan is and of what, and its name."""
    own = sources.experts[len(plan.experts) :]
    pairs = zip(plan.companions, own, strict=True)
    return tuple((companion_name(one, sources), source.name) for one, source in pairs)


def plan_report(
    plan: Plan,
    id: PlanId,
    sources: PlanInputs,
    costs: Costs,
    *,
    analyzed: int = 0,
    factors: int = 0,
    memo: int | None = None,
    not_here: int | None = None,
    not_finite: tuple[NotFiniteTensor, ...] | None = None,
    warnings: tuple[MergeWarning, ...] = (),
    kept: bool = True,
    seconds: float = 0.0,
) -> PlanReport:
    """Return the report of a plan; counts are (expert, chunk) pairs, `costs` those in this store.

    not_finite: what a merge of the plan has; None if it was not run: what it may have. Beside such
    elements no error is told. warnings: more than those that the plan itself shows. factors: what
    of `analyzed` are adapters, for the norms of their products.
    """
    counts: Counter[int] = Counter()
    rows: Sequence[int] = range(1, len(plan.inputs))
    if plan.companions:
        with suppress(Unavailable, BadRequest):
            _, *rows = Operations(plan).read(plan)
    for tensor in plan.tensors:
        for number in rows:
            counts.update(tensor.states[number - 1])
    remarks = list(map(phrased, plan.remarks))
    if factors:
        remarks.append(
            f"{format_size(factors)} of adapters were read for the norms of their products, apart "
            "from the budget"
        )
    if analyzed > factors:
        # Not a remark of the plan: the next run of the same plan does not incur this cost.
        again = "and are not read for them again" if kept else "and what they told is not kept"
        size = format_size(analyzed - factors)
        whose = "experts and companions" if plan.companions else "experts"
        remarks.append(
            f"{size} of {whose} were read for statistics or exact thresholds that were missing, "
            f"apart from the budget, {again}"
        )
    if plan.allow_missing:
        remarks.append(
            "tensors may be missing: the base's count for what an expert lacks, and what the base "
            "lacks is left out"
        )
    if not kept:
        remarks.append("this store can be read and not written: the plan is not kept in it")
    if plan.budget is not None and costs.planned > plan.budget:
        remarks.append(
            "the plan was made where its blocks lie otherwise: here they take "
            f"{exact_size(costs.planned)}, more than its budget of {exact_size(plan.budget)}"
        )
    try:
        leaves_out = counts[OMITTED] + counts[DROPPED] > 0
        remarks += _method_remarks(plan, sources, leaves_out=leaves_out)
        likely = (
            *idle_experts(plan, sources),
            *not_finite_warnings(plan, sources, not_finite),
        )
    except (Unavailable, BadRequest) as error:
        # A method of another package that is not installed, or is another version.
        remarks.append(f"it cannot be run here: {error}")
        likely = ()
    remarks += _without_part(plan, sources)
    remarks += _rule_remarks(plan)
    remarks += _copied_remarks(plan)
    estimate = None if not_finite else plan.error_estimate
    return PlanReport(
        plan=id,
        method=plan.made_by,
        base=sources.base.name,
        experts=tuple(
            (source.name, weight)
            for source, weight in zip(sources.experts, plan.weights, strict=False)
        ),
        companions=companions_of(plan, sources),
        parameters=dict(plan.operation.parameters),
        layers=_layers(plan, sources),
        assembled=plan.is_assembly,
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
        bytes_not_here=not_here,
        analyze_bytes_read=analyzed,
        chunks_total=sum(counts.values()),
        chunks_equal_base=counts[EQUAL],
        chunks_shared=counts[SHARED],
        chunks_not_needed=counts[BELOW],
        chunks_selected=counts[READ] + counts[SHARED],
        chunks_omitted=counts[OMITTED],
        chunks_outside_top_p=counts[DROPPED],
        error_bound=None if not_finite else plan.error_bound,
        error_estimate=estimate,
        error_share_estimate=share_of(estimate, sources.change),
        not_finite=may_be(sources.risks) if not_finite is None else not_finite,
        warnings=(*likely, *warnings),
        remarks=tuple(remarks),
        kept=kept,
        seconds=seconds,
    )


def companion_name(one: PlanInput, sources: PlanInputs) -> str:
    """Return the role of a companion and what it belongs to, as a request names it."""
    if one.of is None:
        return one.role
    return f"{one.role}:{BASE if one.of == 0 else sources.experts[one.of - 1].name}"


def _method_remarks(plan: Plan, sources: PlanInputs, *, leaves_out: bool) -> list[str]:
    """Return what the methods of a plan say of its errors and weights."""
    remarks: list[str] = []
    used = Operations(plan).used(plan)
    estimated = any(not operation.has_bound for operation in used)
    if estimated and plan.error_estimate and leaves_out:
        # Figures of bench/estimates.py.
        why = (
            "with trained and random experts the real error was 0.1 to 4.3 times the estimate, and "
            "it can be far larger where large changes cancel"
        )
        own = (operation.selection.estimated for operation in used)
        why = next((told for told in own if told is not None), why)
        sweep = call("sweep", measure=True)
        remarks.append(phrase(f"the estimate is no bound: {why}; {{sweep}} tells", sweep=sweep))
    divider = _divides_by_only_weight(plan)
    if divider is not None:
        remarks.append(
            f"the weight of {sources.experts[0].name} has no effect: it is the only one, and "
            f"{divider} divides by the sum of all"
        )
    if leaves_out:
        remarks += _remarks_of_forms(plan)
        remarks += dict.fromkeys(one.method.mind for one in used if one.method.mind is not None)
    return remarks


def _remarks_of_forms(plan: Plan) -> Iterator[str]:
    """Yield which forms of one model may differ: blocks of each are chosen by themselves."""
    models = dict.fromkeys(split_name(one.name)[0] for one in plan.tensors)
    forms: dict[str, list[str]] = {}
    for model in models:
        forms.setdefault(place_of(model), []).append(model or "the model at the top")
    for several in forms.values():
        if len(several) > 1:
            yield (
                f"{' and '.join(several)} are forms of one model, and blocks of each are chosen by "
                "themselves: what is left out of one may be in another"
            )


def _divides_by_only_weight(plan: Plan) -> str | None:
    """Return what takes the stated weight of an only expert away; None if nothing does."""
    (first, *others) = Operations(plan).used(plan)
    alone = len(plan.experts) == 1
    stated = alone and plan.weights[0] not in (0.0, 1.0)
    return first.method.combine.divided_by(first) if stated and not others else None


def _layers(plan: Plan, sources: PlanInputs) -> tuple[tuple[str, int, int], ...]:
    names = (sources.base.name, *(expert.name for expert in sources.experts))
    runs: list[tuple[int, int, int]] = []
    for member, layer in plan.layers:
        if runs and runs[-1][0] == member and runs[-1][2] == layer:
            runs[-1] = (member, runs[-1][1], layer + 1)
        else:
            runs.append((member, layer, layer + 1))
    return tuple((names[member], first, end) for member, first, end in runs)


def share_of(error: float | None, change: float | None) -> float | None:
    """Return an error as a share of what the full merge changes, both relative to one norm.

    None if either is unknown, or the full merge changes nothing.
    """
    if error == 0:
        return 0.0
    return error / change if error is not None and change else None


def _without_part(plan: Plan, sources: PlanInputs) -> Iterator[str]:
    """Yield in which tensors an expert with a weight has the factor 0, by their facts."""
    mixed = [tensor for tensor in plan.tensors if tensor.mixture is not None]
    for k, (expert, weight) in enumerate(zip(sources.experts, plan.weights, strict=False)):
        names = [one.name for one in mixed if one.mixture and not one.mixture.experts[k]]
        if names and weight:
            told = f"{expert.name} has no part in {len(names)} of {len(mixed)} tensors"
            yield f"{told}: {few(names)}"


def _rule_remarks(plan: Plan) -> list[str]:
    """Return a line about the tensors that are merged by other operations, and about new ones."""
    counts = Counter(plan.operation_of(one).method for one in plan.tensors if one.operation)
    remarks = []
    if counts.keys() == {plan.method}:
        remarks.append(f"tensors with parameters or weights of their own: {counts.total()}")
    elif counts:
        named = ", ".join(f"{count} by {method}" for method, count in counts.items())
        remarks.append(f"tensors that a rule merges otherwise: {named}")
    new = [one.name for one in plan.tensors if one.sources]
    if new:
        remarks.append(f"tensors that the base does not have: {few(new)}")
    return remarks


def _copied_remarks(plan: Plan) -> list[str]:
    """Return one line per tensor, but not hundreds of lines for hundreds of skipped tensors."""
    causes: dict[str, list[str]] = {}
    for name, why in plan.copied:
        causes.setdefault(why, []).append(name)
    remarks: list[str] = []
    for why, names in causes.items():
        shown = names if len(names) <= 3 else names[:2]
        said = phrased(why)
        remarks += [
            phrase("{name} is the base's own: {why}", name=name, why=said) for name in shown
        ]
        if len(names) > len(shown):
            more = len(names) - len(shown)
            remarks.append(
                phrase("{more} more tensors are the base's own: {why}", more=more, why=said)
            )
    return remarks


def plan_reports(catalog: Catalog) -> list[PlanReport]:
    """Report every stored plan whose inputs this store has, by base, method and cost."""
    found = []
    for id in plan_ids(catalog):
        plan = catalog.record(Plan, id)
        # A plan whose inputs were removed can be neither named nor run.
        with suppress(NotFound):
            sources = sources_of(catalog, id, plan)
            found.append(plan_report(plan, id, sources, costs_to_report(catalog, plan)))
    return sorted(found, key=lambda p: (p.base, p.method, p.planned_expert_bytes, p.plan))
