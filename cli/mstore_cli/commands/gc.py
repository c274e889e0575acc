"""`mstore gc`: give back the space of what nothing reaches any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli.command import command
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.reports import GcReport

SNAPSHOTS_SHOWN = 10


@command(example="mstore gc --dry-run", failure="an error; nothing that is needed was touched")
def gc(
    session: Session,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would go.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="Wait so long for running operations that may still read what goes.",
        ),
    ] = 5.0,
    reflog_days: Annotated[
        int | None,
        typer.Option(
            "--reflog-days",
            metavar="DAYS",
            min=0,
            help="Keep what refs pointed at in so many days [default: as the store is set].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Drop what no ref reaches, and give its space back.

    Kept is what refs, their reflogs of the last 30 days (mstore config reflog_days) and running
    operations reach. Packs that are mostly dead are written anew. Safe beside everything else.
    """
    with session.open() as store, session.progress() as progress:
        report = store.gc(dry_run=dry_run, wait=wait, reflog_days=reflog_days, progress=progress)

    session.output.emit(
        report, ids=report.snapshots_dropped, human=lambda screen: _print(screen, report)
    )


def _print(screen: Screen, report: GcReport) -> None:
    for snapshot in report.snapshots_dropped[:SNAPSHOTS_SHOWN]:
        screen.line(f"snapshot {short(snapshot)}")
    more = len(report.snapshots_dropped) - SNAPSHOTS_SHOWN
    if more > 0:
        screen.line(f"and {more} more")
    if not (report.blocks_dropped or report.records_dropped or report.freed_bytes):
        screen.line("nothing to collect", style="green")
        screen.line(
            "history keeps what it names: mstore prune lets go of it, mstore du says of how much"
        )
    else:
        verb = "would drop" if report.dry_run else "dropped"
        screen.line(
            f"{verb} {len(report.snapshots_dropped)} snapshots, {report.blocks_dropped} blocks, "
            f"{report.plans_dropped} plans: {format_size(report.dropped_bytes)}",
            style="green",
        )
        verb = "would free" if report.dry_run else "freed"
        screen.line(
            f"{verb} {format_size(max(0, report.freed_bytes))}: "
            f"{len(report.packs_removed)} packs removed, "
            f"{len(report.packs_rewritten)} written anew "
            f"({format_size(report.copied_bytes)} copied)"
        )
    if report.waiting_bytes:
        screen.line(
            f"of it {format_size(report.waiting_bytes)} when these have ended: "
            + ", ".join(report.waiting_for)
        )
    for note in report.left:
        screen.line(f"left: {note}")
