"""What people and programs are told about merge methods."""

from __future__ import annotations

from mstore.merge.methods import registry
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter
from mstore.terms.report import Report

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
    facts: tuple[str, ...]
    """what it must know of whole tensors first: measured once, apart from the budget"""
    certified: bool
    """whether the error of leaving chunks out has a certified bound, and not only an estimate"""


def methods() -> tuple[MethodReport, ...]:
    """Describe every method, those of other packages too.  Raises Unavailable for one of these."""
    return tuple(_described(registry.find(name)) for name in registry.names())


def method(name: str) -> MethodReport:
    """Describe one method.  Raises as `registry.find`."""
    return _described(registry.find(name))


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
        facts=() if method.facts is None else (method.facts,),
        certified=method.has_bound,
    )


def _parameter(one: Parameter) -> ParameterReport:
    limits = None if one.range is None else str(one.range)
    words = tuple(dict(one.words))
    return ParameterReport(one.name, _KINDS[one.kind], one.default, limits, words, one.each)
