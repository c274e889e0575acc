"""Merges of virtual merges, as one merge of the models that these were made of.

A weighted sum of weighted sums is a weighted sum: its weights are products, tensor by tensor.  So a
virtual merge by `task_arithmetic` or `linear` may be the base or an expert of another such merge.
The result is computed in one pass from stored models, with no rounding between, and a chain of
merges stores only its last (docs/design/060-merges-of-merges.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mstore.merge.methods import registry
from mstore.merge.planning.request import Request, resolve
from mstore.merge.recipes.sums import weighed
from mstore.models.adapters.targets import is_adapter
from mstore.models.network_blocks import grouped
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.objects.plan import DROPPED, OMITTED, Plan
from mstore.store.objects.shapes import matching
from mstore.store.plans import sources_of_merge
from mstore.terms.errors import BadRequest, Incompatible, MstoreError
from mstore.terms.ids import PlanId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.requests import MergeRequest, TensorRule


class _Model(NamedTuple):
    """A stored model: its snapshot, and which of its models, None for namesakes."""

    snapshot: SnapshotId
    model: str | None


_Sum = Mapping[_Model, float]
"""Stored models and their weights, which add up to 1."""


class _Virtual(NamedTuple):
    """A virtual merge as weighted sums.

    inputs: the models that it is of, the base first, by the names that they have. of: what each
    tensor is. adapters: whether experts are adapters, which mean something with this base alone.
    """

    inputs: Mapping[_Model, str]
    of: Mapping[str, _Sum]
    adapters: bool
    dtype: str | None
    allow_missing: bool

    @property
    def base(self) -> _Model:
        return next(iter(self.inputs))


def flattened(catalog: Catalog, request: MergeRequest, inputs: Sequence[Input]) -> MergeRequest:
    """Return a merge of stored models that is the same; the request itself if all are stored.

    inputs: its base and experts.  Raises BadRequest if a virtual merge, or this one, is no weighted
    sum, and as `resolve` does.
    """
    virtual = {
        one: _virtual(catalog, one)
        for one in dict.fromkeys(inputs)
        if catalog.snapshot(one.snapshot).is_virtual
    }
    if not virtual:
        return request
    if request.companions or request.outputs or request.layers:
        raise _refused([*virtual], "and only weighted sums of virtual merges are merged again")
    names: dict[_Model, str] = {}
    for one in inputs:
        told = virtual.get(one)
        names |= {_model(one): one.name} if told is None else told.inputs
    base = next(iter(names))
    for one, told in virtual.items():
        if told.adapters and told.base != base:
            raise _refused([one], f"of adapters of {names[told.base]}; this merge has another base")
    asked = resolve(request, base=inputs[0], experts=inputs[1:])
    sums = _sums(catalog, asked, virtual)
    used = {model for total, _ in sums.values() for model, weight in total.items() if weight}
    experts = [model for model in names if model != base and model in used] or [*names][1:2]
    groups = grouped(
        {
            tensor: (tuple(total.get(model, 0.0) for model in experts), own)
            for tensor, (total, own) in sums.items()
        }
    )
    (most, dtype), *others = groups
    return replace(
        request,
        base=names[base],
        experts=tuple((names[model], w) for model, w in zip(experts, most, strict=True)),
        method="task_arithmetic",
        parameters={},
        rules=tuple(
            TensorRule(tensors=groups[weights, own], weights=weights, dtype=own)
            for weights, own in others
        ),
        dtype=dtype,
        only=(),
        skip=(),
        allow_missing=asked.allow_missing or any(one.allow_missing for one in virtual.values()),
    )


def _sums(
    catalog: Catalog, asked: Request, virtual: Mapping[Input, _Virtual]
) -> dict[str, tuple[_Sum, str | None]]:
    """Return what each tensor of the result is a sum of, and its type, None for the base's."""
    every = tensors_of(catalog, catalog.manifest_of(asked.base.snapshot))
    merged = matching(every, asked.only) if asked.only else set(every)
    merged -= matching(every, asked.skip)
    above = virtual.get(asked.base)
    found: dict[str, tuple[_Sum, str | None]] = {}
    for tensor in every:
        own = _sum_of(asked.base, tensor, virtual)
        dtype = None if above is None else above.dtype
        if tensor not in merged:
            found[tensor] = own, dtype
            continue
        operation, rule = asked.operation_of(tensor), asked.rule_of(tensor)
        weights = operation.method.combine.linear_weights(operation)
        if weights is None:
            raise _refused(
                [*virtual], f"and {operation.method.name} needs the values of its models"
            )
        parts = [_sum_of(expert, tensor, virtual) for expert in asked.experts]
        found[tensor] = (
            _weighed(own, parts, weights),
            (rule and rule.dtype) or asked.dtype or dtype,
        )
    return found


def _weighed(base: _Sum, experts: Sequence[_Sum], weights: Sequence[float]) -> _Sum:
    """Return a sum of sums: the experts' by their weights, the base's for the rest."""
    shares = (1.0 - math.fsum(weights), *weights)
    return weighed(zip((base, *experts), shares, strict=True))


def _sum_of(one: Input, tensor: str, virtual: Mapping[Input, _Virtual]) -> _Sum:
    """Return what a tensor of an input is a sum of."""
    above = virtual.get(one)
    if above is None:
        return {_model(one): 1.0}
    found = above.of.get(tensor)
    if found is None:
        raise Incompatible(f"{tensor} is missing", where=one.name)
    return found


def _model(one: Input) -> _Model:
    return _Model(one.snapshot, one.model)


def _refused(where: Sequence[Input], why: str) -> BadRequest:
    name = where[0].name
    return BadRequest(f"is a virtual merge, {why}", where=name, hint=call("materialize", name))


# -- what a virtual merge is -----------------------------------------------------------------------


def _virtual(catalog: Catalog, one: Input) -> _Virtual:
    """Return a virtual merge as weighted sums.  Raises BadRequest if it is none."""
    record = catalog.snapshot(one.snapshot)
    assert record.plan is not None
    plan = catalog.record(Plan, PlanId(record.plan))
    if one.model is not None or plan.companions or plan.is_assembly or plan.without:
        raise _refused([one], "and no weighted sum of whole snapshots")
    told = sources_of_merge(catalog, PlanId(record.plan), plan, record)
    models, names = [], {}
    for source, given in zip((told.base, *told.experts), plan.inputs, strict=True):
        models.append(_Model(source.snapshot_id(), given.model))
        name = _name(catalog, source.name, source.snapshot_id())
        names[models[-1]] = name if given.model is None else f"{name}:{given.model}"
    base, *experts = ({model: 1.0} for model in models)
    operations = registry.Operations(plan)
    known: dict[int, _Sum] = {}
    of: dict[str, _Sum] = {}
    for tensor in plan.tensors:
        if tensor.sources or tensor.dtype is not None:
            raise _refused([one], "and some of its tensors have other names or types")
        if any({OMITTED, DROPPED} & {*states} for states in tensor.states):
            raise _refused([one], "whose plan leaves chunks out")
        if tensor.operation not in known:
            operation = operations.of(tensor)
            weights = operation.method.combine.linear_weights(operation)
            if weights is None:
                name = plan.operation_of(tensor).method
                raise _refused([one], f"and {name} makes no weighted sum of its models")
            known[tensor.operation] = _weighed(base, experts, weights)
        of[tensor.name] = known[tensor.operation]
    every = tensors_of(catalog, catalog.manifest(plan.base_id()))
    of = {name: of.get(name, base) for name in every}
    contents = (catalog.manifest(expert.manifest_id()) for expert in plan.experts)
    adapters = any(is_adapter(tensors_of(catalog, one)) for one in contents)
    return _Virtual(names, of, adapters, plan.dtype, plan.allow_missing)


def _name(catalog: Catalog, name: str, snapshot: SnapshotId) -> str:
    """Return what means this snapshot: its name, or its id if the name means another by now."""
    try:
        return name if catalog.resolve(name) == snapshot else str(snapshot)
    except MstoreError:
        return str(snapshot)
