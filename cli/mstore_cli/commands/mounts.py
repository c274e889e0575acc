"""`mstore mounts`: what is mounted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.options import Option
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore_fuse.driver import MountInfo

COLUMNS = (
    Column("MOUNT POINT", style="green"),
    Column("REF"),
    Column("STORE"),
    Column("DRIVER"),
    Column("PID", right=True),
    Column("STATE"),
)
USER = Column("USER")


@command(example="mstore mounts --json")
def mounts(
    session: Session,
    everybody: Annotated[
        bool, Option("--all", help="Those of other users, too; root sees them anyway.")
    ] = False,
) -> None:
    """List the mounts of this user, of all stores."""
    from mstore_fuse.mounts import mounts as list_mounts

    me = os.geteuid()
    found = list_mounts(None if everybody or me == 0 else me)

    def human(screen: Screen) -> None:
        if not found:
            screen.line("nothing is mounted")
        _draw(screen, found, me)

    session.output.emit({"mounts": found}, ids=[one.mountpoint for one in found], human=human)


def _draw(screen: Screen, found: Sequence[MountInfo], me: int) -> None:
    # Show the user only if mounts of several users are listed.
    columns = (*COLUMNS, USER) if any(one.user != me for one in found) else COLUMNS
    screen.table(columns, (_row(one)[: len(columns)] for one in found))
    for line in _how_to_clear(found, me):
        screen.line(line)


def _row(one: MountInfo) -> tuple[str, ...]:
    return (
        str(one.mountpoint),
        one.revision or "(all)",
        str(one.store),
        one.driver,
        "-" if one.pid is None else str(one.pid),
        "serving" if one.alive else "stale",
        _name_of(one.user),
    )


def _how_to_clear(found: Sequence[MountInfo], me: int) -> Iterator[str]:
    stale = [one for one in found if not one.alive]
    if stale:
        yield "the process behind a stale mount has ended, and reading there fails; to clear it:"
    for one in stale:
        whose = "" if me in {0, one.user} else f"   (as {_name_of(one.user)} or root)"
        yield f"  mstore unmount {shlex.quote(str(one.mountpoint))}{whose}"


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
