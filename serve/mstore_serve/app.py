"""One request: is it allowed, what does it name, has the client got it, which bytes, what failed.

An ASGI application for HTTP.  Answers GET and HEAD, and reads no body of a request.  Who may ask,
what a request names and how an error reads is its face's (`Face`); a port has one face.

    NotFound, BadName, Conflict -> 404
    Unavailable, StorageFailed, OSError, MemoryError -> 503: what this machine cannot do now
    anything else -> 500: Corrupt, which says that the store is damaged, or a bug

A message of an error of 500 or more names nothing of this machine; the log has the whole.

**Other people's pages.** A web page may make a browser call a server on the same machine, by a name
that it has pointed there. A loopback server therefore answers only to names of its own machine, or
to those that its user allowed (421 else).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from mstore.terms.errors import BadName, Conflict, MstoreError, NotFound, StorageFailed, Unavailable
from mstore_serve import conditions, ranges
from mstore_serve.bodies import Ahead, Body, Threads, unless_gone
from mstore_serve.conditions import Verdict
from mstore_serve.documents import ErrorReport
from mstore_serve.face import Face, Pairs, Refusal, refusal
from mstore_serve.ranges import Part, Span, Unsatisfiable
from mstore_serve.shown import Elsewhere, Later, Shown

OWN_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_RETRY_AFTER: Final = "2"
_METHODS: Final = ("GET", "HEAD")
_BOUNDARY_BYTES: Final = 16
_SAFE: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'none'"),
)
_UNTOLD: Final = "the server could not read this; its log says why"
_STATUS: Final[Mapping[type[Exception], int]] = {
    NotFound: 404,
    BadName: 404,
    Conflict: 404,
    Unavailable: 503,
    StorageFailed: 503,
    OSError: 503,
    MemoryError: 503,
}

log = logging.getLogger("mstore_serve")
access = logging.getLogger("mstore_serve.access")


class _Answer:
    """What was sent so far: remembers the status and counts the bytes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.sent = 0

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent += len(message["body"])


class App:
    """Answers requests by the face of the port that they came to.

    most: requests at once; more are refused with 503. names: what a request may call this host;
    None: anything.
    """

    def __init__(
        self,
        faces: Mapping[int, Face],
        threads: Threads,
        *,
        most: int,
        names: Collection[str] | None,
    ) -> None:
        self._faces = faces
        self._threads = threads
        self._most = most
        self._names = names
        self._running = 0
        self._ahead = Ahead()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        face = self._faces[scope["server"][1]]
        began = time.perf_counter()
        self._running += 1
        try:
            await self._handle(face, scope, receive, answer)
        finally:
            self._running -= 1
            _note(face, scope, answer, time.perf_counter() - began)

    async def _handle(self, face: Face, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._answer(face, scope, receive, answer)
        except Refusal as refused:
            await _refuse(face, scope, answer, refused)
        except Exception as error:  # noqa: BLE001 - this is the boundary of a request
            _log_failure(scope, error)
            # Else the answer ends here, before its length: the server then ends the connection.
            if not answer.status:
                await _refuse(face, scope, answer, _refusal_of(error))

    async def _answer(self, face: Face, scope: Scope, receive: Receive, answer: _Answer) -> None:
        headers = Headers(scope=scope)
        self._admit(scope, headers)
        face.admit(scope, headers)
        shown = await self._threads.look_up(face.asked(scope, headers))
        if isinstance(shown, Later):
            begin = self._threads.report if shown.is_report else self._threads.tell
            made = await unless_gone(begin(shown.make), receive)
            if made is None:
                return
            shown = made
        if isinstance(shown, Elsewhere):
            told = (("Location", shown.location), ("Cache-Control", "no-cache"))
            await _send_bytes(scope, answer, 307, b"", told)
            return
        given = {name: ", ".join(headers.getlist(name)) for name in headers}
        match conditions.evaluate(given, shown.validators):
            case Verdict.NOT_MODIFIED:
                await answer(_start(304, _about(shown)))
                await answer({"type": "http.response.body", "body": b""})
            case Verdict.FAILED:
                raise refusal(412, "precondition-failed", "it is another version")
            case Verdict.SEND:
                await self._send_shown(scope, given, shown, receive, answer)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Raise Refusal for a request that is refused, whatever it names and whoever asks."""
        if self._running > self._most:
            again = (("Retry-After", _RETRY_AFTER), ("Connection", "close"))
            raise refusal(503, "busy", "too many requests at once", again)
        if self._names is not None:
            name = re.sub(r":[0-9]*\Z", "", headers.get("host", "")).lower()
            # Without one it is HTTP/1.0, which no browser speaks.
            if name and name not in self._names:
                raise refusal(421, "misdirected", "this server does not answer to this name")
        if scope["method"] not in _METHODS:
            allowed = (("Allow", ", ".join(_METHODS)), ("Connection", "close"))
            raise refusal(405, "bad-request", "this server is read-only", allowed)

    async def _send_shown(
        self,
        scope: Scope,
        given: Mapping[str, str],
        shown: Shown,
        receive: Receive,
        answer: _Answer,
    ) -> None:
        spans = _spans(scope, given, shown)
        told = _about(shown)
        parts: list[Part]
        if spans is None:
            status, parts = 200, [Span(0, shown.size)]
            told.append(("Content-Type", shown.media_type))
        elif len(spans) == 1:
            status, parts = 206, [*spans]
            told.append(("Content-Type", shown.media_type))
            told.append(("Content-Range", ranges.content_range(spans[0], shown.size)))
        else:
            boundary = secrets.token_hex(_BOUNDARY_BYTES)
            status, parts = 206, ranges.multipart(spans, shown.size, shown.media_type, boundary)
            told.append(("Content-Type", f"multipart/byteranges; boundary={boundary}"))
        body = Body(shown, parts, self._threads, self._ahead)
        start = _start(status, [*told, ("Content-Length", str(body.length))])
        if scope["method"] == "HEAD":
            await answer(start)
            await answer({"type": "http.response.body", "body": b""})
        else:
            await body.send(start, receive, answer)


def _spans(scope: Scope, given: Mapping[str, str], shown: Shown) -> list[Span] | None:
    """Return the ranges to send; None for the whole.  Raises Refusal (416)."""
    asked = given.get("range")
    # For HEAD, ranges mean nothing.
    if asked is None or scope["method"] != "GET":
        return None
    if not conditions.range_applies(given, shown.validators):
        return None
    try:
        return ranges.parse(asked, shown.size)
    except Unsatisfiable:
        whole = (("Content-Range", f"bytes */{shown.size}"),)
        what = f"no byte of {shown.size} is in these ranges, or they are too many"
        raise refusal(416, "bad-range", what, whole) from None


def _about(shown: Shown) -> list[tuple[str, str]]:
    told = [
        ("ETag", shown.validators.etag),
        ("Cache-Control", shown.cache),
        ("Accept-Ranges", "bytes"),
        *_safe(shown.headers),
    ]
    if shown.validators.modified is not None:
        told.append(("Last-Modified", conditions.http_date(shown.validators.modified)))
    return told


def _safe(headers: Pairs) -> Pairs:
    """Return headers, and those of `_SAFE` that they lack: a page has a policy of its own."""
    own = {name for name, _ in headers}
    return [*(pair for pair in _SAFE if pair[0] not in own), *headers]


def _start(status: int, headers: Pairs) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers
        ],
    }


async def _send_bytes(
    scope: Scope, answer: _Answer, status: int, content: bytes, headers: Pairs
) -> None:
    told = [*_safe(headers), ("Content-Length", str(len(content)))]
    await answer(_start(status, told))
    content = b"" if scope["method"] == "HEAD" else content
    await answer({"type": "http.response.body", "body": content})


def _refusal_of(error: Exception) -> Refusal:
    status = next((of for kind, of in _STATUS.items() if isinstance(error, kind)), 500)
    code = "bug"
    if isinstance(error, MstoreError):
        code = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", _public(type(error))).lower()
    elif isinstance(error, OSError):
        code = "storage-failed"
    elif isinstance(error, MemoryError):
        code = "out-of-memory"
    if isinstance(error, MstoreError) and status < 500:
        return Refusal(status, ErrorReport(code, error.what, error.where))
    return Refusal(status, ErrorReport(code, _UNTOLD, None))


def _public(kind: type[BaseException]) -> str:
    """Return the name of an error's class that the docs list: some modules have kinds of it."""
    listed = (one for one in kind.__mro__ if one.__module__ == MstoreError.__module__)
    return next(listed).__name__


async def _refuse(face: Face, scope: Scope, answer: _Answer, refused: Refusal) -> None:
    about, content = face.refused(scope, refused)
    told = [*about, ("Cache-Control", "no-store"), *refused.headers]
    await _send_bytes(scope, answer, refused.status, content, told)


def _log_failure(scope: Scope, error: Exception) -> None:
    where = scope["raw_path"].decode("latin-1")
    if isinstance(error, MemoryError):
        log.error("%s: out of memory", where)
    elif isinstance(error, MstoreError | OSError):
        if _refusal_of(error).status >= 500 or not isinstance(error, MstoreError):
            log.error("%s: %s", where, error)
        elif isinstance(error, Conflict):
            log.warning("%s: %s", where, error)
    else:
        log.error("%s: a bug in mstore", where, exc_info=error)


def _note(face: Face, scope: Scope, answer: _Answer, seconds: float) -> None:
    client = scope.get("client")
    query = face.query(scope)
    access.info(
        '%s "%s %s%s" %s %d %.3f',
        "-" if client is None else client[0],
        scope["method"],
        scope["raw_path"].decode("latin-1"),
        f"?{query}" if query else "",
        answer.status or "-",
        answer.sent,
        seconds,
    )
