"""`mstore remote show`: what a remote has."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Remote
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_size

COLUMNS = (
    Column("NAME", style="green"),
    Column("KIND"),
    Column("SNAPSHOT", style="yellow"),
    Column("HERE"),
)


@command(
    example="mstore remote show origin",
    failure="there is no remote at this address, it does not answer, or another error",
)
def remote_show(session: Session, name: Remote) -> None:
    """Ask a remote which refs it has, and how much.

    HERE says whether this store has the snapshot. Other snapshots come with `mstore fetch` and
    `mstore pull`. Snapshots without contents are ancestors of others.
    """
    with session.open_to_exchange() as store:
        report = store.remote_contents(name)

    def human(screen: Screen) -> None:
        screen.fields(
            [
                ("url", report.url),
                ("uuid", report.uuid),
                ("changes", report.generation),
                ("block size", format_size(report.block_size)),
                ("snapshots", f"{report.snapshots}, {report.whole_snapshots} with contents"),
                ("size", f"{counted(report.packs, 'pack')}, {format_size(report.bytes)}"),
            ]
        )
        if not report.refs:
            screen.command("it has no refs; next", f"mstore push {name} --all")
        screen.table(
            COLUMNS,
            (
                (one.name, one.kind, short(one.snapshot), "yes" if one.is_here else "no")
                for one in report.refs
            ),
        )

    session.output.emit(report, ids=[one.name for one in report.refs], human=human)
