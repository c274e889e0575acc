"""`mstore remote rename`: another name for a remote."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(example="mstore remote rename origin team")
def remote_rename(
    session: Session,
    old: Annotated[
        str,
        Argument(metavar="OLD", help="The remote.", shell_complete=completion.remotes),
    ],
    new: Annotated[str, Argument(metavar="NEW", help="Its new name.")],
) -> None:
    """Rename a remote and its refs in this store."""
    with session.open() as store:
        report = store.rename_remote(old, new)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{old} is {report.name} now", style="green")

    session.output.emit(report, ids=[report.name], human=human)
