"""Arguments and options that several commands share, declared once so that they read alike."""

from __future__ import annotations

from typing import Annotated

import typer

from mstore_cli import completion

_REVISION = typer.Argument(
    metavar="REF",
    help="A branch, tag, snapshot id or its beginning (4 digits or more), REF~N, or REF@{N}.",
    show_default=False,
    autocompletion=completion.refs,
)
Revision = Annotated[str, _REVISION]
MaybeRevision = Annotated[str | None, _REVISION]
RefNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="REF",
        help="Branches, tags, or patterns [default: all].",
        show_default=False,
        autocompletion=completion.refs,
    ),
]
Message = Annotated[
    str,
    typer.Option(
        "--message", "-m", metavar="MSG", help="A message that says why.", show_default=False
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Worker threads [default: one per processor].",
        show_default=False,
    ),
]
Codec = Annotated[
    str | None,
    typer.Option(
        "--codec",
        metavar="auto|raw|dense",
        help="How new blocks are stored [default: as `mstore config codec` says].",
        show_default=False,
    ),
]
OnlyCompared = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="PATTERN", help="Compare only tensors whose names match. Repeatable."
    ),
]
SkipCompared = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="PATTERN",
        help="Do not compare tensors whose names match: they may be missing, extra or of "
        "another shape. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="PATTERN",
        help="Leave out files or directories whose names match, as in a .gitignore. Repeatable.",
        show_default=False,
    ),
]
NoDefaultExcludes = Annotated[
    bool,
    typer.Option(
        "--no-default-excludes",
        help="Store what is left out by default: .git, download caches, training states.",
    ),
]
