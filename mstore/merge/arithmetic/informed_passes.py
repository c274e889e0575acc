"""The compiled pass of informed averages.

Owns the arithmetic that `methods.fisher` promises.  Importing this module imports the compiler:
only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.tiles import (
    BASE,
    EXPERT,
    POSITIVE,
    POSITIVE_WEIGHT,
    SECOND,
    STRIDE,
    SUM,
    THIRD,
    TILE,
    TILES,
)
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry, pointer
from mstore.numeric.floats import (
    bits_float,
    float_bits,
    load_bits,
    quieten,
    quieten_all,
    store_bits,
)

_INFINITY: Final = np.float32(np.inf)
_ZERO: Final = np.float32(0.0)


@compiled
def _count_unsound(tile: Any) -> Any:
    """Count the elements that are negative, infinite or NaN."""
    found = np.uint32(0)
    for i in range(tile.size):
        value = bits_float(tile[i])
        found = np.uint32(found + np.uint32(not ((value >= _ZERO) & (value < _INFINITY))))
    return np.int64(found)


@compiled
def _weigh(fishers: Any, weight: Any, floor: Any, factors: Any, divisors: Any) -> None:
    """Write the factors of an expert's deltas, and add them to the divisors."""
    for i in range(fishers.size):
        value = bits_float(fishers[i])
        value = value if (value >= _ZERO) & (value < _INFINITY) else _ZERO
        value = value if value > floor else floor
        factor = np.float64(value) * np.float64(weight)
        factors[i] = factor
        divisors[i] += factor


@compiled
def _add(experts: Any, bases: Any, factors: Any, sums: Any) -> None:
    """Add an expert's deltas times their factors; nothing times infinity is nothing."""
    for i in range(experts.size):
        delta = np.float64(bits_float(experts[i])) - np.float64(bits_float(bases[i]))
        moves = (experts[i] != bases[i]) & (factors[i] > 0.0)
        sums[i] += factors[i] * delta if moves else 0.0


@compiled
def _finish(bases: Any, sums: Any, divisors: Any, scale: Any, out: Any) -> None:
    for i in range(bases.size):
        mixed = sums[i] / (divisors[i] if divisors[i] > 0.0 else 1.0) * np.float64(scale)
        total = np.float32(np.float64(bits_float(bases[i])) + mixed)
        out[i] = bases[i] if mixed == 0.0 else quieten(float_bits(total))


@entry("p", floats, tiles, arguments)
def informed(arguments_at: Any) -> None:
    """Do `fisher.run`; write its result into the first of the ties of the arguments."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    both = given[a.EXPERTS]
    experts = both // 2
    base_code, out_code, n = given[a.BASE_CODE], given[a.OUT_CODE], given[a.LENGTH]
    weights = carray(pointer(given[a.WEIGHTS_AT]), (both,), np.float32)
    both_factors = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)
    scale, floor = both_factors[0], both_factors[1]
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    rows = carray(pointer(given[a.ROWS_AT]), (given[a.ROWS], given[a.STRIDE]), np.uint8)
    row_codes = carray(pointer(given[a.CODES_AT]), (given[a.CODES],), np.int64)
    row_of = carray(pointer(given[a.ROW_OF_AT]), (both,), np.int64)
    out = carray(pointer(given[a.OUT_AT]), (given[a.OUT_LENGTH],), np.uint8)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    ties = carray(pointer(given[a.TIES_AT]), (both,), np.int64)
    # Two tiles of words are one of float64.
    sums = scratch[POSITIVE : POSITIVE + 2 * STRIDE].view(np.float64)
    divisors = scratch[POSITIVE_WEIGHT : POSITIVE_WEIGHT + 2 * STRIDE].view(np.float64)
    factors = scratch[THIRD : THIRD + 2 * STRIDE].view(np.float64)
    unsound = 0
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        load_bits(base_code, base, start, count, scratch, BASE)
        bases = scratch[BASE : BASE + count]
        sums[:count] = 0.0
        divisors[:count] = 0.0
        for k in range(experts):
            fisher, expert = row_of[experts + k], row_of[k]
            if fisher < 0:
                continue
            load_bits(row_codes[fisher], rows[fisher], start, count, scratch, SECOND)
            own = scratch[SECOND : SECOND + count]
            unsound += _count_unsound(own)
            _weigh(own, weights[k], floor, factors[:count], divisors[:count])
            if expert < 0:
                continue
            load_bits(row_codes[expert], rows[expert], start, count, scratch, EXPERT)
            _add(scratch[EXPERT : EXPERT + count], bases, factors[:count], sums[:count])
        mixed = scratch[SUM : SUM + count]
        _finish(bases, sums[:count], divisors[:count], scale, mixed)
        if base_code != out_code:
            quieten_all(mixed)
        store_bits(out_code, scratch, SUM, count, out, start)
    ties[0] = unsound
