"""The model of one operation: what leaving chunks out costs, for the tensors that have it.

Owns norms, coefficients, estimates and the rounding error of one operation over its part of the
grid.  A combination with other estimates has a model of its own.  Does not own what is taken
(`planning.planner`), nor the order (`planning.ranking`).  Pure; arrays are [K, C]: experts by the
chunks of these tensors.

Here are also the proved bounds on a merge's error, from omissions and from float32 arithmetic, for
additive methods only: where signs are elected, the change by one expert has no bound that
follows from its norm. Pure functions of operations, in exact arithmetic; no state.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np

from mstore.merge.measures.estimates import elected
from mstore.merge.measures.grid import Bools, Floats, Grid, added
from mstore.merge.methods.method import Operation
from mstore.merge.methods.parameters import MAX_SINGLE
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, READ, SHARED
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import call, phrase

States = np.ndarray[Any, np.dtype[np.uint8]]


class CostModel:
    """One operation over a grid of the tensors that have it.

    squares: float64[K, C], of each selected delta. roots: what leaving it out adds to the norm of
    the error in its chunk. certain: an upper bound on that for additive methods.
    """

    def __init__(self, operation: Operation, grid: Grid) -> None:
        self.operation = operation
        self._grid = grid
        selection = operation.selection
        self.squares = selection.squares(grid)
        self._scale = self._coefficients() * np.sqrt(grid.copies)
        self.certain = scaled(self._scale, selection.certain(grid, self.squares))
        self._typical = scaled(self._scale, self.squares)
        self.roots = self.certain if selection.ranks_by_bound else self._typical

    def free(self) -> States:
        """Return uint8[K, C]: READ, unless the state is known without reading."""
        states = np.full(self._grid.shape, READ, dtype=np.uint8)
        states[self.operation.selection.idle(self._grid)] = BELOW
        states[list(self.operation.weightless)] = BELOW
        states[self._grid.equal] = EQUAL
        return states

    # -- norms -------------------------------------------------------------------------------

    @property
    def _weights(self) -> Floats:
        sizes: Floats = np.abs(np.array(self.operation.weights))[:, None]
        return sizes

    def _coefficients(self) -> Floats:
        """Return |c_k|, float64[K, C] or [K, 1]: certified for additive methods, else a guess."""
        if self.operation.has_bound:
            return np.array(coefficients(self.operation))[:, None]
        weights, scale = self._weights, self._undivided()
        if self.operation.chunk_factors is not None:
            likely = self.operation.chunk_factors.likely
            if likely is None:
                # Shares of all, whatever the angles.
                shared: Floats = weights * scale / max(float(weights.sum()), 1e-30)
                return shared
            scale = scale * likely
        plain: Floats = weights * scale
        return plain

    def _undivided(self) -> Floats:
        """Return |lambda scale| times the factor of random sparsification: float64[K, 1]."""
        thinning = self.operation.selection.thinning
        undivided: Floats = np.full_like(thinning, abs(self.operation.factor_given)) / thinning
        return undivided

    @cached_property
    def _kept(self) -> Floats:
        """Roughly the share of a chunk's elements that sparsifying keeps: float64[K, C]."""
        return self.operation.selection.kept(self._grid)

    # -- ranking -----------------------------------------------------------------------------

    def largest(self, left: Floats) -> Floats:
        """Return float64[C], what leaving out these roots (0 where kept) costs, squared."""
        with np.errstate(over="ignore"):
            return added(left) ** 2 if self.operation.has_bound else added(left**2)

    def ranked(self, score: str) -> Floats:
        """Return the roots to rank units by, where gains do not fall as units are taken."""
        if self.operation.has_bound:
            return self.roots
        squares = self.operation.selection.scored(self._grid, self.squares, score)
        return self.roots if squares is self.squares else scaled(self._scale, squares)

    # -- errors ------------------------------------------------------------------------------

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return the mean squared error of leaving these out, per chunk: float64[C].

        Averages over random masks, too.
        """
        operation, selection = self.operation, self.operation.selection
        if operation.has_bound or operation.chunk_factors is not None:
            # The coefficients hold for every mask: with `rescale` they include 1 / p.
            squares = np.where(left_out, self._typical, 0.0) ** 2
            if operation.is_even:
                # Plans made before experts had densities of their own keep every bit.
                even: Floats = added(squares) * selection.shares[0, 0]
                return even
            each: Floats = squares * selection.shares
            return added(each)
        found = np.zeros(self._grid.shape[1])
        some = np.flatnonzero(left_out.any(axis=0))
        if not len(some):
            return found
        factor, squares = selection.mean_squares, self.squares[:, some]
        if not operation.is_even:
            squares, factor = squares * factor, np.ones_like(factor)
        # Chunks read without statistics, or not finite, count as absent.
        counts = (left_out | taken)[:, some] & np.isfinite(squares)
        squares = np.where(counts, squares, 0.0)
        kept = np.where(counts, self._kept[:, some], 0.0)
        found[some] = self._apart(squares, kept, left_out[:, some])
        scale = abs(operation.factor_given)
        total: Floats = found * self._grid.copies * (float(factor[0, 0]) * scale * scale)
        return total

    def _apart(self, squares: Floats, kept: Floats, left_out: Bools) -> Floats:
        """Return the expected square of the full merge minus the one without these: float64[C].

        squares, kept: as for `estimates.elected`.
        """
        return elected(squares, kept, self.operation.weights, left_out, normalize=False)

    @cached_property
    def _rounding(self) -> Rounding:
        return rounding(self.operation)

    def float32_error(self, free: States) -> float:
        """Return what float32 may add to the distance of two merges; infinite if it may overflow.

        Chunks of which nothing is left out come out equal.  This counts all chunks of which
        anything may be left out, so that the result does not depend on the budget. free: the
        states before units are taken.
        """
        if not self.operation.has_bound:
            return math.inf
        grid = self._grid
        error = self._rounding
        computed = np.isin(free, (READ, DROPPED)).any(axis=0)
        if not computed.any():
            return 0.0
        # Every expert with measured statistics for a chunk has the same base sums in its row; a
        # product has those of the whole tensor.
        squares = np.where(grid.known, grid.column("base_squares"), 0.0).max(axis=0)[computed]
        largest = np.where(grid.known, grid.column("max_abs"), 0.0)[:, computed]
        if not largest_step(error, largest, np.sqrt(squares)) < MAX_SINGLE:
            return math.inf
        with np.errstate(over="ignore", invalid="ignore"):
            roots = np.where(grid.known, self.certain, 0.0)[:, computed]
            copies = grid.copies[computed]
            one = (
                error.of_deltas * added(roots)
                + error.of_base * np.sqrt(squares * copies)
                + error.floor * np.sqrt(grid.elements[computed] * copies)
            )
            # Each of the two merges is that far from exact arithmetic.
            total = 2 * math.sqrt(math.fsum((one * one).tolist()))
        return total if math.isfinite(total) else math.inf

    def surplus(self, states: States, left_out: Bools) -> Floats:
        """Return what the elements kept beyond k add: float64[K, T], squares as in `_roots`."""
        grid, beyond = self._grid, self._grid.surplus
        if not beyond.any():
            return np.zeros((0, 0))
        starts = grid.starts[:-1]
        partly = np.logical_or.reduceat(left_out, starts, axis=1)
        kept = np.where(partly, beyond[:, :, 1].T, beyond[:, :, 0].T)
        is_read = (states == READ) | (states == SHARED)
        share = np.add.reduceat(np.where(is_read, grid.elements, 0.0), starts, axis=1)
        share = share / np.add.reduceat(grid.elements, starts)
        cuts = np.where(kept > 0, (self._scale * grid.threshold)[:, starts], 0.0)
        squares: Floats = kept * share * cuts**2
        return squares

    def reach(self) -> tuple[float, Floats]:
        """Return what a base's element is multiplied by at most, and what is added: float64[T].

        Uses the largest deltas, where statistics exist.
        """
        grid, error = self._grid, self._rounding
        divisor, lam, rescale = error.factors
        weights = self._largest_weights()
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = np.where(grid.known, grid.column("max_abs"), 0.0) * weights
            moved = added(deltas) * (lam * rescale / divisor)
            moved = np.maximum.reduceat(moved, grid.starts[:-1])
        of_base = float(weights.sum()) + abs(error.base_weight)
        return of_base / divisor if error.is_whole else 1.0, moved

    def _largest_weights(self) -> Floats:
        """Return what a delta is multiplied by at most, besides divisor and factor: [K, 1]."""
        return self._weights


def largest_step(error: Rounding, largest: Floats, base: Floats) -> float:
    """Bound the largest step of the kernel, for |d_k| <= largest (float64[K, C]), |b| <= base."""
    divisor, lam, rescale = error.factors
    with np.errstate(over="ignore", invalid="ignore"):
        sides = base + largest if error.is_whole else np.maximum(largest, largest * rescale)
        total = added([abs(w) * side for w, side in zip(error.weights, sides, strict=True)])
        if error.base_weight:
            total = total + abs(error.base_weight) * base
        mixed = total / divisor
        steps = [sides.max(axis=0), total, mixed, mixed * lam, mixed * lam + base]
        found = float(np.max(steps)) * (1 + 2.0**-10)
    return found if math.isfinite(found) else math.inf


def scaled(scale: Floats, squares: Floats) -> Floats:
    """Return |c_k| ||d_k||: float64[K, C].  An expert without weight loses nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(scale > 0, scale * np.sqrt(squares), 0.0)


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
    try:
        nearest = float(exact)
    except OverflowError:
        return math.inf
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)
