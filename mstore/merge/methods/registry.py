"""Which merge methods there are: those of this folder, and those that other packages bring.

A package brings a method as an entry point of the group GROUP, whose name is the method's and whose
value is a `Method`.  A method of this folder cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Final

from mstore.errors import BadRequest, Unavailable, did_you_mean
from mstore.merge.methods import dare_linear, dare_ties, linear, task_arithmetic, ties
from mstore.merge.methods.method import Method, Operation
from mstore.objects.plan import Plan

GROUP: Final = "mstore.methods"
"""The group of entry points that other packages' methods have."""

_MODULES: Final = (linear, task_arithmetic, ties, dare_linear, dare_ties)

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {module.METHOD.name: module.METHOD for module in _MODULES}
)
"""The methods of this folder by name, in the order in which they are listed."""

ELSEWHERE: Final = frozenset(
    (
        *("arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "karcher"),
        *("model_stock", "multislerp", "nearswap", "nuslerp", "passthrough", "sce", "slerp"),
    )
)
"""Methods of mergekit that are not here."""


def find(name: str) -> Method:
    """The method of this name.

    Raises BadRequest that lists the names there are, and Unavailable where another package's
    method cannot be loaded.
    """
    found = METHODS.get(name)
    if found is not None:
        return found
    others = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if name in others:
        return _load(others[name])
    known = (*METHODS, *sorted(others.keys() - METHODS.keys()))
    word = name.lower()
    raise BadRequest(
        f"unknown method {name!r}; methods: {', '.join(known)}",
        hint=f"mergekit has {word}, mstore does not"
        if word in ELSEWHERE
        else did_you_mean(word, known),
    )


def operation(method: str, parameters: Mapping[str, object], weights: Sequence[float]) -> Operation:
    """The method of this name with parameters and weights, as `find` and `Method.apply` do."""
    return find(method).apply(parameters, weights)


def operation_of(plan: Plan) -> Operation:
    """What a plan does to each element.  Raises as `operation` does."""
    weights = [expert.weight for expert in plan.experts]
    return operation(plan.method, dict(plan.parameters), weights)


def names() -> tuple[str, ...]:
    """The names of all methods that `find` finds."""
    others = {entry.name for entry in metadata.entry_points(group=GROUP)}
    return (*METHODS, *sorted(others - METHODS.keys()))


def _load(entry: metadata.EntryPoint) -> Method:
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        method: object = entry.load()
    # What another package raises when it is imported is its own affair.
    except Exception as error:
        raise Unavailable(
            f"the method {entry.name} of {package} cannot be loaded: {error}", where=entry.value
        ) from error
    if not isinstance(method, Method) or method.name != entry.name:
        raise Unavailable(
            f"{package} brings no merge method of the name {entry.name}", where=entry.value
        )
    return method
