"""Measuring a delta: one pass over a chunk of an expert and its base.

Owns the compiled passes: statistics of a chunk (`measure`), the sum of squares of a base chunk
alone (`base_squares`), and the second look into one bin of the histogram (`count_low`).  Does not
own what the numbers mean (`chunk`), the threshold drawn from them (`histogram`) or their bytes at
rest (`table`).

A result is a pure function of its arguments, the same on every machine: widening and the
difference are exact or correctly rounded, NaN is made the one quiet NaN, squares of a float32
are exact in float64, and float64 sums are taken in a fixed order that does not depend on the
vector width, the number of threads or the position of the chunk.  The caller's thread must have
the processor's default floating-point mode (no flushing of subnormals to zero).

Every call may run in any thread and releases the GIL for its pass.  A histogram argument must
not be given to two calls at once; histograms of different threads are added up afterwards.  Each
thread that measures keeps 1 MiB of scratch.  Compiled code is cached on disk by numba.

**Order of the sums.**  Tiles of 1024 elements from the chunk's start, the last one filled up
with zeros; in a tile element j and its three fellows at j + 256, + 512, + 768 are added as
(x0 + x1) + (x2 + x3) to lane j; lanes are added by halving (j with j + 128, then j + 64, ...).
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.errors import BadRequest
from mstore.numeric import floats
from mstore.numeric.compiling import cached, compiled
from mstore.numeric.floats import CODES, ITEMSIZES, QUIET_NAN, load_bits
from mstore.stats.chunk import CHUNK, SKETCH_BUCKETS, Rows, pack_sketch, unchanged

__all__ = ["CHUNK", "TILE", "base_squares", "count_low", "measure", "unchanged"]

TILE: Final = 1024
"""Elements a tile.  A chunk starts at a multiple of it."""

MAX_ELEMENTS: Final = 2**31
"""Most elements a call takes: its counts are kept in 32 bits."""

Bytes = npt.NDArray[np.uint8]
DenseHistogram = npt.NDArray[np.int64]

_QUARTER: Final = TILE // 4
_KEYS: Final = 1 << 16
# Increments of one counter right after each other wait for each other; four counters take turns.
_TURNS: Final = 4

_ABS: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_INFINITY: Final = np.uint32(0x7F800000)
_LOW: Final = np.uint32(0xFFFF)
_INEXACT: Final = np.uint32(0x8000)
_TURN_SALT: Final = np.uint32(0x9E3779B9)

# In the compiled functions each loop does one simple thing to a tile that stays in the L1 cache:
# LLVM vectorises such loops whole.  numba widens 32-bit integers to 64 on every operation; the
# explicit np.uint32 brings them back, so that a vector holds twice as many.


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
    """float32 bits of elements start..start+count, then zeros to the end of the tile."""
    load_bits(code, stored, start, count, bits, 0)
    for j in range(count, bits.size):
        bits[j] = np.uint32(0)


@compiled
def _subtract(expert: Any, base: Any, delta: Any) -> tuple[Any, Any]:
    """Bits of d for a tile; gives the bits of the largest |d| and of the smallest that is not 0.

    Where all of the tile is 0, the smallest comes out as 0 too.
    """
    expert_values = expert.view(np.float32)
    base_values = base.view(np.float32)
    delta_values = delta.view(np.float32)
    for j in range(delta.size):
        delta_values[j] = expert_values[j] - base_values[j]
    for j in range(delta.size):
        delta[j] = delta[j] if expert[j] != base[j] else np.uint32(0)
    largest = np.uint32(0)
    smallest = np.uint32(0xFFFFFFFF)
    for j in range(delta.size):
        magnitude = np.uint32(delta[j] & _ABS)
        largest = max(largest, magnitude)
        # 0 - 1 wraps round to the top, so that zeros never are the smallest.
        smallest = min(smallest, np.uint32(magnitude - np.uint32(1)))
    if largest > _INFINITY:
        largest = QUIET_NAN
        for j in range(delta.size):
            if np.uint32(delta[j] & _ABS) > _INFINITY:
                delta[j] = QUIET_NAN
        smallest = np.uint32(0xFFFFFFFF)
        for j in range(delta.size):
            smallest = min(smallest, np.uint32(np.uint32(delta[j] & _ABS) - np.uint32(1)))
    return largest, np.uint32(smallest + np.uint32(1))


@compiled
def _count(delta: Any, keys: Any, counters: Any) -> None:
    """Count a tile by key: top 16 bits of |d|, and bit 15 where the low 16 are not all zero."""
    for j in range(delta.size):
        magnitude = np.uint32(delta[j] & _ABS)
        inexact = _INEXACT if np.uint32(magnitude & _LOW) != np.uint32(0) else np.uint32(0)
        keys[j] = np.uint16(np.uint32(np.uint32(magnitude >> np.uint32(16)) | inexact))
    for j in range(_QUARTER):
        counters[np.uint64(keys[j]), 0] += np.uint32(1)
        counters[np.uint64(keys[j + _QUARTER]), 1] += np.uint32(1)
        counters[np.uint64(keys[j + 2 * _QUARTER]), 2] += np.uint32(1)
        counters[np.uint64(keys[j + 3 * _QUARTER]), 3] += np.uint32(1)


@compiled
def _collect(counters: Any, first_bin: Any, last_bin: Any, hist: Any) -> Any:
    """Add the counters of these bins to `hist`, set them back to zero, give their sum."""
    total = np.int64(0)
    for bin_ in range(first_bin, last_bin + 1):
        exact = np.int64(0)
        inexact = np.int64(0)
        for turn in range(_TURNS):
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
    v0 = values[:_QUARTER]
    v1 = values[_QUARTER : 2 * _QUARTER]
    v2 = values[2 * _QUARTER : 3 * _QUARTER]
    v3 = values[3 * _QUARTER :]
    for j in range(_QUARTER):
        x0, x1 = np.float64(v0[j]), np.float64(v1[j])
        x2, x3 = np.float64(v2[j]), np.float64(v3[j])
        squares[j] += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)


@compiled
def _add_magnitudes(bits: Any, magnitudes: Any) -> None:
    values = bits.view(np.float32)
    v0 = values[:_QUARTER]
    v1 = values[_QUARTER : 2 * _QUARTER]
    v2 = values[2 * _QUARTER : 3 * _QUARTER]
    v3 = values[3 * _QUARTER :]
    for j in range(_QUARTER):
        x0, x1 = abs(np.float64(v0[j])), abs(np.float64(v1[j]))
        x2, x3 = abs(np.float64(v2[j])), abs(np.float64(v3[j]))
        magnitudes[j] += (x0 + x1) + (x2 + x3)


@compiled
def _add_signed(first: int, bits: Any, lanes: Any) -> None:
    """Add sign(i) * d[i] of the tile that starts at flat index `first`; spoils `bits`."""
    salt = np.uint32(np.uint32(first & 0xFFFFFFFF) ^ _mix(np.uint32(first >> 32)))
    for j in range(bits.size):
        # `first` is a multiple of the tile, so first XOR j is first + j.
        sign = np.uint32(_mix(np.uint32(salt ^ np.uint32(j))) & _SIGN)
        bits[j] = np.uint32(bits[j] ^ sign)
    turn = np.int64(_mix(np.uint32((first // TILE) & 0xFFFFFFFF) ^ _TURN_SALT) >> np.uint32(27))
    turned = lanes[turn : turn + _QUARTER]
    values = bits.view(np.float32)
    v0 = values[:_QUARTER]
    v1 = values[_QUARTER : 2 * _QUARTER]
    v2 = values[2 * _QUARTER : 3 * _QUARTER]
    v3 = values[3 * _QUARTER :]
    for j in range(_QUARTER):
        x0, x1 = np.float64(v0[j]), np.float64(v1[j])
        x2, x3 = np.float64(v2[j]), np.float64(v3[j])
        turned[j] += (x0 + x1) + (x2 + x3)


@compiled
def _halve(lanes: Any, width: int) -> None:
    """Add the upper half of the lanes to the lower until `width` are left."""
    size = lanes.size
    while size > width:
        size //= 2
        for j in range(size):
            lanes[j] += lanes[j + size]


@cached(floats)
def _measure(
    base_code: int,
    base_bytes: Any,
    expert_code: int,
    expert_bytes: Any,
    n: int,
    first: int,
    counters: Any,
    hist: Any,
    sketch: Any,
) -> tuple[int, Any, float, float, float]:
    """(nonzeros, bits of max |d|, sum |d|, sum d^2, sum base^2); fills `sketch` and `hist`."""
    base = np.empty(TILE, dtype=np.uint32)
    expert = np.empty(TILE, dtype=np.uint32)
    delta = np.empty(TILE, dtype=np.uint32)
    keys = np.empty(TILE, dtype=np.uint16)
    magnitudes = np.zeros(_QUARTER, dtype=np.float64)
    squares = np.zeros(_QUARTER, dtype=np.float64)
    base_lanes = np.zeros(_QUARTER, dtype=np.float64)
    sketch_lanes = np.zeros(_QUARTER + SKETCH_BUCKETS, dtype=np.float64)
    largest = np.uint32(0)
    smallest = _ABS
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        _widen(base_code, base_bytes, start, count, base)
        _widen(expert_code, expert_bytes, start, count, expert)
        _add_squares(base, base_lanes)
        tile_largest, tile_smallest = _subtract(expert, base, delta)
        if tile_largest == np.uint32(0):
            continue  # nothing changed in this tile, and adding zeros changes no sum
        largest = max(largest, tile_largest)
        smallest = min(smallest, tile_smallest)
        _count(delta, keys, counters)
        _add_magnitudes(delta, magnitudes)
        _add_squares(delta, squares)
        _add_signed(first + start, delta, sketch_lanes)

    nonzeros = 0
    if largest != np.uint32(0):
        # The key of d == 0 is counted along, which is cheaper than to step over it.
        for turn in range(_TURNS):
            counters[0, turn] = np.uint32(0)
        nonzeros = _collect(counters, np.int64(smallest >> 16), np.int64(largest >> 16), hist)
    # The lanes past a whole round hold elements that a turn carried over the end.
    for j in range(SKETCH_BUCKETS):
        sketch_lanes[j] += sketch_lanes[_QUARTER + j]
    _halve(sketch_lanes[:_QUARTER], SKETCH_BUCKETS)
    sketch[:] = sketch_lanes[:SKETCH_BUCKETS]
    _halve(magnitudes, 1)
    _halve(squares, 1)
    _halve(base_lanes, 1)
    return nonzeros, largest, magnitudes[0], squares[0], base_lanes[0]


@cached(floats)
def _base_squares(code: int, stored: Any, n: int) -> float:
    bits = np.empty(TILE, dtype=np.uint32)
    lanes = np.zeros(_QUARTER, dtype=np.float64)
    for start in range(0, n, TILE):
        _widen(code, stored, start, min(TILE, n - start), bits)
        _add_squares(bits, lanes)
    _halve(lanes, 1)
    return float(lanes[0])


@cached(floats)
def _count_low(
    base_code: int,
    base_bytes: Any,
    expert_code: int,
    expert_bytes: Any,
    n: int,
    bin_: Any,
    low_hist: Any,
) -> None:
    base = np.empty(TILE, dtype=np.uint32)
    expert = np.empty(TILE, dtype=np.uint32)
    delta = np.empty(TILE, dtype=np.uint32)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        _widen(base_code, base_bytes, start, count, base)
        _widen(expert_code, expert_bytes, start, count, expert)
        largest, smallest = _subtract(expert, base, delta)
        if np.uint32(largest >> 16) < bin_ or np.uint32(smallest >> 16) > bin_:
            continue
        for j in range(count):
            magnitude = np.uint32(delta[j] & _ABS)
            if np.uint32(magnitude >> 16) == bin_ and magnitude != np.uint32(0):
                low_hist[np.uint64(magnitude & _LOW)] += 1


class _Scratch(threading.local):
    """Counters of this thread: all zero between calls, because `_collect` leaves them so."""

    def __init__(self) -> None:
        self.counters = np.zeros((_KEYS, _TURNS), dtype=np.uint32)


_scratch = _Scratch()


def measure(
    base: Bytes,
    base_dtype: str,
    expert: Bytes,
    expert_dtype: str,
    n: int,
    first_index: int,
    hist: DenseHistogram,
) -> Rows:
    """Statistics of one chunk's delta: a CHUNK[1] row; `hist` is added to in place.

    `base` and `expert` are the stored bytes of the chunk's `n` elements, uint8[n * itemsize],
    little-endian, of the dtypes named ("BF16", "F16" or "F32", not necessarily the same).
    `first_index` is the chunk's first element within the tensor, a multiple of TILE.

    `hist` is int64[32768, 2]: row t counts elements with d != 0 whose float32 |d| has the top 16
    bits t, column 0 all of them, column 1 those whose low 16 bits are not all zero.

    A delta that is infinite or NaN is counted as nonzero and in `hist` (rows 0x7F80 and 0x7FC0);
    sums and maximum are then not finite, and the sketch is zero: see `chunk.CHUNK`.

    Raises BadRequest for other dtypes, lengths or shapes.
    """
    base_code, base_bytes = _elements(base, base_dtype, n, "base")
    expert_code, expert_bytes = _elements(expert, expert_dtype, n, "expert")
    if first_index < 0 or first_index % TILE:
        raise BadRequest(f"a chunk starts at a multiple of {TILE} elements, not at {first_index}")
    _check_counts(hist, (0x8000, 2), "histogram")
    sketch = np.empty(SKETCH_BUCKETS, dtype=np.float64)
    nonzeros, largest, sum_abs, sum_squares, squares_of_base = _measure(
        base_code,
        base_bytes,
        expert_code,
        expert_bytes,
        n,
        first_index,
        _scratch.counters,
        hist,
        sketch,
    )
    row = unchanged(_one_nan(squares_of_base))
    row["nonzeros"] = nonzeros
    row["sum_abs"] = _one_nan(sum_abs)
    row["sum_squares"] = _one_nan(sum_squares)
    row["max_abs"] = np.array([largest], dtype=np.uint32).view(np.float32)
    if 0 < largest < _INFINITY:
        row["sketch"], row["sketch_exponent"] = pack_sketch(sketch)
    return row


def base_squares(base: Bytes, base_dtype: str, n: int) -> float:
    """Sum of float32(base)^2 over `n` elements: the same float64 that `measure` gives.

    With `unchanged` it makes the row of a chunk that equals the base, for half the work and
    without the expert.  Raises BadRequest as `measure` does.
    """
    code, stored = _elements(base, base_dtype, n, "base")
    return _one_nan(_base_squares(code, stored, n))


def count_low(
    base: Bytes,
    base_dtype: str,
    expert: Bytes,
    expert_dtype: str,
    n: int,
    bin: int,
    low_hist: DenseHistogram,
) -> None:
    """Second look: count, by the low 16 bits of |d|, the elements whose top 16 bits are `bin`.

    `low_hist`, int64[65536], is added to in place; elements with d == 0 are not counted.  Over
    all chunks of a tensor it is what `histogram.select_exact` takes.  Other arguments and errors
    as for `measure`.
    """
    base_code, base_bytes = _elements(base, base_dtype, n, "base")
    expert_code, expert_bytes = _elements(expert, expert_dtype, n, "expert")
    if not 0 <= bin < 0x8000:
        raise BadRequest(f"a bin of the histogram is 0..32767, not {bin}")
    _check_counts(low_hist, (0x10000,), "histogram of low bits")
    _count_low(
        base_code,
        base_bytes,
        expert_code,
        expert_bytes,
        n,
        np.uint32(bin),
        low_hist,
    )


def _elements(stored: Bytes, dtype: str, n: int, side: str) -> tuple[int, Bytes]:
    """(code, the bytes as compiled code takes them)."""
    code = CODES.get(dtype)
    if code is None:
        raise BadRequest(
            f"deltas of {dtype} elements cannot be measured; those of {', '.join(CODES)} can",
            where=side,
        )
    if not 0 <= n <= MAX_ELEMENTS:
        raise BadRequest(f"a chunk has 0 to {MAX_ELEMENTS} elements, not {n}", where=side)
    length = n * ITEMSIZES[dtype]
    if stored.dtype != np.uint8 or stored.shape != (length,):
        raise BadRequest(
            f"{n} elements of {dtype} are uint8[{length}], not {stored.dtype}{list(stored.shape)}",
            where=side,
        )
    # Blocks may lie at any offset of a mapped file; compiled code takes aligned elements only.
    # It is compiled for read-only arrays, once, and takes no others.
    aligned = np.ascontiguousarray(stored)
    if aligned.ctypes.data % ITEMSIZES[dtype]:
        aligned = aligned.copy()
    taken = aligned[:]
    taken.flags.writeable = False
    return code, taken


def _check_counts(counts: DenseHistogram, shape: tuple[int, ...], what: str) -> None:
    if counts.dtype != np.int64 or counts.shape != shape or not counts.flags.carray:
        raise BadRequest(
            f"the {what} is a writeable, contiguous int64{list(shape)}, "
            f"not {counts.dtype}{list(counts.shape)}"
        )


def _one_nan(value: float) -> float:
    # The sign and payload of a NaN that arithmetic makes differ between processors.
    return float("nan") if value != value else value
