"""Selections by the rank of |d_k| in its tensor.

TRIMMED: d_k if it is among the max(1, int(density * n)) largest.  BAND: d_k if int(gamma * n) are
larger, and it is among the int(density * n) largest of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.parameters import GAMMA, TRIM_DENSITY, Value
from mstore.merge.methods.selection import Cuts, Selection, each
from mstore.models.stats.histogram import exp_of_minus, tail_squares
from mstore.store.objects.plan import Threshold


# Not slotted: a survey asks for ranks of every expert and tensor.
class Trimmed(Selection, frozen=True, dict=True):
    """The largest elements of each delta; densities: the share that is kept."""

    densities: tuple[float, ...]

    facts = "the magnitude at which density ends"
    untrimmed = None
    by_norms = False

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter density."""
        return cls(experts, each(parameters, TRIM_DENSITY, experts))

    @cached_property
    def _trims(self) -> bool:
        return min(self.densities) < 1

    @property
    def trims(self) -> bool:
        """Whether an element of an expert is dropped."""
        return self._trims

    @property
    def score(self) -> Literal["norm", "trimmed"]:
        """What is above thresholds, where there are any."""
        return "trimmed" if self._trims else "norm"

    def ranks(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return max(1, int(density * n)), at most n."""
        if not self._trims:
            return ()
        return (min(elements, max(1, int(self.densities[expert] * elements))),)

    def idle(self, grid: Grid) -> Bools:
        """Return where nothing reaches the threshold, too."""
        return reached_by_nothing(grid, grid.threshold) if self.trims else grid.nothing

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those above the threshold."""
        return tails(grid, grid.threshold) if self.trims else grid.whole

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return those of the whole delta: what is above a threshold is only an estimate."""
        return grid.whole if self.trims else squares

    def scored(self, grid: Grid, squares: Floats, score: str) -> Floats:
        """Return those of the whole delta for the score that asks for no more."""
        return grid.whole if self.trims and score == "norm" else squares

    def kept(self, grid: Grid) -> Floats:
        """Return the share above the threshold."""
        return kept_above(grid, grid.threshold) if self.trims else grid.moved

    @property
    def planned(self) -> int:
        """One, where something is trimmed."""
        return self.cuts

    @property
    def cuts(self) -> int:
        """One, where something is trimmed."""
        return int(self.trims)

    def thresholds(self, planned: Sequence[Threshold]) -> Cuts | None:
        """Return those of the plan."""
        if not self.trims:
            return None
        values = np.array([cut.value for cut in planned], dtype=np.float32)
        return values, np.array([cut.quota for cut in planned], dtype=np.int64)


def reached_by_nothing(grid: Grid, threshold: Floats) -> Bools:
    """Return bool[K, C]: where no delta is as large as the threshold."""
    # `<` and not `not >=`: a NaN is larger than everything and must be read.
    found: Bools = grid.nothing | (grid.known & (grid.column("max_abs") < threshold))
    return found


def tails(grid: Grid, threshold: Floats) -> Floats:
    """Return roughly the squares of what is above a threshold; infinite if unknown."""
    found = [
        tail_squares(rows, np.where(np.isnan(cuts), 0.0, cuts))
        for rows, cuts in zip(grid.rows, threshold, strict=True)
    ]
    return np.where(grid.known, np.array(found).reshape(grid.shape), np.inf)


def kept_above(grid: Grid, threshold: Floats, ceiling: Floats | None = None) -> Floats:
    """Return roughly the share of elements above a threshold, and not above a ceiling.

    Assumes exponentially distributed magnitudes, as in `tail_squares`.
    """
    magnitudes = grid.column("sum_abs")
    usable = (magnitudes > 0) & np.isfinite(magnitudes) & np.isfinite(threshold)
    mean = np.where(usable, magnitudes, 1.0) / np.maximum(grid.column("nonzeros"), 1.0)
    cut = np.minimum(np.where(usable, threshold, 0.0) / mean, 2048.0)
    above = exp_of_minus(cut)
    if ceiling is not None:
        finite = np.where(np.isfinite(ceiling), ceiling, np.inf)
        above = above - exp_of_minus(np.minimum(finite / mean, 2048.0))
    return np.where(usable, grid.moved * np.maximum(above, 0.0), 0.0)


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
