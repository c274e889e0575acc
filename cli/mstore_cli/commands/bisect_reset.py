"""`mstore bisect reset`: end the bisection."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.session import Session


@command(example="mstore bisect reset")
def bisect_reset(session: Session) -> None:
    """End the bisection and forget its marks.

    What was found stays a note of the merge.
    """
    with session.open() as store:
        ended = store.bisect_reset()
        session.settled()
    session.output.emit(
        {"ended": ended},
        ids=[],
        human=lambda screen: screen.line(
            "the bisection ended" if ended else "no bisection went on"
        ),
    )
