"""The list of merge methods: those of this folder, and those that other packages provide.

A package provides a method as an entry point of the group GROUP, whose name is the method's and
whose value is a `Method`. A method of this folder cannot be replaced. Its reports say
what people and programs are told about methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from traceback import walk_tb
from typing import TYPE_CHECKING, Final

from msgspec import structs

from mstore.merge.measures.grid import split
from mstore.merge.methods import MODULES
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter
from mstore.store.objects.plan import Plan, PlanOperation, PlanTensor
from mstore.terms.errors import BadRequest, Unavailable, did_you_mean
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.report import Report

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


GROUP: Final = "mstore.methods"
"""The entry point group for methods of other packages."""


class _Here(Mapping[str, Method]):
    """The methods of this folder, each imported when it is looked up: a merge needs one."""

    def __getitem__(self, name: str) -> Method:
        module = import_module(f"mstore.merge.methods.{MODULES[name]}")
        found = getattr(module, name.upper())
        assert isinstance(found, Method)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


METHODS: Final[Mapping[str, Method]] = _Here()
"""The methods of this folder by name, in alphabetical order."""

PARAMETERS_ELSEWHERE: Final = frozenset(("filter", "int8_mask"))
"""Parameters of mergekit's methods, in recipes, that no method here needs to have."""

OF_ADAPTERS: Final = frozenset(
    (
        *("cat", "svd", "magnitude_prune", "magnitude_prune_svd", "magnitude_prune_core"),
        *("ties_svd", "ties_core", "dare_linear_svd", "dare_linear_core"),
        *("dare_ties_svd", "dare_ties_core", "tsv", "svc", "iso_c", "iso_cts", "wudi_ridge"),
    )
)
"""Names of methods that make one adapter of several (`mstore.merge.combination`), and only that."""


_SHOWN = 60
"""Characters of an unknown name in its error."""


_OF_IMAGE_TOOLS: Final = {
    "weighted_sum": "the base is A, and the expert B has the weight",
    "add_difference": "the base is A, the expert B has the weight, C the same below zero",
    "sum_twice": "the base is A; two merges, the first of them virtual",
    "triple_sum": "the base is A, and the experts B and C have the weights",
}
"""What tools for image models call weighted sums, and how they are asked for."""


def find(name: str) -> Method:
    """Return the method of this name.

    Raises BadRequest that lists the known names, and Unavailable if another package's method cannot
    be loaded.
    """
    found = METHODS.get(name)
    if found is not None:
        return found
    others = _elsewhere()
    if name in others:
        return _load(others[name])
    known = (*METHODS, *sorted(others.keys() - METHODS.keys()))
    hint = did_you_mean(name.lower(), known)
    if (told := _OF_IMAGE_TOOLS.get(re.sub(r"[\s-]+", "_", name.lower()))) is not None:
        hint = phrase("{merge}; {told}", merge=Option("method", "task_arithmetic"), told=told)
    elif name.lower() in OF_ADAPTERS:
        combine = call("combine_adapters", method=name.lower())
        hint = phrase("{combine} makes one adapter of several, which merges take", combine=combine)
    raise BadRequest(f"unknown method {name[:_SHOWN]!r}; methods: {', '.join(known)}", hint=hint)


def roles(method: str) -> list[str]:
    """Return the roles of companions that methods here, or this one, ask for.  Raises as `find`."""
    return sorted({one.role for own in (*METHODS.values(), find(method)) for one in own.companions})


def operation(method: str, parameters: Mapping[str, object], weights: Sequence[float]) -> Operation:
    """Return the method of this name with parameters and weights; see `find` and `Method.apply`."""
    return find(method).apply(parameters, weights)


class Operations:
    """The operations of one plan's tensors; `main` is the plan's own.

    Raises as `_of_plan` does.
    """

    def __init__(self, plan: Plan) -> None:
        self._all = [_of_plan(plan, one) for one in _operations(plan)]
        self.main = self._all[0]

    def of(self, tensor: PlanTensor) -> Operation:
        """Return the operation of one tensor, with its mixture."""
        found = self.unsettled(tensor)
        return found if tensor.mixture is None else found.settled(tensor.mixture)

    def unsettled(self, tensor: PlanTensor) -> Operation:
        """Return the operation of one tensor as it was before its facts were known."""
        return self._all[tensor.operation]

    def match(self, plan: Plan) -> bool:
        """Return whether the plan's records are as these operations would be written."""
        return all(
            tuple(sorted(made.parameters.items())) == one.parameters and made.given == one.weights
            for made, one in zip(self._all, _operations(plan), strict=True)
        ) and all(
            self._all[tensor.operation].needs_facts == (tensor.mixture is not None)
            and (tensor.mixture is None or self.of(tensor).mixture == tensor.mixture)
            for tensor in plan.tensors
        )

    def read(self, plan: Plan) -> list[int]:
        """Return the numbers of the inputs that a run reads: not of companions that are facts."""
        experts, inputs = len(plan.experts), range(1, len(plan.inputs))
        asked = split(self.main.method.companions, experts, inputs)
        return [*range(1 + experts), *(n for one, own in asked if one.is_read for n in own)]

    def used(self, plan: Plan) -> list[Operation]:
        """Return those that a tensor of the plan has; `main` if it has no tensors."""
        numbers = sorted({tensor.operation for tensor in plan.tensors})
        return [self._all[number] for number in numbers or [0]]


def _operations(plan: Plan) -> tuple[PlanOperation, ...]:
    if plan.is_assembly:
        # It has no arithmetic, so its method does not count experts.
        return (structs.replace(plan.operation, weights=plan.weights[:1] or (1.0,)),)
    return plan.operations


def _of_plan(plan: Plan, one: PlanOperation) -> Operation:
    """Return an operation of a plan.

    Raises Unavailable if its method is not installed or cannot load, and as `Method.apply`.
    """
    name = one.method
    if name not in METHODS and name not in _elsewhere():
        raise Unavailable(
            f"plan {plan.id().short} uses the method {name[:_SHOWN]}, of a package that is not "
            "installed",
            hint=f"install the package that brings {name[:_SHOWN]}, where mstore is installed",
        )
    return find(name).apply(dict(one.parameters), one.weights)


def names() -> tuple[str, ...]:
    """Return the names of all methods that `find` finds."""
    return (*METHODS, *sorted(_elsewhere().keys() - METHODS.keys()))


def _elsewhere() -> dict[str, EntryPoint]:
    """Return the methods of other packages by name, not loaded yet."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def package_of(name: str) -> tuple[str, str] | None:
    """Return the package that brings a method, and its version; None for a method of this folder.

    Both are empty where nothing says which package it is.
    """
    if name in MODULES:
        return None
    entry = _elsewhere().get(name)
    return (
        ("", "") if entry is None or entry.dist is None else (entry.dist.name, entry.dist.version)
    )


def changed(name: str) -> str | None:
    """Return why a method may make other blocks than before; None for one of this folder."""
    package = package_of(name)
    if package is None:
        return None
    return (
        f"the method {name} of the package {package[0]} may have changed since this merge was made"
    )


def at_fault(error: BaseException) -> str | None:
    """Return the method of another package in whose code an error was raised; None for none.

    That is code of the package, or of mstore for an object of its classes.
    """
    packages = set()
    for frame, _ in walk_tb(error.__traceback__):
        modules = frame.f_globals.get("__name__"), type(frame.f_locals.get("self")).__module__
        packages |= {str(module).partition(".")[0] for module in modules}
    found = [one for one in _elsewhere().values() if one.module.partition(".")[0] in packages]
    if not found:
        return None
    named = " or ".join(sorted(entry.name for entry in found))
    return f"the method {named} of the package {_named(found[0])}"


def _named(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name


def _load(entry: EntryPoint) -> Method:
    package = _named(entry)
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


_KINDS = {"float": "number", "int": "whole number", "bool": "true or false"}


class ParameterReport(Report, frozen=True):
    """A parameter of a merge method."""

    name: str
    """its name, as `--param` takes it"""
    kind: str
    """what it is: number, whole number, or true or false"""
    default: float | int | bool | None
    """its value unless another is given; null: it must be given"""
    range: str | None
    """the values that it may have, as an interval; null: any of its kind"""
    words: tuple[str, ...]
    """words that may be given in place of a value"""
    per_expert: bool
    """whether each expert may have its own value"""


class MethodReport(Report, frozen=True):
    """A merge method."""

    name: str
    """its name, as `--method` takes it"""
    summary: str
    """what it makes, in a line"""
    formula: str
    """an element of the result; d_k is expert k minus base"""
    source: str
    """where it was published"""
    experts: int | None
    """how many experts it takes; None if the number is free, but at least `least_experts`"""
    least_experts: int
    """the fewest experts that it takes"""
    weighted: bool
    """whether experts have weights"""
    parameters: tuple[ParameterReport, ...]
    """its parameters"""
    companions: tuple[str, ...]
    """what it takes beside base and experts, as `--with` names it"""
    facts: tuple[str, ...]
    """what it must know of whole tensors first: measured once, apart from the budget"""
    certified: bool
    """whether the error of leaving chunks out has a certified bound, and not only an estimate"""
    remarks: tuple[str, ...] = ()
    """why it cannot be used here; empty if it can: else only its name is known"""


def methods() -> tuple[MethodReport, ...]:
    """Describe every method, those of other packages too, with a remark where one cannot load."""
    return tuple(map(_listed, names()))


def _listed(name: str) -> MethodReport:
    try:
        return method(name)
    except Unavailable as error:
        nothing = MethodReport(name, "", "", "", None, 1, True, (), (), (), False)
        return structs.replace(nothing, remarks=(error.what,))


def method(name: str) -> MethodReport:
    """Describe one method.  Raises as `find`."""
    return _described(find(name))


def _described(method: Method) -> MethodReport:
    return MethodReport(
        name=method.name,
        summary=method.summary,
        formula=method.formula,
        source=method.source,
        experts=method.experts,
        least_experts=method.least if method.experts is None else method.experts,
        weighted=method.weighted,
        parameters=tuple(map(_parameter, method.accepted)),
        companions=tuple([one.key for one in method.companions]),
        facts=() if method.facts is None else (method.facts,),
        certified=method.has_bound,
    )


def _parameter(one: Parameter) -> ParameterReport:
    limits = None if one.range is None else str(one.range)
    words = tuple(dict(one.words))
    return ParameterReport(one.name, _KINDS[one.kind], one.default, limits, words, one.each)
