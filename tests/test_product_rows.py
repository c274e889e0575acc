"""Statistics of products from their factors: never less than what is measured, and hardly more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.models.adapters.low_rank import Factors
from mstore.models.stats.chunk import CHUNK, Rows, finite
from mstore.models.stats.deltas import base_squares, measure
from mstore.models.stats.pairs import product_rows
from mstore.numeric.codes import ITEMSIZES

Bytes = npt.NDArray[np.uint8]
BOUNDED = ("nonzeros", "sum_abs", "sum_squares", "max_abs", "base_squares")


def measured(factors: Factors, base: Bytes, dtype: str, chunk: int) -> Rows:
    """The rows of base + scale * product, element by element."""
    elements = base.size // ITEMSIZES[dtype]
    found = []
    for first in range(0, elements, chunk):
        n = min(chunk, elements - first)
        own = base[first * ITEMSIZES[dtype] : (first + n) * ITEMSIZES[dtype]]
        expert = np.empty(4 * n, dtype=np.uint8)
        factors.apply(own, dtype, first, n, expert)
        counts = np.zeros((0x8000, 2), dtype=np.int64)
        # Where a chunk begins matters to sketches only.
        found.append(measure(own, dtype, expert, "F32", n, 0, counts))
    return np.concatenate(found) if found else np.zeros(0, dtype=CHUNK)


def require_bounds(found: Rows, exact: Rows) -> None:
    """No number is less than what is measured; what is measured as not finite is not finite."""
    reliable = finite(exact)
    assert not finite(found)[~reliable].any()
    for name in BOUNDED:
        assert (found[name] >= exact[name])[reliable].all(), name


def factors_of(
    rng: np.random.Generator, shape: tuple[int, int, int], sizes: list[float]
) -> Factors:
    rows, rank, columns = shape
    left = rng.standard_normal((rows, rank)) * sizes[0]
    right = rng.standard_normal((rank, columns)) * sizes[1]
    return Factors(
        left.astype(np.float32), right.astype(np.float32), np.array(sizes[2:], np.float32), None
    )


def stored(values: npt.NDArray[np.float64], dtype: str) -> Bytes:
    """The bytes of these numbers, cut off where the type has fewer bits."""
    single = values.astype(np.float32)
    if dtype == "BF16":
        return (single.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    return single.astype({"F16": np.float16, "F32": np.float32}[dtype]).reshape(-1).view(np.uint8)


SIZES = st.sampled_from([1e-30, 2e-22, 1e-12, 1e-6, 1e-3, 0.02, 1.0, 300.0, 1e12])


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 70)),
    sizes=st.tuples(SIZES, SIZES, st.sampled_from([1e-4, 0.25, -2.0, 64.0])),
    base=st.one_of(st.just(0.0), SIZES),
    cancels=st.booleans(),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    chunk=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_row_is_less_than_what_is_measured(
    shape: tuple[int, int, int],
    sizes: tuple[float, float, float],
    base: float,
    cancels: bool,
    dtype: str,
    chunk: int,
    seed: int,
) -> None:
    """Whatever the sizes of factors and base, and wherever chunks end, each number is a bound."""
    rng = np.random.default_rng(seed)
    rows, _, columns = shape
    factors = factors_of(rng, shape, list(sizes))
    if cancels:
        # Nothing is left of such a product, but what rounding leaves.
        factors.right[:] = factors.right[0]
        factors.left[:, -1] = -factors.left[:, :-1].sum(axis=1, dtype=np.float64)
    raw = stored(
        rng.standard_normal((rows, columns)) * min(base, 1e4 if dtype == "F16" else base), dtype
    )
    elements = rows * columns
    found = product_rows(factors, base_squares(raw, dtype, elements), elements, chunk)
    exact = measured(factors, raw, dtype, chunk)
    assert found.shape == exact.shape
    require_bounds(found, exact)


def test_where_chunks_are_whole_rows_hardly_more() -> None:
    """For weights and factors as they are in models, the squares are those measured."""
    rng = np.random.default_rng(0)
    for rank in (1, 8, 16):
        factors = factors_of(rng, (64, rank, 256), [0.01, 0.02, 2.0])
        raw = stored(rng.standard_normal((64, 256)) * 0.02, "BF16")
        found = product_rows(factors, base_squares(raw, "BF16", 64 * 256), 64 * 256, 16 * 256)
        exact = measured(factors, raw, "BF16", 16 * 256)
        assert (found["sum_squares"] <= 1.002 * exact["sum_squares"]).all()


def test_a_product_of_nothing_moves_nothing() -> None:
    """Rows of zeros in the left factor, or a right one of zeros, leave the base as it is."""
    left = np.ones((4, 2), dtype=np.float32)
    left[:2] = 0
    right = np.ones((2, 8), dtype=np.float32)
    scale = np.ones(1, dtype=np.float32)
    half = product_rows(Factors(left, right, scale, None), 1.0, 32, 16)
    assert half["nonzeros"].tolist() == [0, 16]
    assert not half["sum_squares"][0]
    none = product_rows(Factors(left, 0 * right, scale, None), 1.0, 32, 16)
    assert not none["nonzeros"].any()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 3e38])
def test_numbers_that_are_not_finite_are_told(odd: float) -> None:
    """A factor that is not finite, or whose sums may overflow, makes a row that is not finite."""
    left = np.ones((4, 2), dtype=np.float32)
    left[1, 0], left[1, 1] = odd, 2
    right = np.full((2, 8), 2, dtype=np.float32)
    found = product_rows(Factors(left, right, np.ones(1, np.float32), None), 1.0, 32, 16)
    assert finite(found).tolist() == [False, True]
    right[1, 3] = odd
    left[1] = 1
    left[3] = [-3e38, 3e38]
    found = product_rows(Factors(left, right, np.ones(1, np.float32), None), 1.0, 32, 16)
    assert not finite(found)[1]


ZERO, ONE, INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)


@pytest.mark.parametrize(
    ("left", "right", "scale", "base"),
    [
        (ZERO, INFINITE, ONE, ONE),
        (ZERO, np.float32(np.nan), ONE, ONE),
        (INFINITE, ZERO, ONE, ONE),
        (ZERO, ONE, INFINITE, ONE),
        (ONE, ZERO, INFINITE, ONE),
        (ONE, np.float32(1e38), ONE, np.float32(3e38)),
        (ONE, np.float32(3e30), np.float32(1e9), ONE),
        (np.float32(1e30), np.float32(1e30), np.float32(1e-30), ONE),
    ],
)
def test_what_arithmetic_makes_of_factors_is_told(
    left: np.float32, right: np.float32, scale: np.float32, base: np.float32
) -> None:
    """Zero times infinity is not a number, and a sum with the base, or one before it is scaled, may
    overflow: such a chunk is not taken for one that does not move, or moves little."""
    factors = Factors(
        np.full((4, 2), left), np.full((2, 8), right), np.array([scale], np.float32), None
    )
    raw = np.full(32, base).view(np.uint8)
    found = product_rows(factors, base_squares(raw, "F32", 32), 32, 16)
    with np.errstate(all="ignore"):
        require_bounds(found, measured(factors, raw, "F32", 16))
    assert not finite(found).any()
