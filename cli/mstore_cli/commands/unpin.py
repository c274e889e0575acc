"""`mstore unpin`: code a pinned snapshot's blocks again."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Revision, Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size


@command(
    decodes=True,
    example="mstore unpin llama/merged",
    failure="an error; blocks lie as before",
)
def unpin(session: Session, revision: Revision, threads: Threads = None) -> None:
    """Undo `mstore pin`: code the blocks as `add` would.

    Blocks that another pinned snapshot has, too, stay raw.
    """
    with session.open() as store, session.progress() as tick:
        report = store.unpin(revision, threads=threads, progress=tick)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"unpinned {short(report.snapshot)}", style="green")
        before, after = format_size(report.bytes_before), format_size(report.bytes_after)
        kept = f", {report.blocks_kept} stay raw for others" if report.blocks_kept else ""
        screen.fields(
            [
                ("base", short(report.base) if report.base is not None else None),
                ("blocks", f"{report.blocks}: {report.blocks_coded} coded{kept}"),
                ("size", f"{before} before, {after} now"),
                ("written", format_size(report.bytes_written)),
                ("time", format_seconds(report.seconds)),
            ]
        )
        if report.blocks_coded:
            screen.command("to free what they replace", "mstore gc")

    session.output.emit(report, ids=[report.snapshot], human=human)
