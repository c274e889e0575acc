"""`mstore rm`: remove refs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import RemoveReport


@command(example="mstore rm llama/old 'tries/*'")
def rm(
    session: Session,
    names: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Refs, or patterns such as 'old/*' or 'candidates/RUN/*'.",
            shell_complete=completion.refs,
        ),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", "-n", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove refs, all of them or none.

    Snapshots stay until `mstore gc` drops them: when no ref reaches them and the reflog is older
    than reflog_days (see `mstore config`). Until then `mstore reset` restores a ref. What only a
    removed candidate named is dropped the next time.
    """
    with session.open() as store:
        report = store.remove(*names, dry_run=dry_run)
        session.settled()

    session.output.emit(report, ids=report.removed, human=lambda screen: _print(screen, report))


def _print(screen: Screen, report: RemoveReport) -> None:
    from mstore.store.refs import CANDIDATE

    if report.dry_run:
        for name, kind in zip(report.removed, report.kinds, strict=True):
            screen.line(f"would remove {kind} {name}")
        if report.unnamed_snapshots:
            screen.line(f"{counted(report.unnamed_snapshots, 'snapshot')} would have no ref")
        return
    for name, kind in zip(report.removed, report.kinds, strict=True):
        screen.line(f"removed {name}", style="green")
        # The reflog of a candidate keeps nothing.
        soon = kind == CANDIDATE and report.unnamed_snapshots
        lead = "to restore it before the next gc" if soon else "to restore it"
        screen.command(lead, f"mstore reset {name} '{name}@{{1}}'")
    if report.unnamed_snapshots:
        days = report.reflog_days
        is_one = report.unnamed_snapshots == 1
        have, them = ("has", "it") if is_one else ("have", "them")
        when = f"after {days} days" if days else "the next time"
        if days and CANDIDATE in report.kinds:
            when += ", and what only candidates named the next time"
        screen.advice(
            f"{counted(report.unnamed_snapshots, 'snapshot')} {have} no ref now: "
            f"mstore gc drops {them} {when}, unless something else needs {them}"
        )
