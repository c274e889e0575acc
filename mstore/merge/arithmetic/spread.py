"""Spread: how differently experts move an element, and which elements that selects.

The spread of an element is the population variance of its deltas over all K experts, where one that
does not move it, or is not read, counts as zero.  It is summed in float64, in the order of experts
(Welford 1962), and rounded to float32.  Selected are the elements of a larger spread than a
threshold, and of those that equal it the ones before an index: the same however a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from mstore.merge.arithmetic.masks import Bools, Singles

TOGETHER: Final = 1 << 16
"""Elements to work on at a time: temporary arrays are that large."""


class Cut(NamedTuple):
    """Where a tensor's selection ends; before: a flat index, -1 if all equal ones are selected."""

    value: float
    before: int


def spreads(sides: Sequence[Singles | None], n: int) -> Singles:
    """Return float32[n], the spread of n elements; sides: deltas of each expert, None for zeros."""
    found = np.empty(n, dtype=np.float32)
    for start in range(0, n, TOGETHER):
        part = found[start : start + TOGETHER]
        mean, squares = np.zeros(part.size), np.zeros(part.size)
        with np.errstate(invalid="ignore", over="ignore"):
            for number, side in enumerate(sides, 1):
                own = 0.0 if side is None else side[start : start + TOGETHER].astype(np.float64)
                gap = own - mean
                mean = mean + gap / number
                squares = squares + gap * (own - mean)
            part[:] = squares / len(sides)
    return found


def selected(found: Singles, cut: Cut, first_index: int) -> Bools:
    """Return bool[n]: which of the elements from `first_index` on are selected; found: spreads."""
    value = np.float32(cut.value)
    equal = found == value
    if cut.before >= 0:
        equal[max(0, cut.before - first_index) :] = False
    chosen: Bools = equal | (found > value)
    return chosen
