"""The methods of combinations, and their parameters.

The names and the meaning of the first are those of PEFT's `add_weighted_adapter` (version 0.21):

    linear            factors, each times the root of |weight * scale|, added
    cat               factors one beside the other: the product is the weighted sum of the products
    svd               that sum, truncated to a rank
    ties              of each factor the largest elements; those with the sign of the majority,
                      weighted as by linear, added, and divided by how many they are
    dare_linear       as linear, of elements that a draw keeps, divided by the density
    dare_ties         as ties, of elements that a draw keeps, divided by the density
    magnitude_prune   as linear, of the largest elements
    ..._svd           the same with products in place of factors, truncated to a rank
    ..._core          the same with the cores of products (`spectra`)

tsv, svc, iso_c, iso_cts and wudi_ridge combine singular values and vectors (`spectra`).

Owns parsing, and what a method says of itself. Does not own the arithmetic (`elements`, `products`,
`spectra`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, cast

import msgspec

from mstore.merge.combination import products, spectra
from mstore.merge.combination.elements import SIGNS, TOTAL, ElementRule, Select
from mstore.merge.combination.products import Combined, ModuleProducts
from mstore.merge.combination.spectra import Core, CoreSpace
from mstore.merge.methods import registry
from mstore.merge.methods.parameters import MAX_SINGLE, SEED, Parameter, Range, Value
from mstore.terms.errors import BadRequest, Incompatible, did_you_mean
from mstore.terms.phrases import Option, call, phrase

_SIGN: Final = "majority_sign_method"

# A draw has 32 bits: a smaller share is indistinguishable from zero.
_DENSITY: Final = Parameter("density", "float", None, Range(2.0**-32, 1.0))
_CLAMP: Final = Parameter("clamp", "float", None, Range(0.0, 1.0))
_ALPHA: Final = Parameter("alpha", "float", 1.0, Range(0.0, MAX_SINGLE, above_low=True))
_COMMON: Final = Parameter("common_space_fraction", "float", 0.8, Range(0.0, 1.0))
# A smaller one leaves a matrix that float64 cannot invert.
_RIDGE: Final = Parameter("ridge", "float", 1.0, Range(1e-6, MAX_SINGLE))


class CombineSetting(msgspec.Struct, frozen=True):
    """A method and its parameters; those that it lacks have no effect.

    density: the share of elements to keep. sign: how the majority is found. clamp: None, or the
    quantile of the elements of both factors that the result's are clamped to. seed: of the draws.
    alpha: the least that `svc` takes a term for. common: the share of directions that `iso_cts`
    takes from the sum. ridge: how near to the sum `wudi_ridge` stays.
    """

    method: CombineMethod
    density: float
    sign: str
    clamp: float | None
    seed: int
    alpha: float
    common: float
    ridge: float

    def __str__(self) -> str:
        told = {
            _DENSITY.name: self.density,
            _SIGN: self.sign,
            _CLAMP.name: self.clamp,
            SEED.name: self.seed,
            _ALPHA.name: self.alpha,
            _COMMON.name: self.common,
            _RIDGE.name: self.ridge,
        }
        values = [
            f"{name}={told[name]}" for name in self.method.parameters if told[name] is not None
        ]
        return " ".join((self.method.name, *values))

    @property
    def elements(self) -> ElementRule:
        """How single elements are combined: those of tensors without a product, for any method."""
        sign = self.sign if self.method.elects else None
        return ElementRule(self.method.select, self.density, sign, self.seed)


@dataclass(frozen=True)
class CombineMethod(ABC):
    """A method.

    select: which elements count. elects: only those that have the sign of the majority do.

    takes_mean: tensors without a product become the base's and the mean of the differences, as in
    the code of the authors of such methods, not their sum.

    truncates: it decomposes products, takes a rank, and says what that leaves out.  of_rank: the
    rank is a part of its formula, of which it leaves nothing out.
    """

    name: str
    select: Select = Select.ALL
    elects: bool = False
    takes_mean: bool = False
    of_rank: bool = False

    truncates: ClassVar[bool] = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, those first that must be given."""
        return (
            *(["density"] if self.select is not Select.ALL else []),
            *([_SIGN] if self.elects else []),
            *self._own_parameters(),
            *(["seed"] if self.select is Select.DRAWN else []),
        )

    def _own_parameters(self) -> tuple[str, ...]:
        return ()

    def rank_of(self, ranks: Sequence[int], module: str, where: str) -> int:
        """Return the rank of a module's product that none was asked for.  Raises Incompatible.

        ranks: of the adapters'. where: their names.
        """
        return sum(ranks)

    @abstractmethod
    def combined(self, module: ModuleProducts, rank: int, setting: CombineSetting) -> Combined:
        """Combine what the adapters have for a module, to at most this rank if it truncates."""


class _Joined(CombineMethod):
    """Factors stand one beside the other."""

    truncates = False

    def combined(self, module: ModuleProducts, rank: int, setting: CombineSetting) -> Combined:
        return products.joined(module.read)


class _OfFactors(CombineMethod):
    """Each factor is combined from those of the adapters."""

    truncates = False

    def rank_of(self, ranks: Sequence[int], module: str, where: str) -> int:
        if len(set(ranks)) > 1:
            raise Incompatible(
                f"{self.name} adds factors of one rank, and those of {module} have "
                f"{', '.join(map(str, ranks))}",
                where=where,
                hint=phrase(
                    "{cat} or {svd}", cat=Option("method", "cat"), svd=Option("method", "svd")
                ),
            )
        return ranks[0]

    def combined(self, module: ModuleProducts, rank: int, setting: CombineSetting) -> Combined:
        return products.united(module, setting.elements)


class _OfProducts(CombineMethod):
    """Products are combined, and truncated."""

    def _own_parameters(self) -> tuple[str, ...]:
        return (_CLAMP.name,)

    def rank_of(self, ranks: Sequence[int], module: str, where: str) -> int:
        return max(ranks)

    def combined(self, module: ModuleProducts, rank: int, setting: CombineSetting) -> Combined:
        return products.of_elements(module, rank, setting.elements, setting.clamp)


@dataclass(frozen=True, kw_only=True)
class _OfCores(CombineMethod):
    """Cores are combined: `core` returns the result's.  own: parameters of this method alone."""

    core: Callable[[CoreSpace, int, CombineSetting], Core]
    own: tuple[Parameter, ...] = ()

    def _own_parameters(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.own)

    def combined(self, module: ModuleProducts, rank: int, setting: CombineSetting) -> Combined:
        space = CoreSpace.of(module)
        return products.of_product(*space.whole(self.core(space, rank, setting)), rank)


def _methods() -> dict[str, CombineMethod]:
    kinds = (
        ("linear", "svd", None, Select.ALL, False),
        ("ties", "ties_svd", "ties_core", Select.LARGEST, True),
        ("dare_linear", "dare_linear_svd", "dare_linear_core", Select.DRAWN, False),
        ("dare_ties", "dare_ties_svd", "dare_ties_core", Select.DRAWN, True),
        ("magnitude_prune", "magnitude_prune_svd", "magnitude_prune_core", Select.LARGEST, False),
    )
    found: list[CombineMethod] = [
        _Joined("cat"),
        _of_spectra("tsv", lambda space, rank, _: spectra.tsv(space, rank), of_rank=True),
        _of_spectra("svc", lambda space, _, given: spectra.svc(space, given.alpha), _ALPHA),
        _of_spectra("iso_c", lambda space, rank, _: spectra.iso_c(space, rank), of_rank=True),
        _of_spectra(
            "iso_cts",
            lambda space, rank, given: spectra.iso_cts(space, rank, given.common),
            _COMMON,
            of_rank=True,
        ),
        _of_spectra(
            "wudi_ridge", lambda space, _, given: spectra.wudi_ridge(space, given.ridge), _RIDGE
        ),
    ]
    for of_factors, of_products, of_cores, select, elects in kinds:
        found.append(_OfFactors(of_factors, select, elects))
        found.append(_OfProducts(of_products, select, elects))
        if of_cores is not None:
            found.append(_OfCores(of_cores, select, elects, core=_elements_of_cores))
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def _elements_of_cores(space: CoreSpace, _: int, given: CombineSetting) -> Core:
    return spectra.of_elements(space, given.elements)


def _of_spectra(
    name: str,
    core: Callable[[CoreSpace, int, CombineSetting], Core],
    *own: Parameter,
    of_rank: bool = False,
) -> CombineMethod:
    return _OfCores(name, takes_mean=True, of_rank=of_rank, core=core, own=own)


METHODS: Final[Mapping[str, CombineMethod]] = MappingProxyType(_methods())
"""The methods by name, in alphabetical order."""


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
    if sign not in SIGNS:
        raise BadRequest(f"{_SIGN} is {' or '.join(SIGNS)}, not {sign!r}")
    clamp = _value(_CLAMP, given)
    density, alpha, common, ridge = (
        float(cast(float, 1.0 if value is None else value))
        for value in (_value(one, given) for one in (_DENSITY, _ALPHA, _COMMON, _RIDGE))
    )
    return CombineSetting(
        method,
        density=density,
        sign=str(sign),
        clamp=None if clamp is None else float(cast(float, clamp)),
        seed=int(cast(int, _value(SEED, given) or 0)),
        alpha=alpha,
        common=common,
        ridge=ridge,
    )


def _value(parameter: Parameter, given: Mapping[str, object]) -> Value | None:
    """Return what is given, or the default."""
    if parameter.name in given:
        return parameter.parse(given[parameter.name])
    return parameter.default
