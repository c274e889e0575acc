"""The model of one operation: what leaving chunks out costs, for the tensors that have it.

Owns norms, coefficients, estimates and the rounding error of one operation over its part of the
grid.  A combination with other estimates has a model of its own.  Does not own what is taken
(`planning.planner`), nor the order (`planning.ranking`).  Pure; arrays are [K, C]: experts by the
chunks of these tensors.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from mstore.merge.measures.estimates import elected
from mstore.merge.measures.grid import Bools, Floats, Grid, added
from mstore.merge.methods.bounds import Rounding, coefficients, rounding
from mstore.merge.methods.method import Operation
from mstore.merge.methods.parameters import MAX_SINGLE
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, READ, SHARED

States = np.ndarray[Any, np.dtype[np.uint8]]


class Model:
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
        """|w_k|: float64[K, 1]."""
        sizes: Floats = np.abs(np.array(self.operation.weights))[:, None]
        return sizes

    def _coefficients(self) -> Floats:
        """Return |c_k|, float64[K, C] or [K, 1]: certified for additive methods, else a guess."""
        if self.operation.has_bound:
            return np.array(coefficients(self.operation))[:, None]
        weights, scale = self._weights, self._undivided()
        if self.operation.row_factors is not None:
            # A guess: shares of all, whatever the angles.
            shared: Floats = weights * scale / max(float(weights.sum()), 1e-30)
            return shared
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
        if operation.has_bound or operation.row_factors is not None:
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
