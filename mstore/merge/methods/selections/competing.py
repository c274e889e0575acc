"""COMPETING: d_k where its score is among those that are not dropped (`arithmetic.competition`).

Of n elements of a tensor, an expert's score of rank int(n (1 - ratio)) from the smallest, 0, is the
least that counts.  Statistics know the largest delta of each expert.  A first pass over all experts
finds the upper half of that score's bits, and a second the lower.  Scores of a tensor are kept from
the first pass on if they are up to 32 Mi, so that the second reads nothing; of a larger one no pass
keeps more than chunks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3

from mstore.merge.arithmetic.competition import LIMITS, scores, singles_of
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.measures.deltas import Chunks, Ordered
from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.parameters import Parameter, Range, Value
from mstore.merge.methods.selections.selection import Cuts, Measured, Selection, common
from mstore.numeric import halves
from mstore.numeric.halves import Bits, Counts
from mstore.store.objects.plan import Threshold

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts

RATIO: Final = Parameter("ratio", "float", 0.1, Range(0.0, 1.0, above_low=True))
_LACK: Final = "a difference of two inputs is beyond float32", "its experts cannot compete"


class Competing(Selection, frozen=True):
    """The elements in which an expert competes best; ratio: of all."""

    ratio: float

    facts = "the largest delta of each expert, and the least and the largest score that counts"
    estimated = (
        "it takes experts to win different elements, and of what is left out the others win more"
    )
    leaves_nothing = "no element has a score that counts"
    by_norms = False
    is_told = False

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter ratio."""
        return cls(experts, common(parameters, RATIO))

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        """Return the largest delta of each, and the least and largest scores that count.

        Who has no weight does not compete, and has zeros.
        """
        own = [side for side in facts.experts if not weightless[side - 1]]
        ids = [facts.sides[side][0] for side in own]
        what = struct.pack("<d", self.ratio) + b"".join(ids)
        keys = [
            (id, blake3(b"competition %d %d" % (place, k) + what).digest(length=16))
            for place in range(LIMITS)
            for k, id in enumerate(ids)
        ]

        def limits() -> list[float]:
            largest = [facts.largest(side, _LACK) for side in own]
            return [*largest, *_limits(facts.chunks(own), self.ratio, largest, facts.pool)]

        known = facts.once(keys, limits)
        found = np.zeros((LIMITS, self.experts))
        found[:, [side - 1 for side in own]] = np.array(known).reshape(LIMITS, len(own))
        return Measured(thresholds=tuple([Threshold(one, -1) for one in found.ravel().tolist()]))

    def squares(self, grid: Grid) -> Floats:
        """Return a guess: what competes best is mostly also what moves most."""
        return grid.whole * min(1.0, 2.0 * math.sqrt(self.ratio))

    def kept(self, grid: Grid) -> Floats:
        """Return the share of what moves."""
        return grid.moved * self.ratio

    @property
    def planned(self) -> int:
        """Those of each expert."""
        return LIMITS

    @property
    def cuts(self) -> int:
        """As many for the kernel."""
        return LIMITS

    def thresholds(self, planned: Sequence[Threshold]) -> Cuts | None:
        """Return them; nothing ties at them."""
        return (
            np.array([one.value for one in planned], dtype=np.float32),
            np.full(len(planned), UNLIMITED, dtype=np.int64),
        )


def _limits(
    chunks: Chunks, ratio: float, largest: Sequence[float], pool: ThreadPoolExecutor
) -> list[float]:
    """Return the least score and the largest of each expert, in this order."""
    experts, count = range(chunks.experts), chunks.elements * chunks.experts
    every = Ordered(chunks, lambda deltas: scores(deltas, largest), count)

    def upper(number: int) -> tuple[list[Counts], Bits]:
        found, most = [halves.no_counts() for _ in experts], np.zeros(len(experts), dtype=np.uint32)
        for ordered in every.bits(number):
            for k in experts:
                halves.count_upper(ordered[k], found[k])
            most = np.maximum(most, ordered.max(axis=1))
        return found, most

    high, most = [halves.no_counts() for _ in experts], np.zeros(len(experts), dtype=np.uint32)
    for counts, own in pool.map(upper, chunks.numbers):
        most = np.maximum(most, own)
        for k in experts:
            high[k] += counts[k]
    # The rank from the largest, 1.
    rank = chunks.elements - int(chunks.elements * (1.0 - ratio))
    places = [halves.place(one, rank) for one in high]

    def lower(number: int) -> list[Counts]:
        found = [halves.no_counts() for _ in experts]
        for ordered in every.bits(number):
            for k in experts:
                halves.count_lower(ordered[k], places[k][0], found[k])
        return found

    low = [halves.no_counts() for _ in experts]
    for counts in pool.map(lower, chunks.numbers):
        for k in experts:
            low[k] += counts[k]
    least = [
        halves.joined(top, halves.place(own, left)[0])
        for own, (top, left) in zip(low, places, strict=True)
    ]
    found: list[float] = singles_of(np.array([*least, *most.tolist()], dtype=np.uint32)).tolist()
    return found
