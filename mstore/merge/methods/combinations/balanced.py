"""BALANCED: sum of the w_k d_k, each times its share of the scales of all in the element."""

from __future__ import annotations

from collections.abc import Mapping

from mstore.merge.arithmetic.competition import Competition
from mstore.merge.arithmetic.turns import Turn
from mstore.merge.measures.grid import Floats
from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.model import Model
from mstore.merge.methods.parameters import Value


class BalancedModel(Model):
    """As `Model`, for shares of those that win an element."""

    def _coefficients(self) -> Floats:
        """Return a guess: each wins elements of its own, and has all of them."""
        found: Floats = self._weights * self._undivided()
        return found


class Balanced(Sum):
    """A sum with factors of each element."""

    model = BalancedModel
    unbounded = "weighs elements by who competes for them"

    @property
    def by_norms(self) -> bool:
        """Elements count."""
        return False

    def turn(self, parameters: Mapping[str, Value]) -> Turn:
        """Return the competition."""
        return Competition()
