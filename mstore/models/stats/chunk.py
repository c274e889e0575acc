"""One chunk's statistics: what the numbers of a row mean, and how two sketches are compared.

Owns the row (CHUNK) and the estimator on its direction sketch.  Does not own how a row is
measured (`deltas`), nor how rows are stored (`table`).  Pure functions on numpy arrays: no
state, safe in any thread.

A chunk is the element range [first, first + n) of one tensor.  Its delta d is, in float32,

    d[i] = 0                                    where the float32 bits of both sides are equal
    d[i] = float32(expert[i]) - float32(base[i])                                     elsewhere

**Sketch.**  A count sketch (Charikar, Chen, Farach-Colton, "Finding frequent items in data
streams", 2002; as an estimator of inner products: Alon, Matias, Szegedy, 1996).  An element's
bucket and sign depend on its flat index i within the tensor and on nothing else, so sketches of
the same chunk taken from different experts can be compared:

    mix(x)    = MurmurHash3's 32-bit finaliser
    word(i)   = mix((i - q * 256) mod 2^32 XOR mix(i div 2^32)), where q = (i mod 1024) div 256
    sign(i)   = -1 where bit 31 - q of word(i) is set, else +1
    turn(i)   = mix((i div 1024) mod 2^32 XOR 0x9E3779B9) div 2^27
    bucket(i) = (i + turn(i)) mod 32
    S[b]      = sum of sign(i) * d[i] over the chunk's elements with bucket(i) = b

Four elements share a word, and each takes a bit of its own: one hash for four signs.  The turn
is there because outlier columns of a weight matrix, whose width is mostly a multiple
of 32, would otherwise all fall into one bucket.  With d' and d'' two deltas of one chunk,

    E[sum_b S'[b] * S''[b]]   = <d', d''>
    Var[sum_b S'[b] * S''[b]] = sum_b (|d'|_b^2 |d''|_b^2 + <d', d''>_b^2 - 2 sum d'^2 d''^2)
                             <~ (|d'|^2 |d''|^2 + <d', d''>^2) / 32

(_b: only the elements of bucket b): one chunk's cosine is known to about 0.18 to 0.25, and that
of a tensor of C chunks of like norm, whose estimates add, to that over sqrt(C).  The formulas
ask for signs that are independent in fours; a fixed hash stands in for them, so someone who
knows it could build deltas that mislead the estimate.  It therefore only ranks; no promise of
a budget or an error bound rests on it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.terms.errors import BadRequest

SKETCH_BUCKETS: Final = 32

# What the compiled passes have scratch memory for.
TILE: Final = 1024
"""Elements per tile.  A chunk starts at a multiple of it."""

QUARTER: Final = TILE // 4
SKETCH_LANES: Final = QUARTER + SKETCH_BUCKETS
LANES: Final = 3 * QUARTER + SKETCH_LANES
KEYS: Final = 1 << 15
COUNTERS: Final = 1 << 16
# Consecutive increments of one counter wait for each other, so four counters alternate.
TURNS: Final = 4

CHUNK: Final = np.dtype(
    [
        ("nonzeros", "<u4"),  # elements with d != 0; those that are not finite count
        ("sum_abs", "<f8"),  # sum of |d|
        ("sum_squares", "<f8"),  # sum of d^2
        ("max_abs", "<f4"),  # largest |d|; NaN counts as larger than infinity
        ("base_squares", "<f8"),  # sum of float32(base)^2
        ("sketch_exponent", "<i2"),  # S[b] = sketch[b] * 2^sketch_exponent
        ("sketch", "i1", (SKETCH_BUCKETS,)),
    ]
)
"""A row: 66 bytes, packed, little-endian.

If a delta is infinite or NaN, so are the sums and the maximum (NaN always as the one quiet NaN
0x7FC0...), and the sketch is zero.  The row then says nothing about the finite rest: such a row is
*unreliable* (`finite` is False), and a planner must not use it.
"""

Rows = npt.NDArray[np.void]
"""CHUNK[chunks]"""

# The largest bucket is scaled into [2^6, 2^7).  The rounding error, at most half of a 64th of the
# largest bucket, is small compared with the sketch's own uncertainty.
_TOP_EXPONENT: Final = 7
_LARGEST: Final = 127


def unchanged(base_squares: float) -> Rows:
    """Return CHUNK[1] of a chunk that equals the base: zeros except the base's sum of squares."""
    row = np.zeros(1, dtype=CHUNK)
    row["base_squares"] = base_squares
    return row


def pack_sketch(sums: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int8], int]:
    """Encode S, float64[32] and finite, as (sketch, sketch_exponent); ties round to even."""
    largest = float(np.abs(sums).max())
    if largest == 0.0:
        return np.zeros(SKETCH_BUCKETS, dtype=np.int8), 0
    exponent = math.frexp(largest)[1] - _TOP_EXPONENT
    scaled = np.rint(np.ldexp(sums, -exponent))
    # Not np.clip, which takes longer than all of the rest.
    return np.minimum(np.maximum(scaled, -_LARGEST), _LARGEST).astype(np.int8), exponent


def inner(a: Rows, b: Rows) -> npt.NDArray[np.float64]:
    """Estimate <d', d''> chunk by chunk: float64[chunks]. 0 where a sketch is zero.

    `a` and `b` are rows of the same chunks of one tensor, from two experts (or one: the estimate is
    then of |d|^2).  Raises BadRequest if their numbers differ.
    """
    if a.shape != b.shape:
        raise BadRequest(f"rows of the same chunks are needed, not {a.size} and {b.size}")
    products = a["sketch"].astype(np.float64) * b["sketch"].astype(np.float64)
    # Pairwise halving fixes the order of additions; numpy does not specify that of np.sum.
    # Estimates order blocks in a plan, and every machine must make the same plan.
    while products.shape[-1] > 1:
        half = products.shape[-1] // 2
        products = products[..., :half] + products[..., half:]
    exponents = a["sketch_exponent"].astype(np.int32) + b["sketch_exponent"].astype(np.int32)
    estimate: npt.NDArray[np.float64] = np.ldexp(products[..., 0], exponents)
    return estimate


def finite(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which rows are reliable, that is, free of infinities and NaN: bool[chunks]."""
    reliable: npt.NDArray[np.bool_] = np.isfinite(rows["max_abs"])
    for name in ("sum_abs", "sum_squares", "base_squares"):
        reliable = reliable & np.isfinite(rows[name])
    return reliable
