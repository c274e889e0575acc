"""`mstore bisect`: where the bisection stands."""

from __future__ import annotations

from mstore_cli.bisecting import tell
from mstore_cli.command import command
from mstore_cli.session import Session


@command(
    example="mstore bisect",
    failure="an error\n  2  too much was skipped to tell",
)
def bisect(session: Session) -> None:
    """Show where the bisection stands.

    A bisection finds the first bad position of a branch, or the expert or layer that broke a merge.
    Like git bisect, it shows you something, you say whether it is good or bad, and it goes on. The
    second words are commands of their own.
    """
    with session.open() as store:
        report = store.bisect_status()
    tell(session, report)
