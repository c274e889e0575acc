"""Serving a store over HTTP and S3: what programs and the command line call.

Imports starlette and uvicorn only when it serves, so that it can say that they are missing.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from mstore import Store
from mstore.remotes.web import checked_token
from mstore.terms.errors import BadRequest, Unavailable
from mstore.terms.phrases import Option, Text, phrase

HOST = "127.0.0.1"
PORT = 8420
CONNECTIONS = 128
TIMEOUT = 60.0

_NEEDED = ("starlette", "uvicorn")
_KEY = re.compile(r"[A-Za-z0-9_-]{3,128}")
_SECRET = re.compile(r"[!-~]{16,1024}")


class S3Keys(msgspec.Struct, frozen=True):
    """What clients of S3 sign their requests with."""

    key: str
    """the access key's id: letters, digits, `_` and `-`"""
    secret: str
    """the secret access key, of 16 signs or more"""

    def __repr__(self) -> str:
        return f"S3Keys({self.key!r})"

    def require(self) -> None:
        """Raise BadRequest, without them, for keys that no client can send or anybody guesses."""
        if not _KEY.fullmatch(self.key):
            raise BadRequest("an access key's id has 3 to 128 letters, digits, '_' and '-'")
        if not _SECRET.fullmatch(self.secret):
            raise BadRequest(
                "a secret access key has 16 letters, digits and signs or more, and no spaces",
                hint='python -c "import secrets; print(secrets.token_urlsafe())"',
            )


class PageReader(msgspec.Struct, frozen=True):
    """For whom pages are made."""

    signers: Mapping[bytes, str] = {}
    """trusted keys and their names, as for `Store.log`"""
    typed: Callable[[Text], str] = str
    """formats a text of the library, with commands as the reader types them"""


class ServeInfo(msgspec.Struct, frozen=True):
    """A server that answers."""

    url: str | None
    """its address; None if it serves S3 only"""
    s3_url: str | None
    """the endpoint for clients of S3; None if it serves no S3"""
    host: str
    """the IP address that it listens at"""
    port: int | None
    """the port of url"""
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
    port: int | None = PORT,
    s3: int | None = None,
    s3_keys: S3Keys | None = None,
    names: Sequence[str] = (),
    connections: int = CONNECTIONS,
    timeout: float = TIMEOUT,
    token: str = "",
    log: Path | None = None,
    access_log: bool = True,
    reader: PageReader | None = None,
    on_ready: Callable[[ServeInfo], None] | None = None,
) -> None:
    """Answer requests for the files of an open store, until SIGINT, SIGTERM or SIGHUP.

    Call it from the main thread.  Over HTTP there is no authentication without a token.

    host, port: where to listen; port 0 is any free one, None leaves HTTP out.
    s3: the port for clients of S3, whose bucket is `mstore`; 0: any free one; None: S3 is left out.
    s3_keys: what they sign requests with; None: requests are not checked, which only a loopback
    address allows.
    names: what else requests may call this host, at a loopback address; elsewhere any name will do.
    connections: requests at once; more get status 503.
    timeout: seconds after which a client that takes or sends nothing is dropped, and for which
    requests may finish at the end.
    token: what each HTTP request must bring as `Authorization: Bearer`; empty: nothing.
    log: a file to append to, instead of standard error.
    access_log: whether to log each request, not only errors.
    reader: for whom pages are made.
    on_ready: called once the server answers.

    Raises Unavailable (a package is missing, the port is not this user's), Conflict (the port is in
    use), BadRequest (no such address, an invalid number, keys that anybody guesses), StorageFailed
    (the log).
    """
    require_packages()
    if port is None and s3 is None:
        raise BadRequest("HTTP and S3 are both left out: nothing is served", where=Option("port"))
    for name, number in (("port", port), ("s3", s3)):
        if number is not None and not 0 <= number <= 65535:
            raise BadRequest("a port is a number from 0 to 65535", where=Option(name, number))
    if port and port == s3:
        raise BadRequest("HTTP has this port", where=Option("s3", s3), hint=Option("s3", 0))
    if connections < 1:
        where = Option("connections", connections)
        raise BadRequest("at least one request must be allowed", where=where)
    if not 1 <= timeout <= 86400:
        raise BadRequest("a timeout is from 1 to 86400 seconds", where=Option("timeout", timeout))
    if token:
        checked_token(token)
    if s3_keys is not None:
        s3_keys.require()
    from mstore_serve import logs
    from mstore_serve.server import Server, listen

    with logs.written(log, requests=access_log), ExitStack() as opened:
        http = None if port is None else opened.enter_context(listen(host, port))
        bucket = None if s3 is None else opened.enter_context(listen(host, s3, "s3"))
        if bucket is not None and s3_keys is None and not _address(bucket).is_loopback:
            raise BadRequest(
                "requests that nobody signed are answered at a loopback address only",
                where=Option("host", host),
                hint=phrase("give keys, or {host}", host=Option("host", HOST)),
            )
        Server(
            store,
            http,
            bucket,
            names=names,
            most=connections,
            timeout=timeout,
            token=token,
            s3_keys=s3_keys,
            reader=reader or PageReader(),
            on_ready=on_ready,
        ).run()


def described(store: Store, http: socket.socket | None, s3: socket.socket | None) -> ServeInfo:
    """Return what a server of this process at these sockets says of itself."""
    listening = http or s3
    assert listening is not None
    return ServeInfo(
        url=None if http is None else _url(http),
        s3_url=None if s3 is None else _url(s3),
        host=listening.getsockname()[0],
        port=None if http is None else http.getsockname()[1],
        loopback=_address(listening).is_loopback,
        store=store.path,
        pid=os.getpid(),
    )


def _address(listening: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    host: str = listening.getsockname()[0]
    return ipaddress.ip_address(host.partition("%")[0])


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if _address(listening).version == 6 else host
    return f"http://{name}:{port}/"


def require_packages() -> None:
    """Raise Unavailable, naming what to install, if the packages of this extra are missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        what = "is" if len(missing) == 1 else "are"
        raise Unavailable(
            f"{' and '.join(missing)} {what} missing, which serving needs",
            hint='pip install "mstore[serve]"',
        )
