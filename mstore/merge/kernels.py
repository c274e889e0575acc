"""The fused kernels: one pass over a chunk of base and experts, stored bytes to stored bytes.

Owns the float32 arithmetic of every operator, element by element, and its order: sums over
experts run in plan order, no product is contracted into a sum, no sum is reassociated.  Does not
own which experts are present, thresholds or keys (the engine and the planner), nor the scalars
that parameters become (mstore.merge.operators).

A chunk is worked on in tiles that stay in the first-level cache.  Every step over a tile is a
loop that LLVM vectorises; element types and operator flags are looked at once a tile, so that
one compiled function serves all.  `mix_chunk` and `count_ties` release the GIL, allocate a few
tiles, keep nothing between calls and may run on any number of threads.

Bits: equal float32 patterns of base and expert make the delta exactly zero (also for NaN and
infinity); a mix of zero gives the base element's own bits; any other NaN that arithmetic or a
change of element type produces is the canonical quiet one, since payloads differ by machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt

from mstore.merge import random
from mstore.merge.operators import (
    Value,
    check_weights,
    fixed_divisor,
    mask_limit,
    needs_thresholds,
    operator,
    rescale_factor,
    single,
)
from mstore.merge.random import fill_draws
from mstore.numeric import floats
from mstore.numeric.compiling import cached, compiled
from mstore.numeric.floats import (
    ITEMSIZES,
    bits_float,
    dtype_code,
    float_bits,
    load_bits,
    quieten,
    store_bits,
)

UNLIMITED: Final = -1
"""A quota that keeps every element whose magnitude equals the threshold."""

_TILE: Final = 1024

# One scratch array holds all tiles at fixed distances: LLVM then sees that loops over several of
# them do not overlap.  The padding keeps element i of different tiles out of one cache set.
_STRIDE: Final = _TILE + 32
_BASE: Final = 0 * _STRIDE
_DELTA: Final = 1 * _STRIDE
_SUM: Final = 2 * _STRIDE
_DIFFERS: Final = 3 * _STRIDE
_POSITIVE: Final = 4 * _STRIDE
_NEGATIVE: Final = 5 * _STRIDE
_POSITIVE_WEIGHT: Final = 6 * _STRIDE
_NEGATIVE_WEIGHT: Final = 7 * _STRIDE
_SCRATCH: Final = 8 * _STRIDE

_ADDITIVE: Final = 0
_CONSENSUS: Final = 1
_DIRECT: Final = 2

_NOTHING: Final = np.uint32(0)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_MINUS_ZERO: Final = np.uint32(0x80000000)


@dataclass(frozen=True, slots=True)
class Mix:
    """One merge's method, parameters and weights, as the kernel takes them.

    `weights` is float32[K]; `factors` is float32[3]: fixed divisor, lambda, rescale factor;
    `flags` is int64[3]: kind, normalize, trims; `mask_limit` is as in operators.mask_limit.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    mask_limit: int

    @classmethod
    def build(cls, method: str, parameters: Mapping[str, Value], weights: Sequence[float]) -> Mix:
        """From complete parameters (operators.parse_parameters) and one weight an expert.

        Raises BadRequest as operators.check_weights does.
        """
        flags = operator(method)
        kind = _DIRECT if flags.direct else _CONSENSUS if flags.consensus else _ADDITIVE
        trims = needs_thresholds(method, parameters)
        factors = (
            fixed_divisor(method, parameters, weights),
            single(parameters.get("lambda", 1.0)),
            rescale_factor(method, parameters),
        )
        return cls(
            weights=np.array(check_weights(method, parameters, weights), dtype=np.float32),
            factors=np.array(factors, dtype=np.float32),
            flags=np.array([kind, bool(parameters["normalize"]), trims], dtype=np.int64),
            mask_limit=mask_limit(method, parameters),
        )


def mix_chunk(
    mix: Mix,
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    rows: npt.NDArray[np.uint8],
    row_dtypes: Sequence[str],
    positions: npt.NDArray[np.int64],
    n: int,
    first_index: int,
    thresholds: npt.NDArray[np.float32],
    quotas: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint32],
    out: npt.NDArray[np.uint8],
    out_dtype: str,
) -> None:
    """Merge `n` elements of one tensor, from flat index `first_index` on, into `out`.

    base        uint8[>= n * itemsize], contiguous, aligned to its element
    rows        uint8[P, stride], row p the elements of expert positions[p].  Experts without a
                row are absent: their delta is zero.  With P = 0 the output is the base, converted
                to its type (unless operators.reuses_base says otherwise)
    row_dtypes  element type of each row ("BF16", "F16" or "F32"; sources and output may differ)
    positions   int64[P], distinct, each in 0..K-1 for the K weights of `mix`
    thresholds  float32[K]: trimming keeps |d| above it, and
    quotas      int64[K]: that many |d| equal to it, lowest index first, in THIS chunk
                (UNLIMITED: all).  Both are read only if the operator needs thresholds
    keys        uint32[K, 2] of random.mask_keys, read only if the operator is random
    out         uint8[>= n * itemsize]; bytes after the last element are left alone

    Raises BadRequest for another element type and ValueError for arrays that do not fit.
    """
    base_code, out_code = dtype_code(base_dtype), dtype_code(out_dtype)
    row_codes = np.array([dtype_code(dtype) for dtype in row_dtypes], dtype=np.int64)
    if (
        base.size < n * ITEMSIZES[base_dtype]
        or out.size < n * ITEMSIZES[out_dtype]
        or len(row_dtypes) != len(positions)
        or len(row_dtypes) > rows.shape[0]
        or any(rows.shape[1] < n * ITEMSIZES[dtype] for dtype in row_dtypes)
    ):
        raise ValueError("chunk, rows and positions do not fit together")
    experts = mix.weights.size
    if (mix.flags[2] and not thresholds.size == quotas.size == experts) or (
        mix.mask_limit < 2**32 and keys.shape != (experts, 2)
    ):
        raise ValueError("thresholds, quotas or keys are not one an expert")
    row_of = np.full(experts, -1, dtype=np.int64)
    for row, position in enumerate(positions.tolist()):
        if not 0 <= position < experts or row_of[position] >= 0:
            raise ValueError(f"position {position} is taken, or of no expert")
        row_of[position] = row
    _ready()
    _mix(
        mix.weights,
        mix.factors,
        mix.flags,
        mix.mask_limit,
        base,
        base_code,
        rows,
        row_codes,
        row_of,
        n,
        first_index,
        thresholds,
        quotas,
        keys,
        out,
        out_code,
    )


def count_ties(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
    threshold: float,
) -> int:
    """How many of a chunk's `n` deltas have exactly the magnitude `threshold`.

    Arrays as for mix_chunk.  Raises BadRequest for another element type and ValueError for
    arrays that are too short.
    """
    base_code, row_code = dtype_code(base_dtype), dtype_code(row_dtype)
    if base.size < n * ITEMSIZES[base_dtype] or row.size < n * ITEMSIZES[row_dtype]:
        raise ValueError("base or row is shorter than the chunk")
    _ready()
    return int(_count(base, base_code, row, row_code, n, np.float32(threshold)))


def warm_up() -> None:
    """Compile both kernels, or load them from the cache on disk, so that no later call does."""
    with _COMPILING:
        for kernel, signature in _SIGNATURES:
            if not kernel.signatures:
                kernel.compile(signature)
                # Other argument types are then converted or refused, never compiled for.
                kernel.disable_compile()


def _ready() -> None:
    if not (_mix.signatures and _count.signatures):
        warm_up()


@compiled
def _load_delta(code: int, stored: Any, start: int, count: int, scratch: Any) -> None:
    """Tile of deltas: expert minus base, +0 where their bits are equal."""
    load_bits(code, stored, start, count, scratch, _DELTA)
    for i in range(count):
        expert, base = scratch[_DELTA + i], scratch[_BASE + i]
        delta = float_bits(bits_float(expert) - bits_float(base))
        scratch[_DELTA + i] = _NOTHING if expert == base else delta


@compiled
def _count_equal(count: int, threshold: Any, scratch: Any) -> int:
    equal = 0
    for i in range(count):
        equal += bits_float(scratch[_DELTA + i] & _MAGNITUDE) == threshold
    return equal


@compiled
def _trim(count: int, threshold: Any, quota: int, scratch: Any) -> int:
    """Zero the deltas that are not kept; return what is left of the quota."""
    equal = _count_equal(count, threshold, scratch) if quota > 0 else 0
    if 0 < quota < equal:
        # The quota ends inside this tile: at most once a chunk and expert, so not vectorised.
        for i in range(count):
            magnitude = bits_float(scratch[_DELTA + i] & _MAGNITUDE)
            keep = magnitude > threshold
            if magnitude == threshold and quota > 0:
                keep = True
                quota -= 1
            if not keep:
                scratch[_DELTA + i] = _NOTHING
        return quota
    with_equal = quota != 0
    for i in range(count):
        bits = scratch[_DELTA + i]
        magnitude = bits_float(bits & _MAGNITUDE)
        keep = (magnitude > threshold) | ((magnitude == threshold) & with_equal)
        scratch[_DELTA + i] = bits if keep else _NOTHING
    return quota - equal


@compiled
def _drop(
    count: int, first: int, key0: Any, key1: Any, limit: Any, draws: Any, scratch: Any
) -> None:
    """Zero the deltas whose draw is not below the limit."""
    skipped = first % 4
    fill_draws(key0, key1, first // 4, (skipped + count + 3) // 4, draws)
    own = draws[skipped : skipped + count]
    for i in range(count):
        bits = scratch[_DELTA + i]
        scratch[_DELTA + i] = bits if own[i] < limit else _NOTHING


@compiled
def _scale(count: int, factor: Any, scratch: Any) -> None:
    for i in range(count):
        scratch[_DELTA + i] = float_bits(bits_float(scratch[_DELTA + i]) * factor)


@compiled
def _add(count: int, weight: Any, scratch: Any) -> None:
    for i in range(count):
        mixed = bits_float(scratch[_DELTA + i]) * weight
        scratch[_SUM + i] = float_bits(bits_float(scratch[_SUM + i]) + mixed)


@compiled
def _add_by_sign(count: int, weight: Any, scratch: Any) -> None:
    """The sum of all, and sums and weights of the positive and of the negative ones apart.

    Which side agrees is known only after the last expert; keeping both costs less than reading
    every expert's tile twice.
    """
    for i in range(count):
        mixed = bits_float(scratch[_DELTA + i]) * weight
        scratch[_SUM + i] = float_bits(bits_float(scratch[_SUM + i]) + mixed)
        up = mixed if mixed > _ZERO else _ZERO
        down = mixed if mixed < _ZERO else _ZERO
        scratch[_POSITIVE + i] = float_bits(bits_float(scratch[_POSITIVE + i]) + up)
        scratch[_NEGATIVE + i] = float_bits(bits_float(scratch[_NEGATIVE + i]) + down)
        up = weight if mixed > _ZERO else _ZERO
        down = weight if mixed < _ZERO else _ZERO
        scratch[_POSITIVE_WEIGHT + i] = float_bits(bits_float(scratch[_POSITIVE_WEIGHT + i]) + up)
        scratch[_NEGATIVE_WEIGHT + i] = float_bits(bits_float(scratch[_NEGATIVE_WEIGHT + i]) + down)


@compiled
def _add_direct(count: int, weight: Any, expert: int, scratch: Any) -> None:
    """Add weight times the tile at `expert` (the base's own for an absent one)."""
    if expert == _BASE:
        for i in range(count):
            product = bits_float(scratch[_BASE + i]) * weight
            scratch[_SUM + i] = float_bits(bits_float(scratch[_SUM + i]) + product)
    else:
        for i in range(count):
            bits = scratch[_DELTA + i]
            scratch[_SUM + i] = float_bits(
                bits_float(scratch[_SUM + i]) + bits_float(bits) * weight
            )
            scratch[_DIFFERS + i] |= bits ^ scratch[_BASE + i]


@compiled
def _elect(count: int, normalize: Any, scratch: Any) -> None:
    """Replace the sums by those of the side that the sum is on (zero counts as positive)."""
    for i in range(count):
        up, down = scratch[_POSITIVE + i], scratch[_NEGATIVE + i]
        up_weight, down_weight = scratch[_POSITIVE_WEIGHT + i], scratch[_NEGATIVE_WEIGHT + i]
        positive = bits_float(scratch[_SUM + i]) >= _ZERO
        total = bits_float(up if positive else down)
        divisor = bits_float(up_weight if positive else down_weight)
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        scratch[_SUM + i] = float_bits(total / divisor)


@compiled
def _divide(count: int, divisor: Any, scratch: Any) -> None:
    for i in range(count):
        scratch[_SUM + i] = float_bits(bits_float(scratch[_SUM + i]) / divisor)


@compiled
def _multiply(count: int, factor: Any, scratch: Any) -> None:
    for i in range(count):
        scratch[_SUM + i] = float_bits(bits_float(scratch[_SUM + i]) * factor)


@compiled
def _finish(count: int, scratch: Any) -> None:
    """base + mix where the mix is not zero, else the base."""
    for i in range(count):
        base, mixed = scratch[_BASE + i], bits_float(scratch[_SUM + i])
        total = quieten(float_bits(bits_float(base) + mixed))
        scratch[_SUM + i] = base if mixed == _ZERO else total


@compiled
def _finish_direct(count: int, keep_base: Any, scratch: Any) -> None:
    """The sum, or the base where no expert differs from it and `keep_base` says so."""
    for i in range(count):
        total = quieten(scratch[_SUM + i])
        keep = (scratch[_DIFFERS + i] == _NOTHING) & keep_base
        scratch[_SUM + i] = scratch[_BASE + i] if keep else total


@compiled
def _fill(scratch: Any, at: int, count: int, bits: Any) -> None:
    target = scratch[at : at + count]
    for i in range(count):
        target[i] = bits


@compiled
def _quieten(scratch: Any, at: int, count: int) -> None:
    target = scratch[at : at + count]
    for i in range(count):
        target[i] = quieten(target[i])


@cached(floats, random)
def _mix(
    weights: Any,
    factors: Any,
    flags: Any,
    limit: int,
    base: Any,
    base_code: int,
    rows: Any,
    row_codes: Any,
    row_of: Any,
    n: int,
    first_index: int,
    thresholds: Any,
    quotas: Any,
    keys: Any,
    out: Any,
    out_code: int,
) -> None:
    kind, normalize, trims = flags[0], flags[1] != 0, flags[2] != 0
    divisor, lam, rescale = factors[0], factors[1], factors[2]
    scratch = np.empty(_SCRATCH, np.uint32)
    draws = np.empty(_TILE + 8, np.uint32)
    left = quotas.copy()
    for start in range(0, n, _TILE):
        count = min(_TILE, n - start)
        load_bits(base_code, base, start, count, scratch, _BASE)
        # Minus zero plus x is x, bit for bit, so the first expert needs no case of its own.
        _fill(scratch, _SUM, count, _MINUS_ZERO)
        if kind == _DIRECT:
            _fill(scratch, _DIFFERS, count, _NOTHING)
        if kind == _CONSENSUS:
            _fill(scratch, _POSITIVE, 4 * _STRIDE, _NOTHING)
        for k in range(weights.size):
            p = row_of[k]
            if kind == _DIRECT:
                if p < 0:
                    _add_direct(count, weights[k], _BASE, scratch)
                else:
                    load_bits(row_codes[p], rows[p], start, count, scratch, _DELTA)
                    _add_direct(count, weights[k], _DELTA, scratch)
                continue
            if p < 0:
                continue
            _load_delta(row_codes[p], rows[p], start, count, scratch)
            if trims:
                left[k] = _trim(count, thresholds[k], left[k], scratch)
            if limit < 4294967296:
                _drop(
                    count,
                    first_index + start,
                    keys[k, 0],
                    keys[k, 1],
                    np.uint32(limit),
                    draws,
                    scratch,
                )
            if rescale != _ONE:
                _scale(count, rescale, scratch)
            if kind == _CONSENSUS:
                _add_by_sign(count, weights[k], scratch)
            else:
                _add(count, weights[k], scratch)
        if kind == _CONSENSUS:
            _elect(count, normalize, scratch)
        elif normalize and divisor != _ONE:
            _divide(count, divisor, scratch)
        if lam != _ONE:
            _multiply(count, lam, scratch)
        if kind == _DIRECT:
            _finish_direct(count, normalize, scratch)
        else:
            _finish(count, scratch)
        if base_code != out_code:
            _quieten(scratch, _SUM, count)
        store_bits(out_code, scratch, _SUM, count, out, start)


@cached(floats, random)
def _count(base: Any, base_code: int, row: Any, row_code: int, n: int, threshold: Any) -> int:
    scratch = np.empty(2 * _STRIDE, np.uint32)
    equal = 0
    for start in range(0, n, _TILE):
        count = min(_TILE, n - start)
        load_bits(base_code, base, start, count, scratch, _BASE)
        _load_delta(row_code, row, start, count, scratch)
        equal += _count_equal(count, threshold, scratch)
    return equal


def _input(dtype: Any, ndim: int) -> Any:
    """A contiguous array that is only read, so that read-only ones are taken too."""
    return numba.types.Array(dtype, ndim, "C", readonly=True)


_BYTES: Final = _input(numba.uint8, 1)
_SIGNATURES: Final[tuple[tuple[Any, Any], ...]] = (
    (
        _mix,
        numba.void(
            _input(numba.float32, 1),
            _input(numba.float32, 1),
            _input(numba.int64, 1),
            numba.int64,
            _BYTES,
            numba.int64,
            _input(numba.uint8, 2),
            _input(numba.int64, 1),
            _input(numba.int64, 1),
            numba.int64,
            numba.int64,
            _input(numba.float32, 1),
            _input(numba.int64, 1),
            _input(numba.uint32, 2),
            numba.uint8[::1],
            numba.int64,
        ),
    ),
    (
        _count,
        numba.int64(_BYTES, numba.int64, _BYTES, numba.int64, numba.int64, numba.float32),
    ),
)
_COMPILING: Final = threading.Lock()
