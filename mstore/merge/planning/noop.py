"""No-ops: plans that read nothing of what experts changed, or whose result is the base itself.

Such a plan is valid but mostly a mistake: 30 bytes instead of 30 %, an error bound that the base
already meets, an expert that is the base.  A caller who wants it passes `allow_noop`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from mstore.merge.methods.registry import Operations
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.plan import OMITTED, READ, Plan
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.sizes import format_size

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
    if own or each or plan.layers or len(plan.operations) > 1:
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
