"""The model of an average by Fishers: what leaving experts out costs.

An expert's share of an element is w_k F_k over the sum of these.  Only the sums of Fishers over
chunks are known, so an element is taken to have its chunk's mean.  With deltas that are orthogonal,
the full merge minus the one without the experts O, of which R are left, is then, squared,

    sum over O of (s_k |d_k|)^2 + sum over R of (s_k (S_O / S_R) |d_k|)^2,

with S the sums of shares: where some are left out, those that are left weigh more.  So an expert
that is equal to the base counts, too.  An estimate, no bound: shares of single elements may be
anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mstore.merge.methods.method import Operation
from mstore.merge.planning.fishers import FisherGrid
from mstore.merge.planning.grid import Bools, Floats, Grid, added
from mstore.merge.planning.model import Model, States
from mstore.merge.planning.scores import Score
from mstore.merge.planning.surveyed import SurveyedTensor
from mstore.numeric.codes import LARGEST, can_overflow
from mstore.objects.plan import BELOW, EQUAL, READ


class InformedModel(Model):
    """As `Model`, for an operation of Combine.INFORMED."""

    def __init__(self, operation: Operation, grid: Grid, tensors: Sequence[SurveyedTensor]) -> None:
        super().__init__(operation, grid, tensors)
        assert grid.fishers is not None
        self._fishers: FisherGrid = grid.fishers
        self._counts = self.free() == READ
        self._parts = self._informed()
        self.roots = self._alone()

    def free(self) -> States:
        """Return uint8[K, C]: READ, unless the state is known without reading."""
        grid, fishers = self._grid, self._fishers
        states = np.full(grid.shape, READ, dtype=np.uint8)
        nothing = ~fishers.is_there
        if self.operation.floor == 0:
            nothing = nothing | (fishers.sums == 0)
        nothing[list(self.operation.weightless)] = True
        states[nothing] = BELOW
        still = grid.equal | (grid.known & (grid.column("nonzeros") == 0))
        # A Fisher counts where its expert does not move, as long as another one does.
        idle = ~((states == READ) & ~still).any(axis=0)
        states[:, idle] = np.where(grid.equal[:, idle], EQUAL, BELOW)
        return states

    def _informed(self) -> Floats:
        """Return w_k times the mean of F_k, float64[K, C]; 0 for who takes no part.

        Where not all are known, all are taken to be alike.
        """
        fishers = self._fishers
        means = np.maximum(fishers.sums / self._grid.elements, self.operation.floor)
        known = (~np.isnan(fishers.sums) | ~self._counts).all(axis=0)
        weights = np.array(self.operation.weights)[:, None]
        parts: Floats = np.where(self._counts, weights * np.where(known, means, 1.0), 0.0)
        return parts

    def _finite(self) -> Floats:
        """Return ||d_k||^2 times the names of the tensor, 0 where it is not known."""
        squares = self.squares * self._grid.copies
        return np.where(np.isfinite(squares), squares, 0.0)

    def _alone(self) -> Floats:
        """Return what leaving out one expert alone costs: float64[K, C]; infinite if unknown."""
        parts = self._parts
        total = added(parts)
        share = parts / np.where(total > 0, total, 1.0)
        own = share * share * self._finite()
        others = np.maximum(added(own) - own, 0.0)
        rest = total - parts
        with np.errstate(over="ignore"):
            grown = np.where(rest > 0, parts / np.where(rest > 0, rest, 1.0), 0.0)
            roots = np.sqrt(own + grown * grown * others)
        known = np.isfinite(self.squares) & np.isfinite(roots)
        return np.where(self._counts, np.where(known, roots, np.inf), 0.0)

    def largest(self, left: Floats) -> Floats:
        """Return float64[C], what leaving out all of these costs, squared."""
        is_left = left > 0
        return self.likely(is_left, np.zeros_like(is_left))

    def ranked(self, score: Score) -> Floats:
        """Return the roots to rank units by."""
        return self.roots

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return the expected square of the error of leaving these out, per chunk: float64[C]."""
        there = left_out | taken
        parts = np.where(there, self._parts, 0.0)
        total, out = added(parts), added(np.where(left_out, parts, 0.0))
        rest = added(np.where(taken, parts, 0.0))
        share = parts / np.where(total > 0, total, 1.0)
        with np.errstate(over="ignore"):
            grown = np.where(rest > 0, out / np.where(rest > 0, rest, 1.0), 0.0)
            squares = share * share * self._finite()
            return added(np.where(left_out, squares, 0.0)) + grown * grown * added(
                np.where(taken, squares, 0.0)
            )

    def overflow(
        self, dtype: str | None, squares: Mapping[str, float]
    ) -> list[tuple[float, str, int]]:
        """As `Model.overflow`: an average is no larger than the largest expert."""
        grid = self._grid
        moved = np.where(grid.known, grid.column("max_abs"), 0.0).max(axis=0)
        moved = np.maximum.reduceat(moved, grid.starts[:-1])
        found = []
        for tensor, delta in zip(self._tensors, moved.tolist(), strict=True):
            own, out = tensor.record.dtype, tensor.dtype or dtype or tensor.record.dtype
            source = tensor.sources[0] if tensor.sources else tensor.name
            reach = math.sqrt(squares.get(source, 0.0)) + delta
            if can_overflow(own, out) and not reach <= LARGEST[out]:
                worst = math.inf if math.isnan(reach) else reach
                found.append((-worst, tensor.name, tensor.elements))
        return found
