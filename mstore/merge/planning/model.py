"""The model of one operation: what leaving chunks out costs, for the tensors that have it.

Owns norms, coefficients, estimates and the rounding error of one operation over its part of the
grid.  Does not own what is taken (`planner`), nor the order (`greedy`).  Pure; arrays are [K, C]:
experts by the chunks of these tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mstore.merge.methods.bounds import Rounding, coefficients, rounding
from mstore.merge.methods.method import Operation
from mstore.merge.methods.parameters import MAX_SINGLE
from mstore.merge.planning.estimates import averaged, elected
from mstore.merge.planning.grid import Bools, Floats, Grid, added
from mstore.merge.planning.scores import Score, agreement, dilution
from mstore.merge.planning.surveyed import SurveyedTensor
from mstore.numeric.codes import LARGEST, can_overflow
from mstore.objects.plan import BELOW, DROPPED, EQUAL, READ, SHARED
from mstore.stats.histogram import exp_of_minus, tail_squares

States = np.ndarray[Any, np.dtype[np.uint8]]
_REACHED = 1.0 + 2.0**-20


class Model:
    """One operation over a grid of the tensors that have it.

    squares: float64[K, C], of each selected delta. roots: what leaving it out adds to the norm of
    the error in its chunk. certain: an upper bound on that for additive methods.
    """

    def __init__(self, operation: Operation, grid: Grid, tensors: Sequence[SurveyedTensor]) -> None:
        self.operation = operation
        self._grid = grid
        self._tensors = tensors
        self._trims = operation.is_trimmed or operation.is_above
        self._threshold = grid.threshold
        if operation.is_above:
            self._threshold = np.full(grid.shape, operation.least)
        self.squares = self._tails() if self._trims else self._moved()
        self._normalizes = operation.is_elected and operation.normalizes
        heavy = {abs(weight) for weight in operation.weights if weight}
        self._is_uneven = self._normalizes and len(heavy) > 1
        self._scale = self._coefficients() * np.sqrt(grid.copies)
        certain = self.squares
        if self._trims:
            # The norm of a trimmed delta is only an estimate: the whole delta's norm is never less.
            certain = self._whole()
        elif operation.is_important:
            # Of a chunk no more is selected than of its tensor.
            certain = np.minimum(self.squares, self._bands)
            self._fit(list(self.squares))
        self.certain = _scaled(self._scale, certain)
        self._typical = _scaled(self._scale, self.squares)
        # Ranked by what is certain, a larger budget never has a larger bound.
        self.roots = self.certain if operation.is_important else self._typical

    @property
    def is_additive(self) -> bool:
        """Whether errors have a certified bound."""
        return self.operation.is_additive

    def free(self) -> States:
        """Return uint8[K, C]: READ, unless the state is known without reading."""
        grid = self._grid
        states = np.full(grid.shape, READ, dtype=np.uint8)
        nothing = grid.known & (grid.column("nonzeros") == 0)
        if self._trims:
            # `<` and not `not >=`: a NaN is larger than everything and must be read.
            states[nothing | (grid.known & (grid.column("max_abs") < self._threshold))] = BELOW
        elif self.operation.is_important:
            states[nothing | (self._bands == 0)] = BELOW
        elif not self.operation.is_whole:
            states[nothing] = BELOW
        states[list(self.operation.weightless)] = BELOW
        states[grid.equal] = EQUAL
        return states

    # -- norms -------------------------------------------------------------------------------

    def _coefficients(self) -> Floats:
        """Return |c_k|, float64[K, C]: certified for additive methods, a guess for the others.

        An operator that divides by the weights that agree gives an expert all of its delta where no
        heavier one is kept, whatever its own weight, and elsewhere its weight over the heaviest
        one's.  The positions that different experts keep are assumed independent.
        """
        weights = np.abs(np.array(self.operation.weights))[:, None]
        if self.operation.is_additive:
            one = coefficients(self.operation)
            return np.array(one)[:, None]
        scale = self._undivided()
        if self.operation.rows is not None:
            # A guess: shares of all, whatever the angles.
            shared: Floats = weights * scale / max(float(weights.sum()), 1e-30)
            return shared
        if not self._normalizes or not weights.any():
            plain: Floats = weights * scale
            return plain
        share = weights / weights.max()
        if not self._is_uneven:
            even: Floats = share * scale
            return even
        alone = np.ones(self._grid.shape)
        for weight, kept in zip(weights, self._kept, strict=True):
            alone[weights[:, 0] < weight] *= 1.0 - kept
        squares: Floats = np.where(weights > 0, alone + (1.0 - alone) * share**2, 0.0)
        return np.sqrt(squares) * scale

    @cached_property
    def _drawn(self) -> Floats:
        """Return the share of elements that a random mask keeps, float64[K, 1]; 1 for others."""
        operation = self.operation
        shares = operation.densities if operation.is_drawn else (1.0,) * len(operation.weights)
        return np.array(shares)[:, None]

    def _undivided(self) -> Floats:
        """Return |lambda scale| times the factor of random sparsification: float64[K, 1]."""
        scale = np.full_like(self._drawn, abs(self.operation.factor_given))
        if self.operation.is_drawn and self.operation.parameters["rescale"]:
            # E[(m d / p)^2] = d^2 / p for a mask m that keeps with probability p.
            scale = scale / np.sqrt(self._drawn)
        return scale

    def _with_lighter(self, roots: Floats) -> Floats:
        """Return `roots` plus what leaving a unit out lets in: float64[K, C].

        While a heavy expert is kept, lighter ones hardly count; without it their deltas appear.
        """
        weights = np.abs(np.array(self.operation.weights))
        full = _scaled(np.sqrt(self._grid.copies) * self._undivided(), self.squares) ** 2
        full = np.where(np.isfinite(full), full, 0.0)
        squares = roots * roots
        for k, kept in enumerate(self._kept):
            for j in np.flatnonzero((weights > 0) & (weights < weights[k])).tolist():
                squares[k] += kept * full[j]
        found: Floats = np.sqrt(squares)
        return found

    def _whole(self) -> Floats:
        """Return ||d_k||^2: float64[K, C]; infinite if unknown."""
        squares = self._grid.column("sum_squares")
        # A NaN would make every comparison false; such a chunk is read first.
        return np.where(self._grid.known & ~np.isnan(squares), squares, np.inf)

    def _moved(self) -> Floats:
        """Return `_whole`, or a bound on what of it is within reach, if that limits the operation.

        With q = `_REACHED` reaches, the sum of min(|d|, q)^2 is at most q sum |d| and q^2 times the
        number of elements that move; see `methods.bounds`.
        """
        whole = self._whole()
        if self.operation.is_varied:
            # A guess: what varies most is also what moves most.
            return whole * min(1.0, 2.0 * math.sqrt(self.operation.select_share))
        if not self.operation.is_near:
            return whole
        grid = self._grid
        with np.errstate(over="ignore", invalid="ignore"):
            reach = self.operation.reach * _REACHED + grid.column("max_abs") * 2.0**-149
            near = np.fmin(grid.column("sum_abs") * reach, grid.column("nonzeros") * reach * reach)
        # Where the row is not finite, nothing is known.
        return np.where(np.isfinite(whole), np.fmin(whole, near), whole)

    def _tails(self) -> Floats:
        """Return roughly the part of it above the trim threshold."""
        grid = self._grid
        found = [
            tail_squares(rows, np.where(np.isnan(cuts), 0.0, cuts))
            for rows, cuts in zip(grid.rows, self._threshold, strict=True)
        ]
        if self.operation.is_band:
            # Without what is above the ceiling; a NaN (infinity minus infinity) stays unknown.
            for own, rows, cuts in zip(found, grid.rows, grid.ceiling, strict=True):
                above = tail_squares(rows, np.where(np.isnan(cuts), np.inf, cuts))
                with np.errstate(invalid="ignore"):
                    own[:] = np.where(np.isinf(own), own, np.maximum(own - above, 0.0))
            self._fit(found)
        return np.where(grid.known, np.array(found).reshape(grid.shape), np.inf)

    @cached_property
    def _bands(self) -> Floats:
        """Return `ExpertTensor.band` of each chunk's tensor: float64[K, C]."""
        own = np.array([[one.band for one in tensor.experts] for tensor in self._tensors])
        return np.repeat(own.reshape(-1, self._grid.shape[0]), np.diff(self._grid.starts), axis=0).T

    def _fit(self, found: Sequence[Floats]) -> None:
        """Scale the chunks of each tensor so that they add up to what its histogram shows.

        A few large elements, which the ceiling drops, may have most of a chunk's squares; their
        share is known of the whole tensor only.
        """
        starts = self._grid.starts.tolist()
        for k, (own, whole) in enumerate(zip(found, self._whole(), strict=True)):
            for tensor, start, end in zip(self._tensors, starts, starts[1:], strict=False):
                band = tensor.experts[k].band
                part = own[start:end]
                total = math.fsum(part[np.isfinite(part)].tolist())
                if math.isfinite(band) and band >= 0 and total > 0:
                    scaled = np.minimum(part * (band / total), whole[start:end])
                    part[:] = np.where(np.isfinite(part), scaled, part)

    @cached_property
    def _kept(self) -> Floats:
        """Return roughly the share of a chunk's elements that sparsifying keeps: float64[K, C]."""
        grid = self._grid
        kept = grid.column("nonzeros") / grid.elements
        if self._trims:
            magnitudes = grid.column("sum_abs")
            usable = (magnitudes > 0) & np.isfinite(magnitudes) & np.isfinite(self._threshold)
            mean = np.where(usable, magnitudes, 1.0) / np.maximum(grid.column("nonzeros"), 1.0)
            # Assumes exponentially distributed magnitudes, as in `tail_squares`.
            cut = np.minimum(np.where(usable, self._threshold, 0.0) / mean, 2048.0)
            kept_above = exp_of_minus(cut)
            if self.operation.is_band:
                ceiling = np.where(np.isfinite(grid.ceiling), grid.ceiling, np.inf)
                kept_above = kept_above - exp_of_minus(np.minimum(ceiling / mean, 2048.0))
            return np.where(usable, kept * np.maximum(kept_above, 0.0), 0.0)
        return kept * (self.operation.select_share if self.operation.is_varied else self._drawn)

    # -- ranking -----------------------------------------------------------------------------

    def largest(self, left: Floats) -> Floats:
        """Return float64[C], what leaving out these roots (0 where kept) costs, squared."""
        with np.errstate(over="ignore"):
            return added(left) ** 2 if self.is_additive else added(left**2)

    def ranked(self, score: Score) -> Floats:
        """Return the roots to rank units by, where gains do not fall as units are taken."""
        if self.is_additive:
            return self.roots
        roots = self.roots
        if self.operation.is_trimmed and score == "norm":
            roots = _scaled(self._scale, self._whole())
        if score == "conflict":
            # A delta without a norm has no direction; infinity stays infinity.
            share = agreement(self._grid.rows, self.operation.weights)
            squares = roots * roots * np.where(np.isinf(roots), 1.0, share)
            if self._normalizes:
                squares = squares + dilution(roots * roots, self._kept)
            roots = np.sqrt(squares)
        elif self._is_uneven:
            roots = self._with_lighter(roots)
        return roots

    # -- errors ------------------------------------------------------------------------------

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return the mean squared error of leaving these out, per chunk: float64[C].

        Averages over random masks, too: for d, kept with probability p, the mean square is p d^2,
        and d^2 / p with `rescale`.
        """
        operation, density = self.operation, self._drawn
        if operation.is_additive or operation.rows is not None:
            # The coefficients hold for every mask: with `rescale` they include 1 / p.
            squares = np.where(left_out, self._typical, 0.0) ** 2
            if operation.is_even:
                # Plans made before experts had densities of their own keep every bit.
                even: Floats = added(squares) * density[0, 0]
                return even
            each: Floats = squares * density
            return added(each)
        found = np.zeros(self._grid.shape[1])
        some = np.flatnonzero(left_out.any(axis=0))
        if not len(some):
            return found
        factor = 1.0 / density if operation.parameters.get("rescale") else density
        squares = self.squares[:, some]
        if not operation.is_even:
            squares, factor = squares * factor, np.ones_like(factor)
        # Chunks read without statistics, or not finite, count as absent.
        counts = (left_out | taken)[:, some] & np.isfinite(squares)
        squares = np.where(counts, squares, 0.0)
        kept = np.where(counts, self._kept[:, some], 0.0)
        scale = abs(operation.factor_given)
        if operation.is_averaged:
            found[some] = averaged(squares, kept, operation.weights, left_out[:, some])
            return found * self._grid.copies * (scale * scale)
        found[some] = elected(
            squares,
            kept,
            operation.weights,
            left_out[:, some],
            normalize=self._normalizes,
            votes=(1.0,) * len(operation.weights) if operation.is_fused else None,
        )
        total: Floats = found * self._grid.copies * (float(factor[0, 0]) * scale * scale)
        return total

    def float32_error(self, free: States) -> float:
        """Return what float32 may add to the distance of two merges; infinite if it may overflow.

        Chunks of which nothing is left out come out equal.  This counts all chunks of which
        anything may be left out, so that the result does not depend on the budget. free: the
        states before units are taken.
        """
        if not self.operation.is_additive:
            return math.inf
        grid = self._grid
        error = rounding(self.operation)
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

    @cached_property
    def _beyond(self) -> Floats:
        """Return float64[T, K, 2]: `ExpertTensor.surplus`."""
        return np.array([[e.surplus for e in t.experts] for t in self._tensors], dtype=np.float64)

    def surplus(self, states: States, left_out: Bools) -> Floats:
        """Return what the elements kept beyond k add: float64[K, T], squares as in `_roots`."""
        grid, beyond = self._grid, self._beyond
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

    def overflow(
        self, dtype: str | None, squares: Mapping[str, float]
    ) -> list[tuple[float, str, int]]:
        """Return tensors that may overflow the output's type: (-worst, name, elements).

        Uses the norm of the base's tensor, which no element of it exceeds, and the largest deltas
        where statistics exist. dtype: of the output, None for the base's. squares: of each tensor
        of the base.
        """
        grid = self._grid
        error = rounding(self.operation)
        divisor, lam, rescale = error.factors
        weights = np.abs(np.array(self.operation.weights))[:, None]
        if self._normalizes:
            # Divided by the sum of the weights that agree, which may be just one of them.
            weights = np.maximum(weights, 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = np.where(grid.known, grid.column("max_abs"), 0.0) * weights
            moved = added(deltas) * (lam * rescale / divisor)
            moved = np.maximum.reduceat(moved, grid.starts[:-1])
        of_base = float(weights.sum()) + abs(error.base_weight)
        scale = of_base / divisor if error.is_whole else 1.0
        found = []
        for tensor, delta in zip(self._tensors, moved.tolist(), strict=True):
            own, out = tensor.record.dtype, tensor.dtype or dtype or tensor.record.dtype
            source = tensor.sources[0] if tensor.sources else tensor.name
            reach = max(1.0, scale) * math.sqrt(squares.get(source, 0.0)) + delta
            if can_overflow(own, out) and not reach <= LARGEST[out]:
                worst = math.inf if math.isnan(reach) else reach
                found.append((-worst, tensor.name, tensor.elements))
        return found


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


def _scaled(scale: Floats, squares: Floats) -> Floats:
    """Return |c_k| ||d_k||: float64[K, C].  An expert without weight loses nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(scale > 0, scale * np.sqrt(squares), 0.0)
