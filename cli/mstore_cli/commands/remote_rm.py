"""`mstore remote rm`: forget a remote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.options import Remote
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.spelling import flag

if TYPE_CHECKING:
    from mstore.api.reports import RemoteReport


@command(example="mstore remote rm origin")
def remote_rm(session: Session, name: Remote) -> None:
    """Forget a remote, and its refs in this store.

    Nothing changes at the remote. Branches and snapshots stay here. So does its server in your
    settings, as one that may get your credentials: another store may need it.
    """
    with session.open() as store:
        report = store.remove_remote(name)
        left = _still_trusted(report, store.remotes())
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{report.name} is no remote any more", style="green")
        options = [
            f" {flag(field)} {value}"
            for field in ("endpoint", "region", "addressing_style")
            if (value := getattr(report, field))
        ]
        screen.command(
            "to add it again", f"mstore remote add {report.name} {report.url}{''.join(options)}"
        )
        for server in left:
            screen.command(
                f"your credentials may still go to {server}; to end that",
                f"mstore config --user --unset endpoints {server}",
            )

    session.output.emit(report, ids=[report.name], human=human)


def _still_trusted(gone: RemoteReport, others: list[RemoteReport]) -> list[str]:
    """Return the server of a remote that is gone, if the user's settings name it for nothing here.

    It stays in them: another store of this user may need it.
    """
    from mstore.remotes.address import web_server
    from mstore_cli import user_config

    servers = {one.endpoint or web_server(one.url) for one in others}
    server = gone.endpoint or web_server(gone.url)
    return [server] if server not in servers and server in user_config.read()["endpoints"] else []
