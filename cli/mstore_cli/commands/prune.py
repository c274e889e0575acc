"""`mstore prune`: drop the contents of old snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import PruneReport


@command(example="mstore prune --keep-last 3 --keep-weekly 8 llama/merged")
def prune(
    session: Session,
    branches: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Branches [default: all of them].",
            shell_complete=completion.refs,
        ),
    ] = (),
    keep_last: Annotated[
        int, Option("--keep-last", metavar="N", min=0, help="Keep the newest N snapshots.")
    ] = 0,
    keep_daily: Annotated[
        int,
        Option(
            "--keep-daily",
            metavar="N",
            min=0,
            help="Keep the newest of each of the last N days that have one.",
        ),
    ] = 0,
    keep_weekly: Annotated[
        int,
        Option(
            "--keep-weekly",
            metavar="N",
            min=0,
            help="Keep the newest of each of the last N weeks that have one.",
        ),
    ] = 0,
    keep_monthly: Annotated[
        int,
        Option(
            "--keep-monthly",
            metavar="N",
            min=0,
            help="Keep the newest of each of the last N months that have one.",
        ),
    ] = 0,
    keep_yearly: Annotated[
        int,
        Option(
            "--keep-yearly",
            metavar="N",
            min=0,
            help="Keep the newest of each of the last N years that have one.",
        ),
    ] = 0,
    keep_tagged: Annotated[
        bool,
        Option(
            "--keep-tagged/--no-keep-tagged",
            help="Keep tagged snapshots, or remove their tags.",
        ),
    ] = True,
    unnamed_inputs: Annotated[
        bool,
        Option(
            "--unnamed-inputs", help="Also prune bases and experts of merges that no ref names."
        ),
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", "-n", help="Only print what would be pruned.")
    ] = False,
) -> None:
    """Drop the contents of old snapshots; keep their lineage.

    On each branch, what no --keep-... keeps is dropped. The tip of a branch always stays. Days are
    those of this machine's time zone. Pruned snapshots stay in the log, with their plans and
    parents. `mstore gc` frees their space when they are older than the reflog keeps (reflog_days).
    """
    if not any((keep_last, keep_daily, keep_weekly, keep_monthly, keep_yearly)):
        raise UsageError(
            "say what to keep: at least one --keep-... option",
            hint="mstore prune --keep-last 3 --dry-run says what that would prune",
        )
    with session.open() as store:
        report = store.prune(
            branches,
            keep_last=keep_last,
            keep_daily=keep_daily,
            keep_weekly=keep_weekly,
            keep_monthly=keep_monthly,
            keep_yearly=keep_yearly,
            keep_tagged=keep_tagged,
            unnamed_inputs=unnamed_inputs,
            dry_run=dry_run,
        )
        session.settled()

    session.output.emit(report, ids=report.snapshots, human=lambda screen: _print(screen, report))


def _print(screen: Screen, report: PruneReport) -> None:
    for snapshot in report.snapshots:
        screen.line(f"snapshot {short(snapshot)}")
    for tag in report.tags_removed:
        screen.line(f"tag {tag} {'would be ' if report.dry_run else ''}removed")
    if not report.snapshots:
        screen.line("nothing to prune", style="green")
        return
    verb = "would prune" if report.dry_run else "pruned"
    what = counted(len(report.snapshots), "snapshot")
    screen.line(f"{verb} {what}: their contents stay until gc", style="green")
    if report.held and not report.dry_run:
        screen.command(
            f"the reflog still keeps the contents of {len(report.held)} of them; "
            "to remove them now",
            "mstore gc --reflog-days 0",
        )
    elif not report.dry_run:
        screen.command("next", "mstore gc")
        screen.command("what still keeps contents then", "mstore du")
