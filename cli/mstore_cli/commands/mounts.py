"""`mstore mounts`: what is mounted."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session

COLUMNS = (
    Column("MOUNT POINT", style="green"),
    Column("REF"),
    Column("STORE"),
    Column("PID", right=True),
    Column("STATE", sentence=True),
)


@command(example="mstore mounts --json")
def mounts(session: Session) -> None:
    """List the mounts of this user, of all stores."""
    from mstore_fuse.mounts import mounts as list_mounts

    found = list_mounts()

    def human(screen: Screen) -> None:
        if not found:
            screen.line("nothing is mounted")
        screen.table(
            COLUMNS,
            (
                (
                    str(one.mountpoint),
                    one.revision or "(all)",
                    str(one.store),
                    "-" if one.pid is None else str(one.pid),
                    "serving" if one.alive else "dead: mstore unmount clears it",
                )
                for one in found
            ),
        )

    session.output.emit({"mounts": found}, ids=[one.mountpoint for one in found], human=human)
