"""`mstore migrate`: bring a store of an older format to this version's."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.options import Option
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore migrate --dry-run",
    failure="an error; what was done so far stays, and the command can be run again",
)
def migrate(
    session: Session,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print what would be done.")] = False,
) -> None:
    """Convert a store of an older format to the current one.

    Each step can be interrupted and run again. The store must not be in use.
    """
    from mstore import Store

    report = Store.migrate(session.store_path(), dry_run=dry_run)
    session.settled()

    def human(screen: Screen) -> None:
        if not report.steps:
            screen.line(f"the store has format {report.target} already", style="green")
            return
        word = "migrated" if report.done else "would migrate"
        screen.line(f"{word} from format {report.found} to {report.target}", style="green")
        for number, step in enumerate(report.steps, 1):
            screen.line(f"{number}. {step}")

    session.output.emit(report, ids=[], human=human)
