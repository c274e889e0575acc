"""`mstore unmount`: end a mount."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore unmount /mnt/merged",
    failure="it is not a mount of mstore, is in use, or another error",
)
def unmount(
    session: Session,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The mount point.", show_default=False)
    ],
    lazy: Annotated[
        bool,
        typer.Option("--lazy", help="At once; files that are open stay readable until closed."),
    ] = False,
) -> None:
    """End a mount, or remove one whose process died."""
    from mstore_fuse.mounts import unmount as end_mount

    mountpoint = directory.absolute()
    end_mount(mountpoint, lazy=lazy)

    def human(screen: Screen) -> None:
        screen.line(f"unmounted {mountpoint}", style="green")

    session.output.emit({"unmounted": str(mountpoint)}, ids=[mountpoint], human=human)
