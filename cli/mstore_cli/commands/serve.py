"""`mstore serve`: the files of a store over HTTP, read-only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError, warn
from mstore_cli.options import Option
from mstore_cli.output import Mode, Screen
from mstore_cli.session import TOKEN_VARIABLE, Session, token

if TYPE_CHECKING:
    from mstore_serve.serving import ServeInfo

# The defaults of mstore_serve.serving, which is imported when it serves.
HOST = "127.0.0.1"
PORT = 8420
CONNECTIONS = 128
TIMEOUT = 60.0


@command(
    example="mstore serve --port 8420",
    failure="an error; nothing is served",
)
def serve(
    session: Session,
    host: Annotated[
        str, Option("--host", metavar="ADDRESS", help="The address to listen at.")
    ] = HOST,
    port: Annotated[int, Option("--port", metavar="N", help="The port; 0: any free one.")] = PORT,
    allow_name: Annotated[
        tuple[str, ...],
        Option(
            "--allow-name",
            metavar="NAME",
            help="Another host name that requests at a loopback address may use (repeatable).",
        ),
    ] = (),
    connections: Annotated[
        int, Option("--connections", metavar="N", help="Requests at once; more get status 503.")
    ] = CONNECTIONS,
    timeout: Annotated[
        float,
        Option(
            "--timeout",
            metavar="SECONDS",
            help="Drop a client that takes or sends nothing for so long; time to finish at the "
            "end.",
        ),
    ] = TIMEOUT,
    needs_token: Annotated[
        bool,
        Option(
            "--token",
            help="Answer only requests that bring the token in your variable MSTORE_TOKEN.",
        ),
    ] = False,
    log: Annotated[
        Path | None,
        Option("--log", metavar="FILE", help="Append the log to a file, not to standard error."),
    ] = None,
) -> None:
    """Serve refs, snapshots and their files over HTTP.

    The server only reads, and runs until Ctrl-C. Without --token there is no authentication. Each
    request is logged; with --quiet only errors are, unless --log names a file.

    Below /remote/ it shows the store as a remote: `mstore clone http://HOST:PORT/remote DIR`.
    """
    from mstore_serve.serving import serve as run_server

    def ready(info: ServeInfo) -> None:
        def human(screen: Screen) -> None:
            screen.line(f"serving {info.store} at {info.url}", style="green")
            screen.line("to end it: Ctrl-C")

        session.output.emit(info, ids=[info.url], human=human)
        if not info.loopback and needs_token:
            warn(
                "without TLS, the network can read the token and every model that is sent",
                "let a proxy with TLS stand before it (docs/serving.md)",
            )
        elif not info.loopback:
            warn(
                f"there is no authentication: whoever reaches {info.url} can read every model "
                "in this store",
                "let a proxy with passwords and TLS stand before it (docs/serving.md)",
            )

    given = token() if needs_token else ""
    if needs_token and not given:
        raise UsageError(
            f"--token: {TOKEN_VARIABLE} is not set",
            hint=f"export {TOKEN_VARIABLE}="
            "$(python3 -c 'import secrets; print(secrets.token_urlsafe())')",
        )
    with session.open() as store:
        run_server(
            store,
            host=host,
            port=port,
            names=allow_name,
            connections=connections,
            timeout=timeout,
            token=given,
            log=log,
            access_log=log is not None or session.output.mode is not Mode.QUIET,
            on_ready=ready,
        )
