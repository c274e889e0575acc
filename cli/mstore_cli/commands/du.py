"""`mstore du`: what refs take, who shares it, and what would be freed without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli import plots
from mstore_cli.command import command
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size
from mstore_cli.treemap import Node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mstore.reports import CodecUsage, RefUsage, UsageReport

REF_COLUMNS = (
    Column("REF"),
    Column("PLAIN", right=True),
    Column("STORED", right=True),
    Column("UNIQUE", right=True),
    Column("SHARED", right=True),
    Column("FREED BY RM", right=True),
)
SHARED_COLUMNS = (Column("REF"), Column("SHARES WITH"), Column("STORED", right=True))
CODEC_COLUMNS = (
    Column("CODEC"),
    Column("BLOCKS", right=True),
    Column("PLAIN", right=True),
    Column("STORED", right=True),
    Column("RATIO", right=True),
)
UNIQUE, SHARED = "unique", "shared"


@command(example="mstore du llama/old llama/older")
def du(
    session: Session,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REF]...", help="Branches or tags [else all].", show_default=False),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="Draw a treemap of it (needs the extra `plot`)."
        ),
    ] = None,
) -> None:
    """Print what refs take in stored bytes, what they share, and what gc frees without them.

    Sizes are of blocks at rest: those of the ref's snapshot and the bases of its deltas. A ref's
    history counts in what is freed, and what others keep does not: their histories, tags, reflogs.
    """
    if svg is not None:
        plots.require()
    with session.open() as store:
        report = store.usage(names or ())
        path = str(store.path)
    if svg is not None:
        plots.tree_map(treemap_of(report, path), svg)

    def human(screen: Screen) -> None:
        _draw(screen, report, in_full=bool(names))

    session.output.emit(report, ids=[ref.name for ref in report.refs], human=human)


def _draw(screen: Screen, report: UsageReport, *, in_full: bool) -> None:
    screen.table(REF_COLUMNS, (_ref_row(ref) for ref in report.refs))
    if in_full and any(ref.shared_with for ref in report.refs):
        screen.line()
        screen.table(
            SHARED_COLUMNS,
            (
                (ref.name, other.name, format_size(other.stored_bytes))
                for ref in report.refs
                for other in ref.shared_with
            ),
        )
    if report.codecs:
        screen.line()
        screen.table(CODEC_COLUMNS, codec_rows(report.codecs))
    screen.line()
    days = report.reflog_days
    later = f", once their moves are {days} days old" if days else ""
    screen.fields(
        [
            ("together", format_size(report.stored_bytes)),
            ("freed together", f"{format_size(report.freed_bytes)} by rm and gc{later}"),
            ("kept in all", format_size(report.live_bytes)),
            ("freed by gc now", format_size(report.unreachable_bytes)),
        ]
    )


def _ref_row(ref: RefUsage) -> tuple[str, ...]:
    return (
        ref.name,
        format_size(ref.plain_bytes),
        f"{format_size(ref.stored_bytes)} ({format_share(ref.stored_bytes, ref.plain_bytes)})",
        format_size(ref.unique_bytes),
        format_size(ref.shared_bytes),
        format_size(ref.freed_bytes),
    )


def codec_rows(codecs: Sequence[CodecUsage]) -> list[tuple[str, ...]]:
    """Rows for CODEC_COLUMNS."""
    return [
        (
            one.codec,
            str(one.blocks),
            format_size(one.plain_bytes),
            format_size(one.stored_bytes),
            format_share(one.stored_bytes, one.plain_bytes),
        )
        for one in codecs
    ]


def treemap_of(report: UsageReport, title: str) -> plots.TreeMap:
    """Refs; in each what is unique to it and its portion of what is shared; in these the codecs."""
    refs = tuple(
        Node(
            ref.name,
            ref.portion_bytes,
            (
                _codecs(UNIQUE, ref.unique, ref.unique_bytes),
                _codecs(SHARED, ref.shared, ref.portion_bytes - ref.unique_bytes),
            ),
        )
        for ref in report.refs
    )
    return plots.TreeMap(
        title=title,
        root=Node(title, sum(ref.size for ref in refs), refs),
        measure="stored bytes of blocks; what n refs share is counted as an n-th in each",
        describe=lambda size: format_size(round(size)),
        hatched=frozenset({SHARED}),
        hatching="shared with other refs",
    )


def _codecs(name: str, codecs: Sequence[CodecUsage], size: float) -> Node:
    """What is shared counts as a portion, and so do its codecs, each in proportion."""
    whole = sum(one.stored_bytes for one in codecs)
    parts = tuple(Node(one.codec, size * one.stored_bytes / whole) for one in codecs)
    return Node(name, size, parts)
