"""The parameters of merge methods: kind, default and range of each.

Owns parsing of one value, and the parameters that several methods share. Does not own which method
has which. Pure Python, no state.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Final, Literal

import msgspec

from mstore.terms.errors import BadRequest

Scalar = float | int | bool
Value = Scalar | str | tuple[float, ...]
"""A number, a word, or a number for each expert."""

MAX_SINGLE: Final = float.fromhex("0x1.fffffep+127")
"""The largest finite float32."""


class Range(msgspec.Struct, frozen=True):
    """The numbers from `low` to `high`, both included unless `above_low`.  words: what it is."""

    low: float
    high: float
    above_low: bool = False
    words: str = ""

    def __contains__(self, value: float) -> bool:
        # False for NaN, like every comparison with it.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return self.words or f"{'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a method: its kind, default (None: it must be given) and range.

    each: whether every expert may have its own value; such a parameter is a float. words: what may
    be given in place of a value, and the value that each stands for. is_late: whether plans
    have it only if it is not the default, as those made before there was such a parameter. of_rows:
    whether it says that factors are those of rows, and plans have it only if they are.
    """

    name: str
    kind: Literal["float", "int", "bool"]
    default: Scalar | None
    range: Range | None = None
    each: bool = False
    words: tuple[tuple[str, Scalar | str], ...] = ()
    is_late: bool = False
    of_rows: bool = False

    def parse(self, given: object) -> Value:
        """Parse text ("0.2", "true", "0.5,0.3") or Python numbers. Raises BadRequest.

        A sequence has one value for each expert.
        """
        if isinstance(given, str) and given in dict(self.words):
            return dict(self.words)[given]
        several = _several(given)
        if several is None:
            return self._one(given)
        if not self.each:
            raise BadRequest(f"parameter {self.name} is the same for all experts, not {given!r}")
        values = tuple(float(self._one(one)) for one in several)
        if not values:
            raise BadRequest(f"parameter {self.name} takes one number for each expert, not none")
        return values

    def _one(self, given: object) -> Scalar:
        value = _PARSERS[self.kind](given)
        if value is None:
            words = ", or ".join((_ARTICLES[self.kind], *dict(self.words)))
            raise BadRequest(f"parameter {self.name} takes {words}, not {given!r}")
        if self.range is not None and value not in self.range:
            raise BadRequest(f"parameter {self.name} must be in {self.range}, not {given!r}")
        return value


LAMBDA: Final = Parameter("lambda", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))
SCALE: Final = Parameter("scale", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))
"""Of every method that has no parameter of this name: how far the result goes from the base."""
TRIM_DENSITY: Final = Parameter("density", "float", 1.0, Range(0.0, 1.0, above_low=True), each=True)
_SHARE: Final = "(0, 1], and at least 2^-32"
# A draw has 32 bits: a smaller share is indistinguishable from zero.
MASK_DENSITY: Final = Parameter(
    "density", "float", 1.0, Range(2.0**-32, 1.0, words=_SHARE), each=True
)
GAMMA: Final = Parameter("gamma", "float", 0.01, Range(0.0, 1.0), each=True)
EPSILON: Final = Parameter("epsilon", "float", 0.15, Range(0.0, 1.0), each=True)
LEAST_MOVE: Final = Parameter("epsilon", "float", 1e-5, Range(0.0, MAX_SINGLE))
NORM: Final = "l1"
"""The value of `rescale` that restores the L1 norm of each delta."""
DENSITY: Final = "density"
"""The word for the value of `rescale` that divides by the density."""
RESCALE: Final = Parameter("rescale", "bool", True, words=((NORM, NORM), (DENSITY, True)))
RESCALE_NORM: Final = Parameter("rescale", "bool", True, words=((NORM, True),))
AROUND_BASE: Final = Parameter("around_base", "bool", True)
SEED: Final = Parameter("seed", "int", 0, Range(0, 2**64 - 1))


def written(value: Value) -> str:
    """Return a value as `Parameter.parse` reads it."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ",".join(map(json.dumps, value))
    return json.dumps(value)


def normalize(default: bool) -> Parameter:
    """Return the parameter that says whether the sum is divided by weights."""
    return Parameter("normalize", "bool", default)


def single(value: float) -> float:
    """Round `value` to float32, nearest even. Raises OverflowError beyond the finite ones."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def next_single(value: float) -> float:
    """Return the next larger float32 of one that is not negative; infinity after the last."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    larger: float = struct.unpack("<f", struct.pack("<I", bits + 1))[0]
    return larger


def finite_single(name: str, value: float) -> float:
    """Round `value` to float32. Raises BadRequest, with its name, if that is not finite."""
    try:
        rounded = single(value)
    except (OverflowError, struct.error):
        rounded = math.inf
    if not math.isfinite(rounded):
        raise BadRequest(f"{name} must be a finite float32, not {value!r}")
    return rounded


def _several(given: object) -> Sequence[object] | None:
    """Return the values of a list, or of a text with commas; None for a single value."""
    if isinstance(given, str):
        return [one.strip() for one in given.split(",")] if "," in given else None
    return given if isinstance(given, Sequence) else None


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
    if isinstance(given, Integral) and given in (0, 1):
        return given == 1
    return _BOOLEANS.get(given.strip().lower()) if isinstance(given, str) else None


_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PARSERS: Final = {"float": _parse_float, "int": _parse_int, "bool": _parse_bool}
_ARTICLES: Final = {"float": "a number", "int": "a whole number", "bool": "true or false"}
