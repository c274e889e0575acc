"""`mstore gate`: candidates that no branch shows yet, and what gates said of them."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.output import Column, Screen, short, when
from mstore_cli.session import Session

COLUMNS = (
    Column("CANDIDATE", style="green"),
    Column("SNAPSHOT", style="yellow"),
    Column("MADE"),
    Column("PASSED", sentence=True),
    Column("DID NOT PASS", sentence=True),
)


@command(example="mstore gate")
def gate(session: Session) -> None:
    """List candidates, and which gates they passed.

    A gate is a command that a snapshot must pass before a branch moves to it: see --check of merge,
    add and push. Candidates stay until they are dropped, or for the days that `mstore config
    reflog_days` says. The second words are commands of their own.
    """
    with session.open_to_look() as store:
        found = store.candidates()

    def human(screen: Screen) -> None:
        if not found:
            screen.line("no candidates")
            return
        rows = (
            (
                one.candidate,
                short(one.snapshot),
                when(one.time_ns),
                ", ".join(one.passed) or "-",
                ", ".join(one.failed) or "-",
            )
            for one in found
        )
        screen.table(COLUMNS, rows)
        screen.command("to drop one", "mstore gate drop CANDIDATE")

    session.output.emit({"candidates": found}, ids=[one.candidate for one in found], human=human)
