"""`mstore rm`: remove a ref."""

from __future__ import annotations

from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(example="mstore rm llama/old")
def rm(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A branch or tag.", show_default=False)
    ],
) -> None:
    """Remove a branch or tag.

    Its snapshots stay, and so does its reflog.
    """
    with session.open() as store:
        store.remove(name)

    def human(screen: Screen) -> None:
        screen.line(f"removed {name}", style="green")

    session.output.emit({"removed": name}, ids=[name], human=human)
