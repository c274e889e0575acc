"""The list of merge methods: those of this folder, and those that other packages provide.

A package provides a method as an entry point of the group GROUP, whose name is the method's and
whose value is a `Method`. A method of this folder cannot be replaced.
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
"""The entry point group for methods of other packages."""

_MODULES: Final = (linear, task_arithmetic, ties, dare_linear, dare_ties)

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {module.METHOD.name: module.METHOD for module in _MODULES}
)
"""The methods of this folder by name, in listing order."""

ELSEWHERE: Final = frozenset(
    (
        *("arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "karcher"),
        *("model_stock", "multislerp", "nearswap", "nuslerp", "passthrough", "sce", "slerp"),
    )
)
"""Methods of mergekit that are not here."""


def find(name: str) -> Method:
    """Return the method of this name.

    Raises BadRequest that lists the known names, and Unavailable if another package's method cannot
    be loaded.
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
    """Return the method of this name with parameters and weights; see `find` and `Method.apply`."""
    return find(method).apply(parameters, weights)


def operation_of(plan: Plan) -> Operation:
    """Return the operation of a plan. Raises as `operation` does."""
    weights = [expert.weight for expert in plan.experts]
    return operation(plan.method, dict(plan.parameters), weights)


def names() -> tuple[str, ...]:
    """Return the names of all methods that `find` finds."""
    others = {entry.name for entry in metadata.entry_points(group=GROUP)}
    return (*METHODS, *sorted(others - METHODS.keys()))


def _load(entry: metadata.EntryPoint) -> Method:
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        method: object = entry.load()
    # Importing another package may raise anything.
    except Exception as error:
        raise Unavailable(
            f"the method {entry.name} of {package} cannot be loaded: {error}", where=entry.value
        ) from error
    if not isinstance(method, Method) or method.name != entry.name:
        raise Unavailable(
            f"{package} brings no merge method of the name {entry.name}", where=entry.value
        )
    return method
