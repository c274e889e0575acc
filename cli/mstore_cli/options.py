"""How commands declare arguments and options, and those that several commands share.

A command declares a parameter as `Annotated[KIND, Option(...)]` in the signature of its function:
`KIND` and its default say what click is to make of its words (`parameter_of`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import click

from mstore_cli import completion
from mstore_cli.errors import UsageError

WHAT, WHICH, HOW_MUCH, RESULT, CHECKS, DECIDES, REPORTS, HOW, WHERE, OPTIONS = GROUPS = (
    *("What to merge", "Which tensors", "How much to read", "The result"),
    *("What must hold before the branch moves", "What decides", "What reports", "How to search"),
    *("Where it is computed", "Options"),
)
"""The headings of options in help, in their order; OPTIONS is that of options without another."""
_FORMATS = frozenset(
    {
        *("bmp", "eps", "gif", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff"),
        *("csv", "htm", "html", "json", "md", "safetensors", "toml", "webp", "yaml", "yml"),
    }
)
"""Suffixes of file names that promise a format."""


class Option:
    """An option by its names, and what else click.Option takes.

    group: its heading in help. min: the smallest number.
    """

    def __init__(
        self,
        *names: str,
        group: str = OPTIONS,
        min: int | None = None,
        metavar: str | None = None,
        **more: Any,
    ) -> None:
        self.names = names
        self.group = group
        self.min = min
        self.more = {"metavar": metavar, **more}
        # The name of a file may be any bytes.
        self.parse = str if "FILE" in (metavar or "") else parse_text


class Argument:
    """A word by its place, or several.  An empty one, as of `"$UNSET"`, is refused.

    may_be_empty: whether an empty word has a meaning.
    """

    min = None

    def __init__(self, *, help: str, may_be_empty: bool = False, **more: Any) -> None:
        self.help = help
        self.parse = str if may_be_empty else parse_word
        self.more = more


_FILES = ("FILE", "DIR", "PATH")
"""What help calls words that name files, so that the shell completes them."""


def parameter_of(one: inspect.Parameter) -> click.Parameter:
    """Return what click is to parse: `X`, `X | None`, or any number of them, `tuple[X, ...]`."""
    whole, declared = get_args(one.annotation)
    is_several = get_origin(whole) is tuple
    parts = [part for part in get_args(whole) if part not in (NoneType, ...)]
    kind = parts[0] if parts else whole
    more = {"required": one.default is one.empty, **_conversion(kind, declared), **declared.more}
    if kind is Path or more.get("metavar") in _FILES:
        more.setdefault("shell_complete", completion.files)
    if not (more["required"] or is_several):
        more["default"] = one.default.value if isinstance(one.default, Enum) else one.default
    if isinstance(declared, Argument):
        return click.Argument([one.name], nargs=-1 if is_several else 1, **more)
    return click.Option([one.name, *declared.names], multiple=is_several, **more)


def _conversion(kind: Any, declared: Option | Argument) -> dict[str, Any]:
    """Return how click converts words to this kind."""
    if kind is bool:
        return {"is_flag": True}
    if kind is Path:
        return {"type": parse_path}
    if kind in (int, float):
        return {"type": number_of(kind, declared.min)}
    if issubclass(kind, Enum):
        words = click.Choice([one.value for one in kind])
        return {"type": words, "callback": lambda _context, _parameter, word: kind(word)}
    return {"type": declared.parse}


def number_of(kind: type[int | float], least: float | None) -> Callable[[str | float], float]:
    """Return the parser of a number of this kind, which is not below `least`."""
    noun = "a whole number" if kind is int else "a number"

    def parse(word: str | float) -> float:
        try:
            number = kind(word)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise ValueError(f"{noun}, not {word!r}")
        if least is not None and number < least:
            raise ValueError(f"at least {least:g}, not {word}")
        return number

    return parse


def parse_path(word: str | Path) -> Path:
    """Refuse an empty path, as of `--store=$UNSET`: it would be the working directory."""
    if not word:
        raise ValueError("a path cannot be empty")
    return Path(word)


def parse_word(word: str) -> str:
    """Refuse an empty word, which names nothing."""
    if not word:
        raise ValueError("it is empty")
    return word


def parse_text(word: str) -> str:
    """Refuse bytes that are no text in this locale."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ValueError(f"text, not bytes that are not UTF-8: {word!r}") from None
    return word


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


drawing = partial(Option, "--svg", metavar="FILE", type=file_of("svg"))
"""Declares `--svg FILE`; the help says what is drawn."""
_REVISION = Argument(
    metavar="REF",
    help="A branch, tag, snapshot id or its beginning (4 digits or more), REF~N, or REF@{N}.",
    shell_complete=completion.refs,
)
Revision = Annotated[str, _REVISION]
OneModel = Annotated[
    str,
    Argument(
        metavar="REF[:MODEL]",
        help="A snapshot, or one model of it with what lies beside it.",
        shell_complete=completion.refs,
    ),
]
MaybeRevision = Annotated[str | None, _REVISION]
RefNames = Annotated[
    tuple[str, ...],
    Argument(
        metavar="REF",
        help="Refs, or patterns [default: all].",
        shell_complete=completion.refs,
    ),
]
Message = Annotated[
    str,
    Option("--message", "-m", metavar="MSG", help="A message that says why.", show_default=False),
]
Threads = Annotated[
    int | None,
    Option("--threads", metavar="N", min=1, help="Worker threads [default: one per processor]."),
]
REMOTE = Argument(
    metavar="NAME",
    help="The remote, by its name in this store.",
    shell_complete=completion.remotes,
)
Remote = Annotated[str, REMOTE]
MaybeRemote = Annotated[
    str | None,
    Argument(
        metavar="NAME",
        help="The remote, by its name in this store [default: the only one, else origin].",
        shell_complete=completion.remotes,
    ),
]
RemoteRefs = Annotated[
    tuple[str, ...],
    Argument(
        metavar="REF",
        help="Branches and tags of the remote, or patterns [default: all].",
        shell_complete=completion.refs_of_remote,
    ),
]
Endpoint = Annotated[
    str | None,
    Option(
        "--endpoint",
        metavar="URL",
        help="The server [default: the provider's own]. It is added to your settings as one that "
        "may get your credentials.",
    ),
]
Region = Annotated[
    str | None,
    Option("--region", metavar="R", help="The region [default: as the environment says]."),
]
AddressingStyle = Annotated[
    str | None,
    Option(
        "--addressing-style",
        metavar="path|virtual",
        help="Where requests to S3 name the bucket: in the path, or in the host, as "
        "https://BUCKET.SERVER [default: as the environment says, else path].",
    ),
]
JOBS = 8
Jobs = Annotated[
    int, Option("--jobs", "-j", metavar="N", min=1, help="Parts that move at the same time.")
]
Lazy = Annotated[
    bool,
    Option(
        "--lazy",
        help="Get no weights now, nor later from this remote: a block comes when something reads "
        "it.",
    ),
]
LimitRate = Annotated[
    str | None,
    Option("--limit-rate", metavar="RATE", help="The most bytes a second: 20MiB, 100Mbit."),
]
Codec = Annotated[
    str | None,
    Option(
        "--codec",
        metavar="auto|raw|dense",
        help="How new blocks are stored [default: as `mstore config codec` says].",
        shell_complete=completion.codecs,
    ),
]
OnlyCompared = Annotated[
    tuple[str, ...],
    Option("--only", metavar="PATTERN", help="Compare only tensors whose names match. Repeatable."),
]
SkipCompared = Annotated[
    tuple[str, ...],
    Option(
        "--skip",
        metavar="PATTERN",
        help="Do not compare tensors whose names match: they may be missing, extra or of "
        "another shape. Repeatable.",
    ),
]
Include = Annotated[
    tuple[str, ...],
    Option(
        "--include",
        metavar="PATTERN",
        help="Take only files whose names match, as in a .gitignore. Repeatable.",
    ),
]
Exclude = Annotated[
    tuple[str, ...],
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
