"""Serving a store over HTTP: what programs and the command line call.

Imports starlette and uvicorn only when it serves, so that it can say that they are missing.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mstore import Store
from mstore.remotes.web import checked_token
from mstore.terms.errors import BadRequest, Unavailable
from mstore.terms.phrases import Option, phrase

HOST = "127.0.0.1"
PORT = 8420
CONNECTIONS = 128
TIMEOUT = 60.0

_NEEDED = ("starlette", "uvicorn")


class ServeInfo(msgspec.Struct, frozen=True):
    """A server that answers."""

    url: str
    """its address"""
    host: str
    """the IP address that it listens at"""
    port: int
    """the port"""
    loopback: bool
    """whether only programs on this machine can reach it"""
    store: Path
    """the store"""
    pid: int
    """the process that serves it"""


def serve(
    store: Store,
    *,
    host: str = HOST,
    port: int = PORT,
    names: Sequence[str] = (),
    connections: int = CONNECTIONS,
    timeout: float = TIMEOUT,
    token: str = "",
    log: Path | None = None,
    access_log: bool = True,
    on_ready: Callable[[ServeInfo], None] | None = None,
) -> None:
    """Answer HTTP requests for the files of an open store, until SIGINT, SIGTERM or SIGHUP.

    Call it from the main thread.  Without a token there is no authentication.

    host, port: where to listen; port 0 is any free one.
    names: what else requests may call this host, at a loopback address; elsewhere any name will do.
    connections: requests at once; more get status 503.
    timeout: seconds after which a client that takes or sends nothing is dropped, and for which
    requests may finish at the end.
    token: what each request must bring as `Authorization: Bearer`; empty: nothing.
    log: a file to append to, instead of standard error.
    access_log: whether to log each request, not only errors.
    on_ready: called once the server answers.

    Raises Unavailable (a package is missing, the port is not this user's), Conflict (the port is in
    use), BadRequest (no such address, an invalid number), StorageFailed (the log).
    """
    require_packages()
    if not 0 <= port <= 65535:
        raise BadRequest("a port is a number from 0 to 65535", where=Option("port", port))
    if connections < 1:
        where = Option("connections", connections)
        raise BadRequest("at least one request must be allowed", where=where)
    if not 1 <= timeout <= 86400:
        raise BadRequest("a timeout is from 1 to 86400 seconds", where=Option("timeout", timeout))
    if token:
        checked_token(token)
    from mstore_serve import logs
    from mstore_serve.server import Server, listen

    with logs.written(log, requests=access_log), listen(host, port) as socket:
        Server(
            store,
            socket,
            names=names,
            most=connections,
            timeout=timeout,
            token=token,
            on_ready=on_ready,
        ).run()


def described(store: Store, host: str, port: int) -> ServeInfo:
    """Return what a server of this process at an IP address says of itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    name = f"[{host}]" if address.version == 6 else host
    return ServeInfo(
        url=f"http://{name}:{port}/",
        host=host,
        port=port,
        loopback=address.is_loopback,
        store=store.path,
        pid=os.getpid(),
    )


def require_packages() -> None:
    """Raise Unavailable, naming what to install, if the packages of this extra are missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        what = "is" if len(missing) == 1 else "are"
        raise Unavailable(
            f"{' and '.join(missing)} {what} missing, which serving needs",
            hint='pip install "mstore[serve]"',
        )


PORT_TAKEN = phrase(
    "{other} chooses another, {free} any free one", other=Option("port"), free=Option("port", 0)
)
