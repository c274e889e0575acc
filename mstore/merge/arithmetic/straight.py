"""Straight steps: a tile of up to four bf16 experts in one loop, from stored bytes to stored bytes.

For the usual case (`passes`): all elements are bf16, there are at most four experts, nothing is
drawn, and no quota ends within the tile.  Nothing passes through the scratch, and zeros are not
added but left out, so a step takes half the time.  The bits are those of the general steps in
`passes`: their order of operations is the same.  Importing this module imports the compiler.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstore.merge.arithmetic.stages import MAGNITUDE, NOTHING
from mstore.merge.arithmetic.tiles import (
    ALL,
    CONSENSUS,
    COUNTED,
    DIRECT,
    GROUP,
    SUM,
    WEIGHTS,
)
from mstore.numeric.compiling import compiled, inlined
from mstore.numeric.floats import (
    BF16,
    QUIET_NAN,
    bfloat_to_bits,
    bits_float,
    bits_to_bfloat,
    float_bits,
    fused,
)

_SIGN: Final = np.uint32(0x80000000)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_NEVER: Final = np.float32(np.nan)


@inlined
def _widened(stored: Any) -> Any:
    return bits_float(bfloat_to_bits(stored))


@inlined
def _magnitude(number: Any) -> Any:
    return bits_float(float_bits(number) & MAGNITUDE)


@inlined
def _narrowed(number: Any) -> Any:
    """Return the bf16 nearest to a float32, the quiet NaN for any NaN."""
    return bits_to_bfloat(float_bits(number) if number == number else QUIET_NAN)


@inlined
def _kept(delta: Any, weight: Any, least: Any) -> Any:
    """Return the weighted delta, 0 where its magnitude is below `least` or not a number."""
    return np.float32(delta * weight) if _magnitude(delta) >= least else _ZERO


@inlined
def _turned(number: Any, flip: Any) -> Any:
    return bits_float(float_bits(number) ^ flip)


@inlined
def _with(total: Any, part: Any, when: Any) -> Any:
    """Add where it is above zero what else would add plus zero: no sum here is minus zero."""
    return np.float32(total + part) if when > _ZERO else total


@compiled
def _ties(base: Any, expert: Any, threshold: Any) -> Any:
    """Count the deltas whose magnitude is `threshold`; uint16[count] of bf16 both."""
    equal = np.uint32(0)
    for i in range(base.size):
        delta = np.float32(_widened(expert[i]) - _widened(base[i]))
        equal = np.uint32(equal + np.uint32(_magnitude(delta) == threshold))
    return np.int64(equal)


@compiled
def _elect(
    bases: Any,
    e0: Any,
    e1: Any,
    e2: Any,
    e3: Any,
    weights: Any,
    least: Any,
    normalize: Any,
    lam: Any,
    out: Any,
) -> None:
    """Keep each expert's deltas of at least `least`, and add those of the sign of their sum.

    bases, e0..e3, out: uint16[count], bf16.  weights, least: float32[4].  Weights are finite, and
    not zero where `least` is a number; where it is NaN, nothing is kept.
    """
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    l0, l1, l2, l3 = least[0], least[1], least[2], least[3]
    for i in range(out.size):
        base = _widened(bases[i])
        m0 = _kept(np.float32(_widened(e0[i]) - base), w0, l0)
        m1 = _kept(np.float32(_widened(e1[i]) - base), w1, l1)
        m2 = _kept(np.float32(_widened(e2[i]) - base), w2, l2)
        m3 = _kept(np.float32(_widened(e3[i]) - base), w3, l3)
        total = np.float32(np.float32(np.float32(m0 + m1) + m2) + m3)
        # For a negative sum, flip all signs, and flip the result back.
        flip = _SIGN if total < _ZERO else NOTHING
        m0, m1 = _turned(m0, flip), _turned(m1, flip)
        m2, m3 = _turned(m2, flip), _turned(m3, flip)
        total = m0 if m0 > _ZERO else _ZERO
        divisor = w0 if m0 > _ZERO else _ZERO
        total, divisor = _with(total, m1, m1), _with(divisor, w1, m1)
        total, divisor = _with(total, m2, m2), _with(divisor, w2, m2)
        total, divisor = _with(total, m3, m3), _with(divisor, w3, m3)
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        mixed = np.float32(_turned(np.float32(total / divisor), flip) * lam)
        # A mix of zero gives the base's own bits.
        out[i] = bases[i] if mixed == _ZERO else _narrowed(np.float32(base + mixed))


@compiled
def _sum(
    bases: Any, e0: Any, e1: Any, e2: Any, e3: Any, weights: Any, divisor: Any, lam: Any, out: Any
) -> None:
    """Add weights times deltas, nothing where bits are equal.  Arrays as for `_elect`."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(out.size):
        own, s0, s1, s2, s3 = bases[i], e0[i], e1[i], e2[i], e3[i]
        base, total = _widened(own), _ZERO
        total = np.float32(
            total + (_ZERO if s0 == own else np.float32(np.float32(_widened(s0) - base) * w0))
        )
        total = np.float32(
            total + (_ZERO if s1 == own else np.float32(np.float32(_widened(s1) - base) * w1))
        )
        total = np.float32(
            total + (_ZERO if s2 == own else np.float32(np.float32(_widened(s2) - base) * w2))
        )
        total = np.float32(
            total + (_ZERO if s3 == own else np.float32(np.float32(_widened(s3) - base) * w3))
        )
        mixed = np.float32(np.float32(total / divisor) * lam)
        out[i] = own if mixed == _ZERO else _narrowed(np.float32(base + mixed))


@compiled
def _add(
    bases: Any,
    e0: Any,
    e1: Any,
    e2: Any,
    e3: Any,
    experts: int,
    weights: Any,
    divisor: Any,
    lam: Any,
    keep_base: Any,
    out: Any,
) -> None:
    """Add the first `experts`, 1 to 4, times their weights.  Arrays as for `_elect`.

    Those that are left out have the bits of the base.  Where all have, keep those if `keep_base` is
    set.
    """
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    second, third, fourth = experts > 1, experts > 2, experts > 3
    for i in range(out.size):
        own, s0, s1, s2, s3 = bases[i], e0[i], e1[i], e2[i], e3[i]
        total = fused(_widened(s0), w0, _ZERO)
        longer = fused(_widened(s1), w1, total)
        total = longer if second else total
        longer = fused(_widened(s2), w2, total)
        total = longer if third else total
        longer = fused(_widened(s3), w3, total)
        total = longer if fourth else total
        differs = (s0 ^ own) | (s1 ^ own) | (s2 ^ own) | (s3 ^ own)
        narrow = _narrowed(np.float32(np.float32(total / divisor) * lam))
        out[i] = own if (differs == 0) & keep_base else narrow


@compiled
def is_straight(
    kind: int,
    cuts: int,
    codes: Any,
    row_of: Any,
    experts: Any,
    limits: Any,
    rescales: Any,
    weights: Any,
) -> bool:
    """Return whether straight steps do for a chunk whose base and output are bf16.

    kind: ADDITIVE, CONSENSUS or DIRECT, none of which draws masks. experts: those that take part.
    The others are as in `passes.mix`.
    """
    if kind > DIRECT or not 0 < experts.size <= GROUP or cuts > (kind == CONSENSUS):
        return False
    for k in experts:
        if row_of[k] >= 0 and codes[row_of[k]] != BF16:
            return False
        if kind != DIRECT and (limits[k] < ALL or rescales[k] != _ONE):
            return False
        # An infinite delta times zero has no sign, nor has zero times infinity.
        if kind == CONSENSUS and not _ZERO < abs(weights[k]) < np.inf:
            return False
    return True


@compiled
def _halves(p: int, base: Any, rows: Any, start: int, count: int) -> Any:
    """Return a tile of row `p` as uint16, of the base if that is negative."""
    first, end = np.uint64(2 * start), np.uint64(2 * (start + count))
    if p < 0:
        return base[first:end].view(np.uint16)
    return rows[p][first:end].view(np.uint16)


@compiled
def mix_straight(
    kind: int,
    normalize: Any,
    divisor: Any,
    lam: Any,
    trims: Any,
    base: Any,
    rows: Any,
    row_of: Any,
    experts: Any,
    thresholds: Any,
    quotas: Any,
    left: Any,
    ties: Any,
    weights: Any,
    start: int,
    count: int,
    out: Any,
    scratch: Any,
) -> bool:
    """Mix a tile of a straight chunk; arguments as in `passes.mix`.

    Returns False, having changed no argument but the scratch, if a quota ends within the tile.
    """
    own = scratch[WEIGHTS : WEIGHTS + GROUP].view(np.float32)
    least = scratch[SUM : SUM + GROUP].view(np.float32)
    found = scratch[SUM + GROUP : SUM + 2 * GROUP]
    bases = _halves(-1, base, rows, start, count)
    halves = out[np.uint64(2 * start) : np.uint64(2 * (start + count))].view(np.uint16)
    for j in range(GROUP):
        own[j], least[j], found[j] = _ONE, _NEVER, NOTHING
    for j in range(experts.size):
        k = experts[j]
        own[j] = weights[k]
        least[j] = _ZERO
        if trims:
            least[j] = thresholds[k]
            if quotas[k] == COUNTED or left[k] > 0:
                row = _halves(row_of[k], base, rows, start, count)
                found[j] = _ties(bases, row, thresholds[k])
                if left[k] > 0 and found[j] > left[k]:
                    return False
            elif left[k] == 0:
                # "Above" means "not below the next float32"; that of infinity is NaN.
                least[j] = bits_float(float_bits(thresholds[k]) + np.uint32(1))
    for j in range(experts.size):
        k = experts[j]
        if quotas[k] == COUNTED:
            ties[k] += found[j]
        elif left[k] > 0:
            left[k] -= found[j]
    # Those that are left out are the base once more.
    e0 = _halves(row_of[experts[0]], base, rows, start, count)
    e1 = _halves(row_of[experts[1]] if experts.size > 1 else -1, base, rows, start, count)
    e2 = _halves(row_of[experts[2]] if experts.size > 2 else -1, base, rows, start, count)
    e3 = _halves(row_of[experts[3]] if experts.size > 3 else -1, base, rows, start, count)
    if kind == CONSENSUS:
        _elect(bases, e0, e1, e2, e3, own, least, normalize, lam, halves)
        return True
    by = divisor if normalize else _ONE
    if kind == DIRECT:
        _add(bases, e0, e1, e2, e3, experts.size, own, by, lam, normalize, halves)
    else:
        _sum(bases, e0, e1, e2, e3, own, by, lam, halves)
    return True
