"""`mstore remote du`: what the refs of a remote take there."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Remote
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

COLUMNS = (Column("REF", style="green"), Column("STORED", right=True), Column("OWN", right=True))


@command(example="mstore remote du origin")
def remote_du(session: Session, name: Remote) -> None:
    """Print the space that the refs of a remote take there.

    STORED is what a ref needs, OWN the part that no other ref needs.
    """
    with session.open_to_exchange() as store:
        report = store.remote_usage(name)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            ((one.name, format_size(one.bytes), format_size(one.own_bytes)) for one in report.refs),
        )
        screen.fields(
            [
                ("needed", format_size(report.needed_bytes)),
                ("packs", format_size(report.pack_bytes)),
                ("condemned", format_size(report.condemned_bytes)),
            ]
        )

    session.output.emit(report, ids=[one.name for one in report.refs], human=human)
