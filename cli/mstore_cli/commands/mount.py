"""`mstore mount`: a snapshot, or all of them, as an ordinary directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_fuse.drivers import Driver, Verify


@command(
    example="mstore mount llama/merged /mnt/merged",
    failure="an error; nothing is mounted",
)
def mount(
    session: Session,
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="[REF] DIR",
            help="The snapshot and an empty directory; with --all only the directory.",
            show_default=False,
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Show the whole store: refs/... and snapshots/ID/...")
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, until unmounted or interrupted.")
    ] = False,
    driver: Annotated[
        Driver,
        typer.Option(
            help="fuse: a process serves it; erofs: the kernel reads the packs (root, stored raw); "
            "auto: erofs where it works, else fuse."
        ),
    ] = Driver.FUSE,
    verify: Annotated[
        Verify,
        typer.Option(
            help="When blocks are checked. once: before they are shown, with erofs all of them at "
            "mounting; never, with erofs: not at all."
        ),
    ] = Verify.ONCE,
) -> None:
    """Show a snapshot as a read-only directory, or the whole store with --all.

    The command returns when the mount works. The mount stays after you close the shell.
    """
    if len(target) != (1 if everything else 2):
        wanted = "--all takes only DIR" if everything else "give REF and DIR, or --all and DIR"
        raise UsageError(wanted, hint="mstore mount --help")
    revision = None if everything else target[0]
    directory = Path(target[-1])
    from mstore_fuse.mounts import MountInfo
    from mstore_fuse.mounts import mount as start_mount
    from mstore_fuse.mounts import unmount as end_mount

    def ready(info: MountInfo) -> None:
        def human(screen: Screen) -> None:
            shown = revision or "the whole store"
            end = "Ctrl-C" if foreground else f"mstore unmount {info.mountpoint}"
            by = " by the kernel" if info.driver == Driver.EROFS else ""
            screen.line(f"mounted {shown} at {info.mountpoint}{by}", style="green")
            if by and verify is Verify.NEVER:
                screen.line("its blocks were not checked: a damaged pack shows wrong bytes")
            screen.line(f"to end it: {end}")

        try:
            session.output.emit(info, ids=[info.mountpoint], human=human)
        except BaseException:
            # End a mount that could not be reported: the user would not know to unmount it.
            end_mount(info.mountpoint)
            raise

    start_mount(
        session.store_path(),
        revision,
        directory,
        driver=driver,
        verify=verify,
        foreground=foreground,
        on_ready=ready,
    )
