"""Many tables decoded together say what each says alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mstore.models.stats import analysis, deltas
from mstore.models.stats.analysis import PairMeasure
from mstore.models.stats.chunk import finite
from mstore.models.stats.histogram import BINS, INFINITY_BIN, Histogram, select
from mstore.models.stats.pairs import SingleTables
from mstore.models.stats.table import DeltaTable
from mstore.terms.ids import TensorId

CHUNK = 1024
IDS = TensorId(bytes(32)), TensorId(bytes(range(32)))
Words = np.ndarray[Any, np.dtype[np.uint16]]


def words(most: int) -> st.SearchStrategy[Words]:
    """Patterns of bfloat16: any, also infinite and NaN, and more often ordinary ones."""
    some = st.one_of(st.integers(0, 0xFFFF), st.integers(0x3C00, 0x3F80))
    return arrays.arrays(np.uint16, st.integers(1, most), elements=some)


@st.composite
def pairs(draw: st.DrawFn, most: int = 40) -> tuple[Words, Words]:
    """A base and an expert of equal length."""
    base = draw(words(most))
    some = st.one_of(st.integers(0, 0xFFFF), st.integers(0x3C00, 0x3F80))
    expert = draw(arrays.arrays(np.uint16, len(base), elements=some))
    keep = draw(arrays.arrays(np.bool_, len(base)))
    return base, np.where(keep, base, expert).astype(np.uint16)


def measured(base: Words, expert: Words, chunk: int = CHUNK) -> bytes | None:
    """The encoded table of a pair."""
    measure = PairMeasure("BF16", "BF16", len(base), chunk)
    for number, start in enumerate(range(0, len(base), chunk)):
        part = slice(start, start + chunk)
        measure.take_chunk(number, base[part].view(np.uint8), expert[part].view(np.uint8))
    return measure.finish(*IDS).table


def is_plain(table: DeltaTable) -> bool:
    """Whether a table is to be decoded with others."""
    bins = table.histogram.bins
    return bool(
        len(table.rows) == 1 and len(bins) and bins[-1] < INFINITY_BIN and finite(table.rows).all()
    )


@settings(max_examples=30)
@given(st.lists(pairs(), max_size=6), st.data())
def test_together_as_alone(drawn: list[tuple[Words, Words]], data: st.DataObject) -> None:
    """Rows, histograms and thresholds of many are those of `DeltaTable.decode` and `select`; what
    is not plain is left out."""
    values = [measured(*pair) for pair in drawn]
    tables = [DeltaTable.decode(value) for value in values if value is not None]
    keep = [data.draw(st.integers(1, table.elements)) for table in tables]
    found = SingleTables.decode([*values, None, b"junk"], [*keep, 1, 1])
    plain = [place for place, table in enumerate(tables) if is_plain(table)]
    assert found.places.tolist() == plain
    for number, place in enumerate(plain):
        table = tables[place]
        assert found.rows[number : number + 1].tobytes() == table.rows.tobytes()
        assert found.elements[number] == table.elements
        assert found.chunk_elements[number] == table.chunk_elements
        wanted = select(table.histogram, keep[place], table.elements)
        assert found.thresholds[number] == wanted


@settings(max_examples=50)
@given(pairs(), st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_table_is_left_out(pair: tuple[Words, Words], at: int, flip: int) -> None:
    """Bytes that `DeltaTable.decode` refuses are not decoded with others either."""
    value = bytearray(measured(*pair) or b"")
    value[at % len(value)] ^= flip
    found = SingleTables.decode([bytes(value)])
    try:
        table = DeltaTable.decode(bytes(value))
    except Exception:  # noqa: BLE001 -- whatever it says, there is no table
        assert not len(found.places)
    else:
        assert len(found.places) == is_plain(table)


def test_contradictions_are_left_out() -> None:
    """A table of a sound frame whose counts are not is left out, and its neighbours stay."""
    import struct

    import zstandard

    base = np.full(8, 0x3F80, dtype=np.uint16)
    good = measured(base, base + np.arange(8, dtype=np.uint16))
    assert good is not None
    plain = bytearray(zstandard.ZstdDecompressor().decompress(good[4:]))
    size = struct.calcsize("<QQI")
    bad = []
    for place in (0, size, size + 66, len(plain) - 1):
        changed = bytearray(plain)
        changed[place] ^= 0x81
        packed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True)
        bad.append(good[:4] + packed.compress(bytes(changed)))
    found = SingleTables.decode([good, *bad, good])
    assert set(found.places.tolist()) >= {0, 5}
    for place, value in enumerate(bad, start=1):
        try:
            DeltaTable.decode(value)
        except Exception:  # noqa: BLE001 -- as above
            assert place not in found.places


@settings(max_examples=40)
@given(pairs(300), st.sampled_from([64, 128, 1024]))
def test_encoded_as_a_table(pair: tuple[Words, Words], chunk: int) -> None:
    """What a measure encodes is what the table of the same rows and counts encodes to."""
    base, expert = pair
    chunk = 1024 if len(base) <= chunk else chunk * 16
    hist = np.zeros((BINS, 2), dtype=np.int64)
    row = deltas.measure(
        base.view(np.uint8), "BF16", expert.view(np.uint8), "BF16", len(base), 0, hist
    )
    wanted = DeltaTable(row.copy(), Histogram.from_dense(hist), len(base), chunk).encode()
    assert measured(base, expert, chunk) == wanted
    table = DeltaTable.decode(wanted)
    planes = deltas.collect(hist, float(row["max_abs"].max()))
    assert not hist.any()
    assert len(planes) == 18 * len(table.histogram.bins)


def test_histograms_of_threads_are_added_up() -> None:
    """A table is the same whether one thread took all chunks or several did."""
    rng = np.random.default_rng(5)
    base = rng.integers(0x3C00, 0x3F80, 5 * CHUNK - 7, dtype=np.uint16)
    expert = rng.integers(0x3C00, 0x3F80, len(base), dtype=np.uint16)
    measure = PairMeasure("BF16", "BF16", len(base), CHUNK)
    turn = Barrier(5)

    def take(number: int) -> None:
        part = slice(number * CHUNK, (number + 1) * CHUNK)
        # All are alive at once: one that has ended may leave its number to the next.
        turn.wait(60)
        measure.take_chunk(number, base[part].view(np.uint8), expert[part].view(np.uint8))
        turn.wait(60)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(take, range(5)))
    assert measure.finish(*IDS).table == measured(base, expert)
    assert not any(spare.any() for spare in analysis._spare)


def test_a_measure_holds_histograms_only_while_chunks_come() -> None:
    """With its last chunk a measure lets go of half a MiB, long before its file is done."""
    base = np.arange(3 * CHUNK, dtype=np.uint16)
    measure = PairMeasure("BF16", "BF16", len(base), CHUNK)
    for number in (2, 0, 1):
        part = base[number * CHUNK : (number + 1) * CHUNK]
        assert bool(measure._counts) == (number != 2)
        measure.take_chunk(number, part.view(np.uint8), (part + 1).view(np.uint8))
    assert not measure._counts
    assert measure.finish(*IDS).table is not None
