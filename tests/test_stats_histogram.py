"""Thresholds from a histogram, against a stable sort of all elements."""

from __future__ import annotations

import delta_reference as reference
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.models.stats.chunk import CHUNK, Rows
from mstore.models.stats.histogram import (
    Histogram,
    Threshold,
    exp_of_minus,
    select,
    select_exact,
    tail_squares,
)
from mstore.terms.errors import BadRequest, Corrupt

DTYPES = ("BF16", "F16", "F32")
Deltas = npt.NDArray[np.float32]


def _low(d: Deltas, bin_: int) -> npt.NDArray[np.int64]:
    bits = reference.magnitude_bits(d)
    inside = bits[(bits >> 16 == bin_) & (bits != 0)]
    return np.bincount(inside & 0xFFFF, minlength=1 << 16).astype(np.int64)


def _check_selection(d: Deltas, k: int) -> Threshold:
    """Threshold and second look keep exactly what the sort keeps; gives the threshold."""
    expected = reference.largest(d, k)
    threshold = select(Histogram.from_dense(reference.histogram(d)), k, d.size)
    edge = reference.kept_by(d, threshold.value, threshold.quota)
    assert np.count_nonzero(edge) == threshold.kept
    if threshold.exact:
        assert np.array_equal(edge, expected)
    else:
        # The edge serves: what the sort keeps, and the rest of its bin.
        assert np.all(edge >= expected)
        bits = reference.magnitude_bits(d)
        assert np.all(bits[edge & ~expected] >> 16 == threshold.bin)
    value, quota = select_exact(threshold, _low(d, threshold.bin))
    assert np.float32(value) == value or np.isnan(value)
    assert np.array_equal(reference.kept_by(d, value, quota), expected)
    return threshold


def _random_delta(rng: np.random.Generator, dtype: str, n: int, relative: float) -> Deltas:
    base = (rng.standard_normal(n) * 0.02).astype(np.float32)
    expert = base + (rng.standard_normal(n) * 0.02 * relative).astype(np.float32)
    patterns = [reference.patterns_of(side, dtype) for side in (base, expert)]
    return reference.delta(patterns[0], dtype, patterns[1], dtype)


@pytest.mark.parametrize("relative", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_k_are_kept(dtype: str, relative: float) -> None:
    """Histogram and second look keep the k of a stable sort, for every density and dtype."""
    d = _random_delta(np.random.default_rng(21), dtype, 20_000, relative)
    for k in (1, 2, 20, 200, 1000, 4000, 9999, 10_000, 16_000, 19_999, 20_000):
        _check_selection(d, k)


def test_deltas_of_bf16_rarely_need_a_second_look() -> None:
    """Where most differences of bf16 numbers are bf16 numbers, the histogram alone is exact."""
    d = _random_delta(np.random.default_rng(22), "BF16", 50_000, 1e-2)
    exact = [_check_selection(d, k).exact for k in range(500, 25_000, 500)]
    assert np.mean(exact) > 0.9


# Few distinct magnitudes, in neighbouring places of one bin and of its neighbours: all kinds of
# ties and bin ends within a list that is short enough to shrink.
CROWDED = st.sampled_from(
    [
        *(0x00000000, 0x00000001, 0x0000FFFF, 0x00010000, 0x3F7FFFFF, 0x3F800000, 0x3F800001),
        *(0x3F800002, 0x3F80FFFF, 0x3F810000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    ]
)


@given(st.lists(st.tuples(CROWDED, st.booleans()), min_size=1, max_size=30), st.data())
def test_ties_and_edges_of_bins(elements: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Any mixture of ties, edges, subnormals, infinities and NaN: exactly k, lowest index first."""
    patterns = [bits | (int(negative) << 31) for bits, negative in elements]
    d = np.array(patterns, dtype=np.uint32).view(np.float32)
    _check_selection(d, data.draw(st.integers(1, len(elements))))


@given(st.lists(st.integers(0, 0x7F80), min_size=1, max_size=50), st.data())
def test_exact_bins_need_no_second_look(bins: list[int], data: st.DataObject) -> None:
    """Magnitudes that are bf16 numbers always have an exact threshold."""
    d = (np.array(bins, dtype=np.uint32) << 16).view(np.float32)
    assert _check_selection(d, data.draw(st.integers(1, len(bins)))).exact


def test_all_inexact_elements_and_none_on_the_edge() -> None:
    """Where just a bin's inexact elements are needed, its edge with quota 0 is exact."""
    patterns = np.array([0x3F800000, 0x3F800001, 0x3F800000, 0x3F80FFFF], dtype=np.uint32)
    exact = [_check_selection(patterns.view(np.float32), k) for k in (1, 2, 3, 4)]
    assert [threshold.exact for threshold in exact] == [False, True, True, True]
    assert [threshold.quota for threshold in exact] == [2, 0, 1, 2]


def test_more_wanted_than_there_is() -> None:
    """Where fewer than k elements differ, the threshold is 0 and keeps them all."""
    d = np.array([0.0, 1.0, -0.0, -2.0, 0.0], dtype=np.float32)
    threshold = _check_selection(d, 4)
    assert threshold == Threshold(value=0.0, above=2, needed=0, in_bin=0, inexact=0)
    assert (threshold.exact, threshold.quota, threshold.kept) == (True, 0, 2)
    nothing = Histogram.from_dense(np.zeros((0x8000, 2), dtype=np.int64))
    assert select(nothing, 1, 0) == Threshold.none()
    assert select_exact(Threshold.none(), np.zeros(1 << 16, dtype=np.int64)) == (0.0, 0)


def test_senseless_selections_are_refused() -> None:
    """k below 1 or above n, and a histogram of more than n elements."""
    hist = Histogram.from_dense(reference.histogram(np.ones(5, dtype=np.float32)))
    for k, n in ((0, 5), (-1, 5), (6, 5), (2, 0)):
        with pytest.raises(BadRequest, match="cannot keep"):
            select(hist, k, n)
    with pytest.raises(BadRequest, match="counts 5 elements"):
        select(hist, 1, 4)


def test_second_look_at_other_data_is_noticed() -> None:
    """Low bits that do not add up to the bin as the histogram saw it raise Corrupt."""
    patterns = np.array([0x3F800000, 0x3F800001, 0x3F800002], dtype=np.uint32)
    d = patterns.view(np.float32)
    threshold = select(Histogram.from_dense(reference.histogram(d)), 1, 3)
    assert not threshold.exact
    for other in (d[:2], np.repeat(d, 2), (patterns + np.uint32(1)).view(np.float32)):
        with pytest.raises(Corrupt, match="do not belong"):
            select_exact(threshold, _low(other, threshold.bin))
    with pytest.raises(BadRequest, match="65536"):
        select_exact(threshold, np.zeros(5, dtype=np.int64))


def test_dense_and_sparse_are_the_same() -> None:
    """The sparse form has what is in the bins of a dense histogram, and nothing else."""
    rng = np.random.default_rng(23)
    d = rng.integers(0, 1 << 32, 5000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = reference.histogram(d)
    sparse = Histogram.from_dense(dense)
    assert np.array_equal(sparse.counts, dense[sparse.bins, 0])
    assert np.array_equal(sparse.inexact, dense[sparse.bins, 1])
    assert sparse.nonzeros == np.count_nonzero(reference.magnitude_bits(d))
    assert sparse == Histogram.from_dense(dense.copy())
    assert sparse != Histogram.from_dense(dense * 2)


@pytest.mark.parametrize(
    ("bins", "counts", "inexact"),
    [
        ([5, 5], [1, 1], [0, 0]),
        ([6, 5], [1, 1], [0, 0]),
        ([0x7FC1], [1], [0]),
        ([5], [0], [0]),
        ([5], [1], [2]),
        ([0], [2], [1]),
        ([0x7F80], [2], [1]),
        ([0x7FC0], [2], [1]),
        ([5, 6], [1], [0]),
    ],
)
def test_impossible_histograms_are_refused(
    bins: list[int], counts: list[int], inexact: list[int]
) -> None:
    """What no delta can have counted is no Histogram."""
    with pytest.raises(BadRequest):
        Histogram(
            np.array(bins, dtype=np.uint16),
            np.array(counts, dtype=np.uint64),
            np.array(inexact, dtype=np.uint64),
        )


def _rows(parts: list[Deltas]) -> Rows:
    rows = np.zeros(len(parts), dtype=CHUNK)
    for row, d in zip(rows, parts, strict=True):
        wide = np.abs(d.astype(np.float64))
        row["nonzeros"] = np.count_nonzero(d)
        row["sum_abs"] = wide.sum()
        row["sum_squares"] = (wide * wide).sum()
        row["max_abs"] = wide.max()
    return rows


def _tail(d: Deltas, value: float) -> float:
    wide = np.abs(d.astype(np.float64))
    return float((wide[wide >= value] ** 2).sum())


def test_tails_at_both_ends_are_exact() -> None:
    """Threshold 0 gives all of the squares, one above the largest element none of them."""
    rng = np.random.default_rng(25)
    parts = [rng.standard_normal(1000).astype(np.float32), np.zeros(1000, dtype=np.float32)]
    rows = _rows(parts)
    assert np.array_equal(tail_squares(rows, 0.0), rows["sum_squares"])
    above = float(np.nextafter(rows["max_abs"].max(), np.float32(np.inf)))
    for value in (above, 3e38, float("inf"), float("nan")):
        assert np.array_equal(tail_squares(rows, value), [0.0, 0.0])
    with pytest.raises(BadRequest, match="magnitude"):
        tail_squares(rows, -1.0)


def test_tail_of_laplace_deltas_is_close() -> None:
    """For the distribution that the estimate assumes it is right to 5 %."""
    d = np.random.default_rng(26).laplace(size=200_000).astype(np.float32)
    for value in (0.01, 0.5, 1.0, 2.0, 4.0):
        estimate = tail_squares(_rows([d]), value)[0]
        assert abs(estimate / _tail(d, value) - 1) < 0.05


@given(
    st.lists(
        # Squares that float64 holds to the last bit, so that the sums below are certain too.
        st.floats(0, 2.0**60, width=32).filter(lambda x: x == 0 or x > 2.0**-60),
        min_size=1,
        max_size=20,
    ),
    st.floats(0, 2.0**60, width=32),
)
def test_tails_stay_within_what_is_certain(magnitudes: list[float], value: float) -> None:
    """No estimate leaves [the largest square, all squares], nor is one made up where none is."""
    d = np.array(magnitudes, dtype=np.float32)
    rows = _rows([d])
    estimate = tail_squares(rows, value)[0]
    if _tail(d, value) == 0.0:
        assert estimate == 0.0
    else:
        assert float(rows["max_abs"][0]) ** 2 <= estimate * (1 + 1e-15)
        assert estimate <= rows["sum_squares"][0]


def test_rows_that_are_not_finite_come_first() -> None:
    """Where statistics are unreliable, the tail is infinite: read it."""
    rows = _rows([np.ones(3, dtype=np.float32)] * 5)
    for place, name in enumerate(("sum_abs", "sum_squares", "max_abs", "base_squares")):
        rows[name][place] = np.nan if place % 2 else np.inf
    assert np.array_equal(tail_squares(rows, 1.0), [np.inf] * 4 + [tail_squares(rows[4:], 1.0)[0]])
    assert np.array_equal(tail_squares(rows, 0.0), [np.inf] * 4 + [3.0])
    assert np.array_equal(tail_squares(rows, float("nan")), [np.inf] * 4 + [0.0])


def test_exponential_is_the_exponential() -> None:
    """The portable exp(-t) agrees with the library's to 1e-15, relative, over its range."""
    t = np.concatenate([np.linspace(0, 50, 20_001), np.linspace(50, 700, 1001)])
    assert np.max(np.abs(exp_of_minus(t) / np.exp(-t) - 1)) < 1e-15
    assert exp_of_minus(np.array([2048.0])) == 0
