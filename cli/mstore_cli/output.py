"""All standard output: for people, as JSON, or as bare ids.

A command passes its whole result once, after the work is done, so that a failure leaves standard
output empty.  Owns text and layout; knows no command.  Escapes names from checkpoints before they
reach a terminal: a tensor name is data, not a control sequence.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from mstore.snapshots.notes import NoteReport
    from mstore.terms.phrases import Text
    from mstore_cli.tables import Line


class NotPrinted(Exception):
    """Standard output cannot be written; `__cause__` is the system's error."""


@contextmanager
def printing() -> Iterator[None]:
    """Raise NotPrinted where standard output cannot be written, unless its reader is gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise NotPrinted(f"standard output cannot be written: {why.lower()}") from error


class Mode(enum.Enum):
    """Who reads the output."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Column(NamedTuple):
    """A table column: its heading, and the kind of its cells.

    right: numbers, aligned right. sentence: words, which may wrap to the next line.
    """

    title: str
    right: bool = False
    style: str = ""
    sentence: bool = False


FIELDS = (Column("", style="dim"), Column(""))
# An id as a word of its own, not part of a path; field lines are indented by two.
_ID = re.compile(r"(?<![\w/.-])[0-9a-f]{64}(?![\w/.-])")
_ROOM_FOR_AN_ID = 66
_VALUE_WIDTH = 60


class Output:
    """Prints one result in one mode.

    `emit` is called at most once in a run.  In JSON mode it writes exactly one object.
    """

    def __init__(
        self, mode: Mode, stream: TextIO | None = None, typed: Callable[[Text], str] = str
    ) -> None:
        self.mode = mode
        self._stream = stream
        self._typed = typed

    @property
    def is_json(self) -> bool:
        """Whether the result is printed for programs."""
        return self.mode is Mode.JSON

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._stream is None else self._stream

    def tell(self, line: str) -> None:
        """Print a line now, before the result, for people: of a step that may take an hour."""
        if self.mode is Mode.HUMAN:
            with printing():
                Screen(self.stream, self._typed).line(line)
                self.stream.flush()

    def emit(
        self, document: object, *, ids: Iterable[object], human: Callable[[Screen], None]
    ) -> None:
        """Print a result: `document` as JSON, or `ids` one per line, or what `human` draws."""
        with printing():
            match self.mode:
                case Mode.JSON:
                    # Imported here because other output must not pay for them.
                    import json

                    from mstore.terms.report import plain

                    self.stream.write(
                        json.dumps(plain(document, self._typed), indent=2, allow_nan=False) + "\n"
                    )
                case Mode.QUIET:
                    self.stream.writelines(f"{printable(str(one))}\n" for one in ids)
                case Mode.HUMAN:
                    human(Screen(self.stream, self._typed))
            self.stream.flush()


class Screen:
    """Lines, fields and tables for people.

    On a terminal: colours (not with NO_COLOR), and lines no wider than the terminal.  Elsewhere:
    plain text, one line per row however long, no trailing blanks. typed: formats a text of the
    library, with its commands as this user types them.

    An id never wraps.  If no line has room for it, its prefix stands for it, which commands accept
    too; the JSON output has the whole id.
    """

    def __init__(self, stream: TextIO, typed: Callable[[Text], str] = str) -> None:
        self._stream = stream
        self._typed = typed
        self._console = _console(stream) if is_terminal(stream) else None
        self.width = None if self._console is None else self._console.width
        """Columns of the terminal; None elsewhere, where lines may have any length."""

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line of text; on a terminal it wraps between words."""
        if self._console is None:
            self._stream.write(f"{printable(text)}\n")
            return
        from rich.text import Text

        self._console.print(Text(self._fitting(text), style=style))

    def typed(self, text: Text) -> str:
        """Return the text with its commands as this user must type them."""
        return self._typed(text)

    def advice(self, text: Text, style: str = "") -> None:
        """Print a line of mstore's own text that contains commands."""
        self.line(self._typed(text), style)

    def command(self, lead: str, command: str) -> None:
        """Print a line that ends in a command to type, after a colon."""
        self.line(f"{lead}: {self._typed(command)}")

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Print `name  value` lines, the values aligned.  Skips pairs whose value is None."""
        from mstore_cli.tables import lay_out_fields

        told = [(name, self._fitting(str(value))) for name, value in pairs if value is not None]
        for lines in lay_out_fields(told, self.width):
            for line in lines:
                self._draw(line, FIELDS)

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Print a table with headings; nothing if there are no rows."""
        filled = [[self._fitting(cell) for cell in row] for row in rows]
        if not filled:
            return
        from mstore_cli.tables import lay_out

        heading, *others = lay_out(
            [[column.title for column in columns], *filled],
            right=[column.right for column in columns],
            sentences=[column.sentence for column in columns],
            width=self.width,
        )
        for line in heading:
            self._draw(line, [Column("", style="bold")] * len(columns))
        for lines in others:
            for line in lines:
                self._draw(line, columns)

    def _fitting(self, text: str) -> str:
        """Return the text, escaped, with ids no longer than a line."""
        shown = printable(text)
        if self.width is None or self.width >= _ROOM_FOR_AN_ID:
            return shown
        return _ID.sub(lambda found: found[0][:12], shown)

    def _draw(self, line: Line, columns: Sequence[Column]) -> None:
        """Print one line of a table, each piece in the style of its column."""
        if self._console is None:
            self._stream.write(f"{''.join(piece.text for piece in line).rstrip()}\n")
            return
        from rich.text import Text

        # Text, not str: square brackets in names are not markup.
        text = Text(no_wrap=True)
        for piece in line:
            text.append(piece.text, None if piece.column is None else columns[piece.column].style)
        text.rstrip()
        self._console.print(text, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(
        file=stream,
        # Given explicitly: rich's own detection differs from `is_terminal`.
        force_terminal=True,
        color_system="auto",
        markup=False,
        emoji=False,
        highlight=False,
    )


def printable(text: str) -> str:
    """Escape every control, format and unpaired surrogate character of the text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def near(path: str | Path) -> str:
    """Return a path as people write it here: relative if it is below the working directory."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        # Elsewhere, or the working directory is gone.
        return str(path)


def elided(text: str, width: int) -> str:
    """Shorten the text to `width` characters: escaped, its middle left out if it is longer."""
    shown = printable(text)
    if len(shown) <= width:
        return shown
    head = (width - 1) // 2
    return f"{shown[:head]}…{shown[head + 1 - width :]}"


def distinct(names: Sequence[str], width: int) -> list[str]:
    """Shorten the names to `width`, or none of them if that would make two equal."""
    shown = [elided(name, width) for name in names]
    return shown if len(set(shown)) == len(set(names)) else [printable(name) for name in names]


def short(identity: bytes | None) -> str:
    """Return the first twelve hexadecimal digits of an id; `-` for None."""
    return "-" if identity is None else identity.hex()[:12]


def named(refs: Iterable[str]) -> str:
    """Return the refs of a snapshot in a line; remote refs as REMOTE/NAME."""
    return ", ".join(name.removeprefix("remotes/") for name in refs)


def noted(note: NoteReport) -> str:
    """Describe a note in a line: its key and value, and its kind if that says more."""
    kind = "" if note.kind == "value" else f"{note.kind} "
    key = note.subject()
    if note.kind in ("evaluation", "verdict"):
        # A command, unless somebody gave it a name.
        key = elided(key, _VALUE_WIDTH)
    return f"{kind}{key} = {elided(_told(note), _VALUE_WIDTH)}"


def _told(note: NoteReport) -> str:
    from mstore.snapshots.notes import SEARCH

    search = None
    if note.key == SEARCH:
        from mstore.api.reports import searched  # late: few stores have searches

        search = searched([note])
    return note.told() if search is None else search.text()


def when(time_ns: int) -> str:
    """Format a time in local time; a time outside the calendar as `date -d` accepts it."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"@{time_ns // 10**9}"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads this stream.  A dumb terminal counts as a file."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False
