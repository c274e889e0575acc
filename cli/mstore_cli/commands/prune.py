"""`mstore prune`: let the contents of old snapshots go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.reports import PruneReport


@command(example="mstore prune --keep-last 3 llama/merged")
def prune(
    session: Session,
    keep_last: Annotated[
        int,
        typer.Option(
            "--keep-last", metavar="N", min=1, help="Of each branch, keep the newest N snapshots."
        ),
    ],
    branches: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF...",
            help="Branches [default: all of them].",
            show_default=False,
            autocompletion=completion.refs,
        ),
    ] = None,
    keep_tagged: Annotated[
        bool,
        typer.Option(
            "--keep-tagged/--no-keep-tagged",
            help="Keep what a tag names; else remove such tags.",
        ),
    ] = True,
    unnamed_inputs: Annotated[
        bool,
        typer.Option(
            "--unnamed-inputs", help="Also bases and experts of merges that no ref names."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would be pruned.")
    ] = False,
) -> None:
    """Let the contents of old snapshots go.

    They stay in the log, with their plans and parents. Their space comes back with `mstore gc`,
    once the reflog lets go of them too.
    """
    with session.open() as store:
        report = store.prune(
            branches or (),
            keep_last=keep_last,
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
        screen.line(
            f"the reflog still keeps the contents of {len(report.held)} of them; "
            "to let go of them now: mstore gc --reflog-days 0"
        )
    elif not report.dry_run:
        screen.line("next: mstore gc; what still keeps contents then: mstore du")
