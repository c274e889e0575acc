"""clamp: the base, held between the least and the largest element of the experts.

With a stiffness of 1 the range is that of the two elements next to the experts' mean, on either
side; with less, its ends lie so much of the way from those of the widest range.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce
from typing import Final

import numpy as np

from mstore.merge.arithmetic.element_factors import ElementFactors
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.methods.combinations import Factored
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Range
from mstore.merge.methods.selection import Delta, common

STIFFNESS: Final = Parameter("stiffness", "float", 0.0, Range(0.0, 1.0))


class _Clamped(ElementFactors):
    """1 for the expert at the end of the range that the base is beyond; 0 within.

    stiffness: with one, an end lies between two experts, and both have a share.
    """

    code = 8

    def __init__(self, stiffness: float) -> None:
        self._stiffness = np.float32(stiffness)

    def key(self, shape: Sequence[int]) -> bytes:
        return struct.pack("<f", self._stiffness)

    def factors(self, base: Singles, sides: Sequence[Singles], weights: Sequence[float]) -> Singles:
        found = np.zeros((len(sides), base.size), dtype=np.float32)
        mean = reduce(np.add, sides) / np.float32(len(sides))
        free = self._hold(base, sides, mean, np.ones(base.size, dtype=np.bool_), found)
        # The lower end is the upper one of what is negated.
        self._hold(-base, [-side for side in sides], -mean, free, found)
        return found

    def _hold(
        self, base: Singles, sides: Sequence[Singles], mean: Singles, free: Bools, found: Singles
    ) -> Bools:
        """Add the factors of free elements that are above the upper end; return the other ones."""
        near = far = end = reduce(np.maximum, sides)
        rest = np.float32(1) - self._stiffness
        if self._stiffness:
            beyond = [np.where(side >= mean, side, np.float32(np.inf)) for side in sides]
            near = reduce(np.minimum, beyond)
            # A mean that was rounded may have none beyond it.
            near = np.where(np.isfinite(near), near, far)
            end = rest * far + self._stiffness * near
        held = free & (base > end)
        left = left_near = held
        for own, side in zip(found, sides, strict=True):
            # The first of equal ones.  Sums of products take a tenth of the time of a choice.
            is_far, is_near = left & (side == far), left_near & (side == near)
            left, left_near = left & ~is_far, left_near & ~is_near
            factor = (is_far & is_near).astype(np.float32)
            if self._stiffness:
                factor += rest * (is_far & ~is_near) + self._stiffness * (is_near & ~is_far)
            np.add(own, factor, out=own)
        return free & ~held


class Ends(Delta, frozen=True):
    """The deltas of experts that are the ends of a range."""

    estimated = "it takes the base to be beyond the range mostly, by a share of each delta"
    sized_by_norms = False


CLAMP: Final = Method(
    name="clamp",
    summary="the base, held between the least and the largest element of the experts",
    formula="min(max(base, least of the expert_k), largest of the expert_k)",
    source="sd-mecha, github.com/ljleb/sd-mecha",
    parameters=(STIFFNESS,),
    select=Ends,
    combine=Factored(lambda given: _Clamped(common(given, STIFFNESS))),
    weighted=False,
    least=2,
    mind="what is left out of an expert counts as the base's, so that the base is in the range",
    is_ours=True,
)
