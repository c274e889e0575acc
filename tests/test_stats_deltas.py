"""Measuring deltas, against the numpy reference and on bits that break naive code."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import delta_reference as reference
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.models.stats import deltas
from mstore.models.stats.chunk import CHUNK, finite
from mstore.terms.errors import BadRequest

DTYPES = ("BF16", "F16", "F32")
PAIRS = list(itertools.product(DTYPES, DTYPES))
LENGTHS = (0, 1, 2, 31, 255, 1023, 1024, 1025, 3000, 8192)

# Zeros, smallest and largest subnormal, smallest normal, one, largest finite, infinity, quiet and
# signalling NaN, each with both signs.
EDGES = {
    "BF16": (0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF),
    "F16": (0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7FFF),
    "F32": (
        *(0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001),
        *(0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF),
    ),
}


def _patterns(rng: np.random.Generator, dtype: str, n: int, kind: str) -> npt.NDArray[Any]:
    bits = reference.BITS[dtype]
    if kind == "any":
        return rng.integers(0, 1 << bits, n, dtype=np.uint64)
    if kind == "edges":
        edges = np.array(EDGES[dtype], dtype=np.uint64)
        return np.concatenate([edges, edges | np.uint64(1 << (bits - 1))])[
            rng.integers(0, 2 * len(edges), n)
        ]
    return reference.patterns_of(rng.standard_normal(n) * 0.02, dtype)


def _measured(
    base: npt.NDArray[Any], base_dtype: str, expert: npt.NDArray[Any], expert_dtype: str, first: int
) -> tuple[Any, npt.NDArray[np.int64]]:
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    row = deltas.measure(
        reference.stored(base, base_dtype),
        base_dtype,
        reference.stored(expert, expert_dtype),
        expert_dtype,
        base.size,
        first,
        hist,
    )
    assert row.dtype == CHUNK
    assert row.shape == (1,)
    return row[0], hist


def _agree(measured: float, expected: float) -> bool:
    if not np.isfinite(expected):
        return np.array_equal(measured, expected, equal_nan=True)
    return abs(measured - expected) <= 1e-14 * abs(expected)


def _check(
    base: npt.NDArray[Any], base_dtype: str, expert: npt.NDArray[Any], expert_dtype: str, first: int
) -> None:
    row, hist = _measured(base, base_dtype, expert, expert_dtype, first)
    d = reference.delta(base, base_dtype, expert, expert_dtype)
    wide = np.abs(d.astype(np.float64))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        own = reference.widened(base, base_dtype).view(np.float32).astype(np.float64)
    assert np.array_equal(hist, reference.histogram(d))
    assert row["nonzeros"] == np.count_nonzero(d)
    assert row["max_abs"].view(np.uint32) == reference.magnitude_bits(d).max(initial=0)
    assert _agree(row["sum_abs"], reference.sum_of(wide))
    assert _agree(row["sum_squares"], reference.sum_of(wide * wide))
    assert _agree(row["base_squares"], reference.sum_of(own * own))
    sketch = row["sketch"].astype(np.float64) * 2.0 ** float(row["sketch_exponent"])
    if np.isfinite(d).all():
        expected = reference.sketch(d, first)
        top = np.abs(expected).max()
        # Half a step of the rounding, which is a whole one where 127.5 and more become 127.
        step = 2.0 ** float(row["sketch_exponent"])
        allowed = np.where(np.abs(expected) > 127 * step, 1.0, 0.5) * step
        assert np.all(np.abs(sketch - expected) <= allowed + top * 2.0**-38)
    else:
        assert not sketch.any()


@pytest.mark.parametrize("kind", ["gaussian", "any", "edges"])
@pytest.mark.parametrize(("base_dtype", "expert_dtype"), PAIRS)
def test_statistics_equal_the_reference(base_dtype: str, expert_dtype: str, kind: str) -> None:
    """Counts, histogram and maximum are equal bit for bit, sums to 1e-14, for every dtype pair."""
    rng = np.random.default_rng([PAIRS.index((base_dtype, expert_dtype)), len(kind)])
    for place, n in enumerate(LENGTHS):
        base = _patterns(rng, base_dtype, n, kind)
        expert = _patterns(rng, expert_dtype, n, kind)
        if base_dtype == expert_dtype:
            expert = np.where(rng.random(n) < 0.3, base, expert)
        _check(base, base_dtype, expert, expert_dtype, place * 3 * deltas.TILE)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=40),
    st.integers(0, 2**44).map(lambda tile: tile * deltas.TILE),
)
@settings(max_examples=60)
def test_any_bits_at_any_place(dtype: str, pairs: list[tuple[int, int]], first: int) -> None:
    """Whatever the bits and wherever the chunk lies in its tensor, the reference agrees."""
    mask = (1 << reference.BITS[dtype]) - 1
    base = np.array([b & mask for b, _ in pairs], dtype=np.uint64)
    expert = np.array([e & mask for _, e in pairs], dtype=np.uint64)
    _check(base, dtype, expert, dtype, first)


def test_every_half_is_widened_exactly() -> None:
    """Each of the 65,536 fp16 patterns gives the float32 that it stands for."""
    zero = np.zeros(1, dtype=np.uint64)
    every = np.arange(1 << 16, dtype=np.uint64)
    _check(np.repeat(zero, every.size), "F32", every, "F16", 0)
    # One by one against the float32 of the same bits: equal patterns leave no delta.
    wide = reference.widened(every, "F16")
    row, hist = _measured(wide, "F32", every, "F16", 0)
    assert row["nonzeros"] == 0
    assert not hist.any()


def test_equal_bits_are_no_delta() -> None:
    """Equal infinities and equal NaN differ by nothing; so do the two zeros."""
    base = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0000, 0x8000], dtype=np.uint64)
    expert = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x8000, 0x0000], dtype=np.uint64)
    row, hist = _measured(base, "BF16", expert, "BF16", 0)
    assert (row["nonzeros"], row["sum_abs"], row["sum_squares"], row["max_abs"]) == (0, 0, 0, 0)
    assert not hist.any()
    assert np.isnan(row["base_squares"])


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_a_delta_that_is_not_finite_shows(pattern: int) -> None:
    """One infinity or NaN among good numbers makes the row unreliable; it is counted."""
    base = np.full(5000, 0x3F80, dtype=np.uint64)
    expert = base + np.uint64(1)
    assert finite(np.array([_measured(base, "BF16", expert, "BF16", 0)[0]])).all()
    expert[4321] = pattern
    row, hist = _measured(base, "BF16", expert, "BF16", 0)
    assert not finite(np.array([row])).any()
    assert row["nonzeros"] == 5000 == hist[:, 0].sum()
    assert hist[0x7F80, 0] + hist[0x7FC0, 0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_squares_alone_are_those_of_measure(dtype: str) -> None:
    """The short way gives the same float64, to the last bit, as the whole measurement."""
    rng = np.random.default_rng(5)
    for n in LENGTHS:
        base = _patterns(rng, dtype, n, "gaussian")
        row, _ = _measured(base, dtype, base, dtype, 0)
        alone = deltas.base_squares(reference.stored(base, dtype), dtype, n)
        assert np.float64(alone).tobytes() == row["base_squares"].tobytes()
        assert deltas.unchanged(alone).tobytes() == row.tobytes()


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_a_delta_alone_are_those_of_measure(base_dtype: str, dtype: str) -> None:
    """The same float64 for any two types, any length and any numbers: a distance is known by either
    way."""
    rng = np.random.default_rng(8)
    for n in LENGTHS:
        for kind in ("gaussian", "any"):
            base, expert = _patterns(rng, base_dtype, n, kind), _patterns(rng, dtype, n, kind)
            row, _ = _measured(base, base_dtype, expert, dtype, 0)
            sides = reference.stored(base, base_dtype), reference.stored(expert, dtype)
            alone = deltas.apart(sides[0], base_dtype, sides[1], dtype, n)
            assert np.float64(alone).tobytes() == row["sum_squares"].tobytes()


def test_repeated_runs_leave_no_trace() -> None:
    """Measuring twice gives the same row, and exactly twice the histogram, also after a NaN."""
    rng = np.random.default_rng(6)
    for kind in ("gaussian", "any", "edges"):
        base, expert = (_patterns(rng, "F32", 4000, kind) for _ in range(2))
        stored = reference.stored(base, "F32"), reference.stored(expert, "F32")
        hist = np.zeros((0x8000, 2), dtype=np.int64)
        rows = [deltas.measure(stored[0], "F32", stored[1], "F32", 4000, 0, hist) for _ in range(2)]
        assert rows[0].tobytes() == rows[1].tobytes()
        once = reference.histogram(reference.delta(base, "F32", expert, "F32"))
        assert np.array_equal(hist, 2 * once)


def test_order_and_threads_do_not_matter() -> None:
    """Chunks measured backwards or by four threads give the same rows and the same histogram."""
    rng = np.random.default_rng(7)
    chunk, chunks = 8192, 24
    base = reference.stored(_patterns(rng, "BF16", chunk * chunks, "gaussian"), "BF16")
    expert = reference.stored(_patterns(rng, "BF16", chunk * chunks, "gaussian"), "BF16")

    def one(number: int) -> tuple[bytes, npt.NDArray[np.int64]]:
        hist = np.zeros((0x8000, 2), dtype=np.int64)
        part = slice(2 * chunk * number, 2 * chunk * (number + 1))
        row = deltas.measure(base[part], "BF16", expert[part], "BF16", chunk, chunk * number, hist)
        return row.tobytes(), hist

    forwards = [one(number) for number in range(chunks)]
    backwards = [one(number) for number in reversed(range(chunks))][::-1]
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(one, range(chunks)))
    for other in (backwards, threaded):
        assert [row for row, _ in other] == [row for row, _ in forwards]
        assert np.array_equal(sum(h for _, h in other), sum(h for _, h in forwards))
    whole = np.zeros((0x8000, 2), dtype=np.int64)
    deltas.measure(base, "BF16", expert, "BF16", chunk * chunks, 0, whole)
    assert np.array_equal(whole, sum(h for _, h in forwards))


def test_bytes_at_odd_addresses_and_read_only() -> None:
    """Where the bytes lie, and whether they may be written, changes nothing."""
    rng = np.random.default_rng(8)
    for dtype in DTYPES:
        base, expert = (reference.stored(_patterns(rng, dtype, 3000, "any"), dtype) for _ in "be")
        hist = np.zeros((0x8000, 2), dtype=np.int64)
        plain = deltas.measure(base, dtype, expert, dtype, 3000, 0, hist)
        shifted = np.frombuffer(b"x" + base.tobytes(), dtype=np.uint8)[1:]
        sealed = np.frombuffer(b"xyz" + expert.tobytes(), dtype=np.uint8)[3:]
        again = deltas.measure(shifted, dtype, sealed, dtype, 3000, 0, hist)
        assert again.tobytes() == plain.tobytes()
        assert base.flags.writeable


GOLDEN = "ed03fb0fe06b651bcba22c4de1bb988f7a44084c6acad6b86ae9fd833343c774"


def golden() -> str:
    """Digest of rows and histogram for inputs made from integers alone."""
    digest = hashlib.sha256()
    index = np.arange(20_000, dtype=np.uint32)
    noise = (index * np.uint32(2654435761)) >> np.uint32(7)
    for base_dtype, expert_dtype in PAIRS:
        # Exponents near one, so that all dtypes hold like magnitudes; fractions are noise.
        one = {"BF16": 0x3F00, "F16": 0x3800, "F32": 0x3F000000}
        base = one[base_dtype] + (noise & np.uint32(0x7FF))
        expert = one[expert_dtype] + (noise * np.uint32(48271) >> np.uint32(21))
        row, hist = _measured(base, base_dtype, expert, expert_dtype, 7 << 32)
        digest.update(row.tobytes())
        digest.update(hist.astype("<i8").tobytes())
    return digest.hexdigest()


def test_golden_statistics() -> None:
    """The bits are those that every earlier release and every other machine measured."""
    assert golden() == GOLDEN


@pytest.mark.parametrize(("base_dtype", "expert_dtype"), PAIRS)
def test_second_look_counts_the_low_bits(base_dtype: str, expert_dtype: str) -> None:
    """For any bin, `count_low` finds what the reference finds, and it adds to what is there."""
    rng = np.random.default_rng(9)
    for kind in ("gaussian", "edges"):
        base = _patterns(rng, base_dtype, 3000, kind)
        expert = _patterns(rng, expert_dtype, 3000, kind)
        d = reference.delta(base, base_dtype, expert, expert_dtype)
        bits = reference.magnitude_bits(d)
        bits = bits[bits != 0]
        for bin_ in {0, 0x7F80, 0x7FC0, 0x7FFF, *(int(b) for b in (bits >> 16)[:5])}:
            low = np.ones(1 << 16, dtype=np.int64)
            deltas.count_low(
                reference.stored(base, base_dtype),
                base_dtype,
                reference.stored(expert, expert_dtype),
                expert_dtype,
                3000,
                bin_,
                low,
            )
            expected = np.bincount(bits[bits >> 16 == bin_] & 0xFFFF, minlength=1 << 16)
            assert np.array_equal(low - 1, expected)


def test_refusals() -> None:
    """Wrong dtypes, lengths, places and histograms are refused before anything is counted."""
    bytes_ = np.zeros(2048, dtype=np.uint8)
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    low = np.zeros(1 << 16, dtype=np.int64)
    measure, count_low = deltas.measure, deltas.count_low
    with pytest.raises(BadRequest, match="F64"):
        measure(bytes_, "F64", bytes_, "F64", 256, 0, hist)
    with pytest.raises(BadRequest, match=r"uint8\[2046\]"):
        measure(bytes_, "BF16", bytes_, "BF16", 1023, 0, hist)
    with pytest.raises(BadRequest, match=r"uint8\[4096\]"):
        measure(bytes_, "BF16", bytes_, "F32", 1024, 0, hist)
    with pytest.raises(BadRequest, match="uint8"):
        measure(bytes_, "BF16", bytes_.view(np.int8), "BF16", 1024, 0, hist)
    for first in (-1024, 512):
        with pytest.raises(BadRequest, match="multiple of 1024"):
            measure(bytes_, "BF16", bytes_, "BF16", 1024, first, hist)
    for wrong in (hist[:100], hist.astype(np.int32), np.asfortranarray(hist)):
        with pytest.raises(BadRequest, match="int64"):
            measure(bytes_, "BF16", bytes_, "BF16", 1024, 0, wrong)
    for bin_ in (-1, 0x8000):
        with pytest.raises(BadRequest, match="bin"):
            count_low(bytes_, "BF16", bytes_, "BF16", 1024, bin_, low)
    with pytest.raises(BadRequest, match="int64"):
        count_low(bytes_, "BF16", bytes_, "BF16", 1024, 0, low[:-1])
    with pytest.raises(BadRequest, match="elements"):
        deltas.base_squares(bytes_, "BF16", -1)
