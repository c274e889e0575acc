"""arcee_fusion: the base, and the expert's elements that matter more than most.

The importance of an element is |expert - base| times the Kullback-Leibler divergence of its row: of
the softmax of the expert's row from that of the base's, 1e-8 added to each share.  (As in mergekit
0.1.5, which computes it in the type of the tensors; here it is computed in float64 and rounded to
float32.)  A tensor with fewer than two dimensions is one row.

An element is selected if its importance is the median or more by one and a half interquartile
ranges.  The three quartiles are exact: elements of rank int(q (n - 1)) from the smallest.  They are
found by the bits of the importances, which order as the numbers do: the upper half in a first pass,
the lower half in a second.  The first keeps importances, as many as there is room for; what it does
not keep is read again.  Divergences of all rows are kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles, elements
from mstore.merge.arithmetic.tiles import address
from mstore.merge.measures.deltas import Stored, stored
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import ChunkFacts, Cut, CutTogether, Masks, Measured, alike
from mstore.models.stats.chunks import row_length as length_of
from mstore.numeric import halves
from mstore.numeric.codes import CODES
from mstore.numeric.halves import Counts
from mstore.numeric.passes import Pass

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


_MODULE: Final = "mstore.merge.arithmetic.importance"
_SOURCES: Final = ("merge/arithmetic/importance.c", "numeric/codes.py")
_divergences: Final = Pass(_MODULE, "divergences", "ipipiippp", _SOURCES)
_upper: Final = Pass(_MODULE, "upper", "ipipiipppppp", _SOURCES)
_weigh: Final = Pass(_MODULE, "weigh", "ipipiippp", _SOURCES)
_lower: Final = Pass(_MODULE, "lower", "pipp", _SOURCES)
_take: Final = Pass(_MODULE, "take", "ipipiipppp", _SOURCES)
_QUARTERS: Final = (1, 2, 3)
# As in importance.c.
_LANES: Final = 16
_ZEROS: Final = 8

Places = npt.NDArray[np.int64]


class _Tables(threading.local):
    """A thread's tables, zeros between calls: new ones would be new memory for each chunk."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(_QUARTERS) * halves.BINS + _ZEROS, dtype=np.int64)
        self.squares = np.zeros(halves.BINS + _ZEROS)

    def taken(self, uppers: int) -> tuple[Places, Counts]:
        """Return at which places of so many upper halves there are counts; clear them."""
        # Numpy finds what is true in a tenth of the time that numbers other than 0 take.
        places = (self.counts[: uppers * halves.BINS] != 0).nonzero()[0]
        found = self.counts[places]
        self.counts[places] = 0
        return places, found


_tables: Final = _Tables()


class Rows:
    """Whole rows of a base and of an expert, n elements: what passes over them take.

    base, expert: stored bytes and element types.
    """

    def __init__(self, base: Stored, expert: Stored, row_length: int, n: int) -> None:
        self._sides = [(CODES[dtype], elements(data, dtype, n)) for data, dtype in (base, expert)]
        self._shape = n // row_length, row_length
        self._room = -(-row_length // _LANES) * _LANES
        self._singles = np.empty((3, self._room), dtype=np.float32)

    def _arguments(self) -> tuple[int, ...]:
        (base_code, base), (code, expert) = self._sides
        sides = base_code, address(base), code, address(expert)
        return (*sides, *self._shape, address(self._singles))

    def _divergence(self) -> tuple[Singles, npt.NDArray[np.float64]]:
        """Return memory for the divergence of each row, and scratch memory."""
        return np.empty(self._shape[0], dtype=np.float32), np.empty((2, self._room))

    def divergences(self) -> Singles:
        """Return the divergence of each row, float32[rows], NaN if it is not finite."""
        found, scratch = self._divergence()
        _divergences(*self._arguments(), address(scratch), address(found))
        return found

    def upper(
        self, importances: Singles
    ) -> tuple[Singles, Places, Counts, npt.NDArray[np.float64]]:
        """Return `divergences`, and the upper halves of importances: which there are, how many have
        each, and the squares of their deltas.  Writes the importances, float32[n].
        """
        counts, squares = _tables.counts, _tables.squares
        divergence, scratch = self._divergence()
        _upper(
            *(*self._arguments(), address(scratch), address(divergence), address(importances)),
            *(address(counts), address(squares)),
        )
        places, found = _tables.taken(1)
        sums = squares[places]
        squares[places] = 0
        return divergence, places, found, sums

    def importances(self, divergence: Singles) -> Singles:
        """Return the importance of each element, float32[n]."""
        found = np.empty(math.prod(self._shape), dtype=np.float32)
        _weigh(*self._arguments(), address(divergence), address(found))
        return found

    def important(self, divergence: Singles, least: float) -> Bools:
        """Return bool[n]: which elements are of this importance, a float32, or more."""
        found = np.empty(math.prod(self._shape), dtype=np.bool_)
        limit = np.array([least], dtype=np.float32)
        _take(*self._arguments(), address(divergence), address(limit), address(found))
        return found


_REACH: Final = np.float32(1.5)
_LACK: Final = (
    "the importance of an element is infinite or NaN",
    "importance has no quartiles",
)
_MOST_KEPT: Final = 1 << 25
"""So many importances of a tensor are kept: 128 MiB."""
_KEYS: Final = tuple(
    blake3(what).digest(length=16) for what in (b"importance", b"important squares")
)


def lower(importances: Singles, wanted: list[int]) -> tuple[Places, Counts]:
    """Return which lower halves those with these upper halves have, and how many have each.

    wanted: up to three, which ascend.  Lower halves of the second are larger by the number of
    halves, and so on.
    """
    own = np.array([*wanted, *wanted[-1:] * 2], dtype=np.uint32)
    _lower(address(importances), importances.size, address(own), address(_tables.counts))
    return _tables.taken(len(wanted))


class Important(CutTogether, frozen=True):
    """The elements of the only expert that are of unusual importance."""

    facts = "quartiles of the importance of elements"
    leaves_nothing = "no element of the expert is important enough"
    needs_rows = True
    remembers = True
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
        found: Bools = grid.nothing | (grid.band == 0)
        return found

    def squares(self, grid: Grid) -> Floats:
        """Return the chunk's own, as a share of what is selected of the tensor."""
        return grid.fitted([*grid.whole])

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return the whole delta's: of a chunk no more is selected than of its tensor."""
        return np.minimum(grid.whole, grid.band)

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks:
        assert isinstance(facts.cut, Cut)
        if not chunk.row_dtypes:
            return np.zeros((len(chunk.row_of), chunk.n), dtype=np.uint8)
        base, expert = stored(chunk)[:2]
        rows = Rows(base, expert, facts.row_length, chunk.n)
        divergence = rows.divergences() if facts.numbers is None else facts.numbers
        return alike(rows.important(divergence, facts.cut.value), len(chunk.row_of))


class _Chunks:
    """A base and an expert, read in chunks of whole rows."""

    def __init__(self, facts: TensorFacts) -> None:
        self._dtypes = facts.base.dtype, facts.sides[1][1].dtype
        self._chunk, *self._readers = facts.readers(1, length_of(facts.base.shape))
        self.elements = facts.elements
        self._length = length_of(facts.base.shape)
        self.numbers = range(-(-self.elements // self._chunk))
        self._kept = facts.memory(min(self.elements, _MOST_KEPT))

    def rows(self, number: int) -> Rows:
        """Read a chunk."""
        base, expert = (
            (read(number), dtype) for read, dtype in zip(self._readers, self._dtypes, strict=True)
        )
        return Rows(base, expert, self._length, self.size(number))

    def size(self, number: int) -> int:
        """Return the number of elements of a chunk."""
        return min(self._chunk, self.elements - number * self._chunk)

    def kept(self, number: int) -> Singles | None:
        """Return where importances of a chunk are kept; None if there is no room."""
        start, size = number * self._chunk, self.size(number)
        return self._kept[start : start + size] if start + size <= self._kept.size else None


def _select(facts: TensorFacts) -> tuple[float, float]:
    """Return the least importance that is selected, and at most the sum of squares of the deltas.

    Reads the expert, and what importances there is no memory for again.  NaN for tensors that are
    not finite.
    """
    chunks = _Chunks(facts)
    divergence: dict[int, Singles] = {}

    def look(number: int) -> tuple[Places, Counts, npt.NDArray[np.float64]]:
        kept = chunks.kept(number)
        if kept is None:
            kept = np.empty(chunks.size(number), dtype=np.float32)
        divergence[number], places, count, square = chunks.rows(number).upper(kept)
        return places, count, square

    counts = halves.no_counts()
    squares = np.zeros(counts.size)
    for places, count, square in facts.pool.map(look, chunks.numbers):
        counts[places] += count
        squares[places] += square
    # Of infinity and of NaN, with either sign.
    if counts[halves.half_of(np.float32(np.inf)) :].any() or not np.isfinite(squares).all():
        return math.nan, math.nan
    # Of the rank int(q (n - 1)) from the smallest, 0; here from the largest, 1.
    ranked = [
        halves.place(counts, chunks.elements - (chunks.elements - 1) * quarter // 4)
        for quarter in _QUARTERS
    ]
    wanted = sorted({top for top, _ in ranked})

    def look_again(number: int) -> tuple[Places, Counts]:
        known = chunks.kept(number)
        if known is None:
            known = chunks.rows(number).importances(divergence[number])
        return lower(known, wanted)

    below = halves.no_counts(len(wanted))
    for places, count in facts.pool.map(look_again, chunks.numbers):
        below.reshape(-1)[places] += count
    facts.remember(1, np.concatenate([divergence[number] for number in chunks.numbers]))
    first, median, third = (
        np.uint32(halves.joined(top, halves.place(below[wanted.index(top)], rank)[0])).view(
            np.float32
        )
        for top, rank in ranked
    )
    least = np.float32(median + _REACH * np.float32(third - first))
    # All elements that share the threshold's upper half are counted.
    kept = squares[halves.half_of(least) :]
    return float(least), math.fsum(kept[kept.nonzero()].tolist())


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
