"""`mstore ls`: the files of a snapshot."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Revision
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

COLUMNS = (Column("SIZE", right=True), Column("TENSORS", right=True), Column("FILE"))


@command(example="mstore ls llama/merged")
def ls(session: Session, revision: Revision) -> None:
    """List the files of a snapshot."""
    with session.open() as store:
        files = store.files(revision)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            ((format_size(one.size), str(one.tensors or "-"), one.path) for one in files),
        )

    session.output.emit({"files": files}, ids=[one.path for one in files], human=human)
