"""`mstore replay`: run a recorded plan again."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended, remarks
from mstore_cli.options import Revision, Threads
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds


@command(
    example="mstore replay llama/merged",
    failure="the content differs, or another error",
)
def replay(session: Session, revision: Revision, threads: Threads = None) -> None:
    """Run the plan of a merge again and compare the content.

    Nothing is published.
    """
    with session.open() as store, session.progress() as tick:
        report = store.replay(revision, threads=threads, progress=tick)

    def human(screen: Screen) -> None:
        if report.same:
            screen.line("same content", style="green")
        else:
            screen.line(f"DIFFERENT content, first at {report.first_difference}", style="red")
        screen.fields(
            [
                ("snapshot", report.snapshot),
                ("plan", report.plan),
                ("manifest", report.manifest),
                ("replayed", report.replayed),
                ("time", format_seconds(report.seconds)),
            ]
        )

    remarks(report.remarks)
    session.output.emit(report, ids=[report.replayed], human=human)
    if not report.same:
        raise Ended(FAILURE)
