"""`mstore tag`: a name that does not move."""

from __future__ import annotations

from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.options import Revision
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(example="mstore tag v1 llama/merged", failure="the name is taken, or another error")
def tag(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new tag.", show_default=False)],
    revision: Revision,
) -> None:
    """Give a snapshot a name that does not move."""
    with session.open() as store:
        report = store.tag(name, revision)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"tag {report.name} is {short(report.snapshot)}", style="green")

    session.output.emit(report, ids=[report.snapshot], human=human)
