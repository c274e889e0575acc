"""Checks of a plan: that it fits its inputs, and that it changes something.

An id proves that a plan was not changed, not that a planner made it.  After `check_fits` the engine
can follow it blindly: every tensor, chunk, state and threshold that it will look for exists.  What
a plan selects is not checked; `planning.costs` computes what that costs in a store.

A plan that reads nothing of what experts changed, or whose result is the base itself, is valid but
mostly a mistake: 30 bytes instead of 30 %, an error bound that the base already meets, an expert
that is the base.  `require_effect` refuses it; a caller who wants it passes `allow_noop`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from mstore.merge.measures.grid import Companion, split
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.tensors import names_of_plan
from mstore.models.adapters.inputs import Inputs
from mstore.models.stats.chunks import tensor_chunk
from mstore.numeric.codes import CODES
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.plan import BELOW, DROPPED, OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option, call, phrase
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
    operations = Operations(plan)
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
            _check_states(tensor, inputs, asked, own)


def _asked(plan: Plan, operations: Operations) -> tuple[Companion, ...]:
    if plan.is_assembly:
        # No method reads them: their tensors are taken as they are.
        return ()
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
    if plan.is_assembly and plan.dtype is not None:
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
    row = operation.row(base.shape)
    chunk = tensor_chunk(plan.block_size, base, experts, output, row=row)
    chunks = -(-math.prod(records[0].shape) // chunk)
    if (
        tensor.chunk_elements != chunk
        or len(tensor.states) != len(plan.inputs) - 1
        or {*map(len, tensor.states)} != {chunks}
        or max(map(max, tensor.states)) > DROPPED
        or not operation.selection.fits(tensor.thresholds, len(plan.inputs) - 1)
        or any(not -1 <= threshold.quota < 2**63 for threshold in tensor.thresholds)
        or len(tensor.omitted) != len(plan.inputs) - 1
    ):
        raise _unfit(tensor)


def _check_states(
    tensor: PlanTensor, inputs: Inputs, asked: Sequence[Companion], records: Sequence[Tensor]
) -> None:
    """Check that what is read of an expert is read of its companions, too, and that it has them.

    records: of all inputs.  Those of companions that are facts must be what is asked for.
    """
    count = len(inputs.models)
    for one, numbers in split(asked, count, range(len(tensor.states))):
        for k, number in enumerate(numbers):
            own = tensor.states[number]
            if not one.is_read:
                shape = one.shape(tensor.name, records[0].shape)
                is_there = shape is not None and inputs.has(number, tensor.source(1 + number))
                is_odd = is_there and not one.fits(shape or (), records[1 + number])
                if is_odd or set(own) - {BELOW}:
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


# -- without effect ------------------------------------------------------------------------------

_ALLOW: Final = phrase("{allow} merges it all the same", allow=Option("allow_noop", True))
# A number of bytes that the user may have meant as per cent.
_PERCENT = 100


def require_effect(catalog: Catalog, plan: Plan, *, in_bytes: Collection[str] = ()) -> None:
    """Raise BadRequest for a no-op, with its cause and what to type instead.

    in_bytes: which limits the user gave as a number of bytes; the plan has shares in bytes, too.
    Also raises it for a budget of so few bytes that a share was meant: a compressed block of a
    small tensor may fit even that.
    """
    asked = plan.criteria
    if _cancels(plan):
        raise BadRequest(
            "both experts are the same model and their weights cancel: this merge would be the "
            "base itself",
            hint=phrase("change a weight; {allow}", allow=_ALLOW),
        )
    lacks = _of_one(plan)
    if lacks is not None:
        why, change = lacks
        raise BadRequest(
            f"{why}: this merge would be the base itself",
            hint=phrase("{change}; {allow}", change=change, allow=_ALLOW),
        )
    leaves_out = any(OMITTED in states for tensor in plan.tensors for states in tensor.states)
    if plan.taken or plan.dropped:
        return
    if _reads(plan):
        few = "budget" in in_bytes and plan.budget is not None and plan.budget <= _PERCENT
        if leaves_out and few:
            raise _too_small("budget", plan.budget or 0, in_bytes, reads=True)
        return
    if leaves_out:
        if asked.max_error is not None:
            raise BadRequest(
                f"the error limit of {asked.max_error:g} allows the base itself, so this merge "
                "would read nothing of the experts",
                hint=phrase(
                    "a smaller {limit}; {sweep} shows what there is; {allow}",
                    limit=Option("max_error"),
                    sweep=call("sweep"),
                    allow=_ALLOW,
                ),
            )
        limits = {"budget": plan.budget, "expert_budget": asked.expert_budget}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if given:
            name = min(given, key=lambda name: given[name])
            raise _too_small(name, given[name], in_bytes)
    if _is_base(catalog, plan):
        raise BadRequest(f"{_why_base(plan)}: this merge would be the base itself", hint=_ALLOW)


def is_base(catalog: Catalog, plan: Plan) -> bool:
    """Return whether the plan alone shows that every tensor of the result is the base's own."""
    return not (_reads(plan) or plan.taken or plan.dropped or plan.without) and _is_base(
        catalog, plan
    )


def is_retyped(catalog: Catalog, plan: Plan) -> bool:
    """Return whether a tensor gets a different type from the base's."""
    base = tensors_of(catalog, catalog.manifest(plan.base_id()))
    return any(
        dtype is not None and catalog.tensor(base[tensor.source(0)]).dtype != dtype
        for tensor in plan.tensors
        for dtype in (tensor.dtype or plan.dtype,)
    )


def _cancels(plan: Plan) -> bool:
    """Return whether a plain sum has only two terms, one the exact negative of the other."""
    own = any(tensor.sources or tensor.mixture for tensor in plan.tensors)
    each = any(isinstance(value, tuple) for _, value in plan.operation.parameters)
    if own or each or plan.is_assembly or len(plan.operations) > 1:
        return False
    operation = Operations(plan).main
    weighted = [
        (expert.key, weight)
        for expert, weight in zip(plan.experts, plan.weights, strict=True)
        if weight
    ]
    if len(weighted) != 2 or not operation.cancels:
        return False
    (one, weight), (other, other_weight) = weighted
    return one == other and weight == -other_weight


def _of_one(plan: Plan) -> tuple[str, Option] | None:
    """Return why nothing is selected of the only expert, and what to change; None if it is."""
    told = [operation.selection.of_one for operation in Operations(plan).used(plan)]
    return told[0] if len(plan.experts) == 1 and None not in told else None


def _reads(plan: Plan) -> bool:
    return any(READ in states for tensor in plan.tensors for states in tensor.states)


def _is_base(catalog: Catalog, plan: Plan) -> bool:
    operations = Operations(plan)
    if not all(operations.of(tensor).keeps_base for tensor in plan.tensors):
        return False
    if any(tensor.sources for tensor in plan.tensors):
        return False
    return not is_retyped(catalog, plan)


def _too_small(
    name: str, budget: int, in_bytes: Collection[str], *, reads: bool = False
) -> BadRequest:
    if name in in_bytes and budget <= _PERCENT:
        hint = phrase(
            "{given} is {bytes}; did you mean {budget}? {allow}",
            given=Option(name, budget),
            bytes="1 byte" if budget == 1 else f"{budget} bytes",
            budget=Option(name, f"{budget}%"),
            allow=_ALLOW,
        )
    else:
        hint = phrase(
            "{more}, or {sweep} for what budgets give; {allow}",
            more=Option(name, "30%")
            if name in in_bytes
            else phrase("a larger {limit}", limit=Option(name)),
            sweep=call("sweep"),
            allow=_ALLOW,
        )
    return BadRequest(
        f"no block of an expert fits {format_size(budget)}, so this merge would read nothing"
        if not reads
        else f"hardly a block of an expert fits {format_size(budget)}",
        where=Option(name),
        hint=hint,
    )


def _why_base(plan: Plan) -> str:
    if plan.layers:
        return "these layers are all of the base's, in order"
    for name in ("lambda", "scale"):
        if dict(plan.operation.parameters).get(name) == 0:
            return f"{name} is 0"
    operations = Operations(plan)
    if all(not any(operation.given) for operation in operations.used(plan)):
        return "no expert has a weight other than 0"
    if plan.tensors and all(all(operations.of(one).weightless) for one in plan.tensors):
        return "the parameters leave nothing of the experts"
    told = [operations.of(one).selection.leaves_nothing for one in plan.tensors]
    if told and told[0] is not None and None not in told:
        return told[0]
    if plan.criteria.only or plan.criteria.skip:
        return "the patterns leave no tensor that an expert changed"
    return "no expert differs from the base where tensors are merged"
