"""`mstore bisect bad`: say that a snapshot is bad."""

from __future__ import annotations

from mstore_cli.bisecting import MARK_FAILURE, Position, mark
from mstore_cli.command import command
from mstore_cli.session import Session


@command(example="mstore bisect bad", failure=MARK_FAILURE)
def bisect_bad(session: Session, revision: Position = None) -> None:
    """Say that a snapshot is bad.

    The answer is what to try next, or what was found.
    """
    mark(session, "bad", revision)
