"""The compiled passes of competition: scores, and the merge of what wins by them.

exp and tanh are computed here, by argument reduction and polynomials, in plain float64 steps: those
of a C library differ from machine to machine.  Both are within 2^-46 of themselves, so a score is
rounded to float32 as the exact one almost always is.

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, stages, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.stages import subtract
from mstore.merge.arithmetic.tiles import BASE, EXPERT, SECOND, SUM, TILE, TILES
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry, inlined, pointer
from mstore.numeric.floats import (
    bits_float,
    float_bits,
    load_bits,
    quieten,
    quieten_all,
    store_bits,
)

_ZERO: Final = np.float32(0.0)
_SIGN: Final = np.uint32(0x80000000)
_LEAST_SUM: Final = 1e-12
_LOG2E: Final = 1.4426950408889634
_LN2: Final = 0.6931471805599453
_ROUNDER: Final = float.fromhex("0x1.8p52")
"""Added to a small number, it leaves the nearest whole one in the low bits."""
_BIAS: Final = np.int64(1023)
_MANTISSA: Final = np.int64(52)
_LOWEST: Final = -1022.0
"""2 to the power of less is not a normal float64, and counts as 0."""
_SMALL: Final = 0.0625
"""Of numbers that are nearer to 0, tanh is a polynomial."""


# Loops without sums, so that LLVM vectorises them.


@inlined
def _power(x: Any) -> Any:
    """Return 2 to the power of a number up to 0."""
    rounded = x + _ROUNDER
    r = (x - (rounded - _ROUNDER)) * _LN2
    y = 1.0 / 39916800.0
    y = y * r + 1.0 / 3628800.0
    y = y * r + 1.0 / 362880.0
    y = y * r + 1.0 / 40320.0
    y = y * r + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    # The shift leaves nothing of the rounder's own bits.
    whole = np.int64((np.float64(rounded).view(np.int64) + _BIAS) << _MANTISSA)
    return 0.0 if x < _LOWEST else y * whole.view(np.float64)


@inlined
def _small_tanh(x: Any) -> Any:
    """Return tanh of a number that is nearer to 0 than _SMALL."""
    z = x * x
    y = -1382.0 / 155925.0
    y = y * z + 62.0 / 2835.0
    y = y * z + -17.0 / 315.0
    y = y * z + 2.0 / 15.0
    y = y * z + -1.0 / 3.0
    y = y * z + 1.0
    return x * y


@inlined
def _tanh(x: Any) -> Any:
    size = abs(x)
    rest = _power((-2.0 * _LOG2E) * size)
    large = (1.0 - rest) / (1.0 + rest)
    large = large if x > 0.0 else -large
    return _small_tanh(x) if size < _SMALL else large


@compiled
def _add(deltas: Any, totals: Any) -> None:
    for i in range(totals.size):
        totals[i] += np.float64(deltas[i])


@compiled
def _are_small(deltas: Any, totals: Any) -> Any:
    """Return whether tanh of each product is a polynomial."""
    large = np.uint32(0)
    for i in range(totals.size):
        size = abs(np.float64(deltas[i]) * totals[i])
        large = np.uint32(large + np.uint32(not size < _SMALL))
    return large == 0


@compiled
def _score(deltas: Any, totals: Any, largest: Any, competing: Any, found: Any) -> None:
    """Write an expert's scores, float32; totals: of the deltas of all."""
    if largest == 0.0:
        found[:] = _ZERO
        return
    most = competing * _LOG2E
    # Products take less time than quotients.
    inverse = 1.0 / largest
    if _are_small(deltas, totals):
        # As below, in half the time: as good as always.
        for i in range(found.size):
            delta = np.float64(deltas[i])
            share = delta * inverse
            intra = _power(share * share * most - most)
            found[i] = np.float32(intra * _small_tanh(delta * totals[i])) + _ZERO
    else:
        for i in range(found.size):
            delta = np.float64(deltas[i])
            share = delta * inverse
            intra = _power(share * share * most - most)
            # Adding zero leaves no -0: the bits of scores order as they do.
            found[i] = np.float32(intra * _tanh(delta * totals[i])) + _ZERO


@compiled
def _scale(deltas: Any, scores: Any, least: Any, most: Any, scales: Any, sums: Any) -> None:
    """Write an expert's scales, and add them to the sums."""
    span = most - least
    alike = not span > 0.0
    inverse = 0.0 if alike else 1.0 / span
    for i in range(sums.size):
        score = np.float64(scores[i])
        scale = ((score if score < most else most) - least) * inverse
        scale = 1.0 if alike else scale
        scale = scale if (score >= least) & (deltas[i] != _ZERO) else 0.0
        scales[i] = scale
        sums[i] += scale


@compiled
def _invert(sums: Any) -> None:
    for i in range(sums.size):
        sums[i] = 1.0 / (sums[i] if sums[i] > _LEAST_SUM else _LEAST_SUM)


@compiled
def _divide(weight: Any, inverses: Any, scales: Any) -> None:
    """Turn an expert's scales into its factors."""
    for i in range(inverses.size):
        scales[i] = np.float64(np.float32(np.float64(weight) * scales[i] * inverses[i]))


@compiled
def compete(
    start: int,
    count: int,
    weights: Any,
    limits: Any,
    row_codes: Any,
    row_of: Any,
    rows: Any,
    scratch: Any,
    room: Any,
) -> None:
    """Write the factors of a tile: float32 numbers of each expert, to its row of the room.

    The base's tile is in the scratch.  limits: the thresholds of all experts; room: float64[at
    least K + 2, TILE], left as it is of an expert that is not read.
    """
    experts = weights.size
    totals, sums = room[experts, :count], room[experts + 1, :count]
    deltas = scratch[EXPERT : EXPERT + count].view(np.float32)
    scores = scratch[SECOND : SECOND + count].view(np.float32)
    totals[:] = 0.0
    sums[:] = 0.0
    competing = 0.0
    for k in range(experts):
        p = row_of[k]
        if weights[k] != _ZERO:
            competing += 1.0
            if p >= 0:
                load_bits(row_codes[p], rows[p], start, count, scratch, EXPERT)
                subtract(count, EXPERT, scratch)
                _add(deltas, totals)
    for k in range(experts):
        p = row_of[k]
        if weights[k] == _ZERO:
            room[k, :count] = 0.0
        elif p >= 0:
            load_bits(row_codes[p], rows[p], start, count, scratch, EXPERT)
            subtract(count, EXPERT, scratch)
            largest, least = np.float64(limits[k]), np.float64(limits[experts + k])
            _score(deltas, totals, largest, competing, scores)
            most = np.float64(limits[2 * experts + k])
            _scale(deltas, scores, least, most, room[k, :count], sums)
    _invert(sums)
    for k in range(experts):
        if weights[k] != _ZERO and row_of[k] >= 0:
            _divide(weights[k], sums, room[k, :count])


@compiled
def _mix(deltas: Any, factors: Any, mixed: Any) -> None:
    """Add an expert's deltas times their factors."""
    for i in range(mixed.size):
        mixed[i] = np.float32(mixed[i] + np.float32(deltas[i] * np.float32(factors[i])))


@compiled
def _finish(bases: Any, mixed: Any, factor: Any, out: Any) -> None:
    for i in range(bases.size):
        moved = np.float32(mixed[i] * factor)
        total = quieten(float_bits(np.float32(bits_float(bases[i]) + moved)))
        out[i] = bases[i] if moved == _ZERO else total


@entry("pp", floats, stages, tiles, arguments)
def balance(arguments_at: Any, room_at: Any) -> None:
    """Do `pcb.run`; room: float64[K + 2, TILE]."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    experts = given[a.EXPERTS]
    base_code, out_code, n = given[a.BASE_CODE], given[a.OUT_CODE], given[a.LENGTH]
    weights = carray(pointer(given[a.WEIGHTS_AT]), (experts,), np.float32)
    limits = carray(pointer(given[a.THRESHOLDS_AT]), (given[a.CUTS] * experts,), np.float32)
    factor = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)[1]
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    rows = carray(pointer(given[a.ROWS_AT]), (given[a.ROWS], given[a.STRIDE]), np.uint8)
    row_codes = carray(pointer(given[a.CODES_AT]), (given[a.CODES],), np.int64)
    row_of = carray(pointer(given[a.ROW_OF_AT]), (experts,), np.int64)
    out = carray(pointer(given[a.OUT_AT]), (given[a.OUT_LENGTH],), np.uint8)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    room = carray(room_at, (experts + 2, TILE), np.float64)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        load_bits(base_code, base, start, count, scratch, BASE)
        compete(start, count, weights, limits, row_codes, row_of, rows, scratch, room)
        deltas = scratch[EXPERT : EXPERT + count].view(np.float32)
        mixed = scratch[SECOND : SECOND + count].view(np.float32)
        mixed[:] = _ZERO
        for k in range(experts):
            p = row_of[k]
            if weights[k] != _ZERO and p >= 0:
                load_bits(row_codes[p], rows[p], start, count, scratch, EXPERT)
                subtract(count, EXPERT, scratch)
                _mix(deltas, room[k, :count], mixed)
        _finish(scratch[BASE : BASE + count], mixed, factor, scratch[SUM : SUM + count])
        if base_code != out_code:
            quieten_all(scratch[SUM : SUM + count])
        store_bits(out_code, scratch, SUM, count, out, start)


@compiled
def _order(scores: Any, found: Any) -> None:
    """Write numbers without a sign that order as the scores do."""
    for i in range(found.size):
        bits = float_bits(scores[i])
        found[i] = np.uint32(bits ^ np.uint32(0xFFFFFFFF)) if bits & _SIGN else bits | _SIGN


@entry("piippp", floats, stages, tiles, arguments)
def scores(
    sides_at: Any, experts: int, n: int, largest_at: Any, scratch_at: Any, found_at: Any
) -> None:
    """Do `pcb.scores`; sides: addresses of float32[n], int64[experts].

    largest: float64[experts]; scratch: float64[2, TILE].
    """
    sides = carray(sides_at, (experts,), np.int64)
    largest = carray(largest_at, (experts,), np.float64)
    scratch = carray(scratch_at, (2, TILE), np.float64)
    found = carray(found_at, (experts, n), np.uint32)
    for start in range(0, n, TILE):
        end = min(start + TILE, n)
        totals = scratch[0, : end - start]
        own = scratch[1].view(np.float32)[: end - start]
        totals[:] = 0.0
        for k in range(experts):
            _add(carray(pointer(sides[k]), (n,), np.float32)[start:end], totals)
        for k in range(experts):
            deltas = carray(pointer(sides[k]), (n,), np.float32)[start:end]
            _score(deltas, totals, largest[k], np.float64(experts), own)
            _order(own, found[k, start:end])
