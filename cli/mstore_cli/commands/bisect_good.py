"""`mstore bisect good`: say that a snapshot is good."""

from __future__ import annotations

from mstore_cli.bisecting import MARK_FAILURE, Position, mark
from mstore_cli.command import command
from mstore_cli.session import Session


@command(example="mstore bisect good", failure=MARK_FAILURE)
def bisect_good(session: Session, revision: Position = None) -> None:
    """Say that a snapshot is good.

    The answer is what to try next, or what was found.
    """
    mark(session, "good", revision)
