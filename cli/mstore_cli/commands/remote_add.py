"""`mstore remote add`: a name for a remote."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.options import AddressingStyle, Argument, Endpoint, Region
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore remote add origin s3://team-models/llama",
    failure="the store has a remote of this name, or another error",
)
def remote_add(
    session: Session,
    name: Annotated[str, Argument(metavar="NAME", help="The new name, such as origin.")],
    url: Annotated[
        str,
        Argument(
            metavar="URL",
            help="s3://BUCKET/PREFIX, gs://..., az://..., or file:///DIRECTORY; to read only, "
            "bundle:FILE or http(s)://HOST/remote of `mstore serve`.",
        ),
    ],
    endpoint: Endpoint = None,
    region: Region = None,
    addressing_style: AddressingStyle = None,
) -> None:
    """Give a remote a name in this store.

    Nothing is sent or asked: the first `mstore push` makes the remote. Credentials come from the
    environment, never from URL; those for S3 also from your AWS profile or SSO, if boto3 is
    installed and no variable has any. A store's settings may be a stranger's, so credentials go to
    the provider's own servers, and to others only if your settings or your environment name them:
    `mstore config --user endpoints`. A web server gets the token in the variable MSTORE_TOKEN, if
    you have one.
    """
    from mstore.remotes.address import is_read_only

    with session.open() as store:
        report = store.add_remote(
            name,
            url,
            endpoint=endpoint or "",
            region=region or "",
            addressing_style=addressing_style or "",
        )
        server = session.trust(report.url, report.endpoint)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{report.name} is {report.url}", style="green")
        if server:
            screen.line(f"your credentials may go to {server}")
        if not is_read_only(report.url):
            screen.command("to send models", f"mstore push {report.name} --all")
        screen.command("to get its models", f"mstore pull {report.name}")

    session.output.emit(report, ids=[report.name], human=human)
