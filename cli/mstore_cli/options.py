"""Arguments and options that several commands share, declared once so that they read alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from mstore_cli import completion
from mstore_cli.errors import UsageError

WHAT, WHICH, HOW_MUCH, RESULT, OPTIONS = GROUPS = (
    *("What to merge", "Which tensors", "How much to read", "The result"),
    "Options",
)
"""The headings of options in help, in their order; OPTIONS is that of options without another."""
_FORMATS = frozenset(
    {
        *("bmp", "eps", "gif", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff"),
        *("csv", "htm", "html", "json", "md", "safetensors", "toml", "webp", "yaml", "yml"),
    }
)
"""Suffixes of file names that promise a format."""


def parse_path(word: str) -> Path:
    """Refuse an empty path, as of `--store=$UNSET`, which typer takes for the working directory."""
    if not word:
        raise BadParameter("a path cannot be empty")
    return Path(word)


def parse_text(word: str) -> str:
    """Refuse bytes that are no text in this locale."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise BadParameter(f"text, not bytes that are not UTF-8: {word!r}") from None
    return word


def parse_number(
    kind: type[int | float], least: float | None
) -> Callable[[str | float], int | float]:
    """Return the parser of numbers of this kind."""

    def parse(word: str | float) -> int | float:
        try:
            number = kind(word)
        except ValueError:
            whole = "whole " if kind is int else ""
            raise BadParameter(f"a {whole}number, not {word!r}") from None
        if least is not None and not number >= least:
            raise BadParameter(f"at least {least}, not {word}")
        return number

    return parse


def file_of(form: str) -> Callable[[str], Path]:
    """Return the parser of a file that is written in this format: its suffix in small letters.

    It raises UsageError for a name that promises another format.
    """

    def parse(word: str) -> Path:
        path = parse_path(word)
        promised = path.suffix[1:].lower()
        if promised in _FORMATS - {form}:
            raise UsageError(
                f"{word} would hold {form.upper()}, not {promised.upper()}",
                hint=f"name it {path.with_suffix(f'.{form}')}",
            )
        return path

    return parse


drawing = partial(Option, "--svg", metavar="FILE", parser=file_of("svg"))
"""Declares `--svg FILE`; the help says what is drawn."""
png = partial(Option, "--png", metavar="FILE", parser=file_of("png"))
"""Declares `--png FILE`."""
_REVISION = Argument(
    metavar="REF",
    help="A branch, tag, snapshot id or its beginning (4 digits or more), REF~N, or REF@{N}.",
    autocompletion=completion.refs,
)
Revision = Annotated[str, _REVISION]
OneModel = Annotated[
    str,
    Argument(
        metavar="REF[:MODEL]",
        help="A snapshot, or one model of it with what lies beside it.",
        autocompletion=completion.refs,
    ),
]
MaybeRevision = Annotated[str | None, _REVISION]
RefNames = Annotated[
    list[str] | None,
    Argument(
        metavar="REF",
        help="Refs, or patterns [default: all].",
        autocompletion=completion.refs,
    ),
]
Message = Annotated[str, Option("--message", "-m", metavar="MSG", help="A message that says why.")]
Threads = Annotated[
    int | None,
    Option("--threads", metavar="N", min=1, help="Worker threads [default: one per processor]."),
]
Codec = Annotated[
    str | None,
    Option(
        "--codec",
        metavar="auto|raw|dense",
        help="How new blocks are stored [default: as `mstore config codec` says].",
        autocompletion=completion.codecs,
    ),
]
OnlyCompared = Annotated[
    list[str] | None,
    Option("--only", metavar="PATTERN", help="Compare only tensors whose names match. Repeatable."),
]
SkipCompared = Annotated[
    list[str] | None,
    Option(
        "--skip",
        metavar="PATTERN",
        help="Do not compare tensors whose names match: they may be missing, extra or of "
        "another shape. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    Option(
        "--exclude",
        metavar="PATTERN",
        help="Leave out files or directories whose names match, as in a .gitignore. Repeatable.",
    ),
]
NoDefaultExcludes = Annotated[
    bool,
    Option(
        "--no-default-excludes",
        help="Store what is left out by default: .git, download caches, training states.",
    ),
]
