"""The compiled passes of importance: how far the softmax of a row is from that of another, and what
follows from that for its elements.

exp and log are computed here, by argument reduction and a polynomial, in plain float64 steps: those
of a C library differ from machine to machine.  exp is within 2^-48 of it, log within 2 units in the
last place.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.numeric import floats, halves_passes
from mstore.numeric.compiling import compiled, entry, inlined
from mstore.numeric.floats import load_bits
from mstore.numeric.halves_passes import count_lower

_LOG2E: Final = 1.4426950408889634
# ln 2 in two parts; the first has so many zeros that its product with an exponent is exact.
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_LN2: Final = 0.6931471805599453
_ROUNDER: Final = float.fromhex("0x1.8p52")
"""Added to a small number, it leaves the nearest whole one in the low bits."""
_ROUNDER_BITS: Final = np.int64(0x4338000000000000)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)
_BIAS: Final = np.int64(1023)
_MANTISSA: Final = np.int64(52)
_LOWEST: Final = -708.0
"""exp of less is not a normal float64, and counts as 0."""
_EPSILON: Final = 1e-8
LANES: Final = 16
"""Partial sums of a row, by index."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SMALL: Final = np.uint32(0x42800000)
"""The bits of 64: exp of a number up to it, and of its negative, is far from the ends."""
_STEP: Final = np.uint32(0x3C800000)
"""The bits of 1/64."""
_HALF: Final = np.uint32(16)
_BINS: Final = 1 << 16


# Loops without sums, so that LLVM vectorises them.


@inlined
def _exp(x: Any) -> Any:
    """Return exp of a number up to 64, a NaN for a NaN."""
    rounded = x * _LOG2E + _ROUNDER
    exponent = np.float64(rounded).view(np.int64) - _ROUNDER_BITS
    whole = rounded - _ROUNDER
    # A quarter of what is left needs five terms less than all of it, and two squares.
    r = ((x - whole * _LN2_HIGH) - whole * _LN2_LOW) * 0.25
    y = 1.0 / 40320.0
    y = y * r + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    y = y * y
    y = y * y
    power = np.int64((exponent + _BIAS) << _MANTISSA).view(np.float64)
    return 0.0 if x < _LOWEST else y * power


@inlined
def _log(x: Any) -> Any:
    """Return log of a normal number above 0; not of infinity or a NaN."""
    bits = np.float64(x).view(np.int64)
    # The bias makes it positive, and the shift a logical one.
    biased = np.int64(bits - _SQRT_HALF_BITS + (_BIAS << _MANTISSA)) >> _MANTISSA
    exponent = np.int64(biased + _ROUNDER_BITS).view(np.float64) - (_ROUNDER + 1023.0)
    m = np.int64(bits - ((biased - _BIAS) << _MANTISSA)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    y = 1.0 / 21.0
    y = y * z + 1.0 / 19.0
    y = y * z + 1.0 / 17.0
    y = y * z + 1.0 / 15.0
    y = y * z + 1.0 / 13.0
    y = y * z + 1.0 / 11.0
    y = y * z + 1.0 / 9.0
    y = y * z + 1.0 / 7.0
    y = y * z + 1.0 / 5.0
    y = y * z + 1.0 / 3.0
    y = y * z + 1.0
    return exponent * _LN2 + 2.0 * s * y


@compiled
def _largest_size(values: Any) -> Any:
    """Return the largest magnitude of float32[n], above infinity if there is a NaN: its bits."""
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        size = np.uint32(bits[i] & _MAGNITUDE)
        largest = size if size > largest else largest
    return largest


@compiled
def _top(values: Any) -> float:
    """Return what is subtracted before exp: 0, or the largest value where exp might overflow."""
    if _largest_size(values) <= _SMALL:
        return 0.0
    largest = values[0]
    for i in range(1, values.size):
        largest = values[i] if values[i] > largest else largest
    return np.float64(largest)


@compiled
def _exponentials(values: Any, found: Any) -> None:
    """Write exp of float32[n], times the same number for all."""
    top = _top(values)
    for i in range(values.size):
        found[i] = _exp(np.float64(values[i]) - top)


@compiled
def _grown(exponentials: Any, base: Any, expert: Any, found: Any) -> None:
    """Write exp of the expert's elements, as those of the base times exp of the difference.

    That is at most 1/64, so its power series is short.
    """
    for i in range(base.size):
        d = np.float64(expert[i]) - np.float64(base[i])
        y = 1.0 / 720.0
        y = y * d + 1.0 / 120.0
        y = y * d + 1.0 / 24.0
        y = y * d + 1.0 / 6.0
        y = y * d + 0.5
        y = y * d + 1.0
        y = y * d + 1.0
        found[i] = exponentials[i] * y


@compiled
def _sum(values: Any, lanes: Any) -> float:
    """Return the sum of float64[n]: of every sixteenth, then of their halves in turn."""
    lanes[:] = 0.0
    whole = values.size // LANES * LANES
    for start in range(0, whole, LANES):
        own = values[start : start + LANES]
        for i in range(LANES):
            lanes[i] += own[i]
    rest = values[whole:]
    for i in range(rest.size):
        lanes[i] += rest[i]
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return float(lanes[0])


@compiled
def _near(mine: Any, part: float, theirs: Any, own_part: float, terms: Any) -> None:
    """Write p log(p / q) - p + q of shares that follow from differences up to 1/64.

    With s = (p - q) / (p + q), log(p / q) is 2 (s + s^3 / 3 + s^5 / 5 + ...): one division, and
    nothing is lost where p and q are nearly equal.
    """
    for i in range(terms.size):
        p, q = mine[i] * part + _EPSILON, theirs[i] * own_part + _EPSILON
        gap = p - q
        s = gap / (p + q)
        z = s * s
        y = 1.0 / 9.0
        y = y * z + 1.0 / 7.0
        y = y * z + 1.0 / 5.0
        y = y * z + 1.0 / 3.0
        terms[i] = gap * s + (p + p) * s * z * y


@compiled
def _far(mine: Any, part: float, theirs: Any, own_part: float, terms: Any) -> None:
    """Write p log(p / q) - p + q of any shares."""
    for i in range(terms.size):
        p, q = mine[i] * part + _EPSILON, theirs[i] * own_part + _EPSILON
        ratio = p / q
        # The difference is a NaN where the logarithm would be one, and else 0.
        terms[i] = p * _log(ratio) - (p - q) + (ratio - ratio)


@compiled
def _divergence(base: Any, expert: Any, moved: Any, scratch: Any, lanes: Any) -> Any:
    """Return sum p log(p / q) of a row, p and q the softmax of expert and base, each plus 1e-8.

    Both add up to the same, so sum p log(p / q) - p + q is that, too; it does not lose the small
    divergence of similar rows to the rounding of the totals.  moved: float32, the differences.
    scratch: float64[3, length].
    """
    mine, theirs, terms = scratch[0], scratch[1], scratch[2]
    is_near = _largest_size(moved) <= _STEP
    _exponentials(base, theirs)
    if is_near:
        _grown(theirs, base, expert, mine)
    else:
        _exponentials(expert, mine)
    part, own_part = 1.0 / _sum(mine, lanes), 1.0 / _sum(theirs, lanes)
    if is_near:
        _near(mine, part, theirs, own_part, terms)
    else:
        _far(mine, part, theirs, own_part, terms)
    total = _sum(terms, lanes)
    # Rounding may leave less than nothing.
    return np.float32(0.0) if total < 0.0 else np.float32(total)


@compiled
def _subtract(base: Any, expert: Any, moved: Any) -> None:
    for i in range(moved.size):
        moved[i] = np.float32(expert[i] - base[i])


@compiled
def _weigh(moved: Any, divergence: Any, bits: Any) -> None:
    """Write the bits of the importances of a row's differences."""
    for i in range(moved.size):
        bits[i] = np.float32(abs(moved[i]) * divergence).view(np.uint32)


@compiled
def _count(moved: Any, bits: Any, counts: Any, squares: Any) -> None:
    """Count the upper halves of the bits of importances, and add up the squares by them."""
    for i in range(moved.size):
        half, value = np.uint64(bits[i] >> _HALF), np.float64(moved[i])
        counts[half] += 1
        squares[half] += value * value


@compiled
def _take(bits: Any, least: Any, kept: Any) -> None:
    """Write which importances are `least` or more; a NaN is not."""
    for i in range(bits.size):
        kept[i] = np.uint32(bits[i]).view(np.float32) >= least


@compiled
def _load(code: int, stored: Any, row: int, found: Any) -> None:
    """Widen a row of stored elements: float32[length]."""
    load_bits(code, stored, row * found.size, found.size, found.view(np.uint32), 0)


@compiled
def _differ(base_code: int, base: Any, expert_code: int, expert: Any, row: int, found: Any) -> None:
    """Write a row of both sides, and their differences: float32[3 or more, length]."""
    _load(base_code, base, row, found[0])
    _load(expert_code, expert, row, found[1])
    _subtract(found[0], found[1], found[2])


@compiled
def _matter(
    base_code: int, base: Any, expert_code: int, expert: Any, row: int, divergence: Any, found: Any
) -> Any:
    """Do `_differ`; return the differences of a row, and the bits of their importances.

    found: float32[4, length].
    """
    _differ(base_code, base, expert_code, expert, row, found)
    moved, bits = found[2], found[3].view(np.uint32)
    _weigh(moved, divergence[row], bits)
    return moved, bits


@entry("ipiipiiipppp", floats, halves_passes)
def divergences(
    base_code: int,
    base_at: Any,
    base_bytes: int,
    expert_code: int,
    expert_at: Any,
    expert_bytes: int,
    rows: int,
    length: int,
    singles_at: Any,
    scratch_at: Any,
    lanes_at: Any,
    found_at: Any,
) -> None:
    """Write the divergence of each row: float32[rows].

    singles: float32[3, length]. scratch: float64[3, length]. lanes: float64[LANES].
    """
    base = carray(base_at, (base_bytes,), np.uint8)
    expert = carray(expert_at, (expert_bytes,), np.uint8)
    singles = carray(singles_at, (3, length), np.float32)
    scratch = carray(scratch_at, (3, length), np.float64)
    lanes = carray(lanes_at, (LANES,), np.float64)
    found = carray(found_at, (rows,), np.float32)
    for row in range(rows):
        _differ(base_code, base, expert_code, expert, row, singles)
        found[row] = _divergence(singles[0], singles[1], singles[2], scratch, lanes)


@entry("ipiipiiipppp", floats, halves_passes)
def upper(
    base_code: int,
    base_at: Any,
    base_bytes: int,
    expert_code: int,
    expert_at: Any,
    expert_bytes: int,
    rows: int,
    length: int,
    scratch_at: Any,
    divergence_at: Any,
    counts_at: Any,
    squares_at: Any,
) -> None:
    """Count the upper halves of importances, and add up the squares of differences by them.

    divergence: float32[rows]. counts: int64[65536]. squares: float64[65536]. scratch: float32[4,
    length].
    """
    base = carray(base_at, (base_bytes,), np.uint8)
    expert = carray(expert_at, (expert_bytes,), np.uint8)
    singles = carray(scratch_at, (4, length), np.float32)
    divergence = carray(divergence_at, (rows,), np.float32)
    counts = carray(counts_at, (_BINS,), np.int64)
    squares = carray(squares_at, (_BINS,), np.float64)
    for row in range(rows):
        moved, bits = _matter(base_code, base, expert_code, expert, row, divergence, singles)
        _count(moved, bits, counts, squares)


@entry("ipiipiiippppi", floats, halves_passes)
def lower(
    base_code: int,
    base_at: Any,
    base_bytes: int,
    expert_code: int,
    expert_at: Any,
    expert_bytes: int,
    rows: int,
    length: int,
    scratch_at: Any,
    divergence_at: Any,
    halves_at: Any,
    counts_at: Any,
    wanted: int,
) -> None:
    """Count the lower halves of importances that have one of these upper halves.

    divergence: float32[rows]. halves: int64[wanted]. counts: int64[wanted, 65536]. scratch:
    float32[4, length].
    """
    base = carray(base_at, (base_bytes,), np.uint8)
    expert = carray(expert_at, (expert_bytes,), np.uint8)
    singles = carray(scratch_at, (4, length), np.float32)
    divergence = carray(divergence_at, (rows,), np.float32)
    halves = carray(halves_at, (wanted,), np.int64)
    counts = carray(counts_at, (wanted, _BINS), np.int64)
    for row in range(rows):
        _, bits = _matter(base_code, base, expert_code, expert, row, divergence, singles)
        for number in range(wanted):
            count_lower(bits, np.uint32(halves[number]), counts[number])


@entry("ipiipiiippip", floats, halves_passes)
def take(
    base_code: int,
    base_at: Any,
    base_bytes: int,
    expert_code: int,
    expert_at: Any,
    expert_bytes: int,
    rows: int,
    length: int,
    scratch_at: Any,
    divergence_at: Any,
    least_bits: int,
    kept_at: Any,
) -> None:
    """Write which elements are of the importance `least`, bits of a float32, or more: uint8.

    divergence: float32[rows]. scratch: float32[4, length].
    """
    base = carray(base_at, (base_bytes,), np.uint8)
    expert = carray(expert_at, (expert_bytes,), np.uint8)
    singles = carray(scratch_at, (4, length), np.float32)
    divergence = carray(divergence_at, (rows,), np.float32)
    kept = carray(kept_at, (rows, length), np.uint8)
    least = np.uint32(least_bits).view(np.float32)
    for row in range(rows):
        _, bits = _matter(base_code, base, expert_code, expert, row, divergence, singles)
        _take(bits, least, kept[row])
