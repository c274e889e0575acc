"""`mstore reflog`: where a ref has pointed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument
from mstore_cli.output import Column, Screen, short, when
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore.terms.ids import SnapshotId

COLUMNS = (
    Column("POSITION", style="yellow"),
    Column("OLD"),
    Column("NEW"),
    Column("ACTION"),
    Column("WHEN"),
)


@command(example="mstore reflog llama/merged")
def reflog(
    session: Session,
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="A branch or tag, also a removed one [default: all that ever were].",
            shell_complete=completion.ever,
        ),
    ] = None,
) -> None:
    """List where a ref has pointed, newest first.

    NAME@{N} in the first column is a revision like any other, unless gc has collected what it was.
    To restore a removed branch: `mstore reset NAME NAME@{1}`.
    """
    with session.open_to_look() as store:
        entries = store.reflog(name)
    collected = {one.new for one in entries if one.is_collected}

    def shown(id: SnapshotId | None) -> str:
        return f"{short(id)} (collected)" if id in collected else short(id)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            (
                (
                    f"{one.name}@{{{one.position}}}",
                    shown(one.old),
                    shown(one.new),
                    one.action,
                    when(one.time_ns),
                )
                for one in entries
            ),
        )

    ids = [one.new for one in entries if one.new is not None]
    session.output.emit({"name": name, "entries": entries}, ids=ids, human=human)
