"""The methods of combinations, and their parameters.

The names and the meaning of all of them are those of PEFT's `add_weighted_adapter` (version 0.21):

    linear            factors, each times the root of |weight * scale|, added
    cat               factors one beside the other: the product is the weighted sum of the products
    svd               that sum, truncated to a rank
    ties              of each factor the largest elements; those with the sign of the majority,
                      weighted as by linear, added, and divided by how many they are
    dare_linear       as linear, of elements that a draw keeps, divided by the density
    dare_ties         as ties, of elements that a draw keeps, divided by the density
    magnitude_prune   as linear, of the largest elements
    ..._svd           the same with products in place of factors, truncated to a rank

Owns parsing.  Does not own the arithmetic (`products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, cast

import msgspec

from mstore.merge.methods import registry
from mstore.merge.methods.parameters import SEED, Parameter, Range, Value
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.phrases import Option, call, phrase

TOTAL: Final = "total"
"""The sign of the sum of the elements, not weighted."""
FREQUENCY: Final = "frequency"
"""The sign that more of the elements have."""
_SIGNS: Final = (TOTAL, FREQUENCY)
_SIGN: Final = "majority_sign_method"

# A draw has 32 bits: a smaller share is indistinguishable from zero.
_DENSITY: Final = Parameter("density", "float", None, Range(2.0**-32, 1.0))
_CLAMP: Final = Parameter("clamp", "float", None, Range(0.0, 1.0))


class Select(Enum):
    """Which elements of a factor or of a product count."""

    ALL = "all"
    LARGEST = "largest"
    DRAWN = "drawn"


class CombineMethod(msgspec.Struct, frozen=True):
    """A method: of_products: it combines products, and truncates.  elects: only the elements that
    have the sign of the majority count.  joins: factors stand one beside the other.
    """

    name: str
    of_products: bool = False
    select: Select = Select.ALL
    elects: bool = False
    joins: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, those first that must be given."""
        return (
            *(["density"] if self.select is not Select.ALL else []),
            *([_SIGN] if self.elects else []),
            *(["clamp"] if self.of_products else []),
            *(["seed"] if self.select is Select.DRAWN else []),
        )


def _methods() -> dict[str, CombineMethod]:
    pairs = (
        ("linear", "svd", Select.ALL, False),
        ("ties", "ties_svd", Select.LARGEST, True),
        ("dare_linear", "dare_linear_svd", Select.DRAWN, False),
        ("dare_ties", "dare_ties_svd", Select.DRAWN, True),
        ("magnitude_prune", "magnitude_prune_svd", Select.LARGEST, False),
    )
    found = [CombineMethod("cat", joins=True)]
    for of_factors, of_products, select, elects in pairs:
        found.append(CombineMethod(of_factors, select=select, elects=elects))
        found.append(CombineMethod(of_products, of_products=True, select=select, elects=elects))
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


METHODS: Final[Mapping[str, CombineMethod]] = MappingProxyType(_methods())
"""The methods by name, in alphabetical order."""


class CombineSetting(msgspec.Struct, frozen=True):
    """A method and its parameters; those that it lacks have no effect.

    density: the share of elements to keep. sign: how the majority is found. clamp: None, or the
    quantile of the elements of both factors that the result's are clamped to. seed: of the draws.
    """

    method: CombineMethod
    density: float = 1.0
    sign: str = TOTAL
    clamp: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        told = {"density": self.density, _SIGN: self.sign, "clamp": self.clamp, "seed": self.seed}
        values = [
            f"{name}={told[name]}" for name in self.method.parameters if told[name] is not None
        ]
        return " ".join((self.method.name, *values))


def setting_of(name: str, given: Mapping[str, object]) -> CombineSetting:
    """Return a method with its parameters, as text or as Python has them.

    Raises BadRequest for an unknown method or parameter, a value out of range, a missing density.
    """
    method = METHODS.get(name)
    if method is None and name in registry.METHODS:
        raise BadRequest(
            f"{name} merges models, and combines no adapters; methods: {', '.join(METHODS)}",
            hint=phrase("to apply adapters to their base: {merge}", merge=call("merge", help=True)),
        )
    if method is None:
        raise BadRequest(
            f"unknown method {name!r} of combinations; methods: {', '.join(METHODS)}",
            hint=did_you_mean(name, METHODS),
        )
    for key in given:
        if key not in method.parameters:
            known = ", ".join(method.parameters) or "none"
            raise BadRequest(f"{name} has no parameter {key!r}; its parameters: {known}")
    if "density" in method.parameters and "density" not in given:
        raise BadRequest(
            f"{name} needs the share of elements to keep",
            where="density",
            hint=Option("parameters", {"density": 0.5}),
        )
    sign = given.get(_SIGN, TOTAL)
    if sign not in _SIGNS:
        raise BadRequest(f"{_SIGN} is {' or '.join(_SIGNS)}, not {sign!r}")
    clamp = _value(_CLAMP, given, None)
    return CombineSetting(
        method,
        density=float(cast(float, _value(_DENSITY, given, 1.0))),
        sign=str(sign),
        clamp=None if clamp is None else float(cast(float, clamp)),
        seed=int(cast(int, _value(SEED, given, 0))),
    )


def _value(
    parameter: Parameter, given: Mapping[str, object], default: Value | None
) -> Value | None:
    return parameter.parse(given[parameter.name]) if parameter.name in given else default
