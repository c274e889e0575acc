"""arcee_fusion: the base, and the expert's elements that matter more than most.

The importance of an element is |expert - base| times the Kullback-Leibler divergence of its row: of
the softmax of the expert's row from that of the base's, 1e-8 added to each share.  (As in mergekit
0.1.5, which computes it in the type of the tensors; here it is computed in float64 and rounded to
float32.)  A tensor with fewer than two dimensions is one row.

An element is selected if its importance is the median or more by one and a half interquartile
ranges.  The three quartiles are exact: elements of rank int(q (n - 1)) from the smallest.  They are
found by the bits of the importances, which order as the numbers do: the upper half in a first pass,
the lower half in a second.  No pass keeps more than chunks, and the divergences of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import address
from mstore.merge.measures.deltas import pieces_of_rows, stored
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Cut, CutTogether, Masks, Measured, alike
from mstore.models.stats.chunks import row_length as length_of
from mstore.numeric import halves
from mstore.numeric.halves import Counts
from mstore.numeric.passes import Pass

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


_divergences: Final = Pass(
    "mstore.merge.arithmetic.importance_passes",
    "divergences",
    "ppiipp",
    ("merge/arithmetic/importance_passes.py",),
)


def divergences(base: Singles, expert: Singles, row_length: int) -> Singles:
    """Return the divergence of each row, float32[n / row_length], NaN if it is not finite.

    base, expert: float32[n], contiguous, whole rows.
    """
    rows = base.size // row_length
    found = np.empty(rows, dtype=np.float32)
    scratch = np.empty((2, row_length), dtype=np.float64)
    base, expert = np.ascontiguousarray(base), np.ascontiguousarray(expert)
    _divergences(address(base), address(expert), rows, row_length, address(scratch), address(found))
    return found


def importances(base: Singles, expert: Singles, divergence: Singles) -> Singles:
    """Return float32[n]; divergence: of each row.  Equal elements have none."""
    sizes = np.abs(expert - base).reshape(divergence.size, -1)
    found: Singles = sizes * divergence[:, None]
    return found.reshape(-1)


_QUARTERS: Final = (1, 2, 3)
_REACH: Final = np.float32(1.5)
_LACK: Final = (
    "the importance of an element is infinite or NaN",
    "importance has no quartiles",
)
_KEYS: Final = tuple(
    blake3(what).digest(length=16) for what in (b"importance", b"important squares")
)


class Important(CutTogether, frozen=True):
    """The elements of the only expert that are of unusual importance."""

    facts = "quartiles of the importance of elements"
    leaves_nothing = "no element of the expert is important enough"
    needs_rows = True
    by_norms = False
    ranks_by_bound = True
    masked = 4

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        """Return from where on elements are important, and at most their sum of squares."""
        if facts.is_base(1):
            return Measured(cut=Cut(0.0, -1), band=0.0)
        what = [(facts.sides[1][0], key) for key in _KEYS]
        least, kept = facts.once(what, lambda: _select(facts))
        return Measured(cut=Cut(facts.finite(least, (0, 1), _LACK), -1), band=kept)

    def idle(self, grid: Grid) -> Bools:
        """Return where nothing of the tensor is selected, too."""
        found: Bools = grid.nothing | (grid.band == 0)
        return found

    def squares(self, grid: Grid) -> Floats:
        """Return the chunk's own, as a share of what is selected of the tensor."""
        return grid.fitted([*grid.whole])

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return the whole delta's: of a chunk no more is selected than of its tensor."""
        return np.minimum(grid.whole, grid.band)

    def masks(
        self, chunk: Chunk, *, row_length: int, weights: Sequence[float], cut: Cut | None
    ) -> Masks:
        """Return the elements of the only expert that matter as much as the threshold."""
        assert cut is not None
        found = np.zeros(chunk.n, dtype=np.bool_)
        if chunk.row_dtypes:
            sides = stored(chunk)[:2]
            for start, end, (base, expert) in pieces_of_rows(sides, row_length, chunk.n):
                divergence = divergences(base, expert, row_length)
                found[start:end] = importances(base, expert, divergence) >= np.float32(cut.value)
        return alike(found, len(chunk.row_of))


class _Look(msgspec.Struct, frozen=True):
    """Of a chunk: the divergences of rows, by piece; elements by upper half, and their squares."""

    divergence: list[Singles]
    counts: Counts
    squares: npt.NDArray[np.float64]


class _Rows:
    """A base and an expert, read in chunks of whole rows."""

    def __init__(self, facts: TensorFacts) -> None:
        self._dtypes = facts.base.dtype, facts.sides[1][1].dtype
        self._chunk, *self._readers = facts.readers(1, whole=True)
        self.elements = facts.elements
        self.length = length_of(facts.base.shape)
        self.numbers = range(-(-self.elements // self._chunk))

    def read(self, number: int) -> Iterator[list[Singles]]:
        """Yield a chunk of base and expert in pieces of whole rows, float32[n]."""
        elements = min(self._chunk, self.elements - number * self._chunk)
        data = [read(number) for read in self._readers]
        sides = list(zip(data, self._dtypes, strict=True))
        for _, _, both in pieces_of_rows(sides, self.length, elements):
            yield both


def _select(facts: TensorFacts) -> tuple[float, float]:
    """Return the least importance that is selected, and at most the sum of squares of the deltas.

    Reads the expert twice.  NaN for tensors that are not finite.
    """
    rows = _Rows(facts)

    def look(number: int) -> _Look:
        counts, divergence = halves.no_counts(), []
        squares = np.zeros(counts.size)
        with np.errstate(invalid="ignore", over="ignore"):
            for mine, theirs in rows.read(number):
                divergence.append(divergences(mine, theirs, rows.length))
                bits = importances(mine, theirs, divergence[-1]).view(np.uint32)
                halves.count_upper_squares(bits, theirs - mine, counts, squares)
        return _Look(divergence, counts, squares)

    looks = list(facts.pool.map(look, rows.numbers))
    counts = halves.no_counts()
    squares = np.zeros(counts.size)
    for one in looks:
        counts += one.counts
        squares += one.squares
    # Of infinity and of NaN, with either sign.
    if counts[halves.half_of(np.float32(np.inf)) :].any() or not np.isfinite(squares).all():
        return math.nan, math.nan
    # Of the rank int(q (n - 1)) from the smallest, 0; here from the largest, 1.
    places = [
        halves.place(counts, rows.elements - (rows.elements - 1) * quarter // 4)
        for quarter in _QUARTERS
    ]
    wanted = sorted({top for top, _ in places})

    def lower(number: int) -> list[Counts]:
        found = [halves.no_counts() for _ in wanted]
        for (mine, theirs), own in zip(rows.read(number), looks[number].divergence, strict=True):
            bits = importances(mine, theirs, own).view(np.uint32)
            for top, counted in zip(wanted, found, strict=True):
                halves.count_lower(bits, top, counted)
        return found

    below = {top: halves.no_counts() for top in wanted}
    for some in facts.pool.map(lower, rows.numbers):
        for top, counted in zip(wanted, some, strict=True):
            below[top] += counted
    first, median, third = (
        np.uint32(halves.joined(top, halves.place(below[top], rank)[0])).view(np.float32)
        for top, rank in places
    )
    least = np.float32(median + _REACH * np.float32(third - first))
    # All elements that share the threshold's upper half are counted.
    return float(least), math.fsum(squares[halves.half_of(least) :].tolist())


ARCEE_FUSION: Final = Method(
    name="arcee_fusion",
    summary="base plus the deltas of one expert that are of unusual importance",
    formula="base + d where |d| KL >= median + 1.5 (third - first quartile) of |d| KL, KL the "
    "divergence of the softmax of the expert's row from that of the base's",
    source="Arcee Fusion; mergekit, github.com/arcee-ai/mergekit",
    parameters=(),
    select=Important,
    combine=Sum(),
    experts=1,
    weighted=False,
)
