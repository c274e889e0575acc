"""sce: the deltas where experts differ most, fused by their energy where they agree on a sign.

Selected is d_k if the variance of all d_k of the element, at least one of which is not 0, is among
the int(select_topk * n) largest of n.  The result is the sum of the w_k d_k of those that have the
sign of the sum of all selected, over the sum of their w_k, which is at least 1e-6; w_k is the
expert's share of the squares of what is selected.

That variance is the spread of an element: the population variance of its deltas over all K experts,
where one that does not move it, or is not read, counts as zero.  It is summed in float64, in the
order of experts (Welford 1962), and rounded to float32.  Selected are the elements of a larger
spread than a threshold, and of those that equal it the ones before an index: exactly k elements,
the same however a tensor is cut.  The threshold is found by the bits of the spreads,
which order as the numbers do: the upper half in a first pass over all experts, the lower half in a
second.  A third adds up squares, and finds the element with which the number of equal ones is
reached.  Spreads of a tensor of up to 32 Mi elements are kept from the first pass on, so that the
second reads nothing; of a larger one no pass keeps more than chunks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from blake3 import blake3

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.arithmetic.tiles import FUSED, TILE, address
from mstore.merge.measures import BEYOND
from mstore.merge.measures.deltas import Chunks, Ordered, pieces_of_chunk
from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.combinations import Elected, ElectedModel
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter, Range, Value, single
from mstore.merge.methods.selection import (
    ChunkFacts,
    Cut,
    CutTogether,
    Masks,
    Measured,
    Selection,
    alike,
    common,
)
from mstore.numeric import halves
from mstore.numeric.halves import Bits, Counts
from mstore.numeric.passes import Pass
from mstore.store.objects.plan import Mixture, TrimThreshold
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


_spreads: Final = Pass(
    "mstore.merge.arithmetic.spread_passes",
    "spreads",
    "piipp",
    ("merge/arithmetic/tiles.py", "merge/arithmetic/spread_passes.py"),
)


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


SHARE: Final = Parameter("select_topk", "float", 1.0, Range(0.0, 1.0, above_low=True))


class Varied(CutTogether, frozen=True):
    """The elements that experts move most differently; share: of all, select_topk."""

    share: float

    facts = "squares of the deltas that are selected, and where the selection ends"
    by_norms = False
    masked = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter select_topk; all deltas are selected with 1."""
        share = common(parameters, SHARE)
        return cls(experts, share) if share < 1 else _All(experts)

    @property
    def of_one(self) -> tuple[str, Option]:
        """One expert alone has no variance."""
        why = "what varies among the experts is selected, and there is one"
        return why, Option("parameters", {SHARE.name: 1})

    def weightless(self, weights: Sequence[float]) -> tuple[bool, ...]:
        """Return False for all: whoever counts in a variance is read, whatever its weight."""
        return (False,) * len(weights)

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        ids = [id for id, _ in facts.sides[1:]]
        # Sums in another order may round otherwise.
        what = struct.pack("<d", self.share) + b"".join(ids)
        keys = [
            (ids[max(0, place)], blake3(b"spread 2 %d" % place + what).digest(length=16))
            for place in range(-2, len(ids))
        ]

        def select() -> Iterable[float]:
            cut, squares = _select(facts.chunks(), self.share, facts.pool)
            return *cut, *squares

        value, before, *squares = facts.once(keys, select)
        return Measured(cut=Cut(value, int(before)), squares=squares)

    def squares(self, grid: Grid) -> Floats:
        """Return a guess: what varies most is also what moves most."""
        return grid.whole * min(1.0, 2.0 * math.sqrt(self.share))

    def kept(self, grid: Grid) -> Floats:
        return grid.moved * self.share

    def fits(self, thresholds: Sequence[TrimThreshold], listed: int) -> bool:
        """Return whether there is one for each expert, the same for all."""
        return super().fits(thresholds, listed) and len(set(thresholds)) == 1

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks:
        assert isinstance(facts.cut, Cut)
        found = np.empty(chunk.n, dtype=np.bool_)
        for start, end, sides in pieces_of_chunk(chunk):
            at = chunk.first_index + start
            found[start:end] = selected(spreads(sides, end - start), facts.cut, at)
        return alike(found, len(chunk.row_of))


class _All(Selection, frozen=True):
    """All deltas, of which a combination may need squares."""

    by_norms = False


class _Sums(msgspec.Struct, frozen=True):
    """Of a chunk: elements at the threshold, and each expert's squares above it and at it."""

    equal: int
    above: list[float]
    at: list[float]


def _select(chunks: Chunks, share: float, pool: ThreadPoolExecutor) -> tuple[Cut, list[float]]:
    """Return where the selection of this share ends, and the sum of squares that it leaves.

    The share is of the elements with a spread; their number is rounded down, as mergekit does.
    """

    spread = Ordered(chunks, _bits, chunks.elements)

    def upper(number: int) -> Counts:
        # Without those that have no spread.
        return halves.uppers(bits[bits != 0] for bits in spread.bits(number))

    def sums(number: int) -> _Sums:
        number_of_equal, above, at = 0, [], []
        for deltas, bits in spread.with_deltas(number):
            equal = bits == last
            number_of_equal += int(equal.sum())
            above.append(_squares(deltas, bits > last))
            at.append(_squares(deltas, equal))
        return _Sums(number_of_equal, _added(above), _added(at))

    high = halves.added(pool.map(upper, chunks.numbers))
    # In float32: mergekit multiplies so.
    count = int(single(single(int(high.sum())) * single(share)))
    if not count:
        return Cut(math.inf, 0), [0.0] * chunks.experts
    top, left = halves.place(high, count)
    low = halves.added(
        pool.map(lambda number: halves.lowers(spread.bits(number), top), chunks.numbers)
    )
    bottom, left = halves.place(low, left)
    last = halves.joined(top, bottom)
    value = float(np.uint32(last).view(np.float32))
    parts = list(pool.map(sums, chunks.numbers))
    kept = [part.above for part in parts]
    if left == low[bottom]:
        return Cut(value, -1), _added([*kept, *(part.at for part in parts)])
    through = np.cumsum([part.equal for part in parts])
    end = int(np.searchsorted(through, left))
    kept += [part.at for part in parts[:end]]
    left -= int(through[end]) - parts[end].equal
    before = end * chunks.length
    for deltas, bits in spread.with_deltas(end):
        places = np.flatnonzero(bits == last)[:left]
        mask = np.zeros(len(deltas[0]), dtype=bool)
        mask[places] = True
        kept.append(_squares(deltas, mask))
        left -= len(places)
        if not left:
            return Cut(value, before + int(places[-1]) + 1), _added(kept)
        before += len(mask)
    raise AssertionError("the counted elements are not there")


def _bits(deltas: Sequence[Singles]) -> Bits:
    return spreads(deltas, len(deltas[0])).view(np.uint32)


def _squares(deltas: Sequence[Singles], mask: Bools) -> list[float]:
    """Return the sum of squares that a mask leaves of each expert."""
    return [masks.squares(one, mask) for one in deltas]


def _added(sums: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(own) for own in zip(*sums, strict=True)]


class FusedModel(ElectedModel):
    """As `ElectedModel`, with a vote for each."""

    def __init__(self, operation: Operation, grid: Grid) -> None:
        self.votes = (1.0,) * len(operation.weights)
        super().__init__(operation, grid)


class Fused(Elected):
    """What elects is not weighed; weights count after the election.

    weigh: computes the weights of experts from the sums of squares of what is selected, and the
    number of elements.
    """

    kind = FUSED
    model = FusedModel
    elects = False

    def __init__(self, weigh: Callable[[Sequence[float], int], tuple[float, ...]]) -> None:
        self._weigh = weigh

    def normalizes(self, operation: Operation) -> bool:
        return True

    def needs_facts(self, operation: Operation) -> bool:
        return True

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        lack = BEYOND, "its experts cannot be weighed by squares of deltas"
        if measured.squares is None:
            squares = [facts.apart(side, lack) for side in facts.experts]
        else:
            sides = range(len(facts.sides))
            squares = [facts.finite(one, sides, lack) for one in measured.squares]
        return self.weighed(operation, squares, facts.elements)

    def weighed(self, operation: Operation, squares: Sequence[float], elements: int) -> Operation:
        """Return the operation of a tensor of so many elements, with these sums of squares."""
        return operation.settled(Mixture(1.0, self._weigh(squares, elements), keeps_base=True))


_SMALLEST_ENERGY: Final = 1e-6
"""If the mean squares of all experts add up to less, all weigh the same."""


def _weigh(squares: Sequence[float], elements: int) -> tuple[float, ...]:
    means = [one / elements for one in squares]
    total = math.fsum(means)
    if total < _SMALLEST_ENERGY:
        return (1.0 / len(means),) * len(means)
    return tuple(one / total for one in means)


SCE: Final = Method(
    name="sce",
    summary="base plus the deltas that agree on a sign, weighed by their mean squares",
    formula="base + consensus of the selected d_k, w_k their share of all squares",
    source="Wan et al. 2024, arXiv 2408.07990",
    parameters=(SHARE,),
    select=Varied,
    combine=Fused(_weigh),
    weighted=False,
)
