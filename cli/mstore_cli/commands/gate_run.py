"""`mstore gate run`: judge a snapshot, and move nothing."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.errors import REFUSED, Ended, UsageError
from mstore_cli.judging import Checks, draw_verdicts, judged
from mstore_cli.options import Revision
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore gate run llama/merged --check quality",
    failure="an error\n  3  the snapshot did not pass, and that was noted",
)
def gate_run(session: Session, revision: Revision, checks: Checks) -> None:
    """Run gates on a snapshot and note their verdicts.

    No ref moves. A ref that the store guards by these gates may move to the snapshot then.
    """
    with session.open() as store:
        gates = checks.gates(store)
        if not gates:
            raise UsageError(
                "missing: --check, the gate to run", hint=f"mstore gate run {revision} --check NAME"
            )
        verdicts = judged(session, store, revision, gates, checks)
        session.settled()
    passed = all(one.passed for one in verdicts)

    def human(screen: Screen) -> None:
        draw_verdicts(screen, verdicts)

    session.output.emit(
        {"passed": passed, "verdicts": verdicts}, ids=[one.note for one in verdicts], human=human
    )
    if not passed:
        raise Ended(REFUSED)
