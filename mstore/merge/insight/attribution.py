"""Attribution: how much of a chunk's merged delta came from each expert, measured in float64.

Owns the split of the merged delta m (what a merge adds to the base, after consensus and lambda,
before rounding to the output) into contributions: m = m_0 + sum of m_k, with

    m_k = lambda * w_k s_k / divisor              s_k the sparsified delta, 0 where expert k lost
                                                  the election of the sign
    m_k = w_k (e_k - b) / sum of w                for direct operators
    m_0 = (sum of w - 1) b                        for direct operators without normalize, else 0

Sparsification, draws and elections are those of `merge.arithmetic`, in the same float32 and the
same order of experts, so that they come out the same bit for bit; products, quotients and sums
from there on are float64.  Elements whose m is not finite are counted and left out of every sum.
The steps are written again here, plainly: there they are fused for speed.

Deterministic: a chunk's sums are made of 64 partial ones by index, in order.  `attribute`
releases the GIL, keeps nothing between calls and may run on any number of threads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import philox
from mstore.merge.arithmetic.kernels import Mix
from mstore.merge.arithmetic.philox import fill_draws
from mstore.merge.arithmetic.tiles import CONSENSUS, DIRECT
from mstore.merge.running.compute import Loaded
from mstore.numeric import floats
from mstore.numeric.compiling import cached, compiled
from mstore.numeric.floats import bits_float, dtype_code, float_bits, load_bits

_TILE: Final = 1024
_LANES: Final = 64
_ALL: Final = 2**32
_NOTHING: Final = np.uint32(0)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@dataclass(frozen=True, slots=True)
class Attribution:
    """Sums over some elements.  Adding two of them is meant to be done in a fixed order.

    square      ||m||^2
    base        <m_0, m>
    products    float64[K]: <m_k, m>; with `base` they add up to `square`
    squares     float64[K]: ||m_k||^2
    moved       int64[K]: elements with m_k not 0
    changed     elements with m not 0
    not_finite  elements left out because m is NaN or infinite there
    """

    square: float
    base: float
    products: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    moved: npt.NDArray[np.int64]
    changed: int
    not_finite: int

    @classmethod
    def nothing(cls, experts: int) -> Attribution:
        """The sums over no elements."""
        zeros = np.zeros(experts)
        return cls(0.0, 0.0, zeros, zeros, zeros.astype(np.int64), 0, 0)

    def __add__(self, other: Attribution) -> Attribution:
        return Attribution(
            self.square + other.square,
            self.base + other.base,
            self.products + other.products,
            self.squares + other.squares,
            self.moved + other.moved,
            self.changed + other.changed,
            self.not_finite + other.not_finite,
        )


def attribute(loaded: Loaded, mix: Mix, quotas: npt.NDArray[np.int64]) -> Attribution:
    """Split one chunk's merged delta; quotas int64[K] are the ties that THIS chunk may keep."""
    task, tensor = loaded.task, loaded.task.tensor
    experts = mix.weights.size
    sums = np.zeros((2, experts + 2))
    counts = np.zeros(experts + 3, dtype=np.int64)
    _ready()
    _attribute(
        mix.weights,
        mix.factors,
        mix.flags,
        mix.mask_limit,
        loaded.sides[0],
        dtype_code(tensor.base_dtype),
        loaded.sides[1:],
        np.array([dtype_code(row.dtype) for row in task.rows], dtype=np.int64),
        np.array(task.row_of, dtype=np.int64),
        task.n,
        task.first_index,
        tensor.thresholds,
        quotas,
        tensor.keys,
        sums,
        counts,
    )
    return Attribution(
        square=float(sums[1, experts + 1]),
        base=float(sums[0, experts]),
        products=sums[0, :experts],
        squares=sums[1, :experts],
        moved=counts[:experts],
        changed=int(counts[experts + 1]),
        not_finite=int(counts[experts + 2]),
    )


def warm_up() -> None:
    """Compile the kernel, or load it from the cache on disk, so that no later call does."""
    with _COMPILING:
        if not _attribute.signatures:
            _attribute.compile(_SIGNATURE)
            # Other argument types are then converted or refused, never compiled for.
            _attribute.disable_compile()


def _ready() -> None:
    if not _attribute.signatures:
        warm_up()


@compiled
def _subtract(count: int, base: Any, tile: Any) -> None:
    """Turn an expert's bits into its deltas: expert minus base, +0 where their bits are equal."""
    for i in range(count):
        expert = tile[i]
        delta = float_bits(bits_float(expert) - bits_float(base[i]))
        tile[i] = _NOTHING if expert == base[i] else delta


@compiled
def _trim(count: int, threshold: Any, quota: int, tile: Any) -> int:
    """Zero the deltas that are not kept; return what is left of the quota (negative: no limit)."""
    if quota > 0:
        for i in range(count):
            magnitude = bits_float(tile[i] & _MAGNITUDE)
            ties = magnitude == threshold and quota > 0
            quota -= ties
            if not (ties or magnitude > threshold):
                tile[i] = _NOTHING
        return quota
    with_equal = quota != 0
    for i in range(count):
        bits = tile[i]
        magnitude = bits_float(bits & _MAGNITUDE)
        keep = (magnitude > threshold) | ((magnitude == threshold) & with_equal)
        tile[i] = bits if keep else _NOTHING
    return quota


@compiled
def _drop(count: int, own: Any, limit: Any, factor: Any, tile: Any) -> None:
    """Zero the deltas whose draw is not below the limit, and scale the others."""
    for i in range(count):
        scaled = float_bits(bits_float(tile[i]) * factor)
        tile[i] = scaled if own[i] < limit and tile[i] != _NOTHING else _NOTHING


@compiled
def _product(count: int, weight: Any, tile: Any, part: Any) -> None:
    for i in range(count):
        part[i] = np.float64(bits_float(tile[i])) * np.float64(weight)


@compiled
def _difference(count: int, weight: Any, base: Any, tile: Any, part: Any) -> None:
    for i in range(count):
        gap = np.float64(bits_float(tile[i])) - np.float64(bits_float(base[i]))
        part[i] = 0.0 if tile[i] == base[i] else gap * np.float64(weight)


@compiled
def _vote(count: int, weight: Any, tile: Any, mixed: Any, votes: Any) -> None:
    """Weigh in float32; add to the sum, and to the weights for up and for down, in `votes`."""
    for i in range(count):
        vote = np.float32(bits_float(tile[i]) * weight)
        mixed[i] = vote
        votes[0, i] = np.float32(votes[0, i] + vote)
        votes[1, i] = np.float32(votes[1, i] + (weight if vote > _ZERO else _ZERO))
        votes[2, i] = np.float32(votes[2, i] + (weight if vote < _ZERO else _ZERO))


@compiled
def _agreeing(count: int, mixed: Any, votes: Any, part: Any) -> None:
    """Zero what lost the election: the sign of the sum wins, and zero counts as positive."""
    for i in range(count):
        agrees = mixed[i] > _ZERO if votes[0, i] >= _ZERO else mixed[i] < _ZERO
        part[i] = part[i] if agrees else 0.0


@compiled
def _side_factors(count: int, lam: Any, normalize: Any, votes: Any, factor: Any) -> None:
    for i in range(count):
        divisor = votes[1, i] if votes[0, i] >= _ZERO else votes[2, i]
        divisor = _ONE if (divisor == _ZERO) | (not normalize) else divisor
        factor[i] = np.float64(lam) / np.float64(divisor)


@compiled
def _begin(count: int, surplus: Any, base: Any, own: Any, total: Any) -> None:
    """The base's own contribution, with which the sum begins."""
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
    """Mark the elements with a finite total; return how many have none."""
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
    for start in range(0, count, _LANES):
        # Slices, from zero: an index that might be negative keeps a loop from being vectorised.
        own, all_of = part[start : start + _LANES], total[start : start + _LANES]
        for lane in range(min(_LANES, count - start)):
            products[lane] += own[lane] * all_of[lane]
            squares[lane] += own[lane] * own[lane]
    return moved


@cached(floats, philox)
def _attribute(
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
    sums: Any,
    counts: Any,
) -> None:
    kind, normalize, trims = flags[0], flags[1] != 0, flags[2] != 0
    divisor, lam, rescale = factors[0], factors[1], factors[2]
    experts = weights.size
    bases, tile = np.empty(_TILE, np.uint32), np.empty(_TILE, np.uint32)
    draws = np.empty(_TILE + 8, np.uint32)
    # Who won is known after the last expert.
    mixed = np.empty((experts if kind == CONSENSUS else 0, _TILE), np.float32)
    votes = np.empty((3, _TILE), np.float32)
    # Behind the experts' contributions stand the base's own, and the sum of all.
    parts = np.empty((experts + 2, _TILE))
    own, total = parts[experts], parts[experts + 1]
    factor, finite = np.empty(_TILE), np.empty(_TILE, np.bool_)
    products, squares = np.zeros((experts + 2, _LANES)), np.zeros((experts + 2, _LANES))
    left = quotas.copy()
    surplus = -1.0
    for k in range(experts):
        surplus += np.float64(weights[k])
    if kind != DIRECT or normalize:
        surplus = 0.0
    for start in range(0, n, _TILE):
        count = min(_TILE, n - start)
        load_bits(base_code, base, start, count, bases, 0)
        votes[:] = _ZERO
        for k in range(experts):
            p = row_of[k]
            if p < 0:
                continue
            load_bits(row_codes[p], rows[p], start, count, tile, 0)
            if kind == DIRECT:
                _difference(count, weights[k], bases, tile, parts[k])
                continue
            _subtract(count, bases, tile)
            if trims:
                left[k] = _trim(count, thresholds[k], left[k], tile)
            if limit < _ALL:
                first = first_index + start
                skipped = first % 4
                blocks = (skipped + count + 3) // 4
                fill_draws(keys[k, 0], keys[k, 1], first // 4, blocks, draws)
                _drop(count, draws[skipped : skipped + count], np.uint32(limit), rescale, tile)
            _product(count, weights[k], tile, parts[k])
            if kind == CONSENSUS:
                _vote(count, weights[k], tile, mixed[k], votes)
        if kind == CONSENSUS:
            _side_factors(count, lam, normalize, votes, factor)
        else:
            factor[:count] = np.float64(lam) / np.float64(divisor)
        _begin(count, surplus, bases, own, total)
        for k in range(experts):
            if row_of[k] >= 0:
                if kind == CONSENSUS:
                    _agreeing(count, mixed[k], votes, parts[k])
                _scale_and_add(count, factor, parts[k], total)
        counts[experts + 2] += _find_finite(count, total, finite)
        for k in range(experts + 2):
            if k >= experts or row_of[k] >= 0:
                _clear(count, finite, parts[k])
        for k in range(experts + 2):
            if k >= experts or row_of[k] >= 0:
                counts[k] += _accumulate(count, parts[k], total, products[k], squares[k])
    for k in range(experts + 2):
        for lane in range(_LANES):
            sums[0, k] += products[k, lane]
            sums[1, k] += squares[k, lane]


def _input(dtype: Any, ndim: int) -> Any:
    """A contiguous array that is only read, so that read-only ones are taken too."""
    return numba.types.Array(dtype, ndim, "C", readonly=True)


_SIGNATURE: Final = numba.void(
    _input(numba.float32, 1),
    _input(numba.float32, 1),
    _input(numba.int64, 1),
    numba.int64,
    _input(numba.uint8, 1),
    numba.int64,
    _input(numba.uint8, 2),
    _input(numba.int64, 1),
    _input(numba.int64, 1),
    numba.int64,
    numba.int64,
    _input(numba.float32, 1),
    _input(numba.int64, 1),
    _input(numba.uint32, 2),
    numba.float64[:, ::1],
    numba.int64[::1],
)
_COMPILING: Final = threading.Lock()
