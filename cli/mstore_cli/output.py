"""The one way to standard output: for people, as JSON, or as bare ids.

A command hands over its whole result once, after the work is done, so that a failure leaves
standard output empty.  Owns words and layout; knows no command.  Names that come from
checkpoints are escaped before they reach a terminal: a tensor name is data, not a control
sequence.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Mode(enum.Enum):
    """Who reads the output."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A table column: its heading, and whether its cells are numbers (flushed right)."""

    title: str
    right: bool = False
    style: str = ""


class Output:
    """Prints one result in one mode.

    `emit` is called at most once in a run.  In JSON mode it writes exactly one object.
    """

    def __init__(self, mode: Mode, stream: TextIO | None = None) -> None:
        self.mode = mode
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._stream is None else self._stream

    def emit(
        self, document: object, *, ids: Iterable[object], human: Callable[[Screen], None]
    ) -> None:
        """Print a result: `document` as JSON, or `ids` one a line, or what `human` draws."""
        match self.mode:
            case Mode.JSON:
                self.stream.write(json.dumps(plain(document), indent=2, allow_nan=False) + "\n")
            case Mode.QUIET:
                self.stream.writelines(f"{printable(str(one))}\n" for one in ids)
            case Mode.HUMAN:
                human(Screen(self.stream))
        self.stream.flush()


class Screen:
    """Lines, fields and tables for people.

    On a terminal: colours (not with NO_COLOR) and folding at its width.  Elsewhere: plain text,
    one row a line however long, no trailing blanks.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = is_terminal(stream)

    def line(self, text: str = "", style: str = "") -> None:
        """One line of text."""
        if not self._terminal:
            self._stream.write(f"{printable(text)}\n")
            return
        from rich.text import Text

        self._render(Text(printable(text), style=style))

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """`name  value` lines, the values aligned.  Pairs whose value is None are left out."""
        rows = [(name, str(value)) for name, value in pairs if value is not None]
        self._grid((Column("", style="dim"), Column("")), rows, titles=False)

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """A table with headings; nothing at all where there are no rows."""
        filled = list(rows)
        if filled:
            self._grid(columns, filled, titles=True)

    def _grid(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, titles: bool
    ) -> None:
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=None, show_header=titles, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            grid.add_column(
                column.title,
                justify="right" if column.right else "left",
                style=column.style,
                overflow="fold",
                no_wrap=not self._terminal,
            )
        for row in rows:
            # Text, not str: square brackets in names are not markup.
            grid.add_row(*(Text(printable(cell)) for cell in row))
        self._render(grid)

    def _render(self, renderable: RenderableType) -> None:
        if self._terminal:
            self._console(self._stream).print(renderable)
            return
        from io import StringIO

        text = StringIO()
        self._console(text, width=1 << 20).print(renderable)
        self._stream.writelines(f"{row.rstrip()}\n" for row in text.getvalue().splitlines())

    def _console(self, stream: TextIO, width: int | None = None) -> Console:
        from rich.console import Console

        return Console(
            file=stream,
            width=width,
            # Given outright, so that FORCE_COLOR and CI variables cannot colour a pipe.
            force_terminal=self._terminal,
            color_system="auto" if self._terminal else None,
            markup=False,
            emoji=False,
            highlight=False,
        )


def plain(value: object) -> object:
    """A value as JSON knows it: ids as hex, reports as objects, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def printable(text: str) -> str:
    """The text with every control, format and unpaired surrogate character escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def elided(text: str, width: int) -> str:
    """The text in at most `width` characters: escaped, its middle left out where it is longer."""
    shown = printable(text)
    if len(shown) <= width:
        return shown
    head = (width - 1) // 2
    return f"{shown[:head]}…{shown[head + 1 - width :]}"


def short(identity: bytes | None) -> str:
    """The first twelve hexadecimal digits of an id; `-` for none."""
    return "-" if identity is None else identity.hex()[:12]


def when(time_ns: int) -> str:
    """A point in time as the clock on the wall shows it; what is no date as `date -d` takes it."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"@{time_ns // 10**9}"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream.  A dumb terminal counts as a file."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False
