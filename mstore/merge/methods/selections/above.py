"""ABOVE: d_k if |d_k| > epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.parameters import LEAST_MOVE, Value, next_single, single
from mstore.merge.methods.selections.selection import Cuts, Selection, common
from mstore.merge.methods.selections.trimmed import kept_above, reached_by_nothing, tails
from mstore.store.objects.plan import Threshold


class Above(Selection, frozen=True):
    """The deltas of a magnitude of `least` or more: the least float32 above epsilon."""

    least: float

    by_norms = False

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter epsilon."""
        return cls(experts, next_single(single(common(parameters, LEAST_MOVE))))

    def _threshold(self, grid: Grid) -> Floats:
        return np.full(grid.shape, self.least)

    def idle(self, grid: Grid) -> Bools:
        """Return where nothing is as large."""
        return reached_by_nothing(grid, self._threshold(grid))

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those above it."""
        return tails(grid, self._threshold(grid))

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return those of the whole delta."""
        return grid.whole

    def kept(self, grid: Grid) -> Floats:
        """Return the share above it."""
        return kept_above(grid, self._threshold(grid))

    @property
    def cuts(self) -> int:
        """One, the same for all."""
        return 1

    def thresholds(self, planned: Sequence[Threshold]) -> Cuts | None:
        """Return the least move, with all ties."""
        return (
            np.full(self.experts, self.least, dtype=np.float32),
            np.full(self.experts, UNLIMITED, dtype=np.int64),
        )
