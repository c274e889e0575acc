"""`mstore backup`: a copy of the store, brought up to date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.commands.fsck import show_damage
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.options import Argument, Option, Threads
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size, not_here

if TYPE_CHECKING:
    from mstore.api.reports import BackupReport


@command(
    decodes=True,
    example="mstore backup /backup/models",
    failure="the store lacks blocks (all else was copied), or another error",
)
def backup(
    session: Session,
    destination: Annotated[
        Path,
        Argument(
            metavar="DEST",
            help="A new directory, or an earlier backup of this store; a local disk.",
        ),
    ],
    lazy: Annotated[
        bool,
        Option("--lazy", help="Leave at lazy remotes what is only there; DEST reads it there."),
    ] = False,
    threads: Threads = None,
) -> None:
    """Copy the store to DEST, or update an earlier backup there.

    Commands, mounts and gc may run meanwhile: DEST gets the state of one moment. Only packs that
    DEST lacks are copied, and every block in them is checked. Until the copy is complete, DEST
    keeps its previous state, also after an interruption. Then what gc removed from the store is
    removed from DEST.

    DEST is a store: `mstore --store DEST` reads it. If you write to it, it becomes an independent
    store and accepts no more backups. Statistics and the memo table are not copied.

    A lazy store is not backed up while blocks of it are only at a remote: `mstore prefetch --all`
    brings them. With --lazy, DEST has what is stored here, knows the remotes, and is lazy, too.
    If a remote loses blocks, DEST does not have them either.

    Only you may write DEST, even if the store is shared; your umask says who may read it.
    """
    with session.open() as store, session.progress() as tick:
        report = store.backup(destination, lazy=lazy, threads=threads, progress=tick)
        session.settled()
    session.output.emit(
        report,
        ids=[one.where for one in report.problems],
        human=lambda screen: _show(screen, report, session),
    )
    if report.problems:
        raise Ended(FAILURE)


def _show(screen: Screen, report: BackupReport, session: Session) -> None:
    if report.problems:
        found = counted(len(report.problems), "problem")
        screen.line(
            f"{found} in the store; nothing was removed from this backup",
            style="red",
        )
    else:
        screen.line(f"{report.path} is up to date", style="green")
    copied = f"{counted(report.packs_copied, 'pack')}, {format_size(report.bytes_copied)}"
    removed = f"{counted(len(report.packs_removed), 'pack')}, {format_size(report.freed_bytes)}"
    screen.fields(
        [
            ("generation", report.generation),
            ("refs", report.refs),
            ("snapshots", report.snapshots),
            ("packs", report.packs),
            ("copied", copied),
            ("removed", removed if report.packs_removed else None),
            ("waiting", _waiting(report.waiting_bytes)),
            ("lost+found", ", ".join(report.put_aside) or None),
            *(("not copied", not_here(one)) for one in report.leans_on),
            ("time", format_seconds(report.seconds)),
        ]
    )
    show_damage(screen, report.problems, report.affected, report.hint, session.typed)


def _waiting(size: int) -> str | None:
    if not size:
        return None
    return f"{format_size(size)} that the store has no more: somebody reads the backup"
