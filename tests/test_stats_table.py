"""Statistics at rest: round trips, size, and bytes that are not what they claim."""

from __future__ import annotations

import struct

import delta_reference as reference
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mstore.models.stats import deltas
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.histogram import Histogram
from mstore.models.stats.table import MAGIC, DeltaTable
from mstore.terms.errors import BadRequest, Corrupt

MIB = 1 << 20


def _measured(
    dtype: str, elements: int, chunk: int, *, relative: float = 1e-2, seed: int = 31
) -> DeltaTable:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(elements) * 0.02).astype(np.float32)
    noise = (rng.standard_normal(elements) * 0.02 * relative).astype(np.float32)
    base = reference.patterns_of(values, dtype)
    expert = reference.patterns_of(values + noise, dtype)
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    rows = np.zeros(-(-elements // chunk), dtype=CHUNK)
    for number in range(rows.size):
        part = slice(number * chunk, min(elements, (number + 1) * chunk))
        rows[number] = deltas.measure(
            reference.stored(base[part], dtype),
            dtype,
            reference.stored(expert[part], dtype),
            dtype,
            part.stop - part.start,
            part.start,
            hist,
        )[0]
    return DeltaTable(rows, Histogram.from_dense(hist), elements, chunk)


def _empty() -> Histogram:
    return Histogram.from_dense(np.zeros((0x8000, 2), dtype=np.int64))


def _frame(plain: bytes) -> bytes:
    return MAGIC + zstandard.ZstdCompressor(write_checksum=True).compress(plain)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("elements", [0, 1, 8191, 8192, 8193, 50_000])
def test_what_was_encoded_is_decoded(dtype: str, elements: int) -> None:
    """A measured table comes back the same, bit for bit, and encodes to the same bytes again."""
    table = _measured(dtype, elements, 8192)
    encoded = table.encode()
    again = DeltaTable.decode(memoryview(encoded))
    assert again == table
    assert again.rows.tobytes() == table.rows.tobytes()
    assert again.encode() == encoded


@given(
    st.lists(st.binary(min_size=CHUNK.itemsize, max_size=CHUNK.itemsize), max_size=6),
    st.dictionaries(
        st.integers(1, 0x7F7F), st.tuples(st.integers(1, 2**30), st.integers(0, 2**30)), max_size=9
    ),
)
def test_any_rows_and_bins_survive(raw: list[bytes], occupied: dict[int, tuple[int, int]]) -> None:
    """Rows of any non-negative bits, NaN included, and any histogram that fits them."""
    rows = np.frombuffer(b"".join(raw), dtype=CHUNK).copy()
    for name in ("sum_abs", "sum_squares", "max_abs", "base_squares"):
        rows[name] = np.where(rows[name] < 0, 1.0, rows[name])
    rows["nonzeros"] = 0
    bins = sorted(occupied)
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    for bin_ in bins:
        count, inexact = occupied[bin_]
        hist[bin_] = count, min(count, inexact)
    chunk = (1 << 32) - 1
    total = int(hist[:, 0].sum())
    if total > chunk * len(raw):
        hist[:], total = 0, 0
    for number in range(len(raw)):
        rows["nonzeros"][number] = min(chunk, total)
        total -= int(rows["nonzeros"][number])
    table = DeltaTable(rows, Histogram.from_dense(hist), chunk * len(raw), chunk)
    assert DeltaTable.decode(table.encode()) == table


@pytest.mark.sampled(2)
@pytest.mark.parametrize("relative", [1e-1, 1e-3])
def test_tables_of_large_tensors_are_a_thousandth(relative: float) -> None:
    """A bf16 tensor of 8 MiB in chunks of 1 MiB has a table of at most 0.1 % of its bytes."""
    table = _measured("BF16", 4 * MIB, MIB // 2, relative=relative)
    assert len(table.encode()) <= 8 * MIB // 1000


def test_contradictions_are_refused() -> None:
    """Rows, bins and lengths that do not belong together make no table."""
    table = _measured("BF16", 20_000, 8192)
    rows, hist = table.rows, table.histogram
    for elements, chunk in ((30_000, 8192), (20_000, 4096), (-1, 8192), (20_000, 0)):
        with pytest.raises(BadRequest):
            DeltaTable(rows, hist, elements, chunk)
    with pytest.raises(BadRequest, match="bins 0"):
        DeltaTable(rows, _empty(), 20_000, 8192)
    with pytest.raises(BadRequest, match="more elements"):
        DeltaTable(rows, hist, 2 * 8192 + 1, 8192)
    negative = rows.copy()
    negative["sum_squares"][1] = -1.0
    with pytest.raises(BadRequest, match="negative sum_squares"):
        DeltaTable(negative, hist, 20_000, 8192)


def test_no_damage_goes_unnoticed() -> None:
    """Each cut and each byte added is Corrupt, and no flipped bit gives another table."""
    table = _measured("BF16", 3000, 2048)
    encoded = table.encode()
    cut = [encoded[:end] for end in range(len(encoded))]
    for data in [*cut, encoded + b"\0", encoded + encoded[4:], encoded[4:]]:
        with pytest.raises(Corrupt):
            DeltaTable.decode(data)
    noticed = 0
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            # A few bits of a zstd frame mean nothing; its checksum is of what comes out.
            assert DeltaTable.decode(flipped) == table
        except Corrupt:
            noticed += 1
    assert noticed > 7 * len(encoded)


@given(st.binary(max_size=200))
def test_garbage_is_corrupt(data: bytes) -> None:
    """Random bytes, bare or in a sound frame, raise Corrupt and nothing else."""
    for candidate in (data, MAGIC + data, _frame(data)):
        with pytest.raises(Corrupt):
            DeltaTable.decode(candidate)


def test_bombs_are_refused_before_they_unpack() -> None:
    """A frame over the limit, or one that hides its size, is refused; the limit can be raised."""
    bomb = _frame(bytes(10 * MIB))
    with pytest.raises(Corrupt, match="limit of 1048576"):
        DeltaTable.decode(bomb, limit=MIB)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(Corrupt, match="do not say their size"):
        DeltaTable.decode(MAGIC + silent)
    table = _measured("BF16", 3000, 2048)
    encoded = table.encode()
    with pytest.raises(Corrupt, match="limit of 100 "):
        DeltaTable.decode(encoded, limit=100)
    assert DeltaTable.decode(encoded, limit=MIB) == table


HEAD = struct.Struct("<QQI")


@pytest.mark.parametrize(
    "plain",
    [
        HEAD.pack(1 << 63, 1, 0),
        HEAD.pack((1 << 48) + 1, 1 << 31, 0),
        HEAD.pack(10, 0, 0),
        HEAD.pack(10, 1 << 32, 0),
        HEAD.pack(1 << 48, 1, 0),
        HEAD.pack(0, 1, 0x8000),
        HEAD.pack(0, 1, 1) + bytes(17),
        HEAD.pack(0, 1, 1) + bytes(18),
        HEAD.pack(0, 1, 1) + b"\x05\0" + b"\1" + bytes(15),
        HEAD.pack(9, 9, 1) + bytes(CHUNK.itemsize) + b"\x05\0" + b"\1" + bytes(15),
        HEAD.pack(9, 9, 2) + b"\1" + bytes(CHUNK.itemsize - 1) + b"\x05\0\0\0" + bytes(32),
        HEAD.pack(9, 9, 1) + bytes(CHUNK.itemsize) + b"\xff\xff" + bytes(16),
        HEAD.pack(9, 9, 1) + bytes(CHUNK.itemsize) + b"\x05\0" + b"\xff" * 16,
    ],
)
def test_sound_frames_of_nonsense_are_corrupt(plain: bytes) -> None:
    """Lengths that overflow, disagree or ask for what is not there, and counts that cannot be."""
    with pytest.raises(Corrupt):
        DeltaTable.decode(_frame(plain))
