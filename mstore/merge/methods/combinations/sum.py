"""SUM: sum of m_k = w_k * selected_k, over the sum of all w_k if `normalize`."""

from __future__ import annotations

from mstore.merge.arithmetic.tiles import ADDITIVE
from mstore.merge.methods.combinations.combination import Combination


class Sum(Combination):
    """A sum with fixed factors."""

    kind = ADDITIVE
