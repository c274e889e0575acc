"""`mstore rm`: remove refs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.reports import RemoveReport


@command(example="mstore rm llama/old 'tries/*'")
def rm(
    session: Session,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="REF...",
            help="Branches, tags, or patterns, as 'old/*'.",
            show_default=False,
            autocompletion=completion.refs,
        ),
    ],
) -> None:
    """Remove branches or tags, all of them or none.

    Their snapshots stay, and so do their reflogs, until `mstore gc` finds them too old.
    """
    with session.open() as store:
        report = store.remove(*names)
        session.settled()

    session.output.emit(report, ids=report.removed, human=lambda screen: _print(screen, report))


def _print(screen: Screen, report: RemoveReport) -> None:
    for name, kind in zip(report.removed, report.kinds, strict=True):
        screen.line(f"removed {name}", style="green")
        back = "tag" if kind == "tag" else "reset"
        screen.command("to restore it", f"mstore {back} {name} '{name}@{{1}}'")
    if report.unnamed_snapshots:
        days = report.reflog_days
        have = "has" if report.unnamed_snapshots == 1 else "have"
        kept = f"once the reflog is {days} days older" if days else "the next time"
        screen.advice(
            f"{counted(report.unnamed_snapshots, 'snapshot')} {have} no ref now: "
            f"mstore gc drops what nothing else keeps {kept}"
        )
