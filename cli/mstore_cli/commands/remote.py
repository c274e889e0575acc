"""`mstore remote`: the remotes of a store."""

from __future__ import annotations

from mstore_cli.command import Mistakes, command
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session

COLUMNS = (Column("NAME", style="green"), Column("URL"))
MORE = {
    "endpoint": Column("ENDPOINT"),
    "region": Column("REGION"),
    "addressing_style": Column("STYLE"),
    "lazy": Column("LAZY"),
}


@command(
    example="mstore remote",
    mistakes=Mistakes(
        options={"-v": "mstore remote lists addresses, too", "--verbose": "mstore remote"},
        arguments=lambda _, words: f"mstore remote {' '.join(words)}, and options after that",
    ),
)
def remote(session: Session) -> None:
    """List the remotes of the store.

    A remote is a family of models in object storage, or in a directory that several machines share.
    The store keeps its name and address, and no credentials: these come from the environment.
    """
    with session.open_to_look() as store:
        remotes = store.remotes()

    def human(screen: Screen) -> None:
        if not remotes:
            screen.command("no remotes; next", "mstore remote add NAME URL")
        more = [field for field in MORE if any(getattr(one, field) for one in remotes)]
        screen.table(
            (*COLUMNS, *(MORE[field] for field in more)),
            (
                (one.name, one.url, *(_shown(getattr(one, field)) for field in more))
                for one in remotes
            ),
        )

    session.output.emit({"remotes": remotes}, ids=[one.name for one in remotes], human=human)


def _shown(value: str | bool) -> str:
    """Return what stands in a column: a text, or whether something is so."""
    if isinstance(value, bool):
        return "yes" if value else "-"
    return value or "-"
