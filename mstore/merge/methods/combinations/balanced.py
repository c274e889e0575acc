"""BALANCED: sum of the w_k d_k, each times its share of the scales of all in the element."""

from __future__ import annotations

import numpy as np

from mstore.merge.arithmetic import competition
from mstore.merge.arithmetic.tiles import BALANCED
from mstore.merge.measures.grid import Bools, Floats, added
from mstore.merge.methods.method import Combination, Operation
from mstore.merge.methods.model import Model


class BalancedModel(Model):
    """As `Model`, for shares of those that win an element."""

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return a guess, float64[C]: each wins elements of its own, and has all of them."""
        return added(np.where(left_out, self._typical, 0.0) ** 2)


class Balanced(Combination):
    """A sum with factors of each element."""

    kind = BALANCED
    kernel = staticmethod(competition.run)
    model = BalancedModel
    unbounded = "weighs elements by who competes for them"

    @property
    def by_norms(self) -> bool:
        """Elements count."""
        return False

    def who(self, operation: Operation, k: int, listed: int) -> bytes:
        """Return how many compete: scores follow from that, too."""
        return sum(weight != 0 for weight in operation.weights).to_bytes(2, "little")
