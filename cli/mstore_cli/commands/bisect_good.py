"""`mstore bisect good`: say that a snapshot is good."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.bisecting import mark
from mstore_cli.command import command
from mstore_cli.options import Argument
from mstore_cli.session import Session


@command(
    example="mstore bisect good",
    failure="an error; the mark does not count\n  2  too much was skipped to tell",
)
def bisect_good(
    session: Session,
    revision: Annotated[
        str | None,
        Argument(
            metavar="[REF]",
            help="A position of the branch [default: what is to be tried now].",
            shell_complete=completion.refs,
        ),
    ] = None,
) -> None:
    """Say that a snapshot is good.

    The answer is what to try next, or what was found.
    """
    mark(session, "good", revision)
