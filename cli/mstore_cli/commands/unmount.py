"""`mstore unmount`: end a mount, or all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended, UsageError, warn
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen, near
from mstore_cli.session import Session


@command(
    example="mstore unmount /mnt/merged",
    failure="it is not a mount of mstore, is in use, or another error",
)
def unmount(
    session: Session,
    directory: Annotated[Path | None, Argument(metavar="DIR", help="The mount point.")] = None,
    everything: Annotated[
        bool, Option("--all", help="Every mount of this user, of all stores.")
    ] = False,
    lazy: Annotated[
        bool, Option("--lazy", help="At once; files that are open stay readable until closed.")
    ] = False,
) -> None:
    """End a mount, or remove one whose process died."""
    if (directory is None) != everything:
        raise UsageError("give DIR, or --all without DIR", hint="mstore unmount --help")
    if directory is None:
        _unmount_all(session, lazy=lazy)
        return
    from mstore_fuse.mounts import unmount as end_mount

    mountpoint = directory.absolute()
    end_mount(mountpoint, lazy=lazy)

    def human(screen: Screen) -> None:
        screen.line(f"unmounted {near(mountpoint)}", style="green")

    session.output.emit({"unmounted": str(mountpoint)}, ids=[mountpoint], human=human)


def _unmount_all(session: Session, *, lazy: bool) -> None:
    """End every mount of this user; tell of each, and fail if one is left."""
    from mstore_cli.spelling import Typed
    from mstore_fuse.mounts import unmount_all

    done = unmount_all(lazy=lazy)
    told = [error.told(Typed()) for error in done.failed]

    def human(screen: Screen) -> None:
        if not done.unmounted and not told:
            screen.line("nothing is mounted")
        for mountpoint in done.unmounted:
            screen.line(f"unmounted {near(mountpoint)}", style="green")

    for one in told:
        warn(f"{one.where}: {one.what}", one.hint)
    session.output.emit(
        {"unmounted": done.unmounted, "failed": [one.where for one in told]},
        ids=done.unmounted,
        human=human,
    )
    if told:
        raise Ended(FAILURE)
