"""The compiled passes of a merge: a chunk of base and experts in, a chunk of output out.

Owns the arithmetic that `kernels` promises: two entry points, which take addresses and lengths and
check nothing.  Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, draws, stages, straight, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.draws import fill_draws
from mstore.merge.arithmetic.stages import NOTHING as _NOTHING
from mstore.merge.arithmetic.stages import (
    choose,
    count_equal,
    count_kept,
    drawn_by,
    drop_nan,
    multiply,
    subtract,
    swap,
    trim_band,
    weigh,
    weigh_average,
    weigh_counted,
    weigh_drawn,
    weigh_kept,
    weigh_trimmed,
)
from mstore.merge.arithmetic.straight import is_straight, mix_straight
from mstore.merge.arithmetic.tiles import (
    ADDITIVE,
    ALL,
    ALONE,
    AVERAGED,
    BASE,
    CONSENSUS,
    COUNTED,
    DIFFERS,
    DIRECT,
    EXPERT,
    FOURTH,
    FUSED,
    GROUP,
    MAJORITY,
    NEAR,
    NEGATIVE,
    NEGATIVE_WEIGHT,
    POSITIVE,
    POSITIVE_WEIGHT,
    SECOND,
    STRAIGHT,
    STRIDE,
    SUM,
    THIRD,
    TILE,
    TILES,
    WEIGHTS,
)
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry, inlined, pointer
from mstore.numeric.floats import (
    BF16,
    bits_float,
    float_bits,
    fused,
    load_bits,
    quieten,
    quieten_all,
    store_bits,
)

_SIGN: Final = np.uint32(0x80000000)
_ALWAYS: Final = np.uint32(1)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_SMALLEST: Final = np.float32(1e-6)


@compiled
def _add_group(count: int, scratch: Any) -> None:
    """Add four tiles to the sum, in order."""
    for i in range(count):
        total = bits_float(scratch[SUM + i]) + bits_float(scratch[EXPERT + i])
        total = np.float32(total + bits_float(scratch[SECOND + i]))
        total = np.float32(total + bits_float(scratch[THIRD + i]))
        scratch[SUM + i] = float_bits(total + bits_float(scratch[FOURTH + i]))


@inlined
def _positive(bits: Any) -> Any:
    """Return these bits if their number is above zero, else zero."""
    return bits if bits_float(bits) > _ZERO else _NOTHING


@inlined
def _share(bits: Any, weight: Any) -> Any:
    """Return the weight if these bits are of a number above zero, else zero."""
    return weight if bits_float(bits) > _ZERO else _ZERO


@compiled
def _elect_group(count: int, weights: Any, normalize: Any, scratch: Any) -> None:
    """Sum those of four tiles that have the sign of the sum of all four.

    A sum without a sign, zero or infinity minus infinity, counts as positive.
    """
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(count):
        m0, m1 = scratch[EXPERT + i], scratch[SECOND + i]
        m2, m3 = scratch[THIRD + i], scratch[FOURTH + i]
        total = np.float32(np.float32(bits_float(m0) + bits_float(m1)) + bits_float(m2))
        total = np.float32(total + bits_float(m3))
        # For a negative sum, flip all signs, and flip the result back.
        flip = _SIGN if total < _ZERO else _NOTHING
        m0, m1 = np.uint32(m0 ^ flip), np.uint32(m1 ^ flip)
        m2, m3 = np.uint32(m2 ^ flip), np.uint32(m3 ^ flip)
        total = np.float32(bits_float(_positive(m0)) + bits_float(_positive(m1)))
        total = np.float32(total + bits_float(_positive(m2)))
        total = np.float32(total + bits_float(_positive(m3)))
        divisor = np.float32(_share(m0, w0) + _share(m1, w1))
        divisor = np.float32(divisor + _share(m2, w2))
        divisor = np.float32(divisor + _share(m3, w3))
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        scratch[SUM + i] = float_bits(total / divisor) ^ flip


@inlined
def _floored(divisor: Any) -> Any:
    return _SMALLEST if divisor < _SMALLEST else divisor


@compiled
def _fuse_group(count: int, weights: Any, scratch: Any) -> None:
    """Do `_elect_group` for deltas that are weighed after the election, with a smallest divisor."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(count):
        m0, m1 = scratch[EXPERT + i], scratch[SECOND + i]
        m2, m3 = scratch[THIRD + i], scratch[FOURTH + i]
        total = np.float32(np.float32(bits_float(m0) + bits_float(m1)) + bits_float(m2))
        total = np.float32(total + bits_float(m3))
        flip = _SIGN if total < _ZERO else _NOTHING
        m0, m1 = np.uint32(m0 ^ flip), np.uint32(m1 ^ flip)
        m2, m3 = np.uint32(m2 ^ flip), np.uint32(m3 ^ flip)
        first = np.float32(bits_float(_positive(m0)) * w0)
        total = np.float32(first + np.float32(bits_float(_positive(m1)) * w1))
        total = np.float32(total + np.float32(bits_float(_positive(m2)) * w2))
        total = np.float32(total + np.float32(bits_float(_positive(m3)) * w3))
        divisor = np.float32(_share(m0, w0) + _share(m1, w1))
        divisor = np.float32(divisor + _share(m2, w2))
        divisor = np.float32(divisor + _share(m3, w3))
        scratch[SUM + i] = float_bits(total / _floored(divisor)) ^ flip


@compiled
def _fuse_group_by_sign(count: int, weights: Any, scratch: Any) -> None:
    """Do `_add_group_by_sign` for deltas that are weighed after the election."""
    _add_group(count, scratch)
    for flip, sums, sum_weights in (
        (_NOTHING, POSITIVE, POSITIVE_WEIGHT),
        (_SIGN, NEGATIVE, NEGATIVE_WEIGHT),
    ):
        own, own_weights = scratch[sums : sums + count], scratch[sum_weights : sum_weights + count]
        for j in range(GROUP):
            at, weight = EXPERT + j * STRIDE, weights[j]
            for i in range(count):
                moved = np.uint32(scratch[at + i] ^ flip)
                part = np.float32(bits_float(_positive(moved)) * weight)
                own[i] = float_bits(bits_float(own[i]) + part)
                share = _share(moved, weight)
                own_weights[i] = float_bits(bits_float(own_weights[i]) + share)


@compiled
def _fuse(count: int, scratch: Any) -> None:
    """Do `_elect` after `_fuse_group_by_sign`."""
    for i in range(count):
        up, down = scratch[POSITIVE + i], np.uint32(scratch[NEGATIVE + i] ^ _SIGN)
        up_weight, down_weight = scratch[POSITIVE_WEIGHT + i], scratch[NEGATIVE_WEIGHT + i]
        negative = bits_float(scratch[SUM + i]) < _ZERO
        total = bits_float(down if negative else up)
        divisor = bits_float(down_weight if negative else up_weight)
        scratch[SUM + i] = float_bits(total / _floored(divisor))


@inlined
def _vote(bits: Any) -> Any:
    """Return 1, -1 or 0, the sign of these bits' number."""
    number = bits_float(bits)
    return np.float32(_ONE if number > _ZERO else _ZERO) - np.float32(
        _ONE if number < _ZERO else _ZERO
    )


@compiled
def _count_group(count: int, scratch: Any) -> None:
    """Add the signs of four tiles to the sum."""
    for i in range(count):
        votes = bits_float(scratch[SUM + i]) + _vote(scratch[EXPERT + i])
        votes = np.float32(votes + _vote(scratch[SECOND + i]))
        votes = np.float32(votes + _vote(scratch[THIRD + i]))
        scratch[SUM + i] = float_bits(np.float32(votes + _vote(scratch[FOURTH + i])))


@compiled
def _add_group_by_sign(count: int, weights: Any, majority: Any, scratch: Any) -> None:
    """Add four tiles, or their signs, to the total, and to separate sums and weights by sign.

    Which side agrees is known only after the last expert.  Keeping both sums costs less than
    keeping or rereading every expert's tile.
    """
    if majority:
        _count_group(count, scratch)
    else:
        _add_group(count, scratch)
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for flip, sums, sum_weights in (
        (_NOTHING, POSITIVE, POSITIVE_WEIGHT),
        (_SIGN, NEGATIVE, NEGATIVE_WEIGHT),
    ):
        own, own_weights = scratch[sums : sums + count], scratch[sum_weights : sum_weights + count]
        for i in range(count):
            m0 = np.uint32(scratch[EXPERT + i] ^ flip)
            m1 = np.uint32(scratch[SECOND + i] ^ flip)
            m2 = np.uint32(scratch[THIRD + i] ^ flip)
            m3 = np.uint32(scratch[FOURTH + i] ^ flip)
            total = np.float32(bits_float(own[i]) + bits_float(_positive(m0)))
            total = np.float32(total + bits_float(_positive(m1)))
            total = np.float32(total + bits_float(_positive(m2)))
            own[i] = float_bits(total + bits_float(_positive(m3)))
            divisor = np.float32(bits_float(own_weights[i]) + _share(m0, w0))
            divisor = np.float32(divisor + _share(m1, w1))
            divisor = np.float32(divisor + _share(m2, w2))
            own_weights[i] = float_bits(divisor + _share(m3, w3))


@compiled
def _elect(count: int, normalize: Any, majority: Any, scratch: Any) -> None:
    """Replace the sums by those of the side that the total is on (as in `_elect_group`).

    majority: a total of zero is on none.
    """
    for i in range(count):
        up, down = scratch[POSITIVE + i], np.uint32(scratch[NEGATIVE + i] ^ _SIGN)
        up_weight, down_weight = scratch[POSITIVE_WEIGHT + i], scratch[NEGATIVE_WEIGHT + i]
        negative = bits_float(scratch[SUM + i]) < _ZERO
        total = bits_float(down if negative else up)
        is_tie = (bits_float(scratch[SUM + i]) == _ZERO) & majority
        total = _ZERO if is_tie else total
        divisor = bits_float(down_weight if negative else up_weight)
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        scratch[SUM + i] = float_bits(total / divisor)


@compiled
def _add_direct_group(count: int, weights: Any, scratch: Any) -> None:
    """Add weights times four tiles to the sum, and mark where one of them differs from the base."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(count):
        e0, e1 = scratch[EXPERT + i], scratch[SECOND + i]
        e2, e3 = scratch[THIRD + i], scratch[FOURTH + i]
        total = fused(bits_float(e0), w0, bits_float(scratch[SUM + i]))
        total = fused(bits_float(e1), w1, total)
        total = fused(bits_float(e2), w2, total)
        scratch[SUM + i] = float_bits(fused(bits_float(e3), w3, total))
        base = scratch[BASE + i]
        scratch[DIFFERS + i] |= (e0 ^ base) | (e1 ^ base) | (e2 ^ base) | (e3 ^ base)


@compiled
def _add_direct(count: int, weight: Any, at: int, scratch: Any) -> None:
    """Add weight times one tile to the sum, and mark where it differs from the base."""
    tile = scratch[at : at + count]
    sums, differs = scratch[SUM : SUM + count], scratch[DIFFERS : DIFFERS + count]
    bases = scratch[BASE : BASE + count]
    for i in range(count):
        sums[i] = float_bits(fused(bits_float(tile[i]), weight, bits_float(sums[i])))
        differs[i] |= tile[i] ^ bases[i]


@compiled
def _add_base(count: int, weights: Any, scratch: Any) -> None:
    """Add the base times each of four weights to the sum, in order: experts that are absent."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    bases, sums = scratch[BASE : BASE + count], scratch[SUM : SUM + count]
    for i in range(count):
        base = bits_float(bases[i])
        total = fused(base, w0, bits_float(sums[i]))
        total = fused(base, w1, total)
        total = fused(base, w2, total)
        sums[i] = float_bits(fused(base, w3, total))


@compiled
def _add_base_once(count: int, weight: Any, scratch: Any) -> None:
    """Add the base times one weight to the sum."""
    bases, sums = scratch[BASE : BASE + count], scratch[SUM : SUM + count]
    for i in range(count):
        sums[i] = float_bits(fused(bits_float(bases[i]), weight, bits_float(sums[i])))


@compiled
def _until(is_present: Any, first: int, row_of: Any) -> int:
    """Return the end of the run of present, or of absent, experts that begins with `first`."""
    k = first
    while k < row_of.size and (row_of[k] >= 0) == is_present:
        k += 1
    return k


@compiled
def _divide(count: int, divisor: Any, scratch: Any) -> None:
    for i in range(count):
        scratch[SUM + i] = float_bits(bits_float(scratch[SUM + i]) / divisor)


@compiled
def _finish(count: int, scratch: Any) -> None:
    """Compute base + mix where the mix is not zero, else the base."""
    for i in range(count):
        base, mixed = scratch[BASE + i], bits_float(scratch[SUM + i])
        total = quieten(float_bits(bits_float(base) + mixed))
        scratch[SUM + i] = base if mixed == _ZERO else total


@compiled
def _finish_direct(count: int, keep_base: Any, scratch: Any) -> None:
    """Keep the sum, or the base where no expert differs from it and `keep_base` is set."""
    for i in range(count):
        total = quieten(scratch[SUM + i])
        keep = (scratch[DIFFERS + i] == _NOTHING) & keep_base
        scratch[SUM + i] = scratch[BASE + i] if keep else total


@compiled
def _fill(scratch: Any, at: int, count: int, bits: Any) -> None:
    target = scratch[at : at + count]
    for i in range(count):
        target[i] = bits


@compiled
def _taking_part(kind: int, row_of: Any, experts: Any) -> int:
    """List in order the experts that enter the sum: those present; all for a direct operator."""
    count = 0
    for k in range(row_of.size):
        if kind == DIRECT or row_of[k] >= 0:
            experts[count] = k
            count += 1
    return count


@compiled
def _pay(quotas: Any, left: Any, ties: Any, slot: int, found: int) -> None:
    """Take ties from a numbered quota, or count them where the quota asks for that."""
    if quotas[slot] == COUNTED:
        ties[slot] += found
    elif quotas[slot] >= 0:
        left[slot] -= found


@entry("p", draws, floats, stages, straight, tiles, arguments)
def mix(arguments_at: Any) -> None:
    """Do `kernels.mix_chunk`; write its result into the ties of the arguments."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    experts_count, normalize = given[a.EXPERTS], given[a.NORMALIZES]
    near = given[a.KIND] == NEAR
    alone = near or given[a.KIND] == ALONE
    late, majority = given[a.KIND] == FUSED, given[a.KIND] == MAJORITY
    kind = DIRECT if alone else CONSENSUS if late or majority else given[a.KIND]
    cuts, base_code = given[a.CUTS], given[a.BASE_CODE]
    out_code, n, first_index = given[a.OUT_CODE], given[a.LENGTH], given[a.FIRST_INDEX]
    masked = given[a.MASKED]
    row_length = given[a.ROW_LENGTH]
    row_weights = carray(
        pointer(given[a.WEIGHTS_AT]), (-(-n // max(1, row_length)), experts_count), np.float32
    )
    factors = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    rows = carray(pointer(given[a.ROWS_AT]), (given[a.ROWS], given[a.STRIDE]), np.uint8)
    row_codes = carray(pointer(given[a.CODES_AT]), (given[a.CODES],), np.int64)
    row_of = carray(pointer(given[a.ROW_OF_AT]), (experts_count,), np.int64)
    trims = cuts != 0
    slots = experts_count * max(1, cuts)
    thresholds = carray(pointer(given[a.THRESHOLDS_AT]), (slots,), np.float32)
    quotas = carray(pointer(given[a.QUOTAS_AT]), (slots,), np.int64)
    limits = carray(pointer(given[a.LIMITS_AT]), (experts_count,), np.int64)
    keys = carray(pointer(given[a.KEYS_AT]), (experts_count, 2), np.uint32)
    rescales = carray(pointer(given[a.RESCALES_AT]), (experts_count,), np.float32)
    masks = carray(pointer(given[a.MASKS_AT]), (experts_count, n), np.uint8)
    out = carray(pointer(given[a.OUT_AT]), (given[a.OUT_LENGTH],), np.uint8)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    grouped = scratch[WEIGHTS : WEIGHTS + GROUP].view(np.float32)
    drawn = carray(pointer(given[a.DRAWS_AT]), (TILE,), np.uint32)
    working = carray(pointer(given[a.WORKING_AT]), (slots + experts_count,), np.int64)
    left, experts = working[:slots], working[slots:]
    ties = carray(pointer(given[a.TIES_AT]), (slots,), np.int64)
    divisor, lam = factors[0], _ONE if near else factors[1]
    for k in range(slots):
        left[k] = quotas[k]
        ties[k] = 0
    present = _taking_part(kind, row_of, experts)
    by_sign = majority or present > GROUP
    goes_straight = False
    is_usual = not (alone or late or majority or masked)
    if base_code == out_code == BF16 and row_length >= n and is_usual:
        goes_straight = is_straight(
            kind, cuts, row_codes, row_of, experts[:present], limits, rescales, row_weights[0]
        )
    row, row_end = -1, 0
    start = 0
    while start < n:
        if start == row_end:
            row += 1
            row_end += row_length
        weights = row_weights[row]
        if goes_straight:
            count = min(STRAIGHT, row_end - start)
            if mix_straight(
                *(kind, normalize, divisor, lam, trims, base, rows, row_of, experts[:present]),
                *(thresholds, quotas, left, ties, weights, start, count, out, scratch),
            ):
                start += count
                continue
        count = min(TILE, row_end - start)
        load_bits(base_code, base, start, count, scratch, BASE)
        # Start from plus zero, as mergekit does: the difference shows where a direct sum has only
        # minus zeros.
        _fill(scratch, SUM, count, _SIGN if alone else _NOTHING)
        if kind == DIRECT:
            _fill(scratch, DIFFERS, count, _NOTHING)
        elif kind == CONSENSUS and by_sign:
            _fill(scratch, POSITIVE, 4 * STRIDE, _NOTHING)
        elif kind == AVERAGED:
            # All must be counted before the first is divided.
            _fill(scratch, DIFFERS, count, _NOTHING)
            for i in range(present):
                k = experts[i]
                p = row_of[k]
                load_bits(row_codes[p], rows[p], start, count, scratch, EXPERT)
                count_kept(count, thresholds[k], EXPERT, scratch)
        k = 0
        while kind == DIRECT and k < experts_count:
            # Only methods that mix whole experts give a weight to an absent expert: the base's.
            end = _until(False, k, row_of)
            while end - k >= GROUP:
                _add_base(count, weights[k : k + GROUP], scratch)
                k += GROUP
            while k < end:
                _add_base_once(count, weights[k], scratch)
                k += 1
            end = min(_until(True, k, row_of), k + GROUP)
            for j in range(end - k):
                p, at = row_of[k + j], EXPERT + j * STRIDE
                load_bits(row_codes[p], rows[p], start, count, scratch, at)
                if near:
                    swap(count, factors[1], at, scratch)
                if masked:
                    choose(count, masks[k + j, start : start + count], at, scratch)
            if end - k == GROUP:
                _add_direct_group(count, weights[k:end], scratch)
            else:
                for j in range(end - k):
                    _add_direct(count, weights[k + j], EXPERT + j * STRIDE, scratch)
            k = end
        for group in range(0, 0 if kind == DIRECT else present, GROUP):
            members = min(GROUP, present - group)
            for j in range(members):
                k = experts[group + j]
                p = row_of[k]
                at = EXPERT + j * STRIDE
                grouped[j] = weights[k]
                weight = _ONE if late else weights[k]
                load_bits(row_codes[p], rows[p], start, count, scratch, at)
                if kind == AVERAGED:
                    weigh_average(count, weights[k], thresholds[k], at, scratch)
                    continue
                if cuts == 2:
                    high = experts_count + k
                    subtract(count, at, scratch)
                    lows, highs = trim_band(
                        count, thresholds[k], left[k], thresholds[high], left[high], at, scratch
                    )
                    multiply(count, weights[k], at, scratch)
                    if kind == CONSENSUS:
                        drop_nan(count, at, scratch)
                    _pay(quotas, left, ties, k, lows)
                    _pay(quotas, left, ties, high, highs)
                    continue
                if trims and quotas[k] == COUNTED:
                    ties[k] += weigh_counted(count, weights[k], thresholds[k], at, scratch)
                    continue
                if trims and left[k] > 0:
                    equal = weigh_counted(count, weights[k], thresholds[k], at, scratch)
                    if equal <= left[k]:
                        left[k] -= equal
                        continue
                    # The quota ends within this tile; the pass needs its value before the tile.
                    load_bits(row_codes[p], rows[p], start, count, scratch, at)
                if trims:
                    left[k] = weigh_trimmed(count, weights[k], thresholds[k], left[k], at, scratch)
                    continue
                limit = limits[k]
                if not masked and limit == ALL and rescales[k] == _ONE:
                    if kind == CONSENSUS:
                        weigh_kept(count, weight, _ZERO, at, scratch)
                    else:
                        weigh(count, weights[k], at, scratch)
                    continue
                below = _ALWAYS
                if masked:
                    drawn_by(masks[k, start : start + count], drawn)
                elif limit < ALL:
                    below = np.uint32(limit)
                    fill_draws(keys[k, 0], keys[k, 1], first_index + start, drawn[:count])
                else:
                    drawn[:count] = 0
                weigh_drawn(count, rescales[k], weight, drawn, below, at, scratch)
                if kind == CONSENSUS:
                    drop_nan(count, at, scratch)
            for j in range(members, GROUP):
                # Zeros change no sum and have no sign that a side could agree with.
                _fill(scratch, EXPERT + j * STRIDE, count, _NOTHING)
            if kind in (ADDITIVE, AVERAGED):
                _add_group(count, scratch)
            elif late and present > GROUP:
                _fuse_group_by_sign(count, grouped, scratch)
            elif late:
                _fuse_group(count, grouped, scratch)
            elif by_sign:
                _add_group_by_sign(count, grouped, majority, scratch)
            else:
                _elect_group(count, grouped, normalize, scratch)
        if kind == CONSENSUS:
            if late and present > GROUP:
                _fuse(count, scratch)
            elif by_sign:
                _elect(count, normalize, majority, scratch)
        elif normalize and divisor != _ONE:
            _divide(count, divisor, scratch)
        if lam != _ONE:
            multiply(count, lam, SUM, scratch)
        if kind == DIRECT:
            _finish_direct(count, normalize, scratch)
        else:
            _finish(count, scratch)
        if base_code != out_code:
            quieten_all(scratch[SUM : SUM + count])
        store_bits(out_code, scratch, SUM, count, out, start)
        start += count
    for k in range(slots):
        if quotas[k] >= 0:
            ties[k] = quotas[k] - left[k]


@entry("iipiipiipp", draws, floats, stages, tiles)
def count(
    base_code: int,
    base_length: int,
    base_at: Any,
    row_code: int,
    row_length: int,
    row_at: Any,
    n: int,
    threshold_bits: int,
    tiles_at: Any,
    ties_at: Any,
) -> None:
    """Do `kernels.count_ties` into `ties`; the threshold comes as the bits of a float32."""
    base = carray(base_at, (base_length,), np.uint8)
    row = carray(row_at, (row_length,), np.uint8)
    scratch = carray(tiles_at, (TILES,), np.uint32)
    ties = carray(ties_at, (1,), np.int64)
    threshold = bits_float(threshold_bits)
    equal = 0
    for start in range(0, n, TILE):
        length = min(TILE, n - start)
        load_bits(base_code, base, start, length, scratch, BASE)
        load_bits(row_code, row, start, length, scratch, EXPERT)
        subtract(length, EXPERT, scratch)
        equal += count_equal(length, threshold, EXPERT, scratch)
    ties[0] = equal
