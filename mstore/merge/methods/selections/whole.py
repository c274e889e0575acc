"""WHOLE: e_k itself.  What is combined is the result; no base is added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mstore.merge.measures.grid import Bools, Grid
from mstore.merge.methods import bounds
from mstore.merge.methods.selections.selection import Selection

if TYPE_CHECKING:
    from mstore.merge.methods.bounds import Rounding
    from mstore.merge.methods.combinations.combination import Combination
    from mstore.merge.methods.method import Operation


class Whole(Selection, frozen=True):
    """The experts themselves: an element counts although no expert moves it."""

    is_whole = True
    lists_base = True

    @property
    def cancels(self) -> bool:
        """Two of them leave nothing of the base, either."""
        return False

    def idle(self, grid: Grid) -> Bools:
        """Return False throughout."""
        return np.zeros(grid.shape, dtype=bool)

    def keeps_base(self, operation: Operation) -> bool:
        """Return whether weights of experts that equal the base add up to it."""
        return operation.outer == 0 or operation.method.combine.keeps_base(operation)

    def rounding(self, operation: Operation) -> Rounding:
        """Return that of a sum of whole experts."""
        return bounds.of_whole(operation)

    def kind(self, combination: Combination) -> int:
        """Return the code of a sum of whole experts."""
        return combination.whole_kind
