"""Sizes and shares: parsing what people type, and formatting what they read.

Knows nothing of stores.  Parsing raises `BadRequest`; formatting never fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstore.store.leaning import Leaning


def parse_size(text: str, *, option: str) -> int:
    """Parse bytes: `2GiB` and `2G` are powers of 1024, `2GB` of 1000.

    Fractions are rounded down to whole bytes.  Raises BadRequest that names `option`.
    """
    # Imported here because `mstore --help` must not pay for the library.
    from mstore.terms import sizes

    return sizes.parse_size(text, option=option)


def parse_rate(text: str, *, option: str) -> int:
    """Parse bytes a second, as `20MiB` or `200Mbit`.  Raises BadRequest that names `option`."""
    from mstore.terms import sizes

    return sizes.parse_rate(text, option=option)


def parse_seconds(text: str, *, option: str) -> float:
    """Parse a time, as `20ms` or `0.5s`, to seconds.  Raises BadRequest that names `option`."""
    from mstore.terms import sizes

    return sizes.parse_seconds(text, option=option)


def parse_budget(text: str, *, option: str = "--budget") -> int | float:
    """Parse a budget: int bytes, or for `30%` the float share 0.3.  Raises BadRequest."""
    from mstore.terms import sizes

    return sizes.parse_budget(text, option=option)


def format_size(size: int | None) -> str:
    """Format in binary units, up to three digits before the point: `0 B`, `1.5 MiB`; None: `-`."""
    if size is None:
        return "-"
    from mstore.terms import sizes

    return sizes.format_size(size)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 file`, `2 files`."""
    from mstore.terms import sizes

    return sizes.counted(number, noun)


def format_share(part: int, whole: int) -> str:
    """Format `part` of `whole` as a percentage; `-` if the whole is zero."""
    return format_percent(part / whole) if whole else "-"


def format_percent(share: float | None, form: str = ".1f") -> str:
    """Format a share of 1 as a percentage: `5.4 %`; None: `-`.  form: of the number."""
    return "-" if share is None else f"{100 * share:{form}} %"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.42 s`, `12.3 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def not_here(one: Leaning) -> str:
    """Return what stands for blocks that are only at a remote."""
    return f"{counted(one.blocks, 'block')}, {format_size(one.bytes)}, at {one.remote}"
