"""Deltas and their statistics written a second time, in plain numpy, from the definitions alone.

Nothing here imports the code under test.  Sums are correctly rounded (math.fsum), selections are
made by a stable sort of all elements.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

BITS = {"BF16": 16, "F16": 16, "F32": 32}

Array = npt.NDArray[Any]


def stored(patterns: Array, dtype: str) -> npt.NDArray[np.uint8]:
    """Bit patterns as the bytes of a tensor of this dtype."""
    return np.ascontiguousarray(patterns, dtype=f"<u{BITS[dtype] // 8}").view(np.uint8)


def patterns_of(values: Array, dtype: str) -> Array:
    """Bit patterns nearest to float32 values (bf16: round half up in magnitude, good enough)."""
    if dtype == "BF16":
        return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    return values.astype(np.float32).view(np.uint32)


def widened(patterns: Array, dtype: str) -> npt.NDArray[np.uint32]:
    """float32 bits of these patterns; a NaN keeps its sign and payload."""
    if dtype == "BF16":
        return patterns.astype(np.uint32) << 16
    if dtype == "F32":
        return patterns.astype(np.uint32)
    half = patterns.astype(np.uint16)
    wide = half.view(np.float16).astype(np.float32).view(np.uint32)
    raw = half.astype(np.uint32)
    nan = (raw & 0x8000) << 16 | 0x7F800000 | (raw & 0x3FF) << 13
    return np.where((raw & 0x7FFF) > 0x7C00, nan, wide)


def delta(base: Array, base_dtype: str, expert: Array, expert_dtype: str) -> Array:
    """float32 d from bit patterns; a NaN is the quiet one."""
    b, e = widened(base, base_dtype), widened(expert, expert_dtype)
    with np.errstate(all="ignore"):
        d = e.view(np.float32) - b.view(np.float32)
    d[e == b] = 0.0
    d[np.isnan(d)] = np.float32(np.nan)
    return d


def magnitude_bits(d: Array) -> npt.NDArray[np.uint32]:
    """Bits of |d|, NaN as 0x7FC00000."""
    bits = d.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return np.where(bits > 0x7F800000, np.uint32(0x7FC00000), bits).astype(np.uint32)


def histogram(d: Array) -> npt.NDArray[np.int64]:
    """int64[32768, 2]: elements by the top 16 bits of |d|, and those with low bits set."""
    bits = magnitude_bits(d)
    bits = bits[bits != 0]
    everything = np.bincount(bits >> 16, minlength=0x8000)
    inexact = np.bincount(bits[bits & 0xFFFF != 0] >> 16, minlength=0x8000)
    return np.stack([everything, inexact], axis=1).astype(np.int64)


def sum_of(values: Array) -> float:
    """Correctly rounded sum."""
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    if not np.isfinite(wide).all():
        return float("nan") if np.isnan(wide).any() else float("inf")
    return math.fsum(wide.tolist())


def _mix(x: Array) -> Array:
    x = x.astype(np.uint32)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def sketch(d: Array, first: int) -> npt.NDArray[np.float64]:
    """float64[32]: signed sums by bucket, element by element from the formulas."""
    index = np.arange(first, first + d.size, dtype=np.uint64)
    quarter = index % np.uint64(1024) // np.uint64(256)
    low, high = (index - quarter * np.uint64(256)) & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    word = _mix(low.astype(np.uint32) ^ _mix(high))
    negative = word >> (np.uint32(31) - quarter.astype(np.uint32)) & np.uint32(1)
    turn = _mix((index >> np.uint64(10)).astype(np.uint32) ^ np.uint32(0x9E3779B9)) >> 27
    bucket = (index + turn.astype(np.uint64)) % np.uint64(32)
    signed = np.where(negative == 1, -d.astype(np.float64), d.astype(np.float64))
    return np.array([math.fsum(signed[bucket == b].tolist()) for b in range(32)])


def largest(d: Array, k: int) -> npt.NDArray[np.bool_]:
    """The k largest |d| that are not zero, at equal magnitude the lowest index first: bool[n]."""
    bits = magnitude_bits(d).astype(np.int64)
    order = np.argsort(-bits, kind="stable")[:k]
    kept = np.zeros(d.size, dtype=bool)
    kept[order] = True
    return kept & (bits != 0)


def kept_by(d: Array, value: float, quota: int) -> npt.NDArray[np.bool_]:
    """All |d| above `value`, and the first `quota` equal to it: bool[n]."""
    bits = magnitude_bits(d)
    edge = magnitude_bits(np.array([value], dtype=np.float32))[0]
    kept = bits > edge
    kept[np.flatnonzero(bits == edge)[:quota]] = True
    return kept & (bits != 0)
