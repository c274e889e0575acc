"""SUM: sum of m_k = w_k * selected_k, over the sum of all w_k if `normalize`; ALONE: m_0, of the
only expert.
"""

from __future__ import annotations

from mstore.merge.arithmetic.tiles import ADDITIVE, ALONE
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Operation
from mstore.merge.methods.model import Model


class Sum(Combination):
    """A sum with fixed factors."""

    kind = ADDITIVE
    model = Model


class Alone(Sum):
    """One expert, times its weight."""

    whole_kind = ALONE
    stacks = True

    def keeps_base(self, operation: Operation) -> bool:
        """Return whether nothing is multiplied."""
        return super().keeps_base(operation) or operation.weights == (1.0,)
