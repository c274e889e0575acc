"""The compiled pass over decompressed tables of one row each.

Owns what `many` needs of each table: whether it is valid, its row, and where trimming cuts.  Trusts
the addresses and lengths from its caller; checks everything that the tables' own bytes claim.
Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.models.stats import chunk, histogram, table
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.histogram import INFINITY_BIN, NAN_BIN
from mstore.models.stats.table import BIN_BYTES, HEAD_BYTES
from mstore.numeric.compiling import compiled, entry

_WORD: Final = 8
_ROW_BYTES: Final = CHUNK.itemsize
_MAX_BINS: Final = NAN_BIN + 1


@compiled
def _number(plain: Any, at: int, width: int) -> Any:
    """Read a little-endian number; negative if it uses the 64th bit."""
    found = np.int64(0)
    for byte in range(width):
        found |= np.int64(plain[at + byte]) << np.int64(8 * byte)
    return found


@compiled
def _join(plain: Any, at: int, words: Any) -> None:
    """Read numbers of eight bytes from their byte planes, which begin at `at`."""
    size = words.size
    words[:] = 0
    for byte in range(_WORD):
        plane = plain[at + byte * size : at + (byte + 1) * size]
        seen = np.uint8(0)
        for j in range(size):
            seen |= plane[j]
        # Counts of small tensors leave most planes empty.
        if seen != 0:
            shift = np.int64(8 * byte)
            for j in range(size):
                words[j] |= np.int64(plane[j]) << shift


@compiled
def _counted(plain: Any, at: int, limit: int, bins: Any, counts: Any, inexact: Any) -> Any:
    """Decode a histogram at `at`; return the elements that it counts, -1 if it is unusual.

    counts: of all elements of a bin. limit: elements of the tensor.
    """
    size = bins.size
    _join(plain, at + 2 * size, counts)
    _join(plain, at + 2 * size + _WORD * size, inexact)
    total = np.int64(0)
    place = np.int64(0)
    odd = False
    for j in range(size):
        step = np.int64(plain[at + j]) | (np.int64(plain[at + size + j]) << np.int64(8))
        place += step
        bins[j] = place
        exact, rest = counts[j], inexact[j]
        # A number that is negative here exceeds any number of elements.
        odd |= exact < 0 or exact > limit or rest < 0 or rest > limit
        odd |= exact + rest == 0
        odd |= j > 0 and step == 0
        counts[j] = exact + rest
        total += exact + rest
    # Bins rise: the first may be the zero bin, where zeros are not counted; the last may be
    # infinity.
    odd |= bins[0] == 0 and counts[0] != inexact[0]
    if odd or place >= INFINITY_BIN:
        return np.int64(-1)
    return total


@compiled
def _cut(keep: int, bins: Any, counts: Any, inexact: Any, cut: Any) -> None:
    """Return the bin of the `keep`-th largest, elements above it, in it, and inexact ones."""
    above = np.int64(0)
    for back in range(bins.size):
        j = bins.size - 1 - back
        if above + counts[j] >= keep:
            cut[0], cut[1], cut[2], cut[3] = bins[j], above, counts[j], inexact[j]
            return
        above += counts[j]
    cut[0], cut[1], cut[2], cut[3] = -1, above, 0, 0


@entry("pppipppppp", chunk, histogram, table)
def open_singles(
    plain_address: Any,
    ends_address: Any,
    keep_address: Any,
    tables: int,
    words_address: Any,
    rows_address: Any,
    elements_address: Any,
    chunks_address: Any,
    counted_address: Any,
    cuts_address: Any,
) -> None:
    """Decode tables that are stored one after the other.

    plain: their bytes. ends: int64[T + 1], where each begins and the last ends. keep: int64[T],
    elements that trimming keeps, 0 for no trimming. words: scratch, int64[3, NAN_BIN + 1]. rows:
    CHUNK[T]. elements, chunks, counted: int64[T]; counted is -1 for an unusual table, for which all
    else is undefined. cuts: int64[T, 4], see `_cut`.
    """
    ends = carray(ends_address, (tables + 1,), np.int64)
    plain = carray(plain_address, (ends[tables],), np.uint8)
    keep = carray(keep_address, (tables,), np.int64)
    words = carray(words_address, (3, _MAX_BINS), np.int64)
    rows = carray(rows_address, (tables, _ROW_BYTES), np.uint8)
    elements = carray(elements_address, (tables,), np.int64)
    chunks = carray(chunks_address, (tables,), np.int64)
    counted = carray(counted_address, (tables,), np.int64)
    cuts = carray(cuts_address, (tables, 4), np.int64)
    for t in range(tables):
        counted[t] = -1
        at, length = ends[t], ends[t + 1] - ends[t]
        if length < HEAD_BYTES:
            continue
        elements[t] = _number(plain, at, 8)
        chunks[t] = _number(plain, at + 8, 8)
        size = _number(plain, at + 16, 4)
        if not (0 < elements[t] <= chunks[t] < (1 << 32) and 0 < size <= _MAX_BINS):
            continue
        if length != HEAD_BYTES + _ROW_BYTES + size * BIN_BYTES:
            continue
        at += HEAD_BYTES
        for j in range(_ROW_BYTES):
            rows[t, j] = plain[at + j]
        bins, counts, inexact = words[0, :size], words[1, :size], words[2, :size]
        counted[t] = _counted(plain, at + _ROW_BYTES, elements[t], bins, counts, inexact)
        if keep[t] > 0 and counted[t] >= 0:
            _cut(keep[t], bins, counts, inexact, cuts[t])
