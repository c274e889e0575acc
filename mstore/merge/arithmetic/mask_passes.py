"""The compiled passes of masks: deltas, draws, what ranks keep, and norms.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import draws, tiles
from mstore.merge.arithmetic.draws import fill_draws
from mstore.merge.arithmetic.tiles import ALL, DIGIT, LANES, TILE
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import QUIET_NAN, bits_float, float_bits, load_bits

_KEY_BITS: Final = 32
_SIZE_BITS: Final = 31
_OCTAVES: Final = 4
"""Bits of the exponent that tell buckets apart: 16 octaves below the largest size."""
_FEW: Final = 64
"""So many ranks are found faster one by one than by a sort."""
_PLACE: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)
_ABS: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)


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
def _sort(keys: Any, spare: Any, counters: Any) -> Any:
    """Sort by the upper halves, stably, DIGIT bits at a time; return the array that is sorted."""
    bins, length = 1 << DIGIT, keys.size
    passes = -(-_KEY_BITS // DIGIT)
    low = np.uint64(bins - 1)
    counters[: passes * bins] = 0
    for i in range(length):
        key = np.uint64(keys[i] >> _PLACE)
        for step in range(passes):
            at = np.uint64(key >> np.uint64(step * DIGIT)) & low
            counters[np.uint64(step * bins) + at] += np.uint32(1)
    for step in range(passes):
        shift = np.uint64(_KEY_BITS + step * DIGIT)
        own = counters[step * bins : (step + 1) * bins]
        if own[np.uint64(keys[0] >> shift) & low] == length:
            # All have this digit.
            continue
        total = np.uint32(0)
        for number in range(bins):
            here = own[number]
            own[number] = total
            total = np.uint32(total + here)
        for i in range(length):
            at = np.uint64(keys[i] >> shift) & low
            spare[np.uint64(own[at])] = keys[i]
            own[at] += np.uint32(1)
        keys, spare = spare, keys
    return keys


@compiled
def _keep_below(draws: Any, limit: Any, kept: Any) -> None:
    """Write which draws are below a limit, which may be 2^32."""
    for i in range(draws.size):
        kept[i] = np.uint64(draws[i]) < limit


@compiled
def _sizes(values: Any, sizes: Any) -> Any:
    """Write the bits of magnitudes, of which any NaN is the largest; return the largest."""
    top = np.uint32(0)
    for i in range(values.size):
        size = np.uint32(values[i] & _ABS)
        size = QUIET_NAN if size > _INFINITY else size
        sizes[i] = size
        top = max(size, top)
    return top


@compiled
def _count(
    sizes: Any, top: Any, bits: int, draws: Any, limits: Any, table: Any, open_to: Any
) -> Any:
    """Count elements by size, and list those whose rank decides: how many these are.

    table: for each bucket of sizes, in their order, its first rank, and in the upper half how many
    elements it has, 0 if they are all of one size. open_to: the places of the listed ones; then of
    every element its bucket, and how many are before it there.
    """
    length, buckets = sizes.size, 1 << bits
    shift = np.uint32(_SIZE_BITS - _OCTAVES - bits)
    first = np.int32(top >> shift) - np.int32(buckets - 1)
    who, where, before = open_to[0], open_to[1], open_to[2]
    for i in range(length):
        bucket = np.int32(np.int32(sizes[i] >> shift) - first)
        bucket = bucket if bucket > np.int32(0) else np.int32(0)
        # Zeros, which may be most of a row, are of one size.
        where[i] = np.uint32(bucket + np.int32(1)) if sizes[i] > np.uint32(0) else np.uint32(0)
    table[:] = np.uint64(0)
    # A bucket's bits, from the highest: how many, the lower bits of sizes that are 1 in one of
    # them, and those that are 0 in one of them.
    wide = np.uint64(2 * shift)
    one = np.uint64(1) << wide
    rest = np.uint64((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
    least, span = limits[0], limits[length - 1] - limits[0]
    for i in range(length):
        at = np.uint64(where[i])
        entry = table[at]
        tail = np.uint64(sizes[i]) & rest
        table[at] = (entry + one) | (tail << np.uint64(shift)) | (~tail & rest)
        before[i] = np.uint32(entry >> wide)
    found = np.uint64(0)
    for i in range(length):
        who[found] = np.uint32(i)
        found += np.uint64(np.uint64(draws[i]) - least < span)
    start = np.uint64(0)
    for number in range(buckets + 1):
        entry = table[number]
        count = entry >> wide
        differs = (entry & rest) & ((entry >> np.uint64(shift)) & rest)
        # The second one takes all that are smaller, too.
        is_mixed = differs != np.uint64(0) or (number == 1 and first > 0)
        table[number] = start | (count << _PLACE if is_mixed else np.uint64(0))
        start += count
    return found


@compiled
def _decide(draws: Any, limits: Any, table: Any, found: int, open_to: Any, kept: Any) -> Any:
    """Write what the buckets of listed elements decide, and list the others: how many they are."""
    who, where, before = open_to[0], open_to[1], open_to[2]
    left = np.uint64(0)
    for number in range(found):
        i = np.uint64(who[number])
        entry = table[np.uint64(where[i])]
        count, rank = entry >> _PLACE, entry & _LOW
        is_mixed = count != np.uint64(0)
        rank = rank if is_mixed else rank + np.uint64(before[i])
        draw, least = np.uint64(draws[i]), limits[rank]
        most = limits[rank + count - np.uint64(1)] if is_mixed else least
        kept[i] = draw < least
        who[left] = np.uint32(i)
        left += np.uint64(draw - least < most - least)
    return left


@compiled
def _smaller(sizes: Any, size: Any) -> Any:
    found = np.uint32(0)
    for i in range(sizes.size):
        found = np.uint32(found + np.uint32(sizes[i] < size))
    return found


@compiled
def _equal(sizes: Any, size: Any) -> Any:
    found = np.uint32(0)
    for i in range(sizes.size):
        found = np.uint32(found + np.uint32(sizes[i] == size))
    return found


@entry("ppiiiiiipppppppp", draws, floats, tiles)
def ranked(
    values_at: Any,
    limits_at: Any,
    rows: int,
    length: int,
    bits: int,
    key0: int,
    key1: int,
    first_index: int,
    draws_at: Any,
    sizes_at: Any,
    open_at: Any,
    table_at: Any,
    keys_at: Any,
    spare_at: Any,
    counters_at: Any,
    kept_at: Any,
) -> None:
    """Write which elements of rows have a draw below the limit of their rank: uint8[rows, length].

    values: float32[rows, length], ranked by magnitude from the smallest, equal ones by index, any
    NaN last. limits: uint64[length], by rank, none below the one before. bits: the number of
    buckets is 2^bits. first_index: of the first row's first element. Scratch: draws, sizes:
    uint32[length]. open: uint32[3, length]. table: uint64[2^bits + 1]. keys, spare: uint64[length].
    counters: uint32[P * 2^DIGIT], P the digits of 32 bits.

    Few draws are between the lowest and the highest limit, and most of those are not between those
    of their bucket; only what is left needs its rank itself.
    """
    values = carray(values_at, (rows, length), np.uint32)
    limits = carray(limits_at, (length,), np.uint64)
    mine = carray(draws_at, (length,), np.uint32)
    sizes = carray(sizes_at, (length,), np.uint32)
    open_to = carray(open_at, (3, length), np.uint32)
    table = carray(table_at, ((1 << bits) + 1,), np.uint64)
    keys = carray(keys_at, (length,), np.uint64)
    spare = carray(spare_at, (length,), np.uint64)
    counters = carray(counters_at, (-(-_KEY_BITS // DIGIT) << DIGIT,), np.uint32)
    kept = carray(kept_at, (rows, length), np.uint8)
    for row in range(rows):
        own = kept[row]
        fill_draws(key0, key1, first_index + row * length, mine)
        _keep_below(mine, limits[0], own)
        top = _sizes(values[row], sizes)
        found = _count(sizes, top, bits, mine, limits, table, open_to)
        left = _decide(mine, limits, table, found, open_to, own)
        if left <= _FEW:
            for number in range(left):
                place = np.int64(open_to[0, number])
                size = sizes[place]
                before = np.uint64(_smaller(sizes, size)) + np.uint64(_equal(sizes[:place], size))
                own[place] = np.uint64(mine[place]) < limits[before]
            continue
        for i in range(length):
            keys[i] = np.uint64(np.uint64(sizes[i]) << _PLACE) | np.uint64(i)
        order = _sort(keys, spare, counters)
        for rank in range(length):
            at = np.uint64(order[rank] & _LOW)
            own[at] = np.uint64(mine[at]) < limits[rank]


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
