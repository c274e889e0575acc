"""consensus: task arithmetic on the elements that several experts need.

An expert needs an element if its TALL mask has it: |m_k| > tall_mask_lambda |sum of all m_j - m_k|,
m_k = w_k d_k.  So it moves it further than the others do together.  Sums are float32, in the order
of experts; an expert that is not read moves nothing, and needs nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.measures.deltas import pieces_of_chunk
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, MAX_SINGLE, Parameter, Range, Value, single
from mstore.merge.methods.selection import ChunkFacts, Masks, Selection, alike, common, each
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, phrase

LEAST: Final = Parameter("k", "int", 2, Range(1, 2**31))
RATIO: Final = Parameter("tall_mask_lambda", "float", 1.0, Range(0.0, MAX_SINGLE), each=True)


class Agreed(Selection, frozen=True):
    """The elements that several experts need.

    ratios: how many times the others' sum an expert's delta must be, a float32. least: how many
    must need it.
    """

    ratios: tuple[float, ...]
    least: int

    unbounded = "asks how many need an element"
    estimated = (
        "it counts every element as one that enough experts need, and of what is left out "
        "the others' elements may drop, too"
    )
    by_norms = False
    sized_by_norms = False
    masked = 3

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        ratios = tuple([single(ratio) for ratio in each(parameters, RATIO, experts)])
        return cls(experts, ratios, int(common(parameters, LEAST)))

    def check(self, weights: Sequence[float], method: str) -> None:
        """Raise BadRequest if no element can be needed by as many experts as must need it."""
        needs = [r for w, r in zip(weights, self.ratios, strict=True) if w]
        if self.least > len(needs):
            raise BadRequest(
                f"k is {self.least}: no element can be needed by so many of "
                f"{len(needs)} experts that have a weight",
                where=method,
                hint=Option("parameters", {"k": max(1, len(needs))}),
            )
        # Each of two would have to move an element further than the other does.
        if self.least == len(needs) == 2 and math.prod(needs) >= 1:
            raise BadRequest(
                "of two experts both need an element only where tall_mask_lambda is below 1",
                where=method,
                hint=phrase(
                    "{smaller} or {one}",
                    smaller=Option("parameters", {"tall_mask_lambda": 0.4}),
                    one=Option("parameters", {"k": 1}),
                ),
            )

    def mask_bytes(self, read: int) -> int:
        return self.experts

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks:
        found = np.zeros(chunk.n, dtype=np.bool_)
        for start, end, sides in pieces_of_chunk(chunk):
            needed = agreed(sides, facts.weights, self.ratios, self.least)
            if needed is not None:
                found[start:end] = needed
        return alike(found, len(chunk.row_of))

    def chances(self) -> tuple[bytes, ...]:
        return tuple([struct.pack("<dq", ratio, self.least) for ratio in self.ratios])


def agreed(
    sides: Sequence[Singles | None], weights: Sequence[float], ratios: Sequence[float], least: int
) -> Bools | None:
    """Return bool[n]: the elements that at least `least` experts need; None if all are unread.

    sides: deltas of each expert, float32[n], None for one that is not read. An expert needs an
    element if its weighted delta is larger than its ratio times the sum of all the others'.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        moved: list[Singles | None] = [
            None if side is None else side * np.float32(weight)
            for side, weight in zip(sides, weights, strict=True)
        ]
        there = [one for one in moved if one is not None]
        if not there:
            return None
        total = there[0].copy()
        for side in there[1:]:
            total += side
        count = np.zeros(total.size, dtype=np.int32)
        for own, ratio in zip(moved, ratios, strict=True):
            if own is not None:
                count += np.abs(own) > np.float32(ratio) * np.abs(total - own)
    found: Bools = count >= least
    return found


CONSENSUS: Final = Method(
    name="consensus",
    summary="base plus the weighted deltas of the elements that several experts need",
    formula="base + lambda * sum w_k d_k where at least k experts have |w_j d_j| > "
    "tall_mask_lambda |sum of the other w_i d_i|",
    source="Wang et al. 2024, arXiv 2405.07813",
    parameters=(LEAST, RATIO, LAMBDA),
    select=Agreed,
    combine=Sum(),
    is_ours=True,
)
