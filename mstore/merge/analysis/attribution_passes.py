"""The compiled pass of attribution: from a chunk of base and experts to sums.

Owns the arithmetic that `attribution` promises: one entry point, which takes addresses and lengths
and checks nothing. Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, competition_passes, draws, stages, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.competition_passes import compete
from mstore.merge.arithmetic.draws import fill_draws
from mstore.merge.arithmetic.stages import choose, draw, drawn_by, subtract, swap, trim, trim_band
from mstore.merge.arithmetic.tiles import (
    ALL,
    ALONE,
    AVERAGED,
    BALANCED,
    BASE,
    CONSENSUS,
    DIRECT,
    EXPERT,
    FACTORED,
    FUSED,
    INFORMED,
    LANES,
    MAJORITY,
    NEAR,
    SUMMED,
    TILE,
    TILES,
)
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry, pointer
from mstore.numeric.floats import bits_float, load_bits

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_SMALLEST: Final = np.float32(1e-6)
_INFINITY: Final = np.float32(np.inf)


@compiled
def _product(count: int, weight: Any, tile: Any, part: Any) -> None:
    for i in range(count):
        part[i] = np.float64(bits_float(tile[i])) * np.float64(weight)


@compiled
def _share(count: int, tile: Any, part: Any) -> None:
    """Multiply an expert's factors of a tile by its deltas."""
    for i in range(count):
        part[i] *= np.float64(bits_float(tile[i]))


@compiled
def _difference(count: int, weight: Any, base: Any, tile: Any, part: Any) -> None:
    for i in range(count):
        gap = np.float64(bits_float(tile[i])) - np.float64(bits_float(base[i]))
        part[i] = 0.0 if tile[i] == base[i] else gap * np.float64(weight)


@compiled
def _by_element(count: int, factors: Any, base: Any, tile: Any, part: Any) -> None:
    for i in range(count):
        gap = np.float64(bits_float(tile[i])) - np.float64(bits_float(base[i]))
        moves = (tile[i] != base[i]) & (factors[i] != _ZERO)
        part[i] = gap * np.float64(factors[i]) if moves else 0.0


@compiled
def _vote(count: int, early: Any, weight: Any, tile: Any, mixed: Any, votes: Any) -> None:
    """Weigh in float32; update `votes`: the sum, and the weights of positive and negative votes.

    early: what the vote is multiplied by, the weight unless that counts after the election.
    """
    for i in range(count):
        vote = np.float32(bits_float(tile[i]) * early)
        # A NaN has no sign, and does not vote.
        vote = vote if vote == vote else _ZERO
        mixed[i] = vote
        votes[0, i] = np.float32(votes[0, i] + vote)
        votes[1, i] = np.float32(votes[1, i] + (weight if vote > _ZERO else _ZERO))
        votes[2, i] = np.float32(votes[2, i] + (weight if vote < _ZERO else _ZERO))


@compiled
def _count_votes(count: int, row_of: Any, mixed: Any, votes: Any) -> None:
    """Replace the sums by those of signs; zero the votes of elements where these are zero."""
    votes[0, :count] = _ZERO
    for k in range(row_of.size):
        if row_of[k] >= 0:
            for i in range(count):
                sign = np.float32(mixed[k, i] > _ZERO) - np.float32(mixed[k, i] < _ZERO)
                votes[0, i] = np.float32(votes[0, i] + sign)
    for k in range(row_of.size):
        for i in range(count):
            mixed[k, i] = _ZERO if votes[0, i] == _ZERO else mixed[k, i]


@compiled
def _agreeing(count: int, mixed: Any, votes: Any, part: Any) -> None:
    """Zero what lost the election: the sign of the sum wins, and a zero sum counts as positive."""
    for i in range(count):
        agrees = mixed[i] < _ZERO if votes[0, i] < _ZERO else mixed[i] > _ZERO
        part[i] = part[i] if agrees else 0.0


@compiled
def _side_factors(count: int, lam: Any, normalize: Any, late: Any, votes: Any, factor: Any) -> None:
    for i in range(count):
        divisor = votes[2, i] if votes[0, i] < _ZERO else votes[1, i]
        divisor = _SMALLEST if late and divisor < _SMALLEST else divisor
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        factor[i] = np.float64(lam) / np.float64(divisor)


@compiled
def _count_moved(count: int, part: Any, numbers: Any) -> None:
    for i in range(count):
        numbers[i] += 1.0 if part[i] != 0.0 else 0.0


@compiled
def _average(count: int, weight: Any, numbers: Any, part: Any) -> None:
    """Divide by how many experts move an element; weigh it where there is only one."""
    for i in range(count):
        alone = numbers[i] == 1.0
        part[i] = part[i] * np.float64(weight) if alone else part[i] / max(numbers[i], 1.0)


@compiled
def _begin(count: int, surplus: Any, base: Any, own: Any, total: Any) -> None:
    """Compute the base's own contribution, and start the sum with it."""
    for i in range(count):
        # Not zero times the base: that is NaN where the base is infinite.
        own[i] = surplus * np.float64(bits_float(base[i])) if surplus != 0.0 else 0.0
        total[i] = own[i]


@compiled
def _scale_and_add(count: int, factor: Any, part: Any, total: Any) -> None:
    for i in range(count):
        part[i] *= factor[i]
        total[i] += part[i]


@compiled
def _find_finite(count: int, total: Any, finite: Any) -> int:
    """Mark the elements with a finite total; return how many are not finite."""
    wild = 0
    for i in range(count):
        finite[i] = np.isfinite(total[i])
        wild += not finite[i]
    return wild


@compiled
def _clear(count: int, finite: Any, part: Any) -> None:
    for i in range(count):
        part[i] = part[i] if finite[i] else 0.0


@compiled
def _accumulate(count: int, part: Any, total: Any, products: Any, squares: Any) -> int:
    """Add part * total and part * part to the lanes; return how many parts are not zero."""
    moved = 0
    for i in range(count):
        moved += part[i] != 0.0
    for start in range(0, count, LANES):
        # Slices, from zero: an index that might be negative prevents vectorisation.
        own, all_of = part[start : start + LANES], total[start : start + LANES]
        for lane in range(min(LANES, count - start)):
            products[lane] += own[lane] * all_of[lane]
            squares[lane] += own[lane] * own[lane]
    return moved


@compiled
def _inform(count: int, weight: Any, floor: Any, tile: Any, fisher: Any, total: Any) -> None:
    """Write an expert's factors, as `informed_passes` does, and add them to their sums."""
    for i in range(count):
        value = bits_float(tile[i])
        value = value if (value >= _ZERO) & (value < _INFINITY) else _ZERO
        value = value if value > floor else floor
        fisher[i] = np.float64(value) * np.float64(weight)
        total[i] += fisher[i]


@compiled
def _informed(count: int, base: Any, tile: Any, fisher: Any, part: Any) -> None:
    for i in range(count):
        gap = np.float64(bits_float(tile[i])) - np.float64(bits_float(base[i]))
        moves = (tile[i] != base[i]) & (fisher[i] > 0.0)
        part[i] = fisher[i] * gap if moves else 0.0


@compiled
def _take(count: int, sums: Any, part: Any) -> None:
    for i in range(count):
        part[i] = sums[i]


@compiled
def _invert(count: int, scale: Any, divisor: Any, factor: Any) -> None:
    for i in range(count):
        factor[i] = np.float64(scale) / divisor[i] if divisor[i] > 0.0 else 0.0


@entry("ppppppp", draws, floats, competition_passes, stages, tiles, arguments)
def attribute(
    arguments_at: Any,
    sums_at: Any,
    counts_at: Any,
    votes_at: Any,
    parts_at: Any,
    lanes_at: Any,
    finite_at: Any,
) -> None:
    """As `attribution.attribute`, into `sums` and `counts`; the last four are scratch."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    experts, normalizes = given[a.EXPERTS], given[a.NORMALIZES]
    near = given[a.KIND] == NEAR
    late = given[a.KIND] == FUSED
    kind = DIRECT if near or given[a.KIND] == ALONE else given[a.KIND]
    majority = given[a.KIND] == MAJORITY
    kind = CONSENSUS if late or majority else kind
    cuts, base_code = given[a.CUTS], given[a.BASE_CODE]
    n, first_index, masked = given[a.LENGTH], given[a.FIRST_INDEX], given[a.MASKED]
    masks = carray(pointer(given[a.MASKS_AT]), (experts, n), np.uint8)
    row_length = given[a.ROW_LENGTH]
    row_weights = carray(
        pointer(given[a.WEIGHTS_AT]), (-(-n // max(1, row_length)), experts), np.float32
    )
    elements = carray(pointer(given[a.WEIGHTS_AT]), (experts, n), np.float32)
    summed = carray(pointer(given[a.WEIGHTS_AT]), (experts, n), np.float64)
    factors = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    rows = carray(pointer(given[a.ROWS_AT]), (given[a.ROWS], given[a.STRIDE]), np.uint8)
    row_codes = carray(pointer(given[a.CODES_AT]), (given[a.CODES],), np.int64)
    row_of = carray(pointer(given[a.ROW_OF_AT]), (experts,), np.int64)
    slots = experts * max(1, cuts)
    thresholds = carray(pointer(given[a.THRESHOLDS_AT]), (slots,), np.float32)
    quotas = carray(pointer(given[a.QUOTAS_AT]), (slots,), np.int64)
    limits = carray(pointer(given[a.LIMITS_AT]), (experts,), np.int64)
    rescales = carray(pointer(given[a.RESCALES_AT]), (experts,), np.float32)
    keys = carray(pointer(given[a.KEYS_AT]), (experts, 2), np.uint32)
    sums = carray(sums_at, (2, experts + 2), np.float64)
    counts = carray(counts_at, (experts + 3,), np.int64)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    drawn = carray(pointer(given[a.DRAWS_AT]), (TILE,), np.uint32)
    bases, tile = scratch[BASE : BASE + TILE], scratch[EXPERT : EXPERT + TILE]
    # The winning sign is known only after the last expert.
    voting = carray(votes_at, (experts + 3, TILE), np.float32)
    votes, mixed = voting[:3], voting[3:]
    # After the experts' contributions come the base's own, and the sum of all.
    parts = carray(parts_at, (experts + 4, TILE), np.float64)
    own, total, factor = parts[experts], parts[experts + 1], parts[experts + 2]
    numbers = parts[experts + 3]
    lanes = carray(lanes_at, (2, experts + 2, LANES), np.float64)
    products, squares = lanes[0], lanes[1]
    finite = carray(finite_at, (TILE,), np.uint8)
    left = carray(pointer(given[a.WORKING_AT]), (slots,), np.int64)
    normalize = normalizes != 0
    divisor, lam = factors[0], _ONE if near else factors[1]
    for k in range(slots):
        left[k] = quotas[k]
    row, row_end = -1, 0
    start = 0
    while start < n:
        if start == row_end:
            row += 1
            row_end += row_length
        weights = row_weights[row]
        surplus = -1.0
        for k in range(experts):
            surplus += np.float64(weights[k])
        if kind != DIRECT or normalize:
            surplus = 0.0
        count = min(TILE, row_end - start)
        load_bits(base_code, base, start, count, bases, 0)
        votes[:] = _ZERO
        numbers[:] = 0.0
        if kind == BALANCED:
            compete(start, count, weights, thresholds, row_codes, row_of, rows, scratch, parts)
        for k in range(experts):
            p = row_of[k]
            if kind == INFORMED:
                half = experts // 2
                if k >= half:
                    # A Fisher adds nothing of its own.
                    parts[k, :count] = 0.0
                    continue
                fisher = row_of[half + k]
                if fisher < 0:
                    continue
                load_bits(row_codes[fisher], rows[fisher], start, count, tile, 0)
                _inform(count, weights[k], factors[1], tile, parts[half + k], numbers)
                if p >= 0:
                    load_bits(row_codes[p], rows[p], start, count, tile, 0)
                    _informed(count, bases, tile, parts[half + k], parts[k])
                continue
            if p < 0:
                continue
            if kind == SUMMED:
                _take(count, summed[k, start : start + count], parts[k])
                continue
            load_bits(row_codes[p], rows[p], start, count, tile, 0)
            if near:
                swap(count, factors[1], EXPERT, scratch)
            if kind == FACTORED:
                own_factors = elements[k, start : start + count]
                _by_element(count, own_factors, bases, tile, parts[k])
                continue
            if kind == DIRECT:
                if masked:
                    choose(count, masks[k, start : start + count], EXPERT, scratch)
                _difference(count, weights[k], bases, tile, parts[k])
                continue
            subtract(count, EXPERT, scratch)
            if kind == BALANCED:
                _share(count, tile, parts[k])
                continue
            if cuts == 1:
                left[k] = trim(count, thresholds[k], left[k], EXPERT, scratch)
            elif cuts == 2:
                high = experts + k
                lows, highs = trim_band(
                    count, thresholds[k], left[k], thresholds[high], left[high], EXPERT, scratch
                )
                left[k] -= lows if left[k] > 0 else 0
                left[high] -= highs if left[high] > 0 else 0
            limit = limits[k]
            if masked:
                drawn_by(masks[k, start : start + count], drawn)
                draw(count, drawn, np.uint32(1), rescales[k], EXPERT, scratch)
            elif limit < ALL:
                fill_draws(keys[k, 0], keys[k, 1], first_index + start, drawn[:count])
                draw(count, drawn, np.uint32(limit), rescales[k], EXPERT, scratch)
            if kind == AVERAGED:
                _product(count, _ONE, tile, parts[k])
                _count_moved(count, parts[k], numbers)
                continue
            _product(count, weights[k], tile, parts[k])
            if kind == CONSENSUS:
                early = _ONE if late else weights[k]
                _vote(count, early, weights[k], tile, mixed[k], votes)
        if majority:
            _count_votes(count, row_of, mixed, votes)
        if kind == CONSENSUS:
            _side_factors(count, lam, normalize, late, votes, factor)
        elif kind == INFORMED:
            _invert(count, factors[0], numbers, factor)
        else:
            factor[:count] = np.float64(lam) / np.float64(divisor)
        _begin(count, surplus, bases, own, total)
        for k in range(experts):
            if row_of[k] >= 0:
                if kind == CONSENSUS:
                    _agreeing(count, mixed[k], votes, parts[k])
                elif kind == AVERAGED:
                    _average(count, weights[k], numbers, parts[k])
                _scale_and_add(count, factor, parts[k], total)
        counts[experts + 2] += _find_finite(count, total, finite)
        for k in range(experts + 2):
            if k >= experts or row_of[k] >= 0:
                _clear(count, finite, parts[k])
        for k in range(experts + 2):
            if k >= experts or row_of[k] >= 0:
                counts[k] += _accumulate(count, parts[k], total, products[k], squares[k])
        start += count
    for k in range(experts + 2):
        for lane in range(LANES):
            sums[0, k] += products[k, lane]
            sums[1, k] += squares[k, lane]
