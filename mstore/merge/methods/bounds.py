"""Proved bounds on a merge's error: from omissions, and from float32 arithmetic.

For additive methods only: where signs are elected, the change by one expert has no bound that
follows from its norm. Pure functions of operations, in exact arithmetic; no state.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import msgspec

from mstore.merge.methods.method import Operation
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import call, phrase


def coefficients(operation: Operation) -> list[float]:
    """Return |c_k| per expert: omitting a delta d_k changes the merge by at most |c_k| * ||d_k||.

    The exact quotient of the float32 factors that the kernel uses, rounded up to a float64. The
    bound is on the sum in exact arithmetic: the kernel's own roundings (`rounding`) and the
    rounding to the output type come on top. Raises BadRequest for a method that has no such bound.
    """
    does = operation.unbounded
    if does is not None:
        raise BadRequest(
            f"{operation.method.name} {does}, so its error has no bound",
            hint=phrase("{sweep} measures it", sweep=call("sweep", measure=True)),
        )
    factor = abs(Fraction(operation.factor)) / abs(Fraction(operation.divisor))
    return [
        _upper(abs(Fraction(weight)) * Fraction(rescale) * factor)
        for weight, rescale in zip(operation.weights, operation.rescales, strict=True)
    ]


class Rounding(msgspec.Struct, frozen=True):
    """How far the kernel's float32 result is from exact arithmetic, for an additive method.

    For one element with base b and float32 deltas d_k of the experts that are read (the others are
    zero), the kernel makes y, and exact arithmetic with the same float32 factors makes Y = [W] b +
    sum c_k d_k, where W is the sum of all factors for a sum of whole experts that does not keep
    the base, else 1. Factors are those of `Operation`, which have the scale in them. Then

        |y - Y| <= of_deltas * sum |c_k| |d_k| + of_base * |b| + floor,

    as long as no step exceeds the largest float32. weights: w_k; base_weight: of the base, where
    it is one of the summands; factors: |divisor|, |lambda scale| and the largest rescale factor;
    is_whole: as for the operation.

    **Proof.** u = 2^-24 and h = 2^-150: a product, quotient or fused step is off by at most u of
    its result, or by h if that is subnormal; a sum by at most u of its result (a subnormal sum is
    exact). Let g(m) = m u / (1 - m u), which is not less than (1 + u)^m - 1 (Higham, "Accuracy and
    stability of numerical algorithms", lemma 3.1). Each term of the sum goes through at most m
    steps, so its relative error is at most g(m):

    - others: by rescale factor and by weight, K - 1 additions, by divisor, by lambda: m = K + 3.
      Lost in subnormals: h |w_k| + h for each k, over |D| and times |lambda|, h |lambda| for the
      quotient, h for lambda, all of it up to (1 + g(m)) times through what follows. The base is
      added last: off by u of |b| + sum |c_k| |d_k| (1 + g(m)) + what was lost. A sum that is zero
      in float32 leaves the base as it is, which is no larger an error.
    - whole: K fused steps and the quotient, m = K + 1, on w_k e_k with e_k = b + d_k / (1 + v),
      |v| <= u. So the relative error is of sum |w_k| / |D| |b| + sum |c_k| |d_k| / (1 - u), and sum
      |c_k| |d_k| u / (1 - u) is the error of d_k itself. Lost in subnormals: K h / |D| + h. With
      `keeps_base`, D is the float32 sum of the weights, so that sum w_k b / D is not b but off by
      |sum w_k / D - 1| |b|, which is computed exactly; a chunk that keeps the base has no error.
      The base may be one of the e_k, with d_k = 0 (`base_weight`).
    - near: y = v e + (1 - v) b with a float32 v from 0 to 1, so Y = b + v (e - b) and v |d| is at
      most the |d_k| above. Both terms take at most m = 3 steps: 1 - v, product, sum. They lose h
      each, and |v e| + |(1 - v) b| <= |b| + v |e - b|. In `nearswap` v |d| is at most q =
      t (1 + 2^-20) + 2^-149 |d|: the reciprocal r of x = max(|d|, 1e-6) and v = r t are off by u
      or h, so v <= t / x (1 + u)^2 + h t (1 + u) + h, and x < 2^128.  With a scale s the kernel
      makes s (v e + (1 - v) b) + w b by two fused steps, w = 1 - s rounded: m = 4, |s| times what
      is lost above, and the difference |w + s - 1| |b| as for other sums that keep the base.

    The merge under a budget and the full one are each that far from their own Y, and the two Y
    differ by sum |c_k| |d_k| over what is left out.
    """

    of_deltas: float
    of_base: float
    floor: float
    weights: tuple[float, ...]
    base_weight: float
    factors: tuple[float, float, float]
    is_whole: bool


_UNIT: Final = Fraction(1, 2**24)
_SUBNORMAL: Final = Fraction(1, 2**150)


def rounding(operation: Operation) -> Rounding:
    """Return what float32 adds to the error of an operation's merge; see `Rounding`."""
    return _of_whole(operation) if operation.selection.is_whole else _of_deltas(operation)


def _of_deltas(operation: Operation) -> Rounding:
    exact = [Fraction(weight) for weight in operation.weights]
    divisor, lam = abs(Fraction(operation.divisor)), abs(Fraction(operation.factor))
    grown = _grown(len(exact) + 3)
    lost = sum(1 + abs(weight) for weight in exact) / divisor + 1
    floor = _SUBNORMAL * (lost * lam + 1) * (1 + grown) * (1 + _UNIT)
    deltas = grown + _UNIT * (1 + grown)
    return _rounding(operation, deltas, _UNIT, floor * (1 + grown), is_whole=False)


def _of_whole(operation: Operation) -> Rounding:
    # Steps of a share of the expert and the rest of the base, and products of each.
    weights, more = operation.weights, operation.selection.steps
    if operation.has_base:
        weights = (operation.base_weight, *weights)
    exact = [Fraction(weight) for weight in weights]
    divisor = abs(Fraction(operation.divisor))
    grown = _grown(len(exact) + 1 + more)
    base = grown * sum(map(abs, exact)) / divisor
    if operation.keeps_base:
        base += abs(sum(exact) / Fraction(operation.divisor) - 1)
    floor = _SUBNORMAL * (len(exact) / divisor + 1)
    if operation.has_base:
        floor += more * _SUBNORMAL * 2 * abs(exact[-1])
    deltas = (grown + _UNIT) / (1 - _UNIT)
    return _rounding(operation, deltas, base, floor * (1 + grown), is_whole=True)


def _rounding(
    operation: Operation, deltas: Fraction, base: Fraction, floor: Fraction, *, is_whole: bool
) -> Rounding:
    factors = (
        float(abs(Fraction(operation.divisor))),
        float(abs(Fraction(operation.factor))),
        float(Fraction(max(operation.rescales))),
    )
    return Rounding(
        of_deltas=_upper(deltas),
        of_base=_upper(base),
        floor=_upper(floor),
        weights=operation.weights,
        base_weight=operation.base_weight,
        factors=factors,
        is_whole=is_whole,
    )


def _grown(steps: int) -> Fraction:
    """Return the largest relative error of so many roundings."""
    return steps * _UNIT / (1 - steps * _UNIT)


def _upper(exact: Fraction) -> float:
    """Return the smallest float64 that is not below `exact`."""
    try:
        nearest = float(exact)
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
