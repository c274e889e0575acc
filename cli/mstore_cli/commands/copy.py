"""`mstore copy`: models to another store on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.exchange import left_out, show_moved
from mstore_cli.options import JOBS, Argument, Jobs
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.signers import SignersOption, trusted_signers
from mstore_cli.sizes import format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import CopyReport


@command(
    decodes=True,
    example="mstore copy llama/merged /srv/models/store",
    failure="a branch has other commits there and stays, or another error",
)
def copy(
    session: Session,
    refs: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Branches and tags, or patterns of them.",
            shell_complete=completion.named,
        ),
    ],
    destination: Annotated[Path, Argument(metavar="STORE", help="Another store.")],
    signers: SignersOption = None,
    jobs: Jobs = JOBS,
) -> None:
    """Copy models to another store on this machine.

    STORE gets what the refs need and lacks, and refs of the same names, all in one step. A branch
    moves if its place there is an ancestor of its place here. A branch with other commits there
    stays, and so does a tag that is another: then the command ends with status 1.

    Notes and signatures go along. Of ancestors only the records do; to copy their contents, name a
    ref of theirs, too. Reflogs, settings and statistics stay.
    """
    with session.open() as store, session.progress() as tick:
        report = store.copy_to(
            destination, refs, signers=trusted_signers(signers), jobs=jobs, progress=tick
        )
        session.settled()
    session.warn_if_quiet(_stays(one) for one in report.diverged)
    session.output.emit(
        report, ids=[one.name for one in report.moved], human=lambda screen: _show(screen, report)
    )
    if report.diverged:
        raise Ended(FAILURE)


def _stays(name: str) -> str:
    return f"{name} has other commits there, and stays"


def _show(screen: Screen, report: CopyReport) -> None:
    if not (report.moved or report.diverged or report.snapshots):
        screen.line(f"{report.destination} has it all", style="green")
        return
    screen.line(f"copied to {report.destination}", style="green")
    show_moved(screen, report.moved)
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("left out", left_out(report.without_contents)),
            ("blocks", report.blocks),
            ("size", format_size(report.bytes_copied)),
            ("time", format_seconds(report.seconds)),
        ]
    )
    for one in report.diverged:
        screen.line(_stays(one), style="red")
