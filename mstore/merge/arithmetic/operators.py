"""The merge operators as a table: names, parameters, and what each one needs from a plan.

Owns names, parameter parsing, and the scalars that parameters and weights become before any
element is read: divisor, rescale factor, mask limit, bound coefficients.  Does not own the
arithmetic on elements (`kernels`, which switches on the flags of this table) nor which blocks are
read (the planner).  Pure Python, no state.

What the flags mean, for a base element b, expert elements e_k and d_k = e_k - b, in float32:

    direct      mix e_k themselves: sum w_k e_k [/ sum w_k]
    otherwise   b + lambda * (sum of m_k [/ divisor]),  m_k = w_k * sparsified d_k
    trims       sparsified: the max(1, int(density * n)) largest |d_k| of a tensor stay
    random      sparsified: kept with probability density, times 1 / density if `rescale`
    consensus   only the m_k with the sign of their sum count; divisor = sum of their weights

TIES: Yadav et al. 2023, arXiv 2306.01708.  DARE: Yu et al. 2024, arXiv 2311.03099.  Task
arithmetic: Ilharco et al. 2023, arXiv 2212.04089.  Order of operations as in mergekit 0.1.5.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from types import MappingProxyType
from typing import Final, Literal

from mstore.errors import BadRequest, did_you_mean

Value = float | int | bool

MAX_SINGLE: Final = float.fromhex("0x1.fffffep+127")
"""The largest finite float32."""

OTHERS: Final = frozenset(
    (
        *("arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear", "karcher"),
        *("model_stock", "multislerp", "nearswap", "nuslerp", "passthrough", "sce", "slerp"),
    )
)
"""Methods of mergekit that are not here."""

SMALLEST_DIVISOR: Final = 1e-8
"""A sum of weights nearer to zero than this (as a float32) does not divide: it counts as 1."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included unless `above_low`."""

    low: float
    high: float
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        # False for NaN, as every comparison with it is.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator: how it is written, its default, and what it may be."""

    name: str
    kind: Literal["float", "int", "bool"]
    default: Value
    range: Range | None = None

    def parse(self, given: object) -> Value:
        """The canonical value of text ("0.2", "true") or a Python number.  Raises BadRequest."""
        value = _PARSERS[self.kind](given)
        if value is None:
            raise BadRequest(f"parameter {self.name} takes {_ARTICLES[self.kind]}, not {given!r}")
        if self.range is not None and value not in self.range:
            raise BadRequest(f"parameter {self.name} must be in {self.range}, not {given!r}")
        return value


@dataclass(frozen=True, slots=True)
class Operator:
    """One merge method.  The flags are explained at the top of this module.

    `additive`: with fixed coefficients in the deltas, so that what an unread expert block would
    have changed is bounded by its norm (`coefficients`).
    """

    name: str
    parameters: tuple[Parameter, ...]
    consensus: bool = False
    trims: bool = False
    random: bool = False
    additive: bool = False
    direct: bool = False


_LAMBDA: Final = Parameter("lambda", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))
_TRIM_DENSITY: Final = Parameter("density", "float", 1.0, Range(0.0, 1.0, above_low=True))
# A draw has 32 bits: no smaller share can be told from nothing.
_MASK_DENSITY: Final = Parameter("density", "float", 1.0, Range(2.0**-32, 1.0))
_RESCALE: Final = Parameter("rescale", "bool", True)
_SEED: Final = Parameter("seed", "int", 0, Range(0, 2**64 - 1))


def _normalize(default: bool) -> Parameter:
    return Parameter("normalize", "bool", default)


_DARE: Final = (_MASK_DENSITY, _LAMBDA, _normalize(False), _RESCALE, _SEED)

_TABLE: Final = (
    Operator("linear", (_normalize(True),), additive=True, direct=True),
    Operator("task_arithmetic", (_LAMBDA, _normalize(False)), additive=True),
    Operator("ties", (_TRIM_DENSITY, _LAMBDA, _normalize(True)), consensus=True, trims=True),
    Operator("dare_linear", _DARE, additive=True, random=True),
    Operator("dare_ties", _DARE, consensus=True, random=True),
)

OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType({o.name: o for o in _TABLE})
"""Every operator by name.  A new one of the same shape is one more row of the table."""


def operator(method: str) -> Operator:
    """The operator of this name.  Raises BadRequest that lists the names there are."""
    try:
        return OPERATORS[method]
    except KeyError:
        word = method.lower()
        raise BadRequest(
            f"unknown method {method!r}; methods: {', '.join(OPERATORS)}",
            hint=f"mergekit has {word}, mstore does not"
            if word in OTHERS
            else did_you_mean(word, OPERATORS),
        ) from None


def parse_parameters(method: str, given: Mapping[str, object]) -> dict[str, Value]:
    """The complete parameters of `method`, defaults filled in, in the order of the table.

    Values of `given` are text as typed or Python values.  Equal meanings give equal results
    ("1", 1 and 1.0 for a float).  Raises BadRequest for an unknown method or parameter, or a
    value that cannot be.
    """
    parameters = {p.name: p for p in operator(method).parameters}
    for name in given:
        if name == "weight":
            raise BadRequest(
                "weight is given with each expert, not as a parameter",
                hint="--expert REF=WEIGHT",
            )
        if name not in parameters:
            raise BadRequest(
                f"{method} has no parameter {name!r}; its parameters: {', '.join(parameters)}",
                hint=did_you_mean(name, parameters),
            )
    return {
        name: parameter.parse(given[name]) if name in given else parameter.default
        for name, parameter in parameters.items()
    }


def check_weights(
    method: str, parameters: Mapping[str, Value], weights: Sequence[float]
) -> tuple[float, ...]:
    """The weights rounded to float32, in plan order.

    Raises BadRequest if there is none, if one is not a finite float32, or if a linear merge
    would divide by their sum and that is zero.
    """
    if not weights:
        raise BadRequest("a merge needs at least one expert")
    rounded = tuple(_single("weight", weight) for weight in weights)
    if operator(method).direct and parameters["normalize"] and _sum(rounded) == 0.0:
        raise BadRequest(
            f"the weights of {method} add up to zero, and normalize divides by their sum",
            hint="change a weight, or --param normalize=false",
        )
    return rounded


def fixed_divisor(method: str, parameters: Mapping[str, Value], weights: Sequence[float]) -> float:
    """What the sum is divided by wherever that is one number for all elements, as a float32.

    The sequential float32 sum of all weights, of absent experts too.  1 for no division, for
    consensus operators (they divide by the weights that agree at each element), and, except for
    direct ones, where the sum is nearly zero.
    """
    flags = operator(method)
    rounded = check_weights(method, parameters, weights)
    if flags.consensus or not parameters["normalize"]:
        return 1.0
    total = _sum(rounded)
    if not flags.direct and abs(total) < single(SMALLEST_DIVISOR):
        return 1.0
    return total


def rescale_factor(method: str, parameters: Mapping[str, Value]) -> float:
    """What a delta that passed the random mask is multiplied by, as a float32."""
    if not operator(method).random or not parameters["rescale"]:
        return 1.0
    return single(1.0 / parameters["density"])


def mask_limit(method: str, parameters: Mapping[str, Value]) -> int:
    """A draw below this is kept: round(density * 2^32), so 2^32 keeps all."""
    if not operator(method).random:
        return 2**32
    return round(parameters["density"] * 2**32)


def needs_thresholds(method: str, parameters: Mapping[str, Value]) -> bool:
    """Whether a magnitude threshold for each expert and tensor must be known first."""
    return operator(method).trims and parameters["density"] < 1


def keep_count(density: float, elements: int) -> int:
    """How many of a tensor's elements trimming keeps: max(1, int(density * n)), at most n."""
    return min(elements, max(1, int(density * elements)))


def coefficients(
    method: str, parameters: Mapping[str, Value], weights: Sequence[float]
) -> list[float]:
    """|c_k|: leaving out a delta d_k changes the merge by at most |c_k| * ||d_k||, per expert.

    The exact quotient of the float32 factors that the kernel uses, rounded up to a float64.  The
    bound is on the sum in exact arithmetic: the kernel's own roundings come on top (`rounding`),
    like the rounding to the output type.
    Raises BadRequest for an operator that has no such bound.
    """
    if not operator(method).additive:
        bounded = ", ".join(o.name for o in OPERATORS.values() if o.additive)
        raise BadRequest(f"{method} has no error bound; methods that have: {bounded}")
    rounded = check_weights(method, parameters, weights)
    factor = (
        abs(Fraction(single(parameters.get("lambda", 1.0))))
        * Fraction(rescale_factor(method, parameters))
        / abs(Fraction(fixed_divisor(method, parameters, weights)))
    )
    return [_upper(abs(Fraction(weight)) * factor) for weight in rounded]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far the kernel's float32 is from exact arithmetic, for an additive operator.

    Of one element with base b and float32 deltas d_k, of experts that are read (the others are
    zero), the kernel makes y, and exact arithmetic with the same float32 factors makes
    Y = [W] b + sum c_k d_k, where W is sum w_k for `linear` without `normalize`, else 1.  Then

        |y - Y| <= of_deltas * sum |c_k| |d_k| + of_base * |b| + floor,

    as long as no step is larger than the largest float32.  weights: w_k; factors: |divisor|,
    |lambda| and the rescale factor; direct: as for the operator.

    **Proof.**  u = 2^-24 and h = 2^-150: a product, quotient or fused step is off by at most u of
    its result, or by h where that is subnormal; a sum by at most u of its result (a subnormal sum
    is exact).  Let g(m) = m u / (1 - m u), which is not less than (1 + u)^m - 1 (Higham, "Accuracy
    and stability of numerical algorithms", lemma 3.1).  Each term of the sum goes through at most m
    steps, so it comes out with a relative error of at most g(m):

    - others: by rescale factor and by weight, K - 1 additions, by divisor, by lambda: m = K + 3.
      What is lost in subnormals: h |w_k| + h for each k, over |D| and times |lambda|, h |lambda|
      for the quotient, h for lambda, all of it up to (1 + g(m)) times through what follows.
      The base is added last: off by u of |b| + sum |c_k| |d_k| (1 + g(m)) + what was lost.
      What is zero in float32 leaves the base as it is, which is no larger an error.
    - linear: K fused steps and the quotient, m = K + 1, on w_k e_k with e_k = b + d_k / (1 + v),
      |v| <= u.  So the relative error is of sum |w_k| / |D| |b| + sum |c_k| |d_k| / (1 - u), and
      sum |c_k| |d_k| u / (1 - u) is what d_k itself is off.  Lost in subnormals: K h / |D| + h.
      With `normalize`, D is the float32 sum of the weights, so that sum w_k b / D is not b but off
      by |sum w_k / D - 1| |b|, which is computed exactly; a chunk that keeps the base is off by
      nothing.

    The merge under a budget and the full one are each that far from their own Y, and the two Y
    differ by sum |c_k| |d_k| over what is left out.
    """

    of_deltas: float
    of_base: float
    floor: float
    weights: tuple[float, ...]
    factors: tuple[float, float, float]
    direct: bool


_UNIT: Final = Fraction(1, 2**24)
_SUBNORMAL: Final = Fraction(1, 2**150)


def rounding(method: str, parameters: Mapping[str, Value], weights: Sequence[float]) -> Rounding:
    """What float32 adds to the error of an additive operator's merge; see `Rounding`."""
    rounded = check_weights(method, parameters, weights)
    flags, count = operator(method), len(rounded)
    divisor = abs(Fraction(fixed_divisor(method, parameters, weights)))
    lam = abs(Fraction(single(parameters.get("lambda", 1.0))))
    rescale = Fraction(rescale_factor(method, parameters))
    exact = [Fraction(weight) for weight in rounded]
    if flags.direct:
        grown = _grown(count + 1)
        base = grown * sum(map(abs, exact)) / divisor
        if parameters["normalize"]:
            base += abs(sum(exact) / Fraction(fixed_divisor(method, parameters, weights)) - 1)
        deltas = (grown + _UNIT) / (1 - _UNIT)
        floor = _SUBNORMAL * (count / divisor + 1)
    else:
        grown = _grown(count + 3)
        lost = sum(1 + abs(weight) for weight in exact) / divisor + 1
        floor = _SUBNORMAL * (lost * lam + 1) * (1 + grown) * (1 + _UNIT)
        deltas = grown + _UNIT * (1 + grown)
        base = _UNIT
    return Rounding(
        of_deltas=_upper(deltas),
        of_base=_upper(base),
        floor=_upper(floor * (1 + grown)),
        weights=rounded,
        factors=(float(divisor), float(lam), float(rescale)),
        direct=flags.direct,
    )


def _grown(steps: int) -> Fraction:
    """Largest relative error of so many roundings."""
    return steps * _UNIT / (1 - steps * _UNIT)


def reuses_base(method: str, parameters: Mapping[str, Value]) -> bool:
    """Whether a chunk where every expert is absent or equals the base is the base's own bytes."""
    return not operator(method).direct or bool(parameters["normalize"])


def single(value: float) -> float:
    """`value` rounded to float32, nearest even.  Raises OverflowError beyond the finite ones."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _single(name: str, value: float) -> float:
    try:
        rounded = single(value)
    except (OverflowError, struct.error):
        rounded = math.inf
    if not math.isfinite(rounded):
        raise BadRequest(f"{name} must be a finite float32, not {value!r}")
    return rounded


def _sum(values: Sequence[float]) -> float:
    """Sequential float32 sum.  A float64 sum of two float32, rounded, is their float32 sum."""
    total = values[0]
    for value in values[1:]:
        total = _single("the sum of the weights", total + value)
    return total


def _upper(exact: Fraction) -> float:
    """The smallest float64 that is not below `exact`."""
    try:
        nearest = float(exact)
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def _parse_float(given: object) -> float | None:
    if isinstance(given, bool) or not isinstance(given, str | Real):
        return None
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    # Adding zero turns -0.0 into 0.0: one meaning, one plan.
    return value + 0.0 if math.isfinite(value) else None


def _parse_int(given: object) -> int | None:
    if isinstance(given, bool) or not isinstance(given, str | Integral):
        return None
    try:
        return int(given)
    except ValueError:
        return None


def _parse_bool(given: object) -> bool | None:
    if isinstance(given, bool):
        return given
    return _BOOLEANS.get(given.strip().lower()) if isinstance(given, str) else None


_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PARSERS: Final = {"float": _parse_float, "int": _parse_int, "bool": _parse_bool}
_ARTICLES: Final = {"float": "a number", "int": "a whole number", "bool": "true or false"}
