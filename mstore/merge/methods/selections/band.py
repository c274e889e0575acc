"""BAND: d_k if int(gamma * n) of the |d_k| of a tensor are larger, and it is among the
int(density * n) largest of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.parameters import GAMMA, TRIM_DENSITY, Value
from mstore.merge.methods.selections.selection import Selection, each
from mstore.merge.methods.selections.trimmed import Trimmed, kept_above
from mstore.models.stats.histogram import tail_squares


class Band(Trimmed, frozen=True, dict=True):
    """The largest elements but the very largest; gammas: the share of those."""

    gammas: tuple[float, ...]

    facts = "the magnitudes at which density and gamma end"

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameters density and gamma."""
        densities = each(parameters, TRIM_DENSITY, experts)
        return cls(experts, densities, each(parameters, GAMMA, experts))

    def ranks(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return two; elements up to the second are dropped.

        If fewer than int(gamma * n) can be dropped, as many as can.
        """
        if not self.trims:
            return ()
        kept = int(self.densities[expert] * elements)
        last = min(elements, kept + int(self.gammas[expert] * elements))
        return last, last - kept

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those above the threshold, without those above the ceiling."""
        if not self.trims:
            return grid.whole
        found = []
        for rows, low, high in zip(grid.rows, grid.threshold, grid.ceiling, strict=True):
            own = tail_squares(rows, np.where(np.isnan(low), 0.0, low))
            above = tail_squares(rows, np.where(np.isnan(high), np.inf, high))
            # A NaN (infinity minus infinity) stays unknown.
            with np.errstate(invalid="ignore"):
                found.append(np.where(np.isinf(own), own, np.maximum(own - above, 0.0)))
        return np.where(grid.known, grid.fitted(found), np.inf)

    def kept(self, grid: Grid) -> Floats:
        """Return the share between threshold and ceiling."""
        return kept_above(grid, grid.threshold, grid.ceiling) if self.trims else grid.moved

    @property
    def cuts(self) -> int:
        """Two, where something is trimmed."""
        return 2 * int(self.trims)
