"""Masks: which elements of an expert's delta a random method keeps, for runs of whole rows.

`passes` draws the masks of methods whose elements all have one probability itself.  This module
makes those of methods whose probabilities follow from the rank of an element within its row, and
what such masks are measured with.

The probability of the element with rank r of n, from 1 for the smallest |d| (of equal ones that
with the lowest index), is density - epsilon + 2 epsilon (r - 1) / (n - 1), in float32 and in the
order of mergekit 0.1.5 (Deep et al. 2024, arXiv 2406.11617, MAGPRUNE).  A row of one element has
the probability density.

A draw is a pure function of its element's position: seed, expert and tensor become the key of the
generator (`draws`), which makes one 32-bit word per element from its flat index.  So a mask does
not depend on chunk boundaries, threads, or the order of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.tiles import LANES, TILE, Scratch, address, rows_together
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.passes import Pass

_SOURCES: Final = (
    *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/draws.py"),
    *("merge/arithmetic/tiles.py", "merge/arithmetic/mask_passes.py"),
)
_MODULE: Final = "mstore.merge.arithmetic.mask_passes"
_words: Final = Pass(_MODULE, "words", "iiiip", _SOURCES)
_deltas: Final = Pass(_MODULE, "deltas", "ipiipiipp", _SOURCES)
_ranked: Final = Pass(
    "mstore.merge.arithmetic.ranks", "ranked", "iiipppppppp", ("merge/arithmetic/ranks.c",)
)
_squares: Final = Pass(_MODULE, "squares", "ppipp", _SOURCES)
_norms: Final = Pass(_MODULE, "norms", "ppippp", _SOURCES)
_even_norms: Final = Pass(_MODULE, "even_norms", "ipiipiiiiiippp", _SOURCES)
_scratch: Final = Scratch()

_BUCKETS: Final = (5, 10)
"""The least and the most bits of the number of buckets that the sizes of a row are counted in."""
# As in ranks.c.
_ZEROS: Final = 8
_COUNTERS: Final = 3 << 11

Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


Sides = tuple[npt.NDArray[np.uint8], str, npt.NDArray[np.uint8], str, int]
"""Stored bytes of base and expert, each with its element type, and the number of elements."""


def deltas(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
    found: Singles | None = None,
) -> Singles:
    """Return expert - base of n elements, float32[n], as the merge's pass has it.

    found: where they are written; None for new memory.
    """
    found = np.empty(n, dtype=np.float32) if found is None else found
    base, row = elements(base, base_dtype, n), elements(row, row_dtype, n)
    _deltas(
        *(CODES[base_dtype], address(base), base.size),
        *(CODES[row_dtype], address(row), row.size),
        *(n, _scratch.tiles_at, address(found)),
    )
    return found


def elements(stored: npt.NDArray[np.uint8], dtype: str, n: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of n elements, contiguous and where compiled code may take them as such."""
    found = np.ascontiguousarray(stored[: n * ITEMSIZES[dtype]])
    # Blocks may be at any offset of a mapped file.
    return found.copy() if address(found) % ITEMSIZES[dtype] else found


def draws(key: npt.NDArray[np.uint32], first_index: int, n: int) -> npt.NDArray[np.uint32]:
    """Return the words of elements [first_index, first_index + n): uint32[n]; key: uint32[2]."""
    found = np.empty(n, dtype=np.uint32)
    _words(int(key[0]), int(key[1]), first_index, n, address(found))
    return found


def even(key: npt.NDArray[np.uint32], first_index: int, n: int, limit: int) -> Bools:
    """Return bool[n]: which elements a mask of one probability, limit / 2^32, keeps."""
    if limit >= 2**32:
        return np.ones(n, dtype=bool)
    kept: Bools = draws(key, first_index, n) < np.uint32(limit)
    return kept


class Ranks:
    """What is kept of rows of one length by the ranks of their elements; for one thread.

    Owns memory for one row, and for the deltas of some.
    """

    def __init__(self, length: int, density: float, epsilon: float) -> None:
        # Exact: a float32 times 2^32 fits a float64.
        limits = np.rint(chances(length, density, epsilon).astype(np.float64) * 2.0**32)
        self._limits = np.maximum(limits, 0).astype(np.uint64)
        self._length = length
        self._bits = min(max(length.bit_length() - 3, _BUCKETS[0]), _BUCKETS[1])
        self._scratch: tuple[npt.NDArray[Any], ...] = (
            np.empty((2, length), dtype=np.uint32),
            np.empty((2, length), dtype=np.uint64),
            np.empty((4, (1 << self._bits) + _ZEROS), dtype=np.uint32),
            np.empty(_COUNTERS, dtype=np.uint32),
        )

    def keep(
        self,
        values: Singles,
        key: npt.NDArray[np.uint32],
        first_index: int,
        kept: Bools | None = None,
    ) -> Bools:
        """Return which of the elements of whole rows are kept: bool[n].

        values: float32[n], contiguous, ranked by their magnitudes. kept: where that is written;
        None for new memory.
        """
        kept = np.empty(values.size, dtype=np.bool_) if kept is None else kept
        drawn = draws(key, first_index, values.size)
        _ranked(
            *(values.size // self._length, self._length, self._bits),
            *(address(values), address(drawn), address(self._limits)),
            *(*map(address, self._scratch), address(kept)),
        )
        return kept

    def mask(
        self, sides: Sides, key: npt.NDArray[np.uint32], first_index: int, kept: Bools
    ) -> None:
        """Write which of the deltas of whole rows are kept: bool[n]."""
        for start, end, moved in self._pieces(sides):
            self.keep(moved, key, first_index + start, kept[start:end])

    def norms(
        self, sides: Sides, key: npt.NDArray[np.uint32], first_index: int
    ) -> tuple[float, float]:
        """Return the sum of the magnitudes of deltas, and that of those which are kept."""
        kept = np.empty(min(sides[-1], rows_together(self._length)), dtype=np.bool_)
        found = []
        for start, end, moved in self._pieces(sides):
            own = kept[: end - start]
            found.append(norms(moved, self.keep(moved, key, first_index + start, own)))
        before, after = (math.fsum(column) for column in zip(*found, strict=True))
        return before, after

    def _pieces(self, sides: Sides) -> Iterator[tuple[int, int, Singles]]:
        """Yield pieces of whole rows: where one starts and ends, and its deltas, until the next."""
        base, base_dtype, row, row_dtype, n = sides
        step = rows_together(self._length)
        moved = np.empty(min(n, step), dtype=np.float32)
        for start in range(0, n, step):
            end = min(start + step, n)
            ours, theirs = (
                base[start * ITEMSIZES[base_dtype] :],
                row[start * ITEMSIZES[row_dtype] :],
            )
            own = moved[: end - start]
            yield start, end, deltas(ours, base_dtype, theirs, row_dtype, end - start, own)


def chances(length: int, density: float, epsilon: float) -> Singles:
    """Return the probability that an element of a row is kept, float32[length], by its rank."""
    if length == 1:
        return np.full(1, density, dtype=np.float32)
    share = np.arange(length, dtype=np.float32) / np.float32(length - 1)
    return share * np.float32(2) * np.float32(epsilon) + np.float32(density - epsilon)


def squares(values: Singles, kept: Bools) -> float:
    """Return the sum of squares of those of float32[n] that are kept."""
    lanes, found = np.empty(LANES, dtype=np.float64), np.empty(1, dtype=np.float64)
    _squares(address(values), address(kept), values.size, address(lanes), address(found))
    return float(found[0])


def norms(values: Singles, kept: Bools) -> tuple[float, float]:
    """Return the sum of the magnitudes of float32[n], and that of those which are kept."""
    scratch = np.empty((2, TILE), dtype=np.uint32)
    lanes, found = np.empty((2, LANES), dtype=np.float64), np.empty(2, dtype=np.float64)
    _norms(
        *(address(values), address(kept), values.size),
        *(address(scratch), address(lanes), address(found)),
    )
    before, after = found.tolist()
    return before, after


def even_norms(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
    key: npt.NDArray[np.uint32],
    first_index: int,
    limit: int,
) -> tuple[float, float]:
    """Return `norms` of `deltas` and what `even` keeps of them, without keeping either."""
    scratch = np.empty((4, TILE), dtype=np.uint32)
    lanes, found = np.empty((2, LANES), dtype=np.float64), np.empty(2, dtype=np.float64)
    base, row = elements(base, base_dtype, n), elements(row, row_dtype, n)
    _even_norms(
        *(CODES[base_dtype], address(base), base.size),
        *(CODES[row_dtype], address(row), row.size),
        *(n, int(key[0]), int(key[1]), first_index, limit),
        *(address(scratch), address(lanes), address(found)),
    )
    before, after = found.tolist()
    return before, after


KEY_CONTEXT: Final = "mstore 2 mask"
"""BLAKE3 derive_key context of the keys: part of the format, so it never changes."""


def mask_key(seed: int, position: int, tensor: str) -> npt.NDArray[np.uint32]:
    """Return the two key words of one expert (position in the plan) and one tensor (name).

    `seed` is an unsigned 64-bit number.  Raises OverflowError for numbers out of range.
    """
    hashed = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + tensor.encode()
    digest = blake3(hashed, derive_key_context=KEY_CONTEXT).digest(length=8)
    return np.frombuffer(digest, dtype="<u4").astype(np.uint32)


def mask_keys(seed: int, experts: int, tensor: str) -> npt.NDArray[np.uint32]:
    """Return `mask_key` of positions 0..experts-1: uint32[experts, 2]."""
    keys = np.empty((experts, 2), dtype=np.uint32)
    for position in range(experts):
        keys[position] = mask_key(seed, position, tensor)
    return keys
