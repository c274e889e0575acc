"""Sketches: what cosine they estimate, and how well."""

from __future__ import annotations

import math

import delta_reference as reference
import numpy as np
import numpy.typing as npt
import pytest

from mstore.models.stats import chunk, deltas
from mstore.terms.errors import BadRequest

CHUNK_ELEMENTS = 8192


def _rows(values: npt.NDArray[np.float32]) -> chunk.Rows:
    """Rows of a delta given outright: float32[elements] against a base of zeros."""
    zero = reference.stored(np.zeros(CHUNK_ELEMENTS, dtype=np.uint32), "F32")
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    rows = []
    for first in range(0, values.size, CHUNK_ELEMENTS):
        part = values[first : first + CHUNK_ELEMENTS].view(np.uint32)
        expert = reference.stored(part, "F32")
        rows.append(deltas.measure(zero, "F32", expert, "F32", CHUNK_ELEMENTS, first, hist))
    return np.concatenate(rows)


def _spread(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> tuple[float, float, float]:
    """Mean error, root mean square error, largest error of the estimates of cosines of chunks.

    The mean is that of the errors in units of 0.18, the others are in units of the deviations that
    go with the estimates.
    """
    estimates, variances = chunk.cosines(_rows(a), _rows(b))
    left = a.astype(np.float64).reshape(-1, CHUNK_ELEMENTS)
    right = b.astype(np.float64).reshape(-1, CHUNK_ELEMENTS)
    norms = np.sqrt((left**2).sum(axis=1) * (right**2).sum(axis=1))
    errors = estimates - (left * right).sum(axis=1) / norms
    relative = errors / np.sqrt(variances)
    return (
        float(errors.mean()) * math.sqrt(32),
        math.sqrt(float((relative**2).mean())),
        float(abs(relative).max()),
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("likeness", [-0.8, -0.5, 0.0, 0.8, 0.99])
def test_cosines_are_estimated_without_bias(likeness: float) -> None:
    """Over 200 chunks the mean error is within 4 standard errors of none, the spread as stated."""
    rng = np.random.default_rng(11)
    a, other = rng.standard_normal((2, 200 * CHUNK_ELEMENTS)).astype(np.float32)
    b = (likeness * a + math.sqrt(1.0 - likeness**2) * other).astype(np.float32)
    mean, spread, largest = _spread(a, b)
    assert abs(mean) < 4 / math.sqrt(200)
    assert 0.8 < spread < 1.2
    assert largest < 6


@pytest.mark.parametrize("count", [1, 3, 40, 8192])
def test_a_multiple_of_a_delta_has_the_cosine_1(count: int) -> None:
    """A delta and a multiple of it have a cosine of 1, or of -1, however few elements it has.

    If they are many, the stated deviation is small, and not 0: it is an estimate.
    """
    rng = np.random.default_rng(14)
    a = np.zeros((30, CHUNK_ELEMENTS), dtype=np.float32)
    a[:, :count] = rng.standard_normal((30, count))
    for factor in (0.3, -1.7):
        rows, others = _rows(a.reshape(-1)), _rows((a * np.float32(factor)).reshape(-1))
        estimates, variances = chunk.cosines(rows, others)
        assert abs(estimates - math.copysign(1, factor)).max() < 2e-3
        assert variances.min() > 0
        assert math.sqrt(variances.max()) < (2e-3 if count > 1000 else 0.26)


def test_outlier_columns_do_not_crowd_one_bucket() -> None:
    """One changed column of a matrix 2048 wide is known as well as any other delta."""
    rng = np.random.default_rng(12)
    a, b = np.zeros((2, 800, 2048), dtype=np.float32)
    a[:, 64], b[:, 64] = rng.standard_normal((2, 800))
    _, spread, _ = _spread(a.reshape(-1), b.reshape(-1))
    # Four elements a chunk: with all of them in one bucket the spread were sqrt(32) > 5.
    assert spread < 2


def test_chunks_and_experts_far_apart_in_size() -> None:
    """Scales do not count: deltas of 1e-30 and of 1e30 have the cosine of deltas of 1."""
    rng = np.random.default_rng(13)
    a, b = rng.standard_normal((2, CHUNK_ELEMENTS)).astype(np.float32)
    plain = chunk.cosines(_rows(a), _rows(b))
    scaled = chunk.cosines(_rows(a * np.float32(2.0**-100)), _rows(b * np.float32(2.0**100)))
    assert np.array_equal(plain, scaled)


def test_no_delta_no_cosine() -> None:
    """A chunk that equals its base, or whose delta is not finite, has the cosine 0."""
    values = np.ones(CHUNK_ELEMENTS, dtype=np.float32)
    row = _rows(values)
    infinite = values.copy()
    infinite[5] = np.inf
    assert chunk.cosines(row, chunk.unchanged(3.0))[0] == 0
    assert chunk.cosines(row, _rows(infinite))[0] == 0
    assert chunk.cosines(row, row)[0] == 1


def test_rows_of_other_chunks_are_refused() -> None:
    """Different numbers of rows cannot be of the same chunks."""
    with pytest.raises(BadRequest, match="1 and 2"):
        chunk.cosines(chunk.unchanged(1.0), np.concatenate([chunk.unchanged(1.0)] * 2))


def test_a_row_is_small_and_packed() -> None:
    """66 bytes: the size that docs and tables count with."""
    assert chunk.CHUNK.itemsize == 66


def test_sketches_at_the_ends_of_the_range_are_packed() -> None:
    """The smallest and the largest sums that float32 deltas can make survive packing."""
    for scale in (2.0**-149, 1.0, 2.0**127 * 2.0**31):
        sums = np.linspace(-1.0, 0.99, chunk.SKETCH_BUCKETS) * scale
        packed, exponent = chunk.pack_sketch(sums)
        assert -(1 << 15) <= exponent < 1 << 15
        assert 64 <= abs(packed.astype(int)).max() <= 127
        again = packed.astype(np.float64) * 2.0**exponent
        assert np.all(abs(again - sums) <= abs(sums).max() / 64)
