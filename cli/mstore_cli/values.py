"""Values of a command line: from the words after an option, or in a place, to what commands get.

Owns the conversion of plain values.  Whatever else there is, and whatever is wrong, is left to
typer, which refuses it in its own words (`mstore_cli.tree`): both give the same value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from mstore_cli.declared import Parameter
from mstore_cli.errors import UsageError

_PLAIN_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


_FORMATS = frozenset(
    {
        *("bmp", "eps", "gif", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff"),
        *("csv", "htm", "html", "json", "md", "safetensors", "toml", "webp", "yaml", "yml"),
    }
)
"""Suffixes of file names that promise a format."""


class NotPlain(Exception):
    """A value that only typer converts or refuses."""


def convert(parameter: Parameter, word: str) -> object:
    """Convert a word to the parameter's kind: one element, if it is a list.

    Raises NotPlain.
    """
    if not _is_text(word):
        raise NotPlain
    if parameter.shown.parser is not None:
        return _parsed(parameter.shown.parser, word)
    if parameter.kind is str:
        return word
    if parameter.kind is Path:
        return _path(word)
    if parameter.kind in (int, float):
        return _number(parameter.kind, word, parameter.shown.least)
    if issubclass(parameter.kind, Enum):
        return _member(parameter.kind, word)
    raise NotPlain


def what_is_wrong(parameter: Parameter, word: str) -> str | None:
    """Say what is wrong with a word that cannot be a value of the parameter, as far as is known."""
    shown = parameter.shown
    own = parameter.name.replace("_", "-")
    spare = f"--{own}" if parameter.is_option else shown.metavar or own.upper()
    name = next((one for one in shown.names if one.startswith("--")), spare)
    if (
        parameter.is_option
        and parameter.kind is str
        and "FILE" not in (shown.metavar or "")
        and not _is_text(word)
    ):
        return f"{name} takes text, not bytes that are not UTF-8: {word!r}"
    if parameter.kind is Path and not word:
        return f"empty value for {name}"
    if shown.parser is None and issubclass(parameter.kind, Enum):
        known = [str(one.value) for one in parameter.kind]
        return None if word in known else f"{name} takes {', '.join(known)}, not {word!r}"
    if parameter.kind not in (int, float) or shown.parser is not None:
        return None
    try:
        number = parameter.kind(word)
    except ValueError:
        return f"{name} takes a {'whole ' if parameter.kind is int else ''}number, not {word!r}"
    if shown.least is not None and number < shown.least:
        return f"{name} takes at least {shown.least}, not {word}"
    return None


def _is_text(word: str) -> bool:
    """Return whether a word is no bytes that are no text in this locale."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_of(form: str) -> Callable[[str], Path]:
    """Return the parser of a file that is written in this format: its suffix in small letters.

    It raises UsageError for a name that promises another format.
    """

    def parse(word: str) -> Path:
        if not word:
            raise UsageError("empty value for a file")
        path = Path(word)
        promised = path.suffix[1:].lower()
        if promised in _FORMATS - {form}:
            raise UsageError(
                f"{word} would hold {form.upper()}, not {promised.upper()}",
                hint=f"name it {path.with_suffix(f'.{form}')}",
            )
        return path

    return parse


def _parsed(parser: Callable[[str], object], word: str) -> object:
    try:
        return parser(word)
    except UsageError:
        raise NotPlain from None


def _path(word: str) -> Path:
    path = Path(word)
    if not word:
        raise NotPlain
    # typer refuses what is there and cannot be read.
    if os.access(path, os.R_OK) or not os.path.exists(path):
        return path
    raise NotPlain


def _number(kind: type, word: str, least: float | None) -> int | float:
    if not _PLAIN_NUMBER.fullmatch(word):
        raise NotPlain
    if kind is int and not word.isdigit():
        raise NotPlain
    number: int | float = kind(word)
    if least is not None and number < least:
        raise NotPlain
    return number


def _member(kind: type[Enum], word: str) -> Enum:
    try:
        return kind(word)
    except ValueError:
        raise NotPlain from None
