"""What random masks are made of and measured with, against numpy: deltas, ranks, norms, spreads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key
from mstore.merge.arithmetic.tiles import LANES
from mstore.merge.methods.sce import spreads

DTYPES = ("BF16", "F16", "F32")


def elements(dtype: str, n: int, seed: int, skipped: int = 0) -> np.ndarray:
    """Stored bytes with every kind of number; they begin at any address."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, n).astype(np.float32)
    odd = rng.integers(0, 20, n)
    for number, special in enumerate((0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40)):
        values[odd == number] = special
    raw = values.astype(reference.DTYPES[dtype]).tobytes()
    return np.frombuffer(bytes(skipped) + raw, dtype=np.uint8)[skipped:]


def plain(data: np.ndarray, dtype: str) -> np.ndarray:
    return np.frombuffer(data.tobytes(), dtype=reference.DTYPES[dtype]).astype(np.float32)


def moved(base: np.ndarray, expert: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        found = expert - base
    found[base.view(np.uint32) == expert.view(np.uint32)] = 0.0
    return found


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 2600),
    st.integers(0, 1000),
    st.integers(0, 3),
)
def test_deltas(base_dtype: str, dtype: str, n: int, seed: int, skipped: int) -> None:
    """The float32 difference of any two types, any infinity, NaN or subnormal; 0 of equal bits."""
    base, expert = elements(base_dtype, n, seed, skipped), elements(dtype, n, seed + 1, skipped)
    if base_dtype == dtype:
        expert = np.where(np.arange(expert.size) < expert.size // 8, base, expert)
    found = masks.deltas(base, base_dtype, expert, dtype, n)
    assert np.array_equal(
        found, moved(plain(base, base_dtype), plain(expert, dtype)), equal_nan=True
    )


@settings(max_examples=40)
@given(st.integers(0, 5000), st.integers(0, 1000))
def test_the_order_of_norms(n: int, seed: int) -> None:
    """Each element goes to its lane, and lanes are added by halving: equal on every machine."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(0, 1, n) * 10.0 ** rng.integers(-30, 30, n)).astype(np.float32)
    kept = rng.random(n) < 0.5
    lanes = np.zeros((3, LANES))
    for i, value in enumerate(np.abs(values).tolist()):
        lanes[:, i % LANES] += (value, value * kept[i], value * value * kept[i])
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    assert (*masks.norms(values, kept), masks.squares(values, kept)) == tuple(lanes[:, 0])


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 3000),
    st.integers(0, 9),
    st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32]),
)
def test_norms_without_a_mask_in_memory(
    base_dtype: str, dtype: str, n: int, first: int, limit: int
) -> None:
    """The same numbers as of the deltas and the mask, from any element on."""
    rng = np.random.default_rng(n)
    base, expert = (
        rng.normal(0, 1, n).astype(reference.DTYPES[one]).view(np.uint8)
        for one in (base_dtype, dtype)
    )
    sides, key = (base, base_dtype, expert, dtype, n), mask_key(3, 1, "t")
    wanted = masks.norms(masks.deltas(*sides), masks.even(key, first, n, limit))
    assert masks.even_norms(*sides, key, first, limit) == wanted


def _rows(kind: str, n: int) -> npt.NDArray[np.float32]:
    """Numbers of any size, or of few, or of almost one; many of them NaN, zeros, or far smaller."""
    rng = np.random.default_rng(n)
    near = np.float32(1) + rng.integers(0, 2**16, n).astype(np.float32) * np.float32(2.0**-23)
    steps = rng.integers(-3, 4, n).astype(np.float32) * np.float32(2.0**-9)
    small = near * np.float32(2.0**-30) * (steps != 0)
    found = {
        "any": plain(elements("F32", n, n), "F32"),
        "steps": steps,
        "near": near,
        "small": np.where(rng.random(n) < 0.5, small, steps),
        "zeros": np.zeros(n, dtype=np.float32),
        "pairs": np.float32(1) + rng.integers(0, 99, n).astype(np.float32) * np.float32(2.0**-23),
        "powers": np.ldexp(np.float32(1), -rng.integers(0, 60, n)).astype(np.float32),
        "nan": np.where(
            rng.random(n) < 0.5,
            (0x7F800001 + rng.integers(0, 2**22, n)).astype(np.uint32),
            steps.view(np.uint32),
        ).view(np.float32),
    }
    return found[kind]


@pytest.mark.parametrize("length", [1, 2, 300, 2047, 2048, 5000])
@pytest.mark.parametrize(
    "kind", ["any", "steps", "near", "small", "zeros", "pairs", "powers", "nan"]
)
def test_ranks_of_long_rows(length: int, kind: str) -> None:
    """Rows of any length and of any sizes, with infinities and NaN, which rank last: the masks of a
    stable sort."""
    rows, first = 7, 4 * length
    values = _rows(kind, rows * length)
    # Numpy sorts a NaN last; to Python it has no order.
    order = np.argsort(np.abs(values).reshape(rows, length), axis=1, kind="stable")
    places = np.argsort(order, axis=1).astype(np.float32)
    wanted = reference.by_rank(places.reshape(-1), length, 0.5, 0.2)
    drawn = reference.draws(9, 0, "t", first + values.size)[first:].astype(np.uint64)
    kept = masks.Ranks(length, 0.5, 0.2).keep(values, mask_key(9, 0, "t"), first)
    assert np.array_equal(kept, drawn < np.rint(wanted * 2.0**32))


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(1, 70), st.integers(0, 9))
def test_ranks_of_deltas(base_dtype: str, dtype: str, rows: int, skipped: int) -> None:
    """Of stored elements, a piece at a time: the mask of all deltas together, and its norms."""
    length, first = 2000, 2000 * skipped
    n = rows * length
    rng = np.random.default_rng(n)
    base, expert = (
        rng.normal(0, 1, n).astype(reference.DTYPES[one]).view(np.uint8)
        for one in (base_dtype, dtype)
    )
    sides, key = (base, base_dtype, expert, dtype, n), mask_key(3, 1, "t")
    ranks, kept = masks.Ranks(length, 0.4, 0.3), np.empty(n, dtype=np.bool_)
    ranks.mask(sides, key, first, kept)
    moved = masks.deltas(*sides)
    assert np.array_equal(kept, ranks.keep(moved, key, first))
    wanted = (float(np.abs(one).sum(dtype=np.float64)) for one in (moved, moved[kept]))
    assert ranks.norms(sides, key, first) == pytest.approx(tuple(wanted), rel=1e-13)


@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize(
    ("density", "epsilon"),
    [(0.99999999, 1e-9), (0.5, 0.0), (0.5, 0.4999999999), (1e-12, 0.0), (0.2, 0.2 - 1e-12)],
)
def test_limits_at_the_ends(length: int, density: float, epsilon: float) -> None:
    """A limit that rounds to every draw or to none, or is the same for all ranks."""
    values = _rows("any", 5 * length)
    order = np.argsort(np.abs(values).reshape(5, length), axis=1, kind="stable")
    places = np.argsort(order, axis=1)
    limits = np.rint(masks.chances(length, density, epsilon).astype(np.float64) * 2.0**32)
    drawn = reference.draws(9, 0, "t", values.size).astype(np.float64)
    kept = masks.Ranks(length, density, epsilon).keep(values, mask_key(9, 0, "t"), 0)
    assert np.array_equal(kept, drawn < limits[places.reshape(-1)])


@given(st.integers(1, 3000), st.integers(1, 9), st.integers(0, 1000))
def test_spreads(n: int, experts: int, seed: int) -> None:
    """The population variance by Welford, in float64 and in order, rounded once."""
    rng = np.random.default_rng(seed)
    sides = [
        None if rng.random() < 0.2 else plain(elements("F32", n, seed + k), "F32")
        for k in range(experts)
    ]
    mean, squares = np.zeros(n), np.zeros(n)
    with np.errstate(invalid="ignore", over="ignore"):
        for number, side in enumerate(sides, 1):
            own = np.zeros(n) if side is None else side.astype(np.float64)
            gap = own - mean
            mean = mean + gap / number
            squares = squares + gap * (own - mean)
        wanted = (squares / experts).astype(np.float32)
    assert np.array_equal(spreads(sides, n), wanted, equal_nan=True)
