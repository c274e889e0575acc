"""`mstore pin`: rewrite a snapshot's blocks so that they can be mapped."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.options import Option, Revision, Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size


@command(
    decodes=True,
    example="mstore pin llama/merged --raw",
    failure="an error; blocks lie as before",
)
def pin(
    session: Session,
    revision: Revision,
    raw: Annotated[
        bool, Option("--raw", help="Raw and in file order: required, as the only form there is.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Store the blocks of a snapshot raw, for fast reading.

    The blocks lie in file order then: mounts and Python map them, and checkout shares
    them. Contents and ids stay the same; the store grows. `mstore unpin` undoes it. A pin does not
    protect the snapshot from gc.
    """
    with session.open() as store, session.progress() as tick:
        report = store.pin(revision, raw=raw, threads=threads, progress=tick)
        session.settled()

    def human(screen: Screen) -> None:
        before, after = format_size(report.bytes_before), format_size(report.bytes_after)
        elsewhere = format_size(report.unmapped_bytes) if report.unmapped_bytes else None
        screen.line(f"pinned {short(report.snapshot)} raw", style="green")
        screen.fields(
            [
                ("files", f"{counted(report.files, 'file')} in {counted(report.runs, 'run')}"),
                ("blocks", f"{report.blocks}: {report.blocks_copied} copied"),
                ("size", f"{before} before, {after} now"),
                ("written", format_size(report.bytes_written)),
                ("not mapped", elsewhere),
                ("time", format_seconds(report.seconds)),
            ]
        )
        if report.blocks_copied:
            screen.command("to free what they replace", "mstore gc")

    session.output.emit(report, ids=[report.snapshot], human=human)
