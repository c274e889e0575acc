"""`mstore --version`: the version.  No word of its own runs it, so it is not among the verbs."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.session import Session


@command(example="mstore --version")
def version(session: Session) -> None:
    """Print the version."""
    from mstore.version import __version__

    session.output.emit(
        {"version": __version__},
        ids=[__version__],
        human=lambda screen: screen.line(f"mstore {__version__}"),
    )
