"""`mstore bisect skip`: say that a snapshot cannot be judged."""

from __future__ import annotations

from mstore_cli.bisecting import MARK_FAILURE, Position, mark
from mstore_cli.command import command
from mstore_cli.session import Session


@command(example="mstore bisect skip", failure=MARK_FAILURE)
def bisect_skip(session: Session, revision: Position = None) -> None:
    """Say that a snapshot cannot be judged.

    The answer is what to try next, or what was found.
    """
    mark(session, "skip", revision)
