"""`mstore version`, `mstore --version` and `mstore -V`: the version."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.session import Session


def show(session: Session) -> None:
    """Print the version."""
    from mstore.terms import __version__

    session.output.emit(
        {"version": __version__},
        ids=[__version__],
        human=lambda screen: screen.line(f"mstore {__version__}"),
    )


@command(example="mstore version")
def version(session: Session) -> None:
    """Print the version, as --version and -V do."""
    show(session)
