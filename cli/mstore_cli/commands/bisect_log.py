"""`mstore bisect log`: what was said so far."""

from __future__ import annotations

import shlex

from mstore_cli.command import command
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(example="mstore bisect log > bisect.log")
def bisect_log(session: Session) -> None:
    """Print what is bisected, and what was said.

    Change a line that is wrong, then: mstore bisect reset; mstore bisect replay FILE.
    """
    with session.open() as store:
        log = store.bisect_log()

    def human(screen: Screen) -> None:
        screen.line(f"# bad: {log.snapshot.hex()} {log.name}")
        begun = ["start", short(log.snapshot), *(f"--{one}" for one in log.by)]
        screen.line(shlex.join(begun))
        for mark in log.marks:
            of = f"  # {mark.probe}" if mark.snapshot is None else f" {short(mark.snapshot)}"
            screen.line(f"{mark.answer}{of}")

    session.output.emit(log, ids=[log.snapshot], human=human)
