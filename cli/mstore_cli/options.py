"""Arguments and options that several commands share, declared once so that they read alike."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from mstore_cli import values
from mstore_cli.declared import Argument, Option

drawing = partial(Option, "--svg", metavar="FILE", show_default=False, parser=values.file_of("svg"))
"""Declares `--svg FILE`; the help says what is drawn."""
png = partial(Option, "--png", metavar="FILE", show_default=False, parser=values.file_of("png"))
"""Declares `--png FILE`."""
_REVISION = Argument(
    metavar="REF",
    help="A branch, tag, snapshot id or its beginning (4 digits or more), REF~N, or REF@{N}.",
    show_default=False,
    completes="refs",
)
Revision = Annotated[str, _REVISION]
OneModel = Annotated[
    str,
    Argument(
        metavar="REF[:MODEL]",
        help="A snapshot, or one model of it with what lies beside it.",
        show_default=False,
        completes="refs",
    ),
]
MaybeRevision = Annotated[str | None, _REVISION]
RefNames = Annotated[
    list[str] | None,
    Argument(
        metavar="REF",
        help="Refs, or patterns [default: all].",
        show_default=False,
        completes="refs",
    ),
]
Message = Annotated[
    str,
    Option("--message", "-m", metavar="MSG", help="A message that says why.", show_default=False),
]
Threads = Annotated[
    int | None,
    Option(
        "--threads",
        metavar="N",
        least=1,
        help="Worker threads [default: one per processor].",
        show_default=False,
    ),
]
Codec = Annotated[
    str | None,
    Option(
        "--codec",
        metavar="auto|raw|dense",
        help="How new blocks are stored [default: as `mstore config codec` says].",
        show_default=False,
        completes="codecs",
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
        show_default=False,
    ),
]
NoDefaultExcludes = Annotated[
    bool,
    Option(
        "--no-default-excludes",
        help="Store what is left out by default: .git, download caches, training states.",
    ),
]
