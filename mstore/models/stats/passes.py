"""The compiled passes over a chunk of an expert and its base.

Owns the arithmetic of `deltas`, whose docstring states its promises: three entry points, which take
addresses and lengths and check nothing.  Importing this module imports the compiler: only the build
does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.models.stats import chunk
from mstore.models.stats.chunk import COUNTERS, KEYS, LANES, QUARTER, SKETCH_LANES, TILE, TURNS
from mstore.numeric import floats
from mstore.numeric.codes import BF16
from mstore.numeric.compiling import compiled, entry
from mstore.numeric.floats import QUIET_NAN, bfloat_to_bits, load_bits

_ABS: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_INFINITY: Final = np.uint32(0x7F800000)
_LOW: Final = np.uint32(0xFFFF)
_INEXACT: Final = np.uint32(0x8000)
_TURN_SALT: Final = np.uint32(0x9E3779B9)
_BUCKETS: Final = SKETCH_LANES - QUARTER
_STRIDE: Final = 16

# Each loop in the compiled functions does few and simple operations on a tile that stays in the L1
# cache, so that LLVM vectorises the loop whole. numba widens 32-bit integers to 64 on every
# operation; the explicit np.uint32 narrows them again, so that a vector holds twice as many.


@compiled
def _mix(x: Any) -> Any:
    """MurmurHash3's 32-bit finaliser."""
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x85EBCA6B))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(13)))
    x = np.uint32(x * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def _widen(code: int, stored: Any, start: int, count: int, bits: Any) -> None:
    """Write float32 bits of elements start..start+count, then zeros to the end of the tile."""
    load_bits(code, stored, start, count, bits, 0)
    for j in range(count, bits.size):
        bits[j] = np.uint32(0)


@compiled
def _subtract(expert: Any, base: Any, delta: Any) -> None:
    """Compute the bits of d for a tile."""
    expert_values = expert.view(np.float32)
    base_values = base.view(np.float32)
    delta_values = delta.view(np.float32)
    for j in range(delta.size):
        delta_values[j] = expert_values[j] - base_values[j]
    for j in range(delta.size):
        delta[j] = delta[j] if expert[j] != base[j] else np.uint32(0)


@compiled
def _subtract_bfloats(expert: Any, base: Any, delta: Any) -> None:
    """Do the same for a whole tile of bf16 on both sides, directly from the stored bytes."""
    for j in range(delta.size):
        wide_expert = bfloat_to_bits(expert[j])
        wide_base = bfloat_to_bits(base[j])
        difference = np.float32(wide_expert.view(np.float32) - wide_base.view(np.float32))
        bits = difference.view(np.uint32)
        delta[j] = bits if wide_expert != wide_base else np.uint32(0)


@compiled
def _classify(delta: Any, keys: Any) -> tuple[Any, Any]:
    """Normalise NaN, write keys, and return the largest and smallest nonzero |d|.

    A key is the top 16 bits of |d|, and bit 15 if the low 16 are not all zero.  If the whole tile
    is 0, the smallest is 0 too.  Magnitudes are returned as bits.
    """
    largest = np.uint32(0)
    smallest = np.uint32(0xFFFFFFFF)
    for j in range(delta.size):
        magnitude = np.uint32(delta[j] & _ABS)
        largest = max(largest, magnitude)
        # 0 - 1 wraps around to the maximum, so that zeros are never the smallest.
        smallest = min(smallest, np.uint32(magnitude - np.uint32(1)))
        inexact = _INEXACT if np.uint32(magnitude & _LOW) != np.uint32(0) else np.uint32(0)
        keys[j] = np.uint16(np.uint32(np.uint32(magnitude >> np.uint32(16)) | inexact))
    if largest > _INFINITY:
        largest = QUIET_NAN
        smallest = np.uint32(0xFFFFFFFF)
        for j in range(delta.size):
            if np.uint32(delta[j] & _ABS) > _INFINITY:
                delta[j] = QUIET_NAN
                keys[j] = np.uint16(np.uint32(QUIET_NAN >> np.uint32(16)))
            smallest = min(smallest, np.uint32(np.uint32(delta[j] & _ABS) - np.uint32(1)))
    return largest, np.uint32(smallest + np.uint32(1))


@compiled
def _count(keys: Any, counters: Any) -> None:
    """Count a tile by key.  Uses four counters per key: increments of one wait for each other."""
    k0 = keys[:QUARTER]
    k1 = keys[QUARTER : 2 * QUARTER]
    k2 = keys[2 * QUARTER : 3 * QUARTER]
    k3 = keys[3 * QUARTER :]
    for j in range(QUARTER):
        counters[np.uint64(k0[j]), 0] += np.uint32(1)
        counters[np.uint64(k1[j]), 1] += np.uint32(1)
        counters[np.uint64(k2[j]), 2] += np.uint32(1)
        counters[np.uint64(k3[j]), 3] += np.uint32(1)


@compiled
def _collect(counters: Any, first_bin: Any, last_bin: Any, hist: Any) -> Any:
    """Add the counters of these bins to `hist`, zero them, and return their sum."""
    total = np.int64(0)
    for bin_ in range(first_bin, last_bin + 1):
        exact = np.int64(0)
        inexact = np.int64(0)
        for turn in range(TURNS):
            exact += np.int64(counters[bin_, turn])
            inexact += np.int64(counters[bin_ + 0x8000, turn])
            counters[bin_, turn] = np.uint32(0)
            counters[bin_ + 0x8000, turn] = np.uint32(0)
        hist[bin_, 0] += exact + inexact
        hist[bin_, 1] += inexact
        total += exact + inexact
    return total


@compiled
def _add_squares(bits: Any, squares: Any) -> None:
    values = bits.view(np.float32)
    v0 = values[:QUARTER]
    v1 = values[QUARTER : 2 * QUARTER]
    v2 = values[2 * QUARTER : 3 * QUARTER]
    v3 = values[3 * QUARTER :]
    for j in range(QUARTER):
        x0, x1 = np.float64(v0[j]), np.float64(v1[j])
        x2, x3 = np.float64(v2[j]), np.float64(v3[j])
        squares[j] += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)


@compiled
def _add_squares_of_bfloats(halves: Any, squares: Any) -> None:
    h0 = halves[:QUARTER]
    h1 = halves[QUARTER : 2 * QUARTER]
    h2 = halves[2 * QUARTER : 3 * QUARTER]
    h3 = halves[3 * QUARTER :]
    for j in range(QUARTER):
        x0 = np.float64(bfloat_to_bits(h0[j]).view(np.float32))
        x1 = np.float64(bfloat_to_bits(h1[j]).view(np.float32))
        x2 = np.float64(bfloat_to_bits(h2[j]).view(np.float32))
        x3 = np.float64(bfloat_to_bits(h3[j]).view(np.float32))
        squares[j] += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)


@compiled
def _add_sums(bits: Any, magnitudes: Any, squares: Any) -> None:
    values = bits.view(np.float32)
    v0 = values[:QUARTER]
    v1 = values[QUARTER : 2 * QUARTER]
    v2 = values[2 * QUARTER : 3 * QUARTER]
    v3 = values[3 * QUARTER :]
    for j in range(QUARTER):
        x0, x1 = np.float64(v0[j]), np.float64(v1[j])
        x2, x3 = np.float64(v2[j]), np.float64(v3[j])
        magnitudes[j] += (abs(x0) + abs(x1)) + (abs(x2) + abs(x3))
        squares[j] += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)


@compiled
def _add_signed(first: int, bits: Any, signs: Any, lanes: Any) -> None:
    """Add sign(i) * d[i] of the tile that starts at flat index `first`."""
    salt = np.uint32(np.uint32(first & 0xFFFFFFFF) ^ _mix(np.uint32(first >> 32)))
    for j in range(QUARTER):
        # `first` is a multiple of the tile, so first XOR j is first + j.
        signs[j] = _mix(np.uint32(salt ^ np.uint32(j)))
    turn = np.int64(_mix(np.uint32((first // TILE) & 0xFFFFFFFF) ^ _TURN_SALT) >> np.uint32(27))
    turned = lanes[turn : turn + QUARTER]
    b0 = bits[:QUARTER]
    b1 = bits[QUARTER : 2 * QUARTER]
    b2 = bits[2 * QUARTER : 3 * QUARTER]
    b3 = bits[3 * QUARTER :]
    for j in range(QUARTER):
        word = signs[j]
        x0 = np.uint32(b0[j] ^ np.uint32(word & _SIGN)).view(np.float32)
        x1 = np.uint32(b1[j] ^ np.uint32(np.uint32(word << np.uint32(1)) & _SIGN)).view(np.float32)
        x2 = np.uint32(b2[j] ^ np.uint32(np.uint32(word << np.uint32(2)) & _SIGN)).view(np.float32)
        x3 = np.uint32(b3[j] ^ np.uint32(np.uint32(word << np.uint32(3)) & _SIGN)).view(np.float32)
        turned[j] += (np.float64(x0) + np.float64(x1)) + (np.float64(x2) + np.float64(x3))


@compiled
def _halve(lanes: Any, width: int) -> None:
    """Add the upper half of the lanes to the lower until `width` are left."""
    size = lanes.size
    while size > width:
        size //= 2
        for j in range(size):
            lanes[j] += lanes[j + size]


@entry("ipiipiiipppppp", floats, chunk)
def measure(
    base_code: int,
    base_address: Any,
    base_length: int,
    expert_code: int,
    expert_address: Any,
    expert_length: int,
    n: int,
    first: int,
    tiles_address: Any,
    keys_address: Any,
    lanes_address: Any,
    counters_address: Any,
    hist_address: Any,
    results_address: Any,
) -> None:
    """Write results: nonzeros, bits of max |d|, sum |d|, sum d^2, sum base^2, then the sketch.

    `hist` is added to; tiles, keys and lanes are scratch; counters are all zero before and after.
    """
    base_bytes = carray(base_address, (base_length,), np.uint8)
    expert_bytes = carray(expert_address, (expert_length,), np.uint8)
    tiles = carray(tiles_address, (4, TILE), np.uint32)
    base, expert, delta, signs = tiles[0], tiles[1], tiles[2], tiles[3][:QUARTER]
    keys = carray(keys_address, (TILE,), np.uint16)
    lanes = carray(lanes_address, (LANES,), np.float64)
    lanes[:] = 0.0
    magnitudes = lanes[:QUARTER]
    squares = lanes[QUARTER : 2 * QUARTER]
    base_lanes = lanes[2 * QUARTER : 3 * QUARTER]
    sketch_lanes = lanes[3 * QUARTER :]
    counters = carray(counters_address, (COUNTERS, TURNS), np.uint32)
    hist = carray(hist_address, (KEYS, 2), np.int64)
    results = carray(results_address, (5 + _BUCKETS,), np.float64)
    largest = np.uint32(0)
    smallest = _ABS
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        if base_code == BF16 and expert_code == BF16 and count == TILE:
            base_halves = base_bytes[2 * start : 2 * (start + TILE)].view(np.uint16)
            expert_halves = expert_bytes[2 * start : 2 * (start + TILE)].view(np.uint16)
            _add_squares_of_bfloats(base_halves, base_lanes)
            _subtract_bfloats(expert_halves, base_halves, delta)
        else:
            _widen(base_code, base_bytes, start, count, base)
            _widen(expert_code, expert_bytes, start, count, expert)
            _add_squares(base, base_lanes)
            _subtract(expert, base, delta)
        tile_largest, tile_smallest = _classify(delta, keys)
        if tile_largest == np.uint32(0):
            continue  # nothing changed in this tile, and adding zeros changes no sum
        largest = max(largest, tile_largest)
        smallest = min(smallest, tile_smallest)
        _count(keys, counters)
        _add_sums(delta, magnitudes, squares)
        _add_signed(first + start, delta, signs, sketch_lanes)

    nonzeros = np.int64(0)
    if largest != np.uint32(0):
        # The key of d == 0 is counted too, which is cheaper than skipping it.
        for turn in range(TURNS):
            counters[0, turn] = np.uint32(0)
        nonzeros = _collect(counters, np.int64(smallest >> 16), np.int64(largest >> 16), hist)
    # The lanes after a whole turn hold elements that a turn moved past the end.
    for j in range(_BUCKETS):
        sketch_lanes[j] += sketch_lanes[QUARTER + j]
    _halve(sketch_lanes[:QUARTER], _BUCKETS)
    _halve(magnitudes, 1)
    _halve(squares, 1)
    _halve(base_lanes, 1)
    # Counts and bits of 32 bits are exact in float64.
    results[0] = np.float64(nonzeros)
    results[1] = np.float64(largest)
    results[2] = magnitudes[0]
    results[3] = squares[0]
    results[4] = base_lanes[0]
    for j in range(_BUCKETS):
        results[5 + j] = sketch_lanes[j]


@entry("ipiipp", floats, chunk)
def square(
    code: int, address: Any, length: int, n: int, tiles_address: Any, lanes_address: Any
) -> None:
    """Write the sum of squares into the first lane."""
    stored = carray(address, (length,), np.uint8)
    bits = carray(tiles_address, (TILE,), np.uint32)
    lanes = carray(lanes_address, (QUARTER,), np.float64)
    lanes[:] = 0.0
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        if code == BF16 and count == TILE:
            halves = stored[2 * start : 2 * (start + TILE)].view(np.uint16)
            _add_squares_of_bfloats(halves, lanes)
        else:
            _widen(code, stored, start, count, bits)
            _add_squares(bits, lanes)
    _halve(lanes, 1)


@compiled
def _difference(
    base_code: int,
    base_bytes: Any,
    expert_code: int,
    expert_bytes: Any,
    start: int,
    count: int,
    tiles: Any,
) -> Any:
    """Return the bits of d of a tile, zeros after its elements; uses the first three tiles."""
    delta = tiles[2]
    if base_code == BF16 and expert_code == BF16 and count == TILE:
        base_halves = base_bytes[2 * start : 2 * (start + TILE)].view(np.uint16)
        expert_halves = expert_bytes[2 * start : 2 * (start + TILE)].view(np.uint16)
        _subtract_bfloats(expert_halves, base_halves, delta)
    else:
        _widen(base_code, base_bytes, start, count, tiles[0])
        _widen(expert_code, expert_bytes, start, count, tiles[1])
        _subtract(tiles[1], tiles[0], delta)
    return delta


@entry("ipiipiipp", floats, chunk)
def apart(
    base_code: int,
    base_address: Any,
    base_length: int,
    expert_code: int,
    expert_address: Any,
    expert_length: int,
    n: int,
    tiles_address: Any,
    lanes_address: Any,
) -> None:
    """Write the sum of squares of the delta into the first lane, as `measure` has it."""
    base_bytes = carray(base_address, (base_length,), np.uint8)
    expert_bytes = carray(expert_address, (expert_length,), np.uint8)
    tiles = carray(tiles_address, (4, TILE), np.uint32)
    lanes = carray(lanes_address, (QUARTER,), np.float64)
    lanes[:] = 0.0
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        delta = _difference(base_code, base_bytes, expert_code, expert_bytes, start, count, tiles)
        _add_squares(delta, lanes)
    _halve(lanes, 1)


@entry("ipiipiiippp", floats, chunk)
def count_low(
    base_code: int,
    base_address: Any,
    base_length: int,
    expert_code: int,
    expert_address: Any,
    expert_length: int,
    n: int,
    bin_: int,
    tiles_address: Any,
    keys_address: Any,
    low_address: Any,
) -> None:
    """Count the elements of one bin by the low 16 bits of |d|."""
    base_bytes = carray(base_address, (base_length,), np.uint8)
    expert_bytes = carray(expert_address, (expert_length,), np.uint8)
    tiles = carray(tiles_address, (4, TILE), np.uint32)
    keys = carray(keys_address, (TILE,), np.uint16)
    low_hist = carray(low_address, (0x10000,), np.int64)
    wanted = np.uint32(bin_)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        delta = _difference(base_code, base_bytes, expert_code, expert_bytes, start, count, tiles)
        largest, smallest = _classify(delta, keys)
        if np.uint32(largest >> 16) < wanted or np.uint32(smallest >> 16) > wanted:
            continue
        for j in range(count):
            magnitude = np.uint32(delta[j] & _ABS)
            if np.uint32(magnitude >> 16) == wanted and magnitude != np.uint32(0):
                low_hist[np.uint64(magnitude & _LOW)] += 1


@compiled
def _split(number: Any, planes: Any, at: Any, stride: Any) -> None:
    """Write the bytes of a count, lowest first, `stride` apart; assumes zeroed planes.

    Counts of small tensors usually have one byte.
    """
    while number != 0:
        planes[at] = np.uint8(number & 0xFF)
        number >>= np.int64(8)
        at += stride


@compiled
def _occupied(counts: Any, start: int) -> bool:
    """Return whether one of the next bins is occupied; one vector operation checks several."""
    near = counts[2 * start : 2 * (start + _STRIDE)]
    seen = np.int64(0)
    for j in range(2 * _STRIDE):
        seen |= near[j]
    return bool(seen != 0)


@entry("pipp", floats, chunk)
def collect(hist_address: Any, end: int, planes_address: Any, found_address: Any) -> None:
    """Convert a histogram's bins below `end` to the byte planes of `table`, and zero them.

    found: int64[1], the number of occupied bins, which take 18 bytes each.
    """
    hist = carray(hist_address, (KEYS, 2), np.int64)
    counts = carray(hist_address, (2 * KEYS,), np.int64)
    planes = carray(planes_address, (KEYS * 18,), np.uint8)
    found = carray(found_address, (1,), np.int64)
    size = np.int64(0)
    for start in range(0, end, _STRIDE):
        if _occupied(counts, start):
            for bin_ in range(start, start + _STRIDE):
                size += np.int64(hist[bin_, 0] != 0)
    for place in range(size * 18):
        planes[place] = np.uint8(0)
    j = np.int64(0)
    last = np.int64(0)
    for start in range(0, end, _STRIDE):
        if not _occupied(counts, start):
            continue
        for bin_ in range(start, start + _STRIDE):
            count, inexact = hist[bin_, 0], hist[bin_, 1]
            if count != 0:
                step = np.int64(bin_) - last
                last = np.int64(bin_)
                planes[j] = np.uint8(step & 0xFF)
                planes[size + j] = np.uint8(step >> 8)
                _split(count - inexact, planes, 2 * size + j, size)
                _split(inexact, planes, 10 * size + j, size)
                hist[bin_, 0] = 0
                hist[bin_, 1] = 0
                j += 1
    found[0] = size
