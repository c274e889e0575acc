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
from mstore.merge.arithmetic.tiles import TILE, address
from mstore.numeric.passes import Pass

_spreads: Final = Pass(
    "mstore.merge.arithmetic.spread_passes",
    "spreads",
    "piipp",
    ("merge/arithmetic/tiles.py", "merge/arithmetic/spread_passes.py"),
)


class Cut(NamedTuple):
    """Where a tensor's selection ends; before: a flat index, -1 if all equal ones are selected."""

    value: float
    before: int


def spreads(sides: Sequence[Singles | None], n: int) -> Singles:
    """Return float32[n], the spread of n elements.

    sides: deltas of each expert, float32[n], contiguous; None for zeros.
    """
    found, scratch = np.empty(n, dtype=np.float32), np.empty((3, TILE), dtype=np.float64)
    places = np.array([0 if one is None else address(one) for one in sides], dtype=np.int64)
    _spreads(address(places), len(sides), n, address(scratch), address(found))
    return found


def selected(found: Singles, cut: Cut, first_index: int) -> Bools:
    """Return bool[n]: which of the elements from `first_index` on are selected; found: spreads."""
    value = np.float32(cut.value)
    equal = found == value
    if cut.before >= 0:
        equal[max(0, cut.before - first_index) :] = False
    chosen: Bools = equal | (found > value)
    return chosen
