"""Masks: which elements of an expert's delta a random method keeps, for runs of whole rows.

`passes` draws the masks of methods whose elements all have one probability itself.  This module
makes those of methods whose probabilities follow from the rank of an element within its row, and
what such masks are measured with.

The probability of the element with rank r of n, from 1 for the smallest |d| (of equal ones that
with the lowest index), is density - epsilon + 2 epsilon (r - 1) / (n - 1), in float32 and in the
order of mergekit 0.1.5 (Deep et al. 2024, arXiv 2406.11617, MAGPRUNE).  A row of one element has
the probability density.

A draw is a pure function of its element's position: seed, expert and tensor become the key of the
generator (`philox`), which makes one 32-bit word per element from its flat index.  So a mask does
not depend on chunk boundaries, threads, or the order of work.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.tiles import (
    DIGIT,
    DRAWS,
    LANES,
    TILE,
    Scratch,
    address,
    rows_together,
)
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.passes import Pass

_SOURCES: Final = (
    *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/philox.py"),
    *("merge/arithmetic/tiles.py", "merge/arithmetic/mask_passes.py"),
)
_MODULE: Final = "mstore.merge.arithmetic.mask_passes"
_words: Final = Pass(_MODULE, "words", "iiiip", _SOURCES)
_deltas: Final = Pass(_MODULE, "deltas", "ipiipiipp", _SOURCES)
_ranked: Final = Pass(_MODULE, "ranked", "pppiiippppppp", _SOURCES)
_squares: Final = Pass(_MODULE, "squares", "ppipp", _SOURCES)
_norms: Final = Pass(_MODULE, "norms", "ppipp", _SOURCES)
_even_norms: Final = Pass(_MODULE, "even_norms", "ipiipiiiiiippp", _SOURCES)
_scratch: Final = Scratch()

_BUCKETS: Final = (6, 11)
"""The least and the most bits of the number of buckets that the sizes of a row are counted in."""

Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


def deltas(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
) -> Singles:
    """Return expert - base of n elements, float32[n], as the merge's pass has it."""
    found = np.empty(n, dtype=np.float32)
    base, row = _elements(base, base_dtype, n), _elements(row, row_dtype, n)
    _deltas(
        *(CODES[base_dtype], address(base), base.size),
        *(CODES[row_dtype], address(row), row.size),
        *(n, _scratch.tiles_at, address(found)),
    )
    return found


def _elements(stored: npt.NDArray[np.uint8], dtype: str, n: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of n elements where compiled code may take them as such."""
    found = np.ascontiguousarray(stored[: n * ITEMSIZES[dtype]])
    # Blocks may be at any offset of a mapped file.
    return found.copy() if address(found) % ITEMSIZES[dtype] else found


def draws(key: npt.NDArray[np.uint32], first_index: int, n: int) -> npt.NDArray[np.uint32]:
    """Return the words of elements [first_index, first_index + n): uint32[n]; key: uint32[2]."""
    skipped = first_index % 4
    blocks = (skipped + n + 3) // 4
    found = np.empty(4 * blocks, dtype=np.uint32)
    _words(int(key[0]), int(key[1]), first_index // 4, blocks, address(found))
    return found[skipped : skipped + n]


def even(key: npt.NDArray[np.uint32], first_index: int, n: int, limit: int) -> Bools:
    """Return bool[n]: which elements a mask of one probability, limit / 2^32, keeps."""
    if limit >= 2**32:
        return np.ones(n, dtype=bool)
    kept: Bools = draws(key, first_index, n) < np.uint32(limit)
    return kept


def ranked(
    values: Singles,
    key: npt.NDArray[np.uint32],
    first_index: int,
    row_length: int,
    density: float,
    epsilon: float,
) -> Bools:
    """Return bool[n]: which of the elements of whole rows are kept.

    values: float32[n], contiguous, ranked by their magnitudes.
    """
    kept = np.ones(values.size, dtype=bool)
    if density >= 1:
        return kept
    # Exact: a float32 times 2^32 fits a float64.
    limits = np.rint(chances(row_length, density, epsilon).astype(np.float64) * 2.0**32)
    limits = np.maximum(limits, 0).astype(np.uint64)
    bits = min(max(row_length.bit_length() - 2, _BUCKETS[0]), _BUCKETS[1])
    sizes = np.empty(row_length, dtype=np.uint32)
    open_to = np.empty((3, row_length), dtype=np.uint32)
    table = np.empty((1 << bits) + 1, dtype=np.uint64)
    keys, spare = np.empty((2, row_length), dtype=np.uint64)
    counters = np.empty(-(-32 // DIGIT) << DIGIT, dtype=np.uint32)
    step = rows_together(row_length)
    for start in range(0, values.size, step):
        part = values[start : start + step]
        drawn = draws(key, first_index + start, part.size)
        _ranked(
            *(address(part), address(drawn), address(limits)),
            *(part.size // row_length, row_length, bits),
            *(address(sizes), address(open_to), address(table)),
            *(address(keys), address(spare), address(counters)),
            address(kept[start : start + step]),
        )
    return kept


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
    lanes, found = np.empty((2, LANES), dtype=np.float64), np.empty(2, dtype=np.float64)
    _norms(address(values), address(kept), values.size, address(lanes), address(found))
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
    scratch = np.empty(3 * TILE + DRAWS, dtype=np.uint32)
    lanes, found = np.empty((2, LANES), dtype=np.float64), np.empty(2, dtype=np.float64)
    base, row = _elements(base, base_dtype, n), _elements(row, row_dtype, n)
    _even_norms(
        *(CODES[base_dtype], address(base), base.size),
        *(CODES[row_dtype], address(row), row.size),
        *(n, int(key[0]), int(key[1]), first_index, limit),
        *(address(scratch), address(lanes), address(found)),
    )
    before, after = found.tolist()
    return before, after


KEY_CONTEXT: Final = "mstore 1 dare mask"
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
