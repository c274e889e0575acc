"""`mstore remote gc`: remove what no ref of a remote reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.options import Option, Remote
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import RemoteGcReport

HOURS = 24.0


@command(
    decodes=True,
    example="mstore remote gc origin",
    failure="something needed is missing there, or another error; nothing removed",
)
def remote_gc(
    session: Session,
    name: Remote,
    dry_run: Annotated[
        bool, Option("--dry-run", "-n", help="Only print what would be removed.")
    ] = False,
    reflog_days: Annotated[
        int | None,
        Option(
            "--reflog-days",
            metavar="N",
            min=0,
            help="Keep what refs there pointed at in the last N days [default: the store's].",
        ),
    ] = None,
    grace_hours: Annotated[
        float,
        Option(
            "--grace-hours",
            metavar="H",
            min=0,
            help="Delete packs that were condemned so long ago.",
        ),
    ] = HOURS,
) -> None:
    """Remove what no ref of a remote reaches.

    A pack that nothing needs any more is condemned first, and stays for those who read it. A run
    after the time of grace deletes it, by the clock of the remote. Others may push, fetch and
    collect meanwhile: a push that needs a condemned pack makes it live again.
    """
    with session.open_to_exchange() as store:
        report = store.remote_gc(
            name, reflog_days=reflog_days, grace_hours=grace_hours, dry_run=dry_run
        )
        session.settled()
    session.output.emit(
        report, ids=report.snapshots_dropped, human=lambda screen: _show(screen, report)
    )


def _show(screen: Screen, report: RemoteGcReport) -> None:
    of = "would be removed from" if report.dry_run else "removed from"
    size = format_size(report.freed_bytes)
    screen.line(f"{size} {of} {report.remote}, {report.url}", style="green")
    packs = (
        ("deleted", report.packs_deleted),
        ("condemned", report.packs_condemned),
        ("live again", report.packs_revived),
    )
    screen.fields(
        [
            ("snapshots", len(report.snapshots_dropped)),
            *((what, counted(count, "pack")) for what, count in packs),
            ("outdated", f"{counted(report.leftover_objects, 'list')} and tables"),
            ("waiting", format_size(report.waiting_bytes)),
            ("dead", f"{format_size(report.dead_bytes)} in packs that stay"),
            ("time", format_seconds(report.seconds)),
        ]
    )
    if report.waiting_bytes and not report.dry_run:
        screen.command("after the time of grace", f"mstore remote gc {report.remote}")
