"""Plans as JSON text: to read, to keep beside a model, to transfer to another store.

The text holds the plan's fields and its id. Import computes the id from the fields again, and
refuses a text that was changed, because it does not match its id.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from mstore.blocks.schema import PlanInputs
from mstore.merge.planning.costs import costs_to_report
from mstore.merge.planning.report import PlanReport, plan_report
from mstore.merge.planning.validate import check_block_size, check_fits
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import (
    Criteria,
    Mixture,
    Plan,
    PlanInput,
    PlanOperation,
    PlanTensor,
    Taken,
    TrimThreshold,
    Value,
)
from mstore.store.plans import find, sources_of, store_plan
from mstore.terms.errors import BadRequest, Corrupt, NotFound
from mstore.terms.ids import PlanId
from mstore.terms.phrases import call, phrase

FORMAT = "mstore plan 1"
MAX_TEXT = 256 << 20


# JSON has no infinity and no NaN: such thresholds are written as words.
_Number = float | Literal["inf", "nan"]


class _Mixture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base: float
    experts: tuple[float, ...]
    keeps_base: bool


class _Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    parameters: dict[str, Value]
    weights: tuple[float, ...]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    chunk_elements: int
    states: tuple[str, ...]
    thresholds: tuple[tuple[_Number, int], ...]
    omitted: tuple[float, ...]
    operation: int = 0
    sources: tuple[str, ...] = ()
    dtype: str | None = None
    mixture: _Mixture | None = None


class _Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: str
    name: str
    manifest: str
    of: int | None = None
    model: str | None = None


class _Criteria(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    score: str
    max_error: float | None
    expert_budget_bytes: int | None
    only: tuple[str, ...]
    skip: tuple[str, ...]
    top_p: float | None


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    plan: str
    operations: tuple[_Operation, ...]
    inputs: tuple[_Input, ...]
    dtype: str | None
    block_size: int
    budget_bytes: int | None
    criteria: _Criteria
    allow_missing: bool
    full_expert_bytes: int
    planned_expert_bytes: int
    error_bound: float | None
    error_estimate: float | None
    tensors: tuple[_Tensor, ...]
    copied: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    layers: tuple[tuple[int, int], ...] = ()
    taken: tuple[tuple[str, int, str], ...] = ()
    dropped: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    config: str = ""


def export_plan(catalog: Catalog, text: str) -> str:
    """Export a stored plan (id or prefix) as indented JSON."""
    id = find(catalog, text)
    plan = catalog.record(Plan, id)
    return plan_text(plan, id, sources_of(catalog, id, plan))


def plan_text(plan: Plan, id: PlanId, sources: PlanInputs) -> str:
    """Format a plan as indented JSON. States are digits, one per chunk."""
    value = _Text(
        format=FORMAT,
        plan=id.hex(),
        operations=tuple(
            _Operation(one.method, dict(one.parameters), one.weights) for one in plan.operations
        ),
        inputs=tuple(
            _Input(one.role, source.name, one.manifest_id().hex(), one.of, one.model)
            for source, one in zip((sources.base, *sources.experts), plan.inputs, strict=True)
        ),
        dtype=plan.dtype,
        block_size=plan.block_size,
        budget_bytes=plan.budget,
        criteria=_Criteria(*msgspec.structs.astuple(plan.criteria)),
        allow_missing=plan.allow_missing,
        full_expert_bytes=plan.full_expert_bytes,
        planned_expert_bytes=plan.planned_expert_bytes,
        error_bound=plan.error_bound,
        error_estimate=plan.error_estimate,
        tensors=tuple(
            _Tensor(
                tensor.name,
                tensor.chunk_elements,
                tuple("".join(map(str, states)) for states in tensor.states),
                tuple((_number(cut.value), cut.quota) for cut in tensor.thresholds),
                tensor.omitted,
                tensor.operation,
                tensor.sources,
                tensor.dtype,
                None
                if tensor.mixture is None
                else _Mixture(*msgspec.structs.astuple(tensor.mixture)),
            )
            for tensor in plan.tensors
        ),
        copied=plan.copied,
        remarks=plan.remarks,
        layers=plan.layers,
        taken=tuple((one.name, one.member, one.source) for one in plan.taken),
        dropped=plan.dropped,
        without=plan.without,
        config=plan.config,
    )
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def _number(value: float) -> _Number:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf"


def import_plan(catalog: Catalog, text: str) -> PlanReport:
    """Check a plan's text against its id and store the plan.

    Raises BadRequest for a text that is not a plan or was changed, Incompatible for another block
    size, NotFound if this store has no snapshot with one of its inputs.
    """
    hint = phrase("{plan} writes one", plan=call("export_plan", "PLAN"))
    if len(text) > MAX_TEXT:
        raise BadRequest("too long for a plan", hint=hint)
    try:
        value = msgspec.json.decode(text, type=_Text)
        # Validate lengths, ranges and limits as strictly as for a record from a pack.
        plan = decode(Plan, _plan(value).encode(), "plan")
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, Corrupt) as error:
        raise BadRequest(f"not a plan: {error}", hint=hint) from error
    if value.format != FORMAT or plan.id().hex() != value.plan:
        raise BadRequest("the plan does not match its id; it was changed by hand", hint=hint)
    id = PlanId(plan.id())
    check_block_size(catalog, plan)
    for manifest in (expert.manifest_id() for expert in plan.inputs):
        if not catalog.snapshots_of(manifest):
            raise NotFound(
                "this store has no snapshot with an input of the plan",
                where=f"manifest {manifest.short}",
                hint=phrase(
                    "add the checkpoint that it was made from, with: {add}", add=call("add")
                ),
            )
    check_fits(catalog, plan)
    sources = sources_of(catalog, id, plan)
    store_plan(catalog, plan, sources)
    return plan_report(plan, id, sources, costs_to_report(catalog, plan))


def _plan(value: _Text) -> Plan:
    return Plan(
        operations=tuple(
            PlanOperation(one.method, tuple(sorted(one.parameters.items())), one.weights)
            for one in value.operations
        ),
        inputs=tuple(
            PlanInput(one.role, one.of, bytes.fromhex(one.manifest), one.model)
            for one in value.inputs
        ),
        dtype=value.dtype,
        block_size=value.block_size,
        budget=value.budget_bytes,
        criteria=Criteria(*msgspec.structs.astuple(value.criteria)),
        allow_missing=value.allow_missing,
        full_expert_bytes=value.full_expert_bytes,
        planned_expert_bytes=value.planned_expert_bytes,
        error_bound=value.error_bound,
        error_estimate=value.error_estimate,
        tensors=tuple(
            PlanTensor(
                tensor.name,
                tensor.chunk_elements,
                tuple(bytes(map(int, states)) for states in tensor.states),
                tuple(TrimThreshold(float(value), quota) for value, quota in tensor.thresholds),
                tensor.omitted,
                tensor.operation,
                tensor.sources,
                tensor.dtype,
                None
                if tensor.mixture is None
                else Mixture(*msgspec.structs.astuple(tensor.mixture)),
            )
            for tensor in value.tensors
        ),
        copied=value.copied,
        remarks=value.remarks,
        layers=value.layers,
        taken=tuple(Taken(*one) for one in value.taken),
        dropped=value.dropped,
        without=value.without,
        config=value.config,
    )
