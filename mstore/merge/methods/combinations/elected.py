"""ELECTED: sum of the m_k that have the sign of the sum of all, over the sum of their w_k if
`normalize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mstore.merge.arithmetic.tiles import CONSENSUS
from mstore.merge.measures.estimates import elected
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Operation
from mstore.merge.methods.model import Model, scaled


class ElectedModel(Model):
    """As `Model`, for elections."""

    votes: Sequence[float] | None = None

    def __init__(self, operation: Operation, grid: Grid) -> None:
        self._normalizes = operation.normalizes
        heavy = {abs(weight) for weight in operation.weights if weight}
        self._is_uneven = self._normalizes and len(heavy) > 1
        super().__init__(operation, grid)

    def _coefficients(self) -> Floats:
        """Return a guess.

        An operator that divides by the weights that agree gives an expert all of its delta where no
        heavier one is kept, whatever its own weight, and elsewhere its weight over the heaviest
        one's.  The positions that different experts keep are assumed independent.
        """
        weights, scale = self._weights, self._undivided()
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

    def _with_lighter(self, roots: Floats) -> Floats:
        """Return `roots` plus what leaving a unit out lets in: float64[K, C].

        While a heavy expert is kept, lighter ones hardly count; without it their deltas appear.
        """
        weights = np.abs(np.array(self.operation.weights))
        full = scaled(np.sqrt(self._grid.copies) * self._undivided(), self.squares) ** 2
        full = np.where(np.isfinite(full), full, 0.0)
        squares = roots * roots
        for k, kept in enumerate(self._kept):
            for j in np.flatnonzero((weights > 0) & (weights < weights[k])).tolist():
                squares[k] += kept * full[j]
        found: Floats = np.sqrt(squares)
        return found

    def ranked(self, score: str) -> Floats:
        """Return roots that know of conflicts, if the score asks for them."""
        roots = super().ranked(score)
        if score == "conflict":
            # A delta without a norm has no direction; infinity stays infinity.
            share = agreement(self._grid.rows, self.operation.weights)
            squares = roots * roots * np.where(np.isinf(roots), 1.0, share)
            if self._normalizes:
                squares = squares + dilution(roots * roots, self._kept)
            return np.sqrt(squares)
        return self._with_lighter(roots) if self._is_uneven else roots

    def _apart(self, squares: Floats, kept: Floats, left_out: Bools) -> Floats:
        return elected(
            squares,
            kept,
            self.operation.weights,
            left_out,
            normalize=self._normalizes,
            votes=self.votes,
        )

    def _largest_weights(self) -> Floats:
        """Divided by the sum of the weights that agree, which may be just one of them."""
        return np.maximum(self._weights, 1.0) if self._normalizes else self._weights


class Elected(Combination):
    """A sum of what agrees on a sign."""

    kind = CONSENSUS
    model = ElectedModel
    unbounded = "elects signs"
    unconflicting = None
    of_nan = "a NaN has no sign and takes no part, an infinity may"
    elects = True

    def divisor(self, operation: Operation) -> float:
        """Return 1: elements divide by the weights that agree there."""
        return 1.0

    def dilutes(self, operation: Operation) -> bool:
        """Return False: weights that agree never include that of an expert without a delta."""
        return False

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return as much as if it were alone, where it divides by the weights that agree."""
        if self.normalizes(operation):
            return (operation.farthest,) * len(operation.weights)
        return super().most(operation)


def agreement(rows: Sequence[np.ndarray[Any, Any]], weights: Sequence[float]) -> Floats:
    """Estimate how much of each weighted delta the elected signs leave: float64[K, C].

    rows: CHUNK[C] per expert.  With rho the cosine of w_k d_k and sum_j w_j d_j, as their count
    sketches estimate it, (1 + rho) / 2: 1 for a delta with the sum's direction, 1/2 for an
    orthogonal one, 0 for its opposite. 1 where no direction is known.
    """
    directions = []
    for side, weight in zip(rows, weights, strict=True):
        exponents = side["sketch_exponent"].astype(np.int32)[:, None]
        directions.append(weight * np.ldexp(side["sketch"].astype(np.float64), exponents))
    consensus = np.zeros_like(directions[0])
    for direction in directions:
        consensus += direction
    heaviness = _inner(consensus, consensus)
    shares = []
    for direction in directions:
        norms = np.sqrt(_inner(direction, direction)) * np.sqrt(heaviness)
        # Below the smallest normal number a quotient would say nothing.
        known = norms > np.finfo(np.float64).tiny
        cosine = _inner(direction, consensus) / np.where(known, norms, 1.0)
        shares.append(np.where(known, np.clip((1.0 + cosine) / 2.0, 0.0, 1.0), 1.0))
    return np.array(shares)


def dilution(squares: Floats, kept: Floats) -> Floats:
    """Return the effect of leaving a unit out on heavier ones with a shared divisor: float64[K, C].

    squares, kept: float64[K, C], the squared norm of each sparsified delta and the share of
    elements that it keeps.  An operator that divides by the weights that agree takes the mean of a
    heavy and a light delta where both are kept and agree (half of those places, if signs are
    independent).  Without the light one, the heavy one stays whole, which is off by half of it, a
    quarter of its square.
    """
    finite = np.where(np.isfinite(squares), squares, 0.0)
    found = np.zeros_like(finite)
    for light, share in enumerate(kept):
        heavier = np.zeros_like(share)
        for other in finite:
            heavier = heavier + np.where(other > finite[light], other, 0.0)
        found[light] = share * heavier / 8.0
    return found


def _inner(a: Floats, b: Floats) -> Floats:
    products = a * b
    # Pairwise halving, as in `mstore.models.stats.chunk.inner`: one fixed order of additions.
    while products.shape[-1] > 1:
        half = products.shape[-1] // 2
        products = products[..., :half] + products[..., half:]
    found: Floats = products[..., 0]
    return found
