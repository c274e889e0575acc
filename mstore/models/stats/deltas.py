"""Measuring a delta: one pass over a chunk of an expert and its base.

Owns what is called and checked: statistics of a chunk (`measure`), the sum of squares of a delta
alone (`apart`) and of a base chunk alone (`base_squares`), and the second look into one bin of the
histogram (`count_low`).  Does not own the arithmetic (`passes`), what the numbers mean (`chunk`),
the threshold drawn from them (`histogram`) or their bytes at rest (`table`).

A result is a pure function of its arguments, the same on every machine: widening and the
difference are exact or correctly rounded, NaN is made the one quiet NaN, squares of a float32
are exact in float64, and float64 sums are taken in a fixed order that does not depend on the
vector width, the number of threads or the position of the chunk.  The caller's thread must have
the processor's default floating-point mode (no flushing of subnormals to zero).

Every call may run in any thread and releases the GIL for its pass.  A histogram argument must
not be given to two calls at once; histograms of different threads are added up afterwards.  Each
thread that measures keeps 1 MiB of scratch.

**Order of the sums.**  Tiles of 1024 elements from the chunk's start, the last one filled up
with zeros; in a tile element j and its three fellows at j + 256, + 512, + 768 are added as
(x0 + x1) + (x2 + x3) to lane j; lanes are added by halving (j with j + 128, then j + 64, ...).
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.models.stats.chunk import (
    CHUNK,
    COUNTERS,
    KEYS,
    LANES,
    SKETCH_BUCKETS,
    TILE,
    TURNS,
    Rows,
    pack_sketch,
    unchanged,
)
from mstore.models.stats.histogram import bin_of
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.terms.errors import BadRequest

__all__ = ["CHUNK", "TILE", "apart", "base_squares", "collect", "count_low", "measure", "unchanged"]

MAX_ELEMENTS: Final = 2**31
"""The most elements per call: its counts are kept in 32 bits."""

Bytes = npt.NDArray[np.uint8]
DenseHistogram = npt.NDArray[np.int64]

_INFINITY: Final = 0x7F800000
_NO_SKETCH: Final = bytes(SKETCH_BUCKETS)
_SOURCES: Final = (
    *("numeric/codes.py", "numeric/floats.py", "models/stats/chunk.py", "models/stats/passes.py"),
)
_measure: Final = Pass("mstore.models.stats.passes", "measure", "ipiipiiipppppp", _SOURCES)
_square: Final = Pass("mstore.models.stats.passes", "square", "ipiipp", _SOURCES)
_apart: Final = Pass("mstore.models.stats.passes", "apart", "ipiipiipp", _SOURCES)
_count_low: Final = Pass("mstore.models.stats.passes", "count_low", "ipiipiiippp", _SOURCES)
_collect: Final = Pass("mstore.models.stats.passes", "collect", "pipp", _SOURCES)
_ROW: Final = struct.Struct(f"<IddIdh{SKETCH_BUCKETS}s")
"""A row of CHUNK with the largest |d| as its bits; one packing call, unlike numpy's one per field.
"""


class _Scratch(threading.local):
    """Scratch memory of this thread's passes: 1.6 MiB.

    The counters are all zero between calls, because every pass leaves them so.
    """

    def __init__(self) -> None:
        self.counters = np.zeros((COUNTERS, TURNS), dtype=np.uint32)
        self.tiles = np.zeros((4, TILE), dtype=np.uint32)
        self.keys = np.zeros(TILE, dtype=np.uint16)
        self.lanes = np.zeros(LANES, dtype=np.float64)
        self.results = np.zeros(5 + SKETCH_BUCKETS, dtype=np.float64)
        self.planes = np.zeros(KEYS * 18, dtype=np.uint8)
        self.found = np.zeros(1, dtype=np.int64)
        # Addresses are stored as ints: taking an array's address costs more than a small pass.
        self.counters_at = self.counters.ctypes.data
        self.tiles_at = self.tiles.ctypes.data
        self.keys_at = self.keys.ctypes.data
        self.lanes_at = self.lanes.ctypes.data
        self.results_at = self.results.ctypes.data
        self.planes_at = self.planes.ctypes.data
        self.found_at = self.found.ctypes.data


_scratch: Final = _Scratch()


def measure(
    base: Bytes,
    base_dtype: str,
    expert: Bytes,
    expert_dtype: str,
    n: int,
    first_index: int,
    hist: DenseHistogram,
) -> Rows:
    """Compute the statistics of one chunk's delta: a CHUNK[1] row; adds to `hist` in place.

    `base` and `expert` are the stored bytes of the chunk's `n` elements, uint8[n * itemsize],
    little-endian, of the named dtypes ("BF16", "F16" or "F32", not necessarily the same).
    `first_index` is the chunk's first element within the tensor, a multiple of TILE.

    `hist` is int64[32768, 2]: row t counts elements with d != 0 whose float32 |d| has the top 16
    bits t, column 0 all of them, column 1 those whose low 16 bits are not all zero.

    A delta that is infinite or NaN is counted as nonzero and in `hist` (rows 0x7F80 and 0x7FC0);
    sums and maximum are then not finite, and the sketch is zero: see `chunk.CHUNK`.

    Raises BadRequest for other dtypes, lengths or shapes.
    """
    base_code, base_bytes, base_at = _elements(base, base_dtype, n, "base")
    expert_code, expert_bytes, expert_at = _elements(expert, expert_dtype, n, "expert")
    if first_index < 0 or first_index % TILE:
        raise BadRequest(f"a chunk starts at a multiple of {TILE} elements, not at {first_index}")
    _check_counts(hist, (0x8000, 2), "histogram")
    scratch = _scratch
    _measure(
        base_code,
        base_at,
        base_bytes.size,
        expert_code,
        expert_at,
        expert_bytes.size,
        n,
        first_index,
        scratch.tiles_at,
        scratch.keys_at,
        scratch.lanes_at,
        scratch.counters_at,
        hist.ctypes.data,
        scratch.results_at,
    )
    results = scratch.results
    largest = int(results[1])
    sketch, exponent = _NO_SKETCH, 0
    if 0 < largest < _INFINITY:
        signed, exponent = pack_sketch(results[5:])
        sketch = signed.tobytes()
    sum_abs, sum_squares, squares = map(_one_nan, results[2:5].tolist())
    row = _ROW.pack(int(results[0]), sum_abs, sum_squares, largest, squares, exponent, sketch)
    return np.frombuffer(bytearray(row), dtype=CHUNK)


def collect(hist: DenseHistogram, largest: float) -> bytes:
    """Return the counts in `hist` as byte planes of `mstore.models.stats.table`, and zero `hist`.

    largest: no bin above that of this magnitude is occupied.  Scans each bin up to there.
    """
    _check_counts(hist, (0x8000, 2), "histogram")
    end = bin_of(largest) + 1
    _collect(hist.ctypes.data, end, _scratch.planes_at, _scratch.found_at)
    return _scratch.planes[: 18 * int(_scratch.found[0])].tobytes()


def base_squares(base: Bytes, base_dtype: str, n: int) -> float:
    """Sum float32(base)^2 over `n` elements: the same float64 that `measure` gives.

    With `unchanged` it makes the row of a chunk that equals the base, for half the work and without
    the expert.  Raises BadRequest as `measure` does.
    """
    code, stored, address = _elements(base, base_dtype, n, "base")
    scratch = _scratch
    _square(code, address, stored.size, n, scratch.tiles_at, scratch.lanes_at)
    return _one_nan(float(scratch.lanes[0]))


def apart(base: Bytes, base_dtype: str, expert: Bytes, expert_dtype: str, n: int) -> float:
    """Sum the squares of the delta over `n` elements: the same float64 that `measure` gives.

    NaN if it has infinite or NaN elements.  Arguments and errors as for `measure`.
    """
    base_code, base_bytes, base_at = _elements(base, base_dtype, n, "base")
    expert_code, expert_bytes, expert_at = _elements(expert, expert_dtype, n, "expert")
    scratch = _scratch
    _apart(
        *(base_code, base_at, base_bytes.size),
        *(expert_code, expert_at, expert_bytes.size),
        *(n, scratch.tiles_at, scratch.lanes_at),
    )
    return _one_nan(float(scratch.lanes[0]))


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

    Adds to `low_hist`, int64[65536], in place; elements with d == 0 are not counted.  Summed over
    all chunks of a tensor, it is the input of `histogram.select_exact`.  Other arguments and errors
    as for `measure`.
    """
    base_code, base_bytes, base_at = _elements(base, base_dtype, n, "base")
    expert_code, expert_bytes, expert_at = _elements(expert, expert_dtype, n, "expert")
    if not 0 <= bin < 0x8000:
        raise BadRequest(f"a bin of the histogram is 0..32767, not {bin}")
    _check_counts(low_hist, (0x10000,), "histogram of low bits")
    scratch = _scratch
    _count_low(
        base_code,
        base_at,
        base_bytes.size,
        expert_code,
        expert_at,
        expert_bytes.size,
        n,
        bin,
        scratch.tiles_at,
        scratch.keys_at,
        low_hist.ctypes.data,
    )


def _elements(stored: Bytes, dtype: str, n: int, side: str) -> tuple[int, Bytes, int]:
    """Return the dtype code, an aligned array for compiled code, and its address."""
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
    # Blocks may be at any offset of a mapped file; compiled code takes only aligned elements.
    aligned = np.ascontiguousarray(stored)
    address = aligned.ctypes.data
    if address % ITEMSIZES[dtype]:
        aligned = aligned.copy()
        address = aligned.ctypes.data
    return code, aligned, address


def _check_counts(counts: DenseHistogram, shape: tuple[int, ...], what: str) -> None:
    if counts.dtype != np.int64 or counts.shape != shape or not counts.flags.carray:
        raise BadRequest(
            f"the {what} is a writeable, contiguous int64{list(shape)}, "
            f"not {counts.dtype}{list(counts.shape)}"
        )


def _one_nan(value: float) -> float:
    # Processors differ in the sign and payload of a NaN that arithmetic makes.
    return float("nan") if value != value else value
