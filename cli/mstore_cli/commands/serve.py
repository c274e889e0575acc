"""`mstore serve`: the files of a store over HTTP and S3, read-only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError, warn
from mstore_cli.options import Option
from mstore_cli.output import Mode, Screen
from mstore_cli.session import S3_VARIABLES, TOKEN_VARIABLE, Session, s3_keys, token
from mstore_cli.signers import trusted_signers

if TYPE_CHECKING:
    from mstore.terms.phrases import Text
    from mstore_serve.serving import S3Keys, ServeInfo

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
    port: Annotated[
        int | None,
        Option(
            "--port",
            metavar="N",
            help=f"The port of HTTP; 0: any free one.  [default: {PORT}; with --s3: no HTTP]",
        ),
    ] = None,
    s3: Annotated[
        int | None,
        Option(
            "--s3",
            metavar="PORT",
            help="Serve clients of S3 at this port; 0: any free one. They sign requests with the "
            f"keys in your variables {' and '.join(S3_VARIABLES)}.",
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        Option(
            "--no-auth",
            help="Answer clients of S3 without checking signatures; at a loopback address only.",
        ),
    ] = False,
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
            help="Answer only HTTP requests that bring the token in your variable MSTORE_TOKEN.",
        ),
    ] = False,
    log: Annotated[
        Path | None,
        Option("--log", metavar="FILE", help="Append the log to a file, not to standard error."),
    ] = None,
) -> None:
    """Serve refs, snapshots and their files over HTTP or S3.

    The server only reads, and runs until Ctrl-C. Over HTTP there is no authentication without
    --token. Each request is logged; with --quiet only errors are, unless --log names a file.

    Below /remote/ it shows the store as a remote: `mstore clone http://HOST:PORT/remote DIR`.

    With --s3, the bucket `mstore` has the keys refs/NAME/PATH and snapshots/ID/PATH. With --port as
    well, one server answers both.
    """
    from mstore_serve.serving import PageReader
    from mstore_serve.serving import serve as run_server

    if port is None and s3 is None:
        port = PORT
    if needs_token and port is None:
        raise UsageError("--token is for HTTP, which is not served", hint=f"--port {PORT}")
    if no_auth and s3 is None:
        raise UsageError("--no-auth is for S3, which is not served", hint="--s3 9000")
    keys = _keys() if s3 is not None and not no_auth else None

    def ready(info: ServeInfo) -> None:
        def human(screen: Screen) -> None:
            if info.url is not None:
                screen.line(f"serving {info.store} at {info.url}", style="green")
            if info.s3_url is not None:
                what = f"serving {info.store} to clients of S3: s3://mstore at {info.s3_url}"
                screen.line(what, style="green")
            screen.line("to end it: Ctrl-C")

        urls = [url for url in (info.url, info.s3_url) if url is not None]
        session.output.emit(info, ids=urls, human=human)
        if info.loopback:
            return
        if info.url is not None and not needs_token:
            warn(
                f"there is no authentication: whoever reaches {info.url} can read every model "
                "in this store",
                "let a proxy with passwords and TLS stand before it (docs/serving.md)",
            )
        else:
            read = (
                "every model that is sent"
                if info.url is None
                else ("the token and every model that is sent")
            )
            warn(
                f"without TLS, the network can read {read}",
                "let a proxy with TLS stand before it (docs/serving.md)",
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
            s3=s3,
            s3_keys=keys,
            names=allow_name,
            connections=connections,
            timeout=timeout,
            token=given,
            log=log,
            access_log=log is not None or session.output.mode is not Mode.QUIET,
            reader=PageReader(trusted_signers(None), _typed),
            on_ready=ready,
        )


def _typed(text: Text) -> str:
    """Format a text for readers of pages, who may not know where the store lies."""
    from mstore.terms.phrases import as_phrase
    from mstore_cli.spelling import Typed

    return as_phrase(text).spelled(Typed())


def _keys() -> S3Keys:
    """Return the keys of the environment.  Raises UsageError where there are none."""
    from mstore_serve.serving import S3Keys

    key, secret = s3_keys()
    missing = [name for name, value in zip(S3_VARIABLES, (key, secret), strict=True) if not value]
    if missing:
        raise UsageError(
            f"--s3: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            hint=f"export {S3_VARIABLES[0]}=models {S3_VARIABLES[1]}="
            "$(python3 -c 'import secrets; print(secrets.token_urlsafe())')\n"
            "or --no-auth, for programs on this machine",
        )
    return S3Keys(key, secret)
