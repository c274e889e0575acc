"""The units of a merge, and the merge of some of them alone.

What is not chosen is left out of the plan as a budget leaves it out: there, the expert counts as
the base, and nothing of it is read. Thresholds, coefficients and weights stay those of the whole
merge. So a plan of some units costs a record, and its blocks are computed when they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from mstore.merge.planning.costs import costs_of
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.store.objects.shapes import layers_of
from mstore.terms.errors import BadRequest

_USED: Final = frozenset((READ, SHARED))


class Unit(NamedTuple):
    """An expert (its number), a layer, or a layer of an expert.

    None stands for all: of the experts, or of the layers.
    """

    expert: int | None
    layer: str | None


def units_of(plan: Plan, *, experts: bool, layers: bool) -> list[Unit]:
    """Return the units of a merge that change anything, by expert, then by layer.

    Raises BadRequest for a merge that has none.
    """
    if plan.is_assembly:
        raise BadRequest("the merge takes tensors as they are: no expert changes another's")
    found: dict[Unit, None] = {}
    count = len(plan.experts)
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    for expert in range(count) if experts else (None,):
        for name, layer in layers_of(tensors).items():
            numbers = range(count) if expert is None else (expert,)
            if any(not _USED.isdisjoint(tensors[name].states[number]) for number in numbers):
                found[Unit(expert, layer if layers else None)] = None
    if not found:
        raise BadRequest("the merge takes nothing from its experts")
    return list(found)


def plan_of_units(catalog: Catalog, plan: Plan, units: Collection[Unit]) -> Plan:
    """Return the plan of these units of a merge: all others are the base's."""
    chosen = frozenset(units)
    layer_of = layers_of(tensor.name for tensor in plan.tensors)

    def counts(expert: int, layer: str) -> bool:
        ways = (Unit(expert, None), Unit(None, layer), Unit(expert, layer))
        return not chosen.isdisjoint(ways)

    count = len(plan.experts)
    of = [*range(count), *((one.of or 0) - 1 for one in plan.companions)]
    tensors = tuple(
        _without(tensor, [at >= 0 and not counts(at, layer_of[tensor.name]) for at in of])
        for tensor in plan.tensors
    )
    made = msgspec.structs.replace(
        plan, tensors=tensors, budget=None, error_bound=None, error_estimate=None
    )
    costs = costs_of(catalog, made)
    return msgspec.structs.replace(
        made,
        full_expert_bytes=costs.full,
        planned_expert_bytes=costs.planned,
    )


def _without(tensor: PlanTensor, left_out: Iterable[bool]) -> PlanTensor:
    """Return a tensor of a plan without some of its inputs."""
    states: list[bytes] = []
    lost: set[int] = set()
    for own, is_left_out in zip(tensor.states, left_out, strict=True):
        if is_left_out:
            lost.update(at for at, state in enumerate(own) if state in _USED)
            states.append(bytes(OMITTED if state in _USED else state for state in own))
        else:
            # The chunks that it shares may be those of an input that is not read now.
            states.append(
                bytes(
                    READ if state == SHARED and at in lost else state
                    for at, state in enumerate(own)
                )
            )
    if tuple(states) == tensor.states:
        return tensor
    unknown = (-1.0,) * len(tensor.omitted)
    return msgspec.structs.replace(tensor, states=tuple(states), omitted=unknown)
