"""ALONE: m_0, of the only expert."""

from __future__ import annotations

from mstore.merge.arithmetic.tiles import ALONE
from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Operation


class Alone(Sum):
    """One expert, times its weight."""

    whole_kind = ALONE
    stacks = True

    def keeps_base(self, operation: Operation) -> bool:
        """Return whether nothing is multiplied."""
        return super().keeps_base(operation) or operation.weights == (1.0,)
