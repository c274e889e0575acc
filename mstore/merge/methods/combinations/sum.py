"""SUM: sum of m_k = w_k * selected_k, over the sum of all w_k if `normalize`."""

from __future__ import annotations

from mstore.merge.arithmetic.tiles import ADDITIVE
from mstore.merge.methods.method import Combination
from mstore.merge.methods.model import Model


class Sum(Combination):
    """A sum with fixed factors."""

    kind = ADDITIVE
    model = Model
