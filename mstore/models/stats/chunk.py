"""One chunk's statistics: what the numbers of a row mean, and how two sketches are compared.

Owns the row (CHUNK) and what two direction sketches tell (`cosines`).  Does not own how a row is
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

    E[sum_b S'[b] * S''[b]] = <d', d''>

with a variance of about (|d'|^2 |d''|^2 + <d', d''>^2) / 32.  Most of it comes from |S'| and |S''|,
which miss |d'| and |d''|; but those norms are known.  So the cosine of the two sketches estimates
that of the two deltas: with a cosine c, its variance is about

    (1 - c^2)^2 / 32

0.18 squared for two deltas that have nothing in common, and almost nothing for a delta and a
multiple of it, as an expert and a merge that one of its tensors dominates.  The mean of the
estimate is c * (1 - (1 - c^2) / 64), which `cosines` corrects.  (Li, Hastie, Church, "Improving
random projections using marginal information", 2006; Olkin, Pratt, "Unbiased estimation of certain
correlation coefficients", 1958.)

Two deltas of a few elements each have the same sketch if these fall into one bucket.  So where the
largest element of both is more than a 32nd of the square of the norm, `cosines` states the variance
above, (1 + c^2) / 32.  The formulas ask for signs that are independent in fours; a fixed hash
stands in for them, so someone who knows it could build deltas that mislead the estimate.
It therefore only tells and ranks; no promise of a budget or an error bound rests on it.
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

_DEVIATION: Final = math.tanh(1 / math.sqrt(SKETCH_BUCKETS))
"""Of the estimate of a cosine c, that of artanh c: whatever c is, it is about the same there."""
_ROUNDING: Final = 2.0**-9
"""How far a cosine of rounded sketches may be from 1 if that of the sketches is 1."""


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


def cosines(a: Rows, b: Rows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Estimate the cosine of d' and d'' chunk by chunk, and its variance: float64[chunks] each.

    `a` and `b` are rows of the same chunks of one tensor, from two experts.  The cosine is 0 where
    a sketch is zero.  The variance is never 0: it is that of a cosine which is smaller by one
    deviation.  Raises BadRequest if the numbers of rows differ.
    """
    if a.shape != b.shape:
        raise BadRequest(f"rows of the same chunks are needed, not {a.size} and {b.size}")
    # Sums of products of small integers: exact, so every machine has the same.
    ours, theirs = (side["sketch"].astype(np.int64) for side in (a, b))
    product, one, other = (
        (left * right).sum(axis=-1)
        for left, right in ((ours, theirs), (ours, ours), (theirs, theirs))
    )
    told = product / np.sqrt(np.maximum(one * other, 1))
    cosine = np.clip(told * (1 + (1 - told * told) / (2 * SKETCH_BUCKETS)), -1.0, 1.0)
    size = np.abs(cosine)
    less = np.clip((size - _DEVIATION) / (1 - size * _DEVIATION), 0.0, 1.0 - _ROUNDING)
    variance = (1 - less * less) ** 2 / SKETCH_BUCKETS
    is_few = _is_few(a) & _is_few(b)
    return cosine, np.where(is_few, (1 + cosine * cosine) / SKETCH_BUCKETS, variance)


def _is_few(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return where one element has more than a bucket's share of the square of the norm."""
    largest = rows["max_abs"].astype(np.float64)
    few: npt.NDArray[np.bool_] = largest * largest * SKETCH_BUCKETS > rows["sum_squares"]
    return few


def finite(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which rows are reliable, that is, free of infinities and NaN: bool[chunks]."""
    reliable: npt.NDArray[np.bool_] = np.isfinite(rows["max_abs"])
    for name in ("sum_abs", "sum_squares", "base_squares"):
        reliable = reliable & np.isfinite(rows[name])
    return reliable
