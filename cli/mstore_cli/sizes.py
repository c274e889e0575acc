"""Sizes and shares: parsing what people type, and the words for what they read.

Knows nothing of stores.  Parsing raises `BadRequest`; formatting never fails.
"""

from __future__ import annotations

import re
from typing import NoReturn

_BINARY = {"": 1, "B": 1} | {
    f"{letter}{tail}": 1024**power
    for power, letter in enumerate("KMGTPE", start=1)
    for tail in ("", "IB")
}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTPE", start=1)}
UNITS = _BINARY | _DECIMAL
MAX_SIZE = 2**63 - 1
SIZE_HINT = "write a size as 512MB, 2GiB or a plain number of bytes"
BUDGET_HINT = "write a budget as a size (2GiB, 512MB, a number of bytes) or as a share (30%)"
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)")


def parse_size(text: str, *, option: str) -> int:
    """Bytes meant by `text`: `2GiB` and `2G` are powers of 1024, `2GB` of 1000.

    Fractions are rounded down to whole bytes.  Raises BadRequest that names `option`.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in UNITS:
        _refuse(f"not a size: {text!r}", option, SIZE_HINT)
    return _scaled(match[1], UNITS[unit], text, option)


def parse_budget(text: str, *, option: str = "--budget") -> int | float:
    """A budget: int bytes, or for `30%` the float share 0.3.

    Zero is handed on: what is too small a budget is for the library to say.  Raises BadRequest
    for anything that is neither a size nor a share of at most 100 %.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is not None and match[2] == "%":
        share = float(match[1]) / 100
        if share > 1:
            _refuse(f"more than the whole: {text!r}", option, "a share is at most 100%")
        return share
    if match is None or match[2].upper() not in UNITS:
        _refuse(f"neither a size nor a share: {text!r}", option, BUDGET_HINT)
    if not match[2] and 0 < float(match[1]) < 1:
        percent = f"{float(match[1]):.0%}"
        _refuse(f"less than a byte: {text!r}", option, f"{option} {percent} is a share")
    return _scaled(match[1], UNITS[match[2].upper()], text, option)


def _scaled(number: str, unit: int, text: str, option: str) -> int:
    # Whole numbers stay exact: a float would be off above 2**53.
    size = int(float(number) * unit) if "." in number else int(number) * unit
    if size > MAX_SIZE:
        _refuse(f"too large: {text!r}", option, "a size is at most 8 EiB")
    return size


def _refuse(what: str, option: str, hint: str) -> NoReturn:
    # Imported here because `mstore --help` must not pay for the library.
    from mstore.errors import BadRequest

    raise BadRequest(what, where=option, hint=hint)


def format_size(size: int | None) -> str:
    """Binary units, three digits at most before the point: `0 B`, `1.5 MiB`; `-` for None."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # Rounding is looked at first, so that 1023.96 KiB reads 1.0 MiB.
        if round(value, 1) < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} EiB"


def counted(number: int, noun: str) -> str:
    """A count with its noun: `1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_share(part: int, whole: int) -> str:
    """`part` of `whole` as a percentage; `-` where the whole is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_seconds(seconds: float) -> str:
    """A duration for people: `0.42 s`, `12.3 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
