"""`mstore rename`: another name for a branch or tag."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(
    example="mstore rename llama/try7 llama/math",
    failure="the name is taken, or another error\n"
    "  3  a gate guards the new name, and the snapshot has not passed it",
)
def rename(
    session: Session,
    old: Annotated[
        str, Argument(metavar="OLD", help="A branch or tag.", shell_complete=completion.refs)
    ],
    new: Annotated[str, Argument(metavar="NEW", help="Its new name.")],
) -> None:
    """Rename a branch or tag.

    The reflog of the old name keeps its earlier positions.
    """
    with session.open() as store:
        report = store.rename(old, new)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{old} is now {report.name}: {short(report.snapshot)}", style="green")

    session.output.emit(report, ids=[report.name], human=human)
