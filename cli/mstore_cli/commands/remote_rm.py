"""`mstore remote rm`: forget a remote."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.options import Remote
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(example="mstore remote rm origin")
def remote_rm(session: Session, name: Remote) -> None:
    """Forget a remote, and its refs in this store.

    Nothing changes at the remote. Branches and snapshots stay here.
    """
    with session.open() as store:
        report = store.remove_remote(name)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{report.name} is no remote any more", style="green")
        options = [
            f" --{option} {value}"
            for option, value in (("endpoint", report.endpoint), ("region", report.region))
            if value
        ]
        screen.command(
            "to add it again", f"mstore remote add {report.name} {report.url}{''.join(options)}"
        )

    session.output.emit(report, ids=[report.name], human=human)
