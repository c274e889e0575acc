"""clamp: the base, held between the least and the largest element of the experts.

With a stiffness of 1 the range is that of the two elements next to the experts' mean, on either
side; with less, its ends lie so much of the way from those of the widest range.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.element_factors import ElementFactors
from mstore.merge.arithmetic.masks import Singles
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
        every, columns = np.stack(sides), np.arange(base.size)
        mean = sides[0]
        for side in sides[1:]:
            mean = mean + side
        mean = mean / np.float32(len(sides))
        rest = np.float32(1) - self._stiffness
        # The lower end is the upper one of what is negated.
        for sign in (np.float32(-1), np.float32(1)):
            own = every * sign
            near = far = np.argmax(own, axis=0)
            end = own[far, columns]
            if self._stiffness:
                beyond = np.where(own >= mean * sign, own, np.float32(np.inf))
                # A mean that was rounded may have none beyond it.
                near = np.where(np.isfinite(beyond.min(axis=0)), np.argmin(beyond, axis=0), far)
                end = rest * end + self._stiffness * own[near, columns]
            held = np.flatnonzero(base * sign > end)
            far, near = far[held], near[held]
            found[:, held] = 0
            found[far, held] = rest
            found[near, held] += self._stiffness
            found[far, held] = np.where(far == near, np.float32(1), found[far, held])
        return found


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
