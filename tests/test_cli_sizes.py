"""Sizes and budgets on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.terms.errors import BadRequest
from mstore.terms.sizes import MAX_SIZE, UNITS
from mstore_cli.sizes import (
    format_seconds,
    format_share,
    format_size,
    parse_budget,
    parse_rate,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KiB", 1024),
        ("1k", 1024),
        ("2GiB", 2 * 1024**3),
        ("2G", 2 * 1024**3),
        ("512MB", 512_000_000),
        ("1.5 MiB", 1_572_864),
        (" 64kib ", 65_536),
        ("9223372036854775807", MAX_SIZE),
    ],
)
def test_size(text: str, size: int) -> None:
    """Units are powers of 1024, those that end in a bare B of 1000, whatever the case."""
    assert parse_size(text, option="--block-size") == size


@pytest.mark.parametrize(
    "text", ["", "-1", "GiB", "1XB", "1e9", "0x10", "1,5GiB", "nan", "1GiBs", "8EiB", "٣", "30%"]
)
def test_not_a_size(text: str) -> None:
    """Anything else is refused, with the option named and a way to write it."""
    with pytest.raises(BadRequest) as caught:
        parse_size(text, option="--block-size")
    assert caught.value.where == "--block-size"
    assert caught.value.hint


@given(st.integers(0, 2**40), st.sampled_from(sorted(UNITS)))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    """A whole number of units is that many bytes, without a float's rounding."""
    if number * UNITS[unit] <= MAX_SIZE:
        assert parse_size(f"{number}{unit}", option="x") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200Mbit", 25_000_000), ("1 gbit", 125_000_000), ("1Kbit", 125), ("20MiB", 20 << 20)],
)
def test_rate(text: str, rate: int) -> None:
    """A rate is a size a second, or bits in powers of 1000."""
    assert parse_rate(text, option="--rate") == rate


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("0.5s", 0.5), ("0 ms", 0)])
def test_seconds(text: str, seconds: float) -> None:
    """A time is written in milliseconds or seconds."""
    assert parse_seconds(text, option="--latency") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "20min", "-1ms", "1.ms", "fast"])
def test_not_a_time_nor_a_rate(text: str) -> None:
    """Anything else is refused, with the option named and a way to write it."""
    for parse in (parse_seconds, parse_rate):
        if parse is parse_rate and text == "20":
            continue
        with pytest.raises(BadRequest) as caught:
            parse(text, option="--latency")
        assert caught.value.where == "--latency"
        assert caught.value.hint


@pytest.mark.parametrize(("text", "share"), [("30%", 0.3), ("100%", 1.0), ("0%", 0.0)])
def test_share(text: str, share: float) -> None:
    """A percentage is a float: the library can tell it from bytes."""
    budget = parse_budget(text)
    assert isinstance(budget, float)
    assert budget == share


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("1", 1), ("2GiB", 2 * 1024**3)])
def test_budget_in_bytes(text: str, size: int) -> None:
    """A size is an int, also where it is one byte."""
    budget = parse_budget(text)
    assert isinstance(budget, int)
    assert budget == size


@pytest.mark.parametrize("text", ["", "lots", "-5%", "101%", "%", "30%%", "0.3.1", "inf"])
def test_nonsense_budget(text: str) -> None:
    """A budget that says nothing is refused."""
    with pytest.raises(BadRequest) as caught:
        parse_budget(text)
    assert caught.value.where == "--budget"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**3 // 2, "1.5 GiB"),
        (2**63 - 1, "8.0 EiB"),
    ],
)
def test_format_size(size: int | None, text: str) -> None:
    """Sizes are printed in binary units and never as 1024.0 of one."""
    assert format_size(size) == text


def test_format_share_and_seconds() -> None:
    """Shares of nothing are a dash; durations use the units that people use."""
    assert format_share(1, 3) == "33.3 %"
    assert format_share(0, 0) == "-"
    assert [format_seconds(s) for s in (0.4, 12.34, 185, 7620)] == [
        "0.40 s",
        "12.3 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
