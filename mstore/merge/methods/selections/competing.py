"""COMPETING: d_k where its score is among those that are not dropped (`arithmetic.competition`).

Of n elements of a tensor, an expert's score of rank int(n (1 - ratio)) from the smallest, 0, is the
least that counts.  The largest delta of each expert is found in a first pass, the upper half of
that score's bits in a second and the lower in a third; all read all experts.  No pass keeps more
than chunks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3

from mstore.merge.arithmetic.competition import LIMITS, scores
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.measures.deltas import Chunks
from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.parameters import Parameter, Range, Value
from mstore.merge.methods.selections.selection import Cuts, Measured, Selection, common
from mstore.numeric import halves
from mstore.numeric.halves import Bits, Counts
from mstore.objects.plan import Threshold

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts

RATIO: Final = Parameter("ratio", "float", 0.1, Range(0.0, 1.0, above_low=True))
_SIGN: Final = np.uint32(1 << 31)
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

    def weightless(self, weights: Sequence[float]) -> tuple[bool, ...]:
        """Return False for all: whoever competes is read, whatever its weight."""
        return (False,) * len(weights)

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        """Return the largest delta of each, and the least and largest scores that count."""
        ids = [id for id, _ in facts.sides[1:]]
        what = struct.pack("<d", self.ratio) + b"".join(ids)
        keys = [
            (id, blake3(b"competition %d %d" % (place, k) + what).digest(length=16))
            for place in range(LIMITS)
            for k, id in enumerate(ids)
        ]
        known = facts.known(keys)
        if known is None:
            known = _limits(facts.chunks(), self.ratio, facts.pool)
            facts.keep(keys, known)
        sides = range(len(facts.sides))
        found = [facts.finite(one, sides, _LACK) for one in known]
        return Measured(thresholds=tuple([Threshold(one, -1) for one in found]))

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

    def thresholds(self, planned: Sequence[Threshold]) -> Cuts | None:
        """Return them for `Competition`; the kernel itself trims nothing."""
        return (
            np.array([one.value for one in planned], dtype=np.float32),
            np.full(len(planned), UNLIMITED, dtype=np.int64),
        )


def _ordered(score: Singles) -> Bits:
    """Return numbers without a sign that order as the scores do."""
    bits = score.view(np.uint32)
    found: Bits = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return found


def _score(ordered: int) -> float:
    bits = np.uint32(ordered)
    return float((bits ^ _SIGN if bits & _SIGN else ~bits).view(np.float32))


def _limits(chunks: Chunks, ratio: float, pool: ThreadPoolExecutor) -> list[float]:
    """Return the largest delta, the least score and the largest of each expert, in this order.

    NaN or infinity for tensors that are not finite.
    """
    experts = range(chunks.experts)

    def largest_in(number: int) -> Floats:
        found = np.zeros(chunks.experts)
        for deltas in chunks.deltas(number):
            found = np.maximum(found, [np.abs(one).max() for one in deltas])
        return found

    largest = np.max(list(pool.map(largest_in, chunks.numbers)), axis=0).tolist()
    if not all(map(math.isfinite, largest)):
        return [math.nan] * (LIMITS * chunks.experts)

    def upper(number: int) -> tuple[list[Counts], list[float]]:
        found, most = [halves.no_counts() for _ in experts], [-math.inf for _ in experts]
        for deltas in chunks.deltas(number):
            for k, score in enumerate(scores(deltas, largest)):
                halves.count_upper(_ordered(score), found[k])
                most[k] = max(most[k], float(score.max()))
        return found, most

    high, most = [halves.no_counts() for _ in experts], [-math.inf for _ in experts]
    for counts, own in pool.map(upper, chunks.numbers):
        most = list(map(max, most, own))
        for k in experts:
            high[k] += counts[k]
    # The rank from the largest, 1.
    rank = chunks.elements - int(chunks.elements * (1.0 - ratio))
    places = [halves.place(one, rank) for one in high]

    def lower(number: int) -> list[Counts]:
        found = [halves.no_counts() for _ in experts]
        for deltas in chunks.deltas(number):
            for k, score in enumerate(scores(deltas, largest)):
                halves.count_lower(_ordered(score), places[k][0], found[k])
        return found

    low = [halves.no_counts() for _ in experts]
    for counts in pool.map(lower, chunks.numbers):
        for k in experts:
            low[k] += counts[k]
    least = [
        _score(halves.joined(top, halves.place(own, left)[0]))
        for own, (top, left) in zip(low, places, strict=True)
    ]
    return [*largest, *least, *most]
