"""FUSED: sum of the w_k selected_k of those that have the sign of the sum of all selected_k, over
the sum of their w_k, which is at least 1e-6.  The w_k follow from squares of what is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mstore.merge.arithmetic.tiles import FUSED
from mstore.merge.measures import BEYOND
from mstore.merge.measures.grid import Grid
from mstore.merge.methods.combinations.elected import Elected, ElectedModel
from mstore.merge.methods.method import Operation
from mstore.merge.methods.selections.selection import Measured
from mstore.store.objects.plan import Mixture

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


class FusedModel(ElectedModel):
    """As `ElectedModel`, with a vote for each."""

    def __init__(self, operation: Operation, grid: Grid) -> None:
        self.votes = (1.0,) * len(operation.weights)
        super().__init__(operation, grid)


class Fused(Elected):
    """What elects is not weighed; weights count after the election.

    weigh: computes the weights of experts from the sums of squares of what is selected, and the
    number of elements.
    """

    kind = FUSED
    model = FusedModel
    elects = False

    def __init__(self, weigh: Callable[[Sequence[float], int], tuple[float, ...]]) -> None:
        self._weigh = weigh

    def normalizes(self, operation: Operation) -> bool:
        """Return True."""
        return True

    def needs_facts(self, operation: Operation) -> bool:
        """Return True."""
        return True

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return the operation with what `weigh` makes of the squares."""
        lack = BEYOND, "its experts cannot be weighed by squares of deltas"
        if measured.squares is None:
            squares = [facts.apart(side, lack) for side in facts.experts]
        else:
            sides = range(len(facts.sides))
            squares = [facts.finite(one, sides, lack) for one in measured.squares]
        return self.weighed(operation, squares, facts.elements)

    def weighed(self, operation: Operation, squares: Sequence[float], elements: int) -> Operation:
        """Return the operation of a tensor of so many elements, with these sums of squares."""
        return operation.settled(Mixture(1.0, self._weigh(squares, elements), keeps_base=True))
