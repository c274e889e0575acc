"""Products of matrices in one order."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mstore.numeric.matmul import Doubles, Singles, add_blocks

NUMBERS = arrays.from_dtype(
    np.dtype(np.float32), min_value=-(2.0**60), max_value=2.0**60, allow_nan=False
)
SIZES = some.one_of(some.integers(1, 9), some.integers(60, 70))


def in_order(left: Singles, right: Singles, sums: Doubles) -> Doubles:
    """The promise, written with numpy: products are exact, and added by ascending index."""
    found = sums.copy()
    for k in range(left.shape[1]):
        found += left[:, k, None].astype(np.float64) * right[k].astype(np.float64)
    return found


def product(left: Singles, right: Singles) -> Doubles:
    """One block, added to nothing."""
    found = np.zeros((left.shape[0], right.shape[1]))
    add_blocks(found, left, right[None])
    return found


@given(rows=SIZES, inner=SIZES, columns=SIZES, seed=some.integers(0, 99))
def test_sums_are_in_order_of_the_inner_index(
    rows: int, inner: int, columns: int, seed: int
) -> None:
    """An element is the float64 sum of its exact products, by ascending inner index, to the bit."""
    rng = np.random.default_rng(seed)
    left = (rng.standard_normal((rows, inner)) * 10.0 ** rng.integers(-9, 9)).astype(np.float32)
    right = rng.standard_normal((inner, columns)).astype(np.float32)
    expected = in_order(left, right, np.zeros((rows, columns)))
    assert product(left, right).tobytes() == expected.tobytes()


@given(values=arrays.arrays(np.float32, (5, 6), elements=NUMBERS))
def test_any_finite_numbers(values: Singles) -> None:
    """Subnormal and large numbers, too."""
    right = np.ascontiguousarray(values.T)
    expected = in_order(values, right, np.zeros((5, 5)))
    assert product(values, right).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("blocks", "inner", "columns"), [(3, 5, 7), (2, 64, 64), (1, 130, 33)])
def test_blocks_on_the_diagonal(blocks: int, inner: int, columns: int) -> None:
    """Blocks multiply their own part of each row, which may lie within a longer one, and are added
    to what is there."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((6, blocks * inner + 3)).astype(np.float32)
    left, right = wide[:, 1:-2], rng.standard_normal((blocks, inner, columns)).astype(np.float32)
    sums = rng.standard_normal((6, blocks * columns + 2))
    expected = sums.copy()
    for block in range(blocks):
        own = np.s_[:, 1 + block * columns : 1 + (block + 1) * columns]
        part = left[:, block * inner : (block + 1) * inner]
        expected[own] = in_order(part, right[block], sums[own])
    add_blocks(sums[:, 1:-1], left, right)
    assert sums.tobytes() == expected.tobytes()
