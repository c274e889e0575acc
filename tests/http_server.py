"""A server of a store for tests: in a thread of this process, at a real socket."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mstore import Store
from mstore_serve.server import Server, listen
from mstore_serve.serving import ServeInfo


@dataclass(frozen=True)
class Answer:
    """What one request came to."""

    status: int
    headers: Mapping[str, str]
    """by lower-case name"""
    body: bytes


@dataclass(frozen=True)
class Served:
    """A server that answers, and the store that it serves."""

    info: ServeInfo
    server: Server
    store: Store

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> Answer:
        """Send one request on a connection of its own; `path` goes out as it is."""
        return self._ask(self.info.url, path, headers, method)

    def ask_s3(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> Answer:
        """The same, to the S3 face."""
        return self._ask(self.info.s3_url, path, headers, method)

    def _ask(
        self, url: str | None, path: str, headers: Mapping[str, str] | None, method: str
    ) -> Answer:
        assert url is not None
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            found = connection.getresponse()
            told = {name.lower(): value for name, value in found.getheaders()}
            return Answer(found.status, told, found.read())
        finally:
            connection.close()

    def connect(self, room: int = 1 << 12) -> socket.socket:
        """A bare connection that takes little at once."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        client.settimeout(120)
        assert self.info.port is not None
        client.connect((self.info.host, self.info.port))
        return client

    def begin(self, path: str, room: int = 1 << 12) -> socket.socket:
        """Send a request and take nothing of the answer yet."""
        client = self.connect(room)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return client


@contextmanager
def served(path: Path, *, s3: bool = False, **options: Any) -> Iterator[Served]:
    """Serve a store while the block runs; s3: to clients of S3, too."""
    given: dict[str, Any] = {"names": (), "most": 64, "timeout": 60.0, **options}
    ready = threading.Event()
    told: list[ServeInfo] = []

    def on_ready(info: ServeInfo) -> None:
        told.append(info)
        ready.set()

    with Store.open(path) as store, listen("127.0.0.1", 0) as listening, ExitStack() as more:
        bucket = more.enter_context(listen("127.0.0.1", 0)) if s3 else None
        # Connections inherit it: so what a socket holds does not depend on the machine.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        server = Server(store, listening, bucket, on_ready=on_ready, **given)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            assert ready.wait(120)
            yield Served(told[0], server, store)
        finally:
            server.stop()
            server.stop()
            thread.join(120)
            assert not thread.is_alive()


def taken(client: socket.socket) -> bytes:
    """What is left of an answer, until the server closes the connection or it breaks."""
    found = bytearray()
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return bytes(found)
