"""Stages: the compiled steps over one tile of an expert: its selection, and its weight.

Merge and attribution share those of a selection.  A merge fuses most of them with the weight, for
speed (`weigh` and what follows); both ways give the same bits.  `at` is the tile's place in the
scratch (`tiles`).  Importing this module imports the compiler.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstore.merge.arithmetic.tiles import BASE, DIFFERS, UNLIMITED
from mstore.numeric.compiling import compiled
from mstore.numeric.floats import bits_float, float_bits, quieten

NOTHING: Final = np.uint32(0)
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_ONE: Final = np.float32(1.0)
_INFINITY: Final = np.uint32(0x7F800000)
_LONE: Final = np.uint32(1)
_NEAREST: Final = np.float32(1e-6)


@compiled
def subtract(count: int, at: int, scratch: Any) -> None:
    """Turn an expert's tile into its deltas: expert minus base, +0 where their bits are equal."""
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        expert, base = tile[i], bases[i]
        delta = float_bits(bits_float(expert) - bits_float(base))
        tile[i] = NOTHING if expert == base else delta


@compiled
def swap(count: int, reach: Any, at: int, scratch: Any) -> None:
    """Move the base's elements to the expert's, by about `reach` at most; write them to its tile.

    The order of operations is mergekit's: the reciprocal of the distance, times `reach`.
    """
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        expert, base = bits_float(tile[i]), bits_float(bases[i])
        distance = bits_float(float_bits(expert - base) & MAGNITUDE)
        # A NaN stays one.
        distance = _NEAREST if distance < _NEAREST else distance
        share = np.float32(np.float32(_ONE / distance) * reach)
        share = _ONE if share > _ONE else share
        rest = np.float32(np.float32(_ONE - share) * base)
        # A NaN with a payload might equal the base's, on some machines.
        moved = quieten(float_bits(np.float32(share * expert) + rest))
        tile[i] = bases[i] if tile[i] == bases[i] else moved


@compiled
def choose(count: int, mask: Any, at: int, scratch: Any) -> None:
    """Write the base's elements to an expert's tile where the mask is 0."""
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        tile[i] = tile[i] if mask[i] else bases[i]


@compiled
def trim(count: int, threshold: Any, quota: int, at: int, scratch: Any) -> int:
    """Zero the deltas that are not kept; return the remaining quota (negative: no limit)."""
    tile = scratch[at : at + count]
    if quota > 0:
        for i in range(count):
            magnitude = bits_float(tile[i] & MAGNITUDE)
            keep = magnitude > threshold
            if magnitude == threshold and quota > 0:
                keep = True
                quota -= 1
            if not keep:
                tile[i] = NOTHING
        return quota
    with_equal = quota != 0
    for i in range(count):
        bits = tile[i]
        magnitude = bits_float(bits & MAGNITUDE)
        keep = (magnitude > threshold) | ((magnitude == threshold) & with_equal)
        tile[i] = bits if keep else NOTHING
    return quota


@compiled
def _ties(tile: Any, threshold: Any) -> Any:
    equal = np.uint32(0)
    for i in range(tile.size):
        magnitude = bits_float(tile[i] & MAGNITUDE)
        equal = np.uint32(equal + np.uint32(magnitude == threshold))
    return np.int64(equal)


@compiled
def _trim_whole_band(tile: Any, low: Any, low_quota: int, high: Any, high_quota: int) -> Any:
    """Do `trim_band` where each threshold takes all of its ties, or none."""
    # "Above" means "not below the next float32".  For infinity that is a NaN, which nothing
    # reaches.
    above_low, above_high = float_bits(low) + np.uint32(1), float_bits(high) + np.uint32(1)
    least = low if low_quota < 0 else bits_float(above_low)
    beyond = high if high_quota < 0 else bits_float(above_high)
    lows, highs = np.uint32(0), np.uint32(0)
    for i in range(tile.size):
        magnitude = bits_float(tile[i] & MAGNITUDE)
        lows = np.uint32(lows + np.uint32(magnitude == low))
        highs = np.uint32(highs + np.uint32(magnitude == high))
        tile[i] = tile[i] if (magnitude >= least) & (not magnitude >= beyond) else NOTHING
    return np.int64(lows) if low_quota < 0 else 0, np.int64(highs) if high_quota < 0 else 0


@compiled
def trim_band(
    count: int, low: Any, low_quota: int, high: Any, high_quota: int, at: int, scratch: Any
) -> Any:
    """Zero the deltas but those that `low` keeps and `high` does not.

    Returns the ties at both thresholds that count as kept: up to the quota, or all if that is
    negative.
    """
    tile = scratch[at : at + count]
    # A quota ends in one tile of a tensor; before that, it is as good as unlimited.
    if low_quota > 0 and _ties(tile, low) <= low_quota:
        low_quota = UNLIMITED
    if high_quota > 0 and _ties(tile, high) <= high_quota:
        high_quota = UNLIMITED
    if low_quota <= 0 and high_quota <= 0:
        return _trim_whole_band(tile, low, low_quota, high, high_quota)
    lows, highs = np.int64(0), np.int64(0)
    for i in range(count):
        magnitude = bits_float(tile[i] & MAGNITUDE)
        keep, drop = magnitude > low, magnitude > high
        if magnitude == low and (low_quota < 0 or lows < low_quota):
            keep = True
            lows += 1
        if magnitude == high and (high_quota < 0 or highs < high_quota):
            drop = True
            highs += 1
        if drop or not keep:
            tile[i] = NOTHING
    return lows, highs


@compiled
def draw(count: int, own: Any, limit: Any, factor: Any, at: int, scratch: Any) -> None:
    """Zero the deltas whose draw is not below the limit, and scale the others."""
    tile = scratch[at : at + count]
    for i in range(count):
        scaled = float_bits(bits_float(tile[i]) * factor)
        tile[i] = scaled if own[i] < limit and tile[i] != NOTHING else NOTHING


@compiled
def drawn_by(mask: Any, draws: Any) -> None:
    """Write draws that a limit of 1 turns into this mask."""
    for i in range(mask.size):
        draws[i] = mask[i] == 0


@compiled
def multiply(count: int, factor: Any, at: int, scratch: Any) -> None:
    tile = scratch[at : at + count]
    for i in range(count):
        tile[i] = float_bits(bits_float(tile[i]) * factor)


@compiled
def weigh(count: int, weight: Any, at: int, scratch: Any) -> None:
    """Turn an expert's tile into its weighted deltas."""
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        expert, base = tile[i], bases[i]
        mixed = float_bits((bits_float(expert) - bits_float(base)) * weight)
        tile[i] = NOTHING if expert == base else mixed


@compiled
def weigh_kept(count: int, weight: Any, least: Any, at: int, scratch: Any) -> None:
    """Turn an expert's tile into its weighted deltas, 0 where the magnitude is below `least`.

    Equal bits need no special case: they give zero, or a NaN, which is not kept.  The NaN of an
    infinite delta and a zero weight is not kept either.
    """
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        delta = bits_float(tile[i]) - bits_float(bases[i])
        magnitude = bits_float(float_bits(delta) & MAGNITUDE)
        mixed = np.float32(delta * weight)
        tile[i] = float_bits(mixed) if (magnitude >= least) & (mixed == mixed) else NOTHING


@compiled
def drop_nan(count: int, at: int, scratch: Any) -> None:
    """Zero every NaN of a tile: it has no sign and takes part in no election."""
    tile = scratch[at : at + count]
    for i in range(count):
        tile[i] = tile[i] if np.uint32(tile[i] & MAGNITUDE) <= _INFINITY else NOTHING


@compiled
def count_equal(count: int, threshold: Any, at: int, scratch: Any) -> int:
    tile = scratch[at : at + count]
    equal = 0
    for i in range(count):
        equal += bits_float(tile[i] & MAGNITUDE) == threshold
    return equal


@compiled
def weigh_counted(count: int, weight: Any, threshold: Any, at: int, scratch: Any) -> Any:
    """Do `weigh_kept` keeping all ties at the threshold; return the number of ties."""
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    equal = np.uint32(0)
    for i in range(count):
        delta = bits_float(tile[i]) - bits_float(bases[i])
        magnitude = bits_float(float_bits(delta) & MAGNITUDE)
        mixed = np.float32(delta * weight)
        tile[i] = float_bits(mixed) if (magnitude >= threshold) & (mixed == mixed) else NOTHING
        equal = np.uint32(equal + np.uint32(magnitude == threshold))
    return np.int64(equal)


@compiled
def weigh_trimmed(
    count: int, weight: Any, threshold: Any, quota: int, at: int, scratch: Any
) -> int:
    """Turn an expert's tile into its weighted, trimmed deltas; return the remaining quota."""
    if quota > 0:
        # A quota ends in one tile of a tensor, which is not worth a fused loop.
        subtract(count, at, scratch)
        quota = trim(count, threshold, quota, at, scratch)
        multiply(count, weight, at, scratch)
        drop_nan(count, at, scratch)
        return quota
    # "Above the threshold" means "not below the next float32".  For infinity that is a NaN, which
    # nothing reaches.
    least = threshold if quota < 0 else bits_float(float_bits(threshold) + np.uint32(1))
    weigh_kept(count, weight, least, at, scratch)
    return quota


@compiled
def weigh_drawn(
    count: int, factor: Any, weight: Any, own: Any, limit: Any, at: int, scratch: Any
) -> None:
    """Turn an expert's tile into its deltas times factor and weight, masked by its draws.

    An element is 0 if its own draw is not below the limit.
    """
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    for i in range(count):
        expert, base = tile[i], bases[i]
        delta = np.float32(bits_float(expert) - bits_float(base))
        mixed = float_bits(np.float32(delta * factor) * weight)
        tile[i] = mixed if (own[i] < limit) & (expert != base) else NOTHING


@compiled
def count_kept(count: int, least: Any, at: int, scratch: Any) -> None:
    """Count at each element the experts whose delta has this magnitude or more."""
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    numbers = scratch[DIFFERS : DIFFERS + count]
    for i in range(count):
        delta = bits_float(tile[i]) - bits_float(bases[i])
        kept = bits_float(float_bits(delta) & MAGNITUDE) >= least
        numbers[i] = np.uint32(numbers[i] + np.uint32(kept))


@compiled
def weigh_average(count: int, weight: Any, least: Any, at: int, scratch: Any) -> None:
    """Turn an expert's tile into its part of the mean: 0 where the magnitude is below `least`.

    Where it is the only one, it is the delta times the weight.
    """
    tile, bases = scratch[at : at + count], scratch[BASE : BASE + count]
    numbers = scratch[DIFFERS : DIFFERS + count]
    for i in range(count):
        delta = np.float32(bits_float(tile[i]) - bits_float(bases[i]))
        kept = bits_float(float_bits(delta) & MAGNITUDE) >= least
        lone, part = np.float32(delta * weight), np.float32(delta / np.float32(numbers[i]))
        mixed = lone if numbers[i] == _LONE else part
        tile[i] = float_bits(mixed) if kept else NOTHING
