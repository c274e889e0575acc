"""Sizes and budgets as people write and read them: `2GiB`, `512MB`, `30%`.

In Python, where the numbers 1 and 1.0 are equal, `Budget` states a limit unambiguously.  On the
command line a budget is text.  Parsing raises BadRequest that names the option.
"""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Final, NoReturn

import msgspec

from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, Text, phrase

_BINARY = {"": 1, "B": 1} | {
    f"{letter}{tail}": 1024**power
    for power, letter in enumerate("KMGTPE", start=1)
    for tail in ("", "IB")
}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTPE", start=1)}
_SECONDS = {"ms": 1e-3, "s": 1.0}
UNITS = _BINARY | _DECIMAL
_BITS = {f"{letter}BIT": 1000**power for power, letter in enumerate("KMGT", start=1)}
MAX_SIZE = 2**63 - 1
SIZE_HINT = "write a size as 512MB, 2GiB or a plain number of bytes"
BUDGET_HINT = "write a budget as a size (2GiB, 512MB, a number of bytes) or as a share (30%)"
_BUDGET: Final = Option("budget")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)")


def parse_size(text: str, *, option: Text) -> int:
    """Parse bytes: `2GiB` and `2G` are powers of 1024, `2GB` of 1000.

    Fractions are rounded down to whole bytes.  Raises BadRequest that names `option`.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in UNITS:
        _refuse(f"not a size: {text!r}", option, SIZE_HINT)
    return _scaled(match[1], UNITS[unit], text, option)


def parse_rate(text: str, *, option: Text) -> int:
    """Parse bytes a second: a size, or as networks are sold: `200Mbit`, in powers of 1000 bits.

    Raises BadRequest that names `option`.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in _BITS:
        return parse_size(text, option=option)
    return _scaled(match[1], _BITS[unit], text, option) // 8


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parse_seconds(text: str, *, option: Text) -> float:
    """Parse a time, as `20ms` or `0.5s`, to seconds.  Raises BadRequest that names `option`."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        _refuse(f"not a time: {text!r}", option, "write a time as 20ms or 0.5s")
    return float(match[1]) * _SECONDS[match[2]]


def parse_budget(text: str, *, option: Text = _BUDGET) -> int | float:
    """Parse a budget: int bytes, or for `30%` the float share 0.3.

    Zero is accepted here: the library decides which budget is too small.  Raises BadRequest for
    anything that is neither a size nor a share of at most 100 %.
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
        given: Text = f"{option} {percent}"
        if isinstance(option, Option):
            given = Option(option.name, percent)
        hint = phrase("{given} is a share", given=given)
        _refuse(f"less than a byte: {text!r}", option, hint)
    return _scaled(match[1], UNITS[match[2].upper()], text, option)


def format_size(size: int) -> str:
    """Format in binary units, up to three digits before the point: `0 B`, `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # Round before comparing, so that 1023.96 KiB becomes 1.0 MiB.
        if round(value, 1) < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} EiB"


def exact_size(size: int) -> str:
    """Format with the exact number of bytes in brackets, where close sizes are compared."""
    told = format_size(size)
    return told if size < 1024 else f"{told} ({size} bytes)"


def _scaled(number: str, unit: int, text: str, option: Text) -> int:
    # Whole numbers stay exact: a float would be off above 2**53.
    size = int(float(number) * unit) if "." in number else int(number) * unit
    if size > MAX_SIZE:
        _refuse(f"too large: {text!r}", option, "a size is at most 8 EiB")
    return size


def _refuse(what: str, option: Text, hint: Text) -> NoReturn:
    raise BadRequest(what, where=option, hint=hint)


def _require_number(given: object, kind: type, words: str) -> None:
    if isinstance(given, bool) or not isinstance(given, kind):
        what = f"it is {words}, not {type(given).__name__}"
        _refuse(what, "Budget", 'mstore.Budget.share(0.3), or the text "30%"')


class Budget(msgspec.Struct, frozen=True):
    """A limit on bytes read: a number of bytes (int), or a share of the full cost (float)."""

    amount: int | float

    def __post_init__(self) -> None:
        _require_number(self.amount, Real, "a number of bytes, or a share")

    @classmethod
    def bytes(cls, number: int) -> Budget:
        """Return a limit in bytes at rest.  Raises BadRequest unless it is a whole number."""
        _require_number(number, Integral, "a number of bytes")
        return cls(int(number))

    @classmethod
    def share(cls, share: float) -> Budget:
        """Return a limit as a share of the cost of reading everything: 1 is all of it.

        Raises BadRequest unless it is a number.
        """
        _require_number(share, Real, "a share")
        return cls(float(share))

    @classmethod
    def of(cls, given: object, *, option: Text) -> Budget:
        """Convert a Budget, text as on the command line, bytes (int), or a share (float below 1).

        Raises BadRequest for anything else, and for the number 1, which could mean a byte or all.
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return cls(parse_budget(given, option=option))
        if isinstance(given, bool) or not isinstance(given, Real):
            _refuse(
                f"a budget is a number of bytes or a share, not {given!r}",
                option,
                'budget="2GiB" or budget="30%"',
            )
        if given < 0:
            _refuse(
                f"a budget is a number above 0, not {given!r}",
                option,
                'budget="2GiB" or budget="30%"',
            )
        if given == 1:
            _refuse(
                f"{given!r} may be one byte or all of it",
                option,
                'budget="100%" or budget=mstore.Budget.bytes(1)',
            )
        return cls(int(given) if isinstance(given, Integral) else float(given))
