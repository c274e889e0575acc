"""The compiled passes of masks: deltas, draws and norms.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import draws, tiles
from mstore.merge.arithmetic.draws import fill_draws
from mstore.merge.arithmetic.tiles import ALL, LANES, TILE
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import bits_float, float_bits, load_bits

_ABS: Final = np.uint32(0x7FFFFFFF)


@entry("iiiip", draws)
def words(key0: int, key1: int, first: int, n: int, words_at: Any) -> None:
    """Write the draws of n elements from flat index `first` on: uint32[n]."""
    fill_draws(key0, key1, first, carray(words_at, (n,), np.uint32))


@compiled
def _subtract(
    base_code: int, base: Any, row_code: int, row: Any, start: int, ours: Any, theirs: Any, own: Any
) -> None:
    """Write the float32 bits of row - base of a tile's elements, from `start` on, to `own`."""
    count = own.size
    load_bits(base_code, base, start, count, ours, 0)
    load_bits(row_code, row, start, count, theirs, 0)
    for i in range(count):
        moved = float_bits(bits_float(theirs[i]) - bits_float(ours[i]))
        own[i] = moved if ours[i] != theirs[i] else np.uint32(0)


@entry("ipiipiipp", floats, tiles)
def deltas(
    base_code: int,
    base_at: Any,
    base_length: int,
    row_code: int,
    row_at: Any,
    row_length: int,
    n: int,
    scratch_at: Any,
    found_at: Any,
) -> None:
    """Write row - base of n elements as float32; 0 where their float32 bits are equal.

    Lengths are in bytes; scratch: uint32[2, TILE].
    """
    base = carray(base_at, (base_length,), np.uint8)
    row = carray(row_at, (row_length,), np.uint8)
    found = carray(found_at, (n,), np.uint32)
    scratch = carray(scratch_at, (2, TILE), np.uint32)
    for start in range(0, n, TILE):
        own = found[start : min(start + TILE, n)]
        _subtract(base_code, base, row_code, row, start, scratch[0], scratch[1], own)


@compiled
def _halved(lanes: Any) -> float:
    """Return the sum of lanes: i and i + half of them, until one is left."""
    half = lanes.size // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return float(lanes[0])


@entry("ppipp", tiles)
def squares(values_at: Any, kept_at: Any, n: int, lanes_at: Any, found_at: Any) -> None:
    """Write the sum of squares of those of float32[n] that are kept: float64[1].

    Summed as in `norms`. lanes: float64[LANES].
    """
    values = carray(values_at, (n,), np.float32)
    kept = carray(kept_at, (n,), np.uint8)
    lanes = carray(lanes_at, (LANES,), np.float64)
    found = carray(found_at, (1,), np.float64)
    lanes[:] = 0.0
    for start in range(0, n, LANES):
        count = min(LANES, n - start)
        own, mine = values[start : start + count], kept[start : start + count]
        for i in range(count):
            value = np.float64(own[i])
            lanes[i] += value * value if mine[i] else 0.0
    found[0] = _halved(lanes)


@compiled
def _add_up(sizes: Any, lanes: Any) -> None:
    """Add numbers, whole runs of LANES, to their lanes."""
    for start in range(0, sizes.size, LANES):
        own = sizes[start : start + LANES]
        for i in range(LANES):
            lanes[i] += np.float64(own[i])


@compiled
def _add_sizes(sizes: Any, left: Any, count: int, lanes: Any) -> None:
    """Add the first numbers of two tiles, as bits, to their lanes; fills up the last run."""
    end = -(-count // LANES) * LANES
    # What is added up has no sign, so zeros change nothing.
    sizes[count:end] = np.uint32(0)
    left[count:end] = np.uint32(0)
    _add_up(sizes[:end].view(np.float32), lanes[0])
    _add_up(left[:end].view(np.float32), lanes[1])


@compiled
def _split(values: Any, kept: Any, sizes: Any, left: Any) -> None:
    """Write the magnitudes of numbers, as bits, and those of the kept ones, 0 for others."""
    for i in range(values.size):
        size = np.uint32(values[i] & _ABS)
        sizes[i] = size
        left[i] = size if kept[i] else np.uint32(0)


@compiled
def _split_below(values: Any, draws: Any, limit: Any, sizes: Any, left: Any) -> None:
    """Do `_split` where those are kept whose draw is below the limit."""
    for i in range(values.size):
        size = np.uint32(values[i] & _ABS)
        sizes[i] = size
        left[i] = size if draws[i] < limit else np.uint32(0)


@entry("ppippp", tiles)
def norms(
    values_at: Any, kept_at: Any, n: int, scratch_at: Any, lanes_at: Any, found_at: Any
) -> None:
    """Write the sum of the magnitudes of float32[n], and of those that are kept: float64[2].

    Element i goes to lane i % LANES; the lanes are added by halving. scratch: uint32[2, TILE].
    lanes: float64[2, LANES].
    """
    values = carray(values_at, (n,), np.uint32)
    kept = carray(kept_at, (n,), np.uint8)
    scratch = carray(scratch_at, (2, TILE), np.uint32)
    lanes = carray(lanes_at, (2, LANES), np.float64)
    found = carray(found_at, (2,), np.float64)
    lanes[:] = 0.0
    for start in range(0, n, TILE):
        end = min(start + TILE, n)
        _split(values[start:end], kept[start:end], scratch[0], scratch[1])
        _add_sizes(scratch[0], scratch[1], end - start, lanes)
    found[0] = _halved(lanes[0])
    found[1] = _halved(lanes[1])


@entry("ipiipiiiiiippp", draws, floats, tiles)
def even_norms(
    base_code: int,
    base_at: Any,
    base_length: int,
    row_code: int,
    row_at: Any,
    row_length: int,
    n: int,
    key0: int,
    key1: int,
    first_index: int,
    limit: int,
    scratch_at: Any,
    lanes_at: Any,
    found_at: Any,
) -> None:
    """Do `norms` of `deltas`, of which a draw below the limit keeps an element.

    scratch: uint32[4, TILE]. lanes: float64[2, LANES].
    """
    base = carray(base_at, (base_length,), np.uint8)
    row = carray(row_at, (row_length,), np.uint8)
    scratch = carray(scratch_at, (4, TILE), np.uint32)
    lanes = carray(lanes_at, (2, LANES), np.float64)
    found = carray(found_at, (2,), np.float64)
    ours, theirs, drawn, moved = scratch[0], scratch[1], scratch[2], scratch[3]
    lanes[:] = 0.0
    keeps_all = limit >= ALL
    below = np.uint32(1) if keeps_all else np.uint32(limit)
    drawn[:] = np.uint32(0)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        own = moved[:count]
        _subtract(base_code, base, row_code, row, start, ours, theirs, own)
        if not keeps_all:
            fill_draws(key0, key1, first_index + start, drawn[:count])
        _split_below(own, drawn, below, ours, theirs)
        _add_sizes(ours, theirs, count, lanes)
    found[0] = _halved(lanes[0])
    found[1] = _halved(lanes[1])
