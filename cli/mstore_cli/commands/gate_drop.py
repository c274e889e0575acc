"""`mstore gate drop`: remove candidates."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(
    example="mstore gate drop candidates/gate-1f0c2a9b/llama/merged",
    failure="an error; nothing was removed",
)
def gate_drop(
    session: Session,
    names: Annotated[
        tuple[str, ...],
        Argument(
            metavar="CANDIDATE",
            help="Candidates, or patterns such as 'candidates/*'.",
            shell_complete=completion.refs,
        ),
    ] = (),
) -> None:
    """Remove candidates that did not pass a gate.

    gc then frees what only they needed.
    """
    from mstore.store.refs import is_candidate
    from mstore.terms.errors import NotFound

    if not names:
        raise UsageError("no candidate is named", hint="mstore gate")
    other = next((name for name in names if not is_candidate(name)), None)
    if other is not None:
        raise UsageError(f"{other} is no candidate", hint="mstore gate")
    with session.open() as store:
        try:
            report = store.remove(*names)
        except NotFound as missing:
            missing.advise("mstore gate")
            raise
        session.settled()

    def human(screen: Screen) -> None:
        for name, snapshot in zip(report.removed, report.snapshots, strict=True):
            screen.line(f"dropped {name} {short(snapshot)}", style="green")

    session.output.emit(report, ids=report.removed, human=human)
