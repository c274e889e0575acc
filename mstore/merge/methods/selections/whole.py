"""WHOLE: e_k itself.  What is combined is the result; no base is added."""

from __future__ import annotations

import numpy as np

from mstore.merge.measures.grid import Bools, Grid
from mstore.merge.methods.selections.selection import Selection


class Whole(Selection, frozen=True):
    """The experts themselves: an element counts although no expert moves it."""

    is_whole = True
    lists_base = True
    leaves_base = False

    @property
    def cancels(self) -> bool:
        """Two of them leave nothing of the base, either."""
        return False

    def idle(self, grid: Grid) -> Bools:
        """Return False throughout."""
        return np.zeros(grid.shape, dtype=bool)
