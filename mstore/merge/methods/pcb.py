"""pcb: the base plus the deltas that win the competition for an element (PCB-Merging).

As in the authors' code (github.com/duguodong7/pcb-merging, `pcb-merging.py`), but each tensor
competes by itself, where theirs ranks all elements of a model together; the largest and smallest
0.01 % of deltas are not clipped; |d_k| is scaled to 1 by the largest, not from the smallest; and an
expert has no part in an element that it does not move.  Their `lams` are the weights of experts;
one of weight 0, which they never have, does not compete.

Of K experts with deltas d_k, the score of expert k in an element is

    s_k = exp(K (u_k^2 - 1)) tanh(d_k * sum of all d_j),     u_k = |d_k| / the largest |d_k|

in float64, rounded to float32; the factor exp(-K), which has no effect on what follows, keeps it in
range.  With the least and the largest score of those that are not dropped, both of the whole
tensor, its scale is (s_k - least) / (largest - least), from 0 to 1, or 1 if all of these are equal;
it is 0 where d_k is 0.  The factor of d_k is w_k times its scale over the sum of all scales, which
is at least 1e-12, in float64, rounded to float32.  Products with these, and their sum in the order
of experts, are float32.

An expert of weight 0 does not compete: it is none of the K.  One that is not read does, and moves
nothing.

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
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.arguments import Chunk, Mix, pack
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import BALANCED, TILE, address
from mstore.merge.measures.deltas import Chunks, Ordered
from mstore.merge.measures.grid import Bools, Floats, Grid, added
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.model import Model
from mstore.merge.methods.parameters import Parameter, Range, Value
from mstore.merge.methods.selection import Cuts, Measured, Selection, common
from mstore.numeric import halves
from mstore.numeric.halves import Bits, Counts
from mstore.numeric.passes import Pass
from mstore.store.objects.plan import Threshold

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


LIMITS: Final = 3
"""Thresholds of each expert: its largest |d_k|, the least score, and the largest."""
_SOURCES: Final = (
    "numeric/codes.py",
    "numeric/floats.py",
    "merge/arithmetic/tiles.py",
    "merge/arithmetic/arguments.py",
    "merge/arithmetic/stages.py",
    "merge/arithmetic/competition_passes.py",
)
_MODULE: Final = "mstore.merge.arithmetic.competition_passes"
_scores: Final = Pass(_MODULE, "scores", "piippp", _SOURCES)
_balance: Final = Pass(_MODULE, "balance", "pp", _SOURCES)
_SIGN: Final = np.uint32(1 << 31)


def scores(deltas: Sequence[Singles], largest: Sequence[float]) -> Bits:
    """Return the score of each expert in n elements, as numbers that order so: uint32[K, n].

    deltas: float32[n] of each, contiguous; largest: of each expert's |d_k| in the tensor.
    """
    n = deltas[0].size
    found, scratch = np.empty((len(deltas), n), dtype=np.uint32), np.empty((2, TILE))
    sides = np.array(list(map(address, deltas)), dtype=np.int64)
    most = np.array(largest, dtype=np.float64)
    places = address(sides), len(deltas), n, address(most), address(scratch), address(found)
    _scores(*places)
    return found


def singles_of(ordered: Bits) -> Singles:
    """Return the scores that these numbers stand for, float32."""
    bits = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)
    found: Singles = bits.view(np.float32)
    return found


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    row_weights: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Merge a chunk into `out`, as `kernels.run`; its thresholds are LIMITS of each expert."""
    packed = pack(mix, chunk, out, out_dtype)
    room = np.empty((mix.weights.size + 2, TILE))
    _balance(packed.at, address(room))
    return ()


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
    sized_by_norms = False
    planned = LIMITS
    cuts = LIMITS

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


class BalancedModel(Model):
    """As `Model`, for shares of those that win an element."""

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        """Return a guess, float64[C]: each wins elements of its own, and has all of them."""
        return added(np.where(left_out, self._typical, 0.0) ** 2)


class Balanced(Combination):
    """A sum with factors of each element."""

    kind = BALANCED
    kernel = staticmethod(run)
    model = BalancedModel
    unbounded = "weighs elements by who competes for them"
    by_norms = False

    def who(self, operation: Operation, k: int, listed: int) -> bytes:
        """Return how many compete: scores follow from that, too."""
        return sum(weight != 0 for weight in operation.weights).to_bytes(2, "little")


PCB: Final = Method(
    name="pcb",
    summary="base plus the deltas with the best scores, shared out by size and agreement",
    formula="base + sum w_k c_k d_k / sum c_k, c_k from 0 to 1 by the score exp(K (d_k / max "
    "|d_k|)^2) tanh(d_k * sum d_j), 0 for all but the best",
    source="Du et al. 2024, arXiv 2410.02396",
    parameters=(RATIO,),
    select=Competing,
    combine=Balanced(),
    mind="what is left out of an expert has no part in the competition: the others win more there",
    is_ours=True,
)
