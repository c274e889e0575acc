"""A proxy between clients and an S3 server, which numbers requests and does a fault to some.

It speaks HTTP/1.1 at 127.0.0.1 and logs each request, so that a test can count them, too. Clients
ask for the bucket `BUCKET`; the proxy asks the server for a bucket of its own, so that a test needs
no new settings for a new bucket.

Replacements of the root go to the server one at a time: so the proxy knows which root each of them
replaced, and answers a stale read with it.
"""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

BUCKET = "family"
ROOT = "mstore-remote"
DELAY = 0.2
"""Seconds of a delay."""


class Fault(StrEnum):
    """What may happen to one request."""

    DELAYED = "delayed"
    CUT = "cut"
    """the server's answer ends in its middle, and the connection with it"""
    LOST = "lost"
    """the server did it; the connection ends without an answer"""
    RESET = "reset"
    """the connection is reset before the server hears of it"""
    RESET_AFTER = "reset-after"
    """the server did it; the connection is reset"""
    BUSY = "busy"
    """429, and not passed on"""
    UNAVAILABLE = "unavailable"
    """503, and not passed on"""
    FAILED = "failed"
    """500, and not passed on"""
    FAILED_AFTER = "failed-after"
    """500, although the server did it"""
    STALE = "stale"
    """a read of the root gives what it was before the last change"""
    SILENT = "silent"
    """no answer, and the connection stays open"""


SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0",
    "Content-Type": "application/octet-stream",
}
"""Headers of the proxy's own requests: moto compares no signature, but looks for one."""
STATUS = {
    Fault.BUSY: (429, {"Retry-After": "1"}),
    Fault.UNAVAILABLE: (503, {"Retry-After": "1"}),
    Fault.FAILED: (500, {}),
    Fault.FAILED_AFTER: (500, {}),
}


@dataclass
class Asked:
    """One request."""

    number: int
    """from 0"""
    method: str
    name: str
    """of the object, without the bucket"""
    query: str
    body: str
    """hash of what was sent"""
    sent: int
    """bytes"""
    status: int = 0
    """of the server's answer; 0 if it was not asked"""
    received: int = 0
    """bytes of the answer"""
    answered: bool = False
    """whether the client was given the server's whole answer"""

    @property
    def is_done(self) -> bool:
        """Whether the client knows that the server did it."""
        return self.answered and 200 <= self.status < 300


@dataclass(frozen=True)
class Answer:
    """A server's answer."""

    status: int
    headers: dict[str, str]
    body: bytes


def nothing(asked: Asked) -> Fault | None:
    """Do no fault."""
    return None


@dataclass
class FaultProxy:
    """A proxy for one bucket.

    before: called with each request before the server is asked; says the fault, or does something
    itself. after: called when the server has answered, and the client has not been told.
    """

    server: str
    """address of the S3 server"""
    bucket: str
    before: Callable[[Asked], Fault | None] = nothing
    after: Callable[[Asked], object] = nothing
    log: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._replacing = threading.Lock()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._stale: Answer | None = None
        self._listening = _Server(("127.0.0.1", 0), _Handler)
        self._listening.proxy = self
        self._thread = threading.Thread(
            target=self._listening.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://127.0.0.1:{self._listening.server_address[1]}"

    def close(self) -> None:
        """End it, and every connection."""
        self._closing.set()
        self._listening.shutdown()
        self._listening.server_close()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def begin(
        self,
        before: Callable[[Asked], Fault | None] = nothing,
        after: Callable[[Asked], object] = nothing,
    ) -> None:
        """Number requests from 0 again, with other faults."""
        with self._lock:
            self.log.clear()
            self.before, self.after = before, after

    # -- what the server has -----------------------------------------------------------------

    def names(self, below: str = "") -> list[str]:
        """Return the names of the objects that begin so, past the log and all faults."""
        listed = self.ask("GET", f"/{self.bucket}?list-type=2&prefix={below}").body
        return [
            each.text or "" for each in ET.fromstring(listed).iter() if each.tag.endswith("}Key")
        ]

    def objects(self, below: str = "") -> dict[str, bytes]:
        """Return the objects whose names begin so, likewise."""
        return {name: self.ask("GET", f"/{self.bucket}/{name}").body for name in self.names(below)}

    def fill(self, *states: dict[str, bytes]) -> None:
        """Put these objects, of each state those that the one before has not; the root last."""
        assert self.ask("PUT", f"/{self.bucket}").status == 200
        known: dict[str, bytes] = {}
        for state in states:
            for name in sorted(state, key=lambda name: name.endswith(ROOT)):
                if known.get(name) != state[name]:
                    self._put(name, state[name])
            known = state

    def _put(self, name: str, data: bytes) -> None:
        asked = Asked(-1, "PUT", name, "", "", len(data))
        assert self._forward(asked, f"/{self.bucket}/{name}", SIGNED, data).status == 200

    # -- requests ----------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Ask the server."""
        parts = urlsplit(self.server)
        connection = http.client.HTTPConnection(parts.netloc, timeout=120)
        try:
            connection.request(method, path, body, SIGNED if headers is None else headers)
            got = connection.getresponse()
            # A name may come twice; no name that matters here does.
            return Answer(got.status, dict(got.getheaders()), got.read())
        finally:
            connection.close()

    def _forward(self, asked: Asked, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Ask the server; remember what the root was before it changed."""
        if asked.method != "PUT" or not asked.name.endswith(ROOT):
            return self.ask(asked.method, path, headers, body)
        with self._replacing:
            old = self.ask("GET", path)
            answer = self.ask(asked.method, path, headers, body)
            if answer.status == 200:
                self._stale = old
        return answer

    def _serve(self, handler: _Handler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        parts = urlsplit(handler.path)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        assert bucket == BUCKET, handler.path
        path = handler.path.replace(f"/{BUCKET}", f"/{self.bucket}", 1)
        with self._lock:
            digest = hashlib.blake2b(body).hexdigest()
            number = len(self.log)
            asked = Asked(number, handler.command, name, parts.query, digest, len(body))
            self.log.append(asked)
        fault = self.before(asked)
        if fault == Fault.SILENT:
            self._closing.wait(60)
            handler.reset()
        elif fault == Fault.RESET:
            handler.reset()
        elif fault in STATUS and fault != Fault.FAILED_AFTER:
            handler.answer(Answer(*STATUS[fault], b""))
        else:
            self._pass_on(handler, asked, path, body, fault)

    def _pass_on(
        self, handler: _Handler, asked: Asked, path: str, body: bytes, fault: Fault | None
    ) -> None:
        if fault == Fault.DELAYED:
            time.sleep(DELAY)
        headers = dict(handler.headers.items())
        answer = None
        if fault == Fault.STALE and asked.method == "GET" and asked.name.endswith(ROOT):
            answer = self._stale
            known = handler.headers.get("If-None-Match")
            if answer is not None and known is not None and answer.headers.get("ETag") == known:
                answer = Answer(304, {"ETag": known}, b"")
        if answer is None:
            answer = self._forward(asked, path, headers, body)
        asked.status, asked.received = answer.status, len(answer.body)
        self.after(asked)
        if fault == Fault.LOST:
            handler.close_connection = True
        elif fault == Fault.RESET_AFTER:
            handler.reset()
        elif fault == Fault.FAILED_AFTER:
            handler.answer(Answer(*STATUS[fault], b""))
        else:
            asked.answered = fault != Fault.CUT
            handler.answer(answer, is_cut=fault == Fault.CUT)

    def _tell(self, connection: socket.socket, *, is_open: bool) -> None:
        with self._lock:
            (self._open.add if is_open else self._open.discard)(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.proxy._tell(self.connection, is_open=True)

    def finish(self) -> None:
        self.server.proxy._tell(self.connection, is_open=False)
        super().finish()

    def _any(self) -> None:
        self.server.proxy._serve(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any  # noqa: N815 -- named by http.server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the proxy has a log of its own."""

    def answer(self, answer: Answer, *, is_cut: bool = False) -> None:
        """Answer, all in one piece; or half of it."""
        skipped = {"connection", "transfer-encoding", "content-length", "date", "server"}
        length = str(len(answer.body))
        if self.command == "HEAD":
            length = answer.headers.get("Content-Length", "0")
        lines = [f"HTTP/1.1 {answer.status} said by the server", f"Content-Length: {length}"]
        lines += [f"{k}: {v}" for k, v in answer.headers.items() if k.lower() not in skipped]
        head = "\r\n".join([*lines, "", ""]).encode()
        body = b"" if self.command == "HEAD" else answer.body
        if is_cut:
            self.close_connection = True
            head, body = (head, body[: len(body) // 2]) if body else (head[: len(head) // 2], b"")
        self.wfile.write(head + body)

    def reset(self) -> None:
        """Reset the connection."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # Each holds the socket open.
        self.rfile.close()
        self.wfile.close()
        self.connection.close()
