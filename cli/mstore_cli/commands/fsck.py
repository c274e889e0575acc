"""`mstore fsck`: check a store."""

from __future__ import annotations

from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.errors import FAILURE
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size

COLUMNS = (Column("PROBLEM", style="red"), Column("WHERE"), Column("WHAT"))


@command(
    example="mstore fsck --read-data",
    failure="problems were found, or another error",
)
def fsck(
    session: Session,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Also read and verify every block.")
    ] = False,
) -> None:
    """Check the store: packs, index, records, refs; with --read-data every byte.

    Changes nothing. Garbage is what interrupted work left behind; it does no harm.
    """
    with session.open() as store, session.progress() as tick:
        report = store.fsck(read_data=read_data, progress=tick)

    def human(screen: Screen) -> None:
        count = len(report.problems)
        if count:
            screen.line(f"{count} problem{'s' if count > 1 else ''} found", style="red")
        else:
            screen.line("no problems found", style="green")
        read = format_size(report.bytes_read)
        screen.fields(
            [
                ("packs", report.packs),
                ("blocks", report.blocks),
                ("records", report.records),
                ("snapshots", report.snapshots),
                ("refs", report.refs),
                ("read", f"{read} in {format_seconds(report.seconds)}"),
                ("garbage", ", ".join(report.garbage) or None),
            ]
        )
        if report.problems:
            screen.line()
        screen.table(COLUMNS, ((one.kind, one.where, one.what) for one in report.problems))

    session.output.emit(report, ids=[one.where for one in report.problems], human=human)
    if report.problems:
        raise typer.Exit(FAILURE)
