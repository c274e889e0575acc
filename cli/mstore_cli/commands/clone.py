"""`mstore clone`: a new store with all that another one has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Threads
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size


@command(
    decodes=True,
    example="mstore clone /srv/models/store ./mine",
    failure="the source is damaged, or another error; no store was made",
)
def clone(
    session: Session,
    source: Annotated[Path, Argument(metavar="SRC", help="A store or a backup.")],
    destination: Annotated[Path, Argument(metavar="DST", help="A new or empty directory.")],
    threads: Threads = None,
) -> None:
    """Make an independent copy of a store.

    The copy has models, refs, reflogs, settings, and its own UUID. Later changes to one store do
    not affect the other. Others may use SRC meanwhile. Everything is copied, no file is linked, and
    every block is checked. Statistics and the memo table are not copied.
    """
    given = session.given_store
    if given is not None and given.absolute() != source.absolute():
        raise UsageError(f"two stores named: {source} and, by --store, {given}")
    from mstore import Store

    with session.progress() as tick:
        report = Store.clone(source, destination, threads=threads, progress=tick)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{report.path} is a clone of {report.source}", style="green")
        screen.fields(
            [
                ("uuid", report.uuid),
                ("refs", report.refs),
                ("snapshots", report.snapshots),
                (
                    "copied",
                    f"{counted(report.packs, 'pack')}, {format_size(report.bytes_copied)}",
                ),
                ("time", format_seconds(report.seconds)),
            ]
        )

    session.output.emit(report, ids=[report.uuid], human=human)
