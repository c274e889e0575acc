"""`mstore gc`: remove what nothing reaches, and free its space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.options import Option
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_size

if TYPE_CHECKING:
    from mstore.api.reports import GcReport

SNAPSHOTS_SHOWN = 10


@command(example="mstore gc --dry-run", failure="an error; nothing that is needed was removed")
def gc(
    session: Session,
    dry_run: Annotated[
        bool, Option("--dry-run", "-n", help="Only print what would be removed.")
    ] = False,
    wait: Annotated[
        float,
        Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="Wait up to this long for commands that may still read what is removed; a later "
            "gc frees the space of those that run longer.",
        ),
    ] = 5.0,
    everything: Annotated[
        bool,
        Option(
            "--all", help="Rewrite every pack with dead bytes, not only those that are 30% dead."
        ),
    ] = False,
    empty_lost_found: Annotated[
        bool,
        Option(
            "--empty-lost-found",
            help="Also delete lost+found/: packs that the index did not know, and indexes that "
            "reindex replaced.",
        ),
    ] = False,
    reflog_days: Annotated[
        int | None,
        Option(
            "--reflog-days",
            metavar="DAYS",
            min=0,
            help="Keep what refs pointed at in the last DAYS days [default: reflog_days].",
        ),
    ] = None,
) -> None:
    """Remove what no ref reaches, and free its space.

    It keeps what refs, their reflogs of the last 30 days (`mstore config reflog_days`) and running
    operations reach. Packs of which at least 30 % is dead are rewritten. Other commands may run at
    the same time. A pack that the index does not know is not deleted: it moves to lost+found/ in
    the store.
    """
    with session.open() as store, session.progress() as progress:
        report = store.gc(
            dry_run=dry_run,
            wait=wait,
            reflog_days=reflog_days,
            dead_share=0.0 if everything else None,
            empty_lost_found=empty_lost_found,
            progress=progress,
        )
        session.settled()

    session.output.emit(
        report, ids=report.snapshots_dropped, human=lambda screen: _print(screen, report)
    )


def _print(screen: Screen, report: GcReport) -> None:
    for snapshot in report.snapshots_dropped[:SNAPSHOTS_SHOWN]:
        screen.line(f"snapshot {short(snapshot)}")
    more = len(report.snapshots_dropped) - SNAPSHOTS_SHOWN
    if more > 0:
        screen.line(f"and {more} more")
    for name in report.candidates_dropped:
        screen.line(f"candidate {name}")
    if not (report.blocks_dropped or report.records_dropped or _does_anything(report)):
        screen.line("nothing to collect", style="green")
        screen.command("what holds the rest (refs, lineage, reflogs, virtual merges)", "mstore du")
    else:
        _print_work(screen, report)
    if report.dead_bytes:
        screen.command(
            f"{format_size(report.dead_bytes)} dead stay in packs of which less than 30 % is dead, "
            "until more is; to rewrite these now",
            "mstore gc --all",
        )
    if report.waiting_bytes:
        screen.line(
            f"of it {format_size(report.waiting_bytes)} when these have ended: "
            + ", ".join(report.waiting_for)
        )
    for one in report.left:
        screen.line(f"left: {screen.typed(one)}")
    if report.emptied_bytes:
        was = "would be" if report.dry_run else "was"
        screen.line(f"lost+found {was} emptied: {format_size(report.emptied_bytes)}", style="green")
    if report.put_aside:
        would = "would move" if report.dry_run else "moved"
        screen.advice(
            f"{counted(len(report.put_aside), 'pack')} that the index does not know {would} to "
            "lost+found: an interrupted command left them, or the index lost them; mstore reindex "
            "takes in again what is of this store"
        )
    if report.lost_found_bytes:
        screen.command(
            f"lost+found holds {format_size(report.lost_found_bytes)}; to remove that for good",
            "mstore gc --empty-lost-found",
        )


def _does_anything(report: GcReport) -> bool:
    return bool(
        report.packs_removed
        or report.candidates_dropped
        or report.packs_rewritten
        or report.leftover_files
        or report.put_aside
        or report.emptied_bytes
    )


def _print_work(screen: Screen, report: GcReport) -> None:
    verb = "would drop" if report.dry_run else "dropped"
    dropped = (
        f"{counted(len(report.snapshots_dropped), 'snapshot')}, "
        f"{counted(report.blocks_dropped, 'block')}, {counted(report.plans_dropped, 'plan')}: "
        f"{format_size(report.dropped_bytes)}"
    )
    drops = report.blocks_dropped or report.records_dropped or report.candidates_dropped
    screen.line(f"{verb} {dropped if drops else 'nothing'}", style="green")
    would = "would be " if report.dry_run else ""
    verb = "would free" if report.dry_run else "freed"
    rewritten = len(report.packs_rewritten) - len(report.packs_joined)
    freed = format_size(max(0, report.freed_bytes - report.joined_bytes))
    packs = f"{counted(len(report.packs_removed), 'pack')} removed, {rewritten} rewritten"
    if report.packs_removed or rewritten:
        screen.line(f"{verb} {freed}: {packs}")
    elif drops:
        screen.line(f"{verb} nothing: no pack removed, none rewritten")
    if report.packs_joined:
        screen.line(
            f"{counted(len(report.packs_joined), 'small pack')} {would}put together, "
            f"which gives back {format_size(max(0, report.joined_bytes))} of headers and dead bytes"
        )
    if report.packs_rewritten:
        screen.line(f"{format_size(report.copied_bytes)} {would}copied")
    if report.leftover_files:
        screen.line(
            f"{counted(report.leftover_files, 'file')} that interrupted commands left "
            f"{would}removed: {format_size(report.leftover_bytes)}"
        )
