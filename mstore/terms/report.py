"""What calls return and tell while they run.

Frozen structs that notebooks show as tables, and that become JSON types.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mstore.terms.phrases import Phrase, Text


class Report(msgspec.Struct, frozen=True):
    """What a call returns.  Its fields are the JSON keys of the command line."""

    def _repr_html_(self) -> str:
        return html(self)


def fields(report: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a report by name."""
    return {name: getattr(report, name) for name in report.__struct_fields__}


def plain(value: object, typed: Callable[[Text], str] = str) -> Any:
    """Convert a value to JSON types: ids to hex, reports to objects, NaN and infinities to null.

    typed: formats a phrase, with its commands as the user types them.
    """
    if isinstance(value, msgspec.Struct):
        return {name: plain(one, typed) for name, one in fields(value).items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, typed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, typed) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return typed(value) if isinstance(value, Phrase) else value


def html(value: object, rows: int = 100) -> str:
    """Return a value as HTML, for notebooks: fields and lists as tables of at most `rows` rows."""
    if isinstance(value, list | tuple) and value:
        first = value[0]
        if isinstance(first, msgspec.Struct):
            names = first.__struct_fields__
            lines = ["".join(f"<th>{name}</th>" for name in names)]
            lines += [
                "".join(f"<td>{_cell(one, name)}</td>" for name in names) for one in value[:rows]
            ]
            if len(value) > rows:
                lines.append(f"<td>and {len(value) - rows} more</td>")
            return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"
        return ", ".join(html(one) for one in value[:rows]) + (", ..." if len(value) > rows else "")
    if isinstance(value, msgspec.Struct):
        lines = [
            f"<tr><th>{name}</th><td>{_cell(value, name)}</td></tr>"
            for name in value.__struct_fields__
        ]
        return f"<table>{''.join(lines)}</table>"
    from html import escape  # late: commands never show HTML

    # Ids are bytes; their first digits name them.
    shown = value.hex()[:12] if isinstance(value, bytes) else "" if value is None else str(value)
    return escape(shown)


def _cell(value: object, name: str) -> str:
    """Return a field as HTML, times as they are read: in UTC, to the second."""
    part = getattr(value, name)
    if name.endswith("time_ns") and isinstance(part, int):
        return f"{utc(part)} UTC"
    return html(part)


def utc(time_ns: int) -> str:
    """Return a time as it is read: in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ns // 10**9))


class Progress(Report, frozen=True):
    """One tick of a long call: `done` of `total` bytes in the named phase."""

    phase: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]
"""Called now and then by a long call, from its own thread or from one of its workers."""


class ProgressCounter:
    """Adds up the bytes done in one phase, and reports each sum.  Used by one thread.

    total: how many are expected.
    """

    def __init__(self, phase: str, total: int, progress: ProgressCallback | None) -> None:
        self._phase = phase
        self._total = total
        self._progress = progress
        self.done = 0

    def __call__(self, more: int) -> None:
        self.done += more
        if self._progress is not None:
            self._progress(Progress(self._phase, self.done, max(self._total, self.done)))
