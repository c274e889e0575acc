"""Check that a plan fits its inputs, before it is run or imported.

An id proves that a plan was not changed, not that a planner made it.  After this check the engine
can follow it blindly: every tensor, chunk, state and threshold that it will look for exists.  What
a plan selects is not checked; `planning.costs` computes what that costs in a store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mstore.merge.measures.companions import Companion, split
from mstore.merge.methods import registry
from mstore.merge.methods.method import Operation
from mstore.merge.planning.tied import names_of_plan
from mstore.models.adapters.inputs import Inputs
from mstore.models.stats.chunks import tensor_chunk
from mstore.numeric.codes import CODES
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import BELOW, DROPPED, OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import call, phrase
from mstore.terms.sizes import format_size

_TOGETHER: Final = 64
"""Number of tensors whose records are read together."""


def check_block_size(catalog: Catalog, plan: Plan) -> None:
    """Raise Incompatible for a plan of a store with another block size."""
    if plan.block_size != catalog.block_size:
        raise Incompatible(
            f"the plan is for blocks of {format_size(plan.block_size)}, this store has "
            f"{format_size(catalog.block_size)}",
            hint=phrase("{plan} makes one for this store", plan=call("plan")),
        )


def check_fits(catalog: Catalog, plan: Plan) -> None:
    """Raise BadRequest unless the engine can run this plan here.

    Also raises Incompatible (block size) and NotFound if an input is missing.
    """
    check_block_size(catalog, plan)
    operations = registry.Operations(plan)
    if plan.dtype not in (None, *CODES) or not operations.match(plan):
        raise BadRequest("not a sound plan: its parameters are not a planner's")
    _check_criteria(plan)
    inputs = Inputs.of(catalog, plan)
    if plan.without != inputs.without:
        raise BadRequest("not a sound plan: it leaves out other models than its inputs need")
    asked, read = _asked(plan, operations), operations.read(plan)
    first = names_of_plan(catalog, plan, inputs.base, inputs.experts)
    seen: set[str] = set()
    members = inputs.members
    _check_stack(plan, inputs)
    for start in range(0, len(plan.tensors), _TOGETHER):
        tensors = plan.tensors[start : start + _TOGETHER]
        for tensor in tensors:
            is_new = bool(tensor.sources) and tensor.name not in inputs.base
            if tensor.name in seen or not (is_new or first.get(tensor.name) == tensor.name):
                raise _unfit(tensor)
            if any(tensor.source(k) not in member for k, member in enumerate(members)):
                raise _unfit(tensor)
            seen.add(tensor.name)
        records = inputs.records(
            [found[tensor.source(k)] for tensor in tensors for k, found in enumerate(members)]
        )
        for number, tensor in enumerate(tensors):
            own = records[number * len(members) : (number + 1) * len(members)]
            _check_tensor(plan, tensor, [own[one] for one in read], operations.of(tensor))
            _check_states(tensor, inputs, asked)


def _asked(plan: Plan, operations: registry.Operations) -> tuple[Companion, ...]:
    """Return what the method asks for.  Raises BadRequest unless the plan has that."""
    asked = operations.main.method.companions
    wanted = [(one.role, of) for one in asked for of in one.places(len(plan.experts))]
    if [(one.role, one.of) for one in plan.companions] != wanted:
        raise BadRequest("not a sound plan: its companions are not those of its method")
    return asked


def _check_stack(plan: Plan, inputs: Inputs) -> None:
    """Raise BadRequest unless a stack takes stored tensors that exist, and leaves one at least."""
    ids = []
    for one in plan.taken:
        if one.source not in inputs.members[one.member]:
            raise _unsound_stack(one.name)
        ids.append(inputs.members[one.member][one.source])
    for one, record in zip(plan.taken, inputs.records(ids), strict=True):
        if isinstance(record, AppliedTensor):
            raise _unsound_stack(one.name)
    for name in plan.dropped:
        if name not in inputs.base:
            raise _unsound_stack(name)
    if plan.layers and plan.dtype is not None:
        raise _unsound_stack(plan.dtype)


def _unsound_stack(where: str) -> BadRequest:
    return BadRequest(
        "not a sound plan: its layers are not those of its inputs",
        where=where,
        hint=phrase("{plan} makes one for this store", plan=call("plan")),
    )


def _check_criteria(plan: Plan) -> None:
    dropped = any(DROPPED in states for tensor in plan.tensors for states in tensor.states)
    if plan.criteria.problem() or (dropped and plan.criteria.top_p is None):
        raise BadRequest("not a sound plan: its criteria are not a planner's")


def _check_tensor(
    plan: Plan, tensor: PlanTensor, records: list[Tensor], operation: Operation
) -> None:
    """Check one tensor; records: of the inputs that are read, the base's first."""
    dtypes = {record.dtype for record in records}
    output = tensor.dtype or plan.dtype or records[0].dtype
    if output not in CODES or operation.needs_facts:
        raise _unfit(tensor)
    if any(isinstance(one, AppliedTensor) and one.base != records[0] for one in records):
        raise _unfit(tensor)
    if not dtypes <= CODES.keys() or len({record.shape for record in records}) != 1:
        raise _unfit(tensor)
    base, *experts = records
    chunk = tensor_chunk(plan.block_size, base, experts, output, whole=operation.needs_rows)
    chunks = -(-math.prod(records[0].shape) // chunk)
    if (
        tensor.chunk_elements != chunk
        or len(tensor.states) != len(plan.inputs) - 1
        or any(len(states) != chunks or max(states) > DROPPED for states in tensor.states)
        or not operation.selection.fits(tensor.thresholds, len(plan.inputs) - 1)
        or any(not -1 <= threshold.quota < 2**63 for threshold in tensor.thresholds)
        or len(tensor.omitted) != len(plan.inputs) - 1
    ):
        raise _unfit(tensor)


def _check_states(tensor: PlanTensor, inputs: Inputs, asked: Sequence[Companion]) -> None:
    """Check that what is read of an expert is read of its companions, too, and that it has them."""
    count = len(inputs.models)
    for one, numbers in split(asked, count, range(len(tensor.states))):
        for k, number in enumerate(numbers):
            own = tensor.states[number]
            if not one.is_read:
                if set(own) - {BELOW}:
                    raise _unfit(tensor)
                continue
            if any(s not in _WITH[of] for of, s in zip(tensor.states[k], own, strict=True)):
                raise _unfit(tensor)
            is_used = not _READ.isdisjoint(own)
            if is_used and not inputs.has(number, tensor.source(1 + number)):
                raise _unfit(tensor)


_READ: Final = frozenset((READ, SHARED))
_UNREAD: Final = frozenset((BELOW, OMITTED, DROPPED))
_WITH: Final = (_READ, _READ, _READ | _UNREAD, _UNREAD, _UNREAD, _UNREAD)
"""By the state of an expert's chunk: what that of its companion may be.

A companion counts where the expert is the base's, too.
"""


def _unfit(tensor: PlanTensor) -> BadRequest:
    return BadRequest(
        "not a sound plan: it does not fit this tensor of its inputs",
        where=tensor.name,
        hint=phrase("{plan} makes one for this store", plan=call("plan")),
    )
