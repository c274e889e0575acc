"""The process: a socket for each face, uvicorn that serves them, signals that end it.

start    the sockets are bound before anything else starts: a port that is taken is an error now
ready    `on_ready`, once connections are accepted
stop     no new connections; answers under way have `timeout` seconds to finish
again    a second signal ends them at once

uvicorn closes a connection that is idle after an answer. It has no limit for one that never sends a
whole request, nor for one that takes nothing of its answer: `Connection.is_overdue` tells these,
and the server asks it about each connection every second. A client that takes any byte has its
whole time again.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from mstore import Store
from mstore.terms import heap
from mstore.terms.errors import BadRequest, Conflict, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Option, phrase
from mstore_serve.app import OWN_NAMES, App
from mstore_serve.bodies import Threads
from mstore_serve.face import Face
from mstore_serve.http_face import HttpFace
from mstore_serve.s3.face import S3Face
from mstore_serve.serving import PageReader, S3Keys, ServeInfo, described
from mstore_serve.shown import Showing


class Connection(H11Protocol):
    """A connection of uvicorn that knows when something last moved on it."""

    most = 1024
    """How many there may be; a further one is closed at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting_since = self.loop.time()
        self._moved_at = self._waiting_since
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        if len(self.connections) > self.most:
            transport.abort()

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def resume_writing(self) -> None:
        self._moved_at = self.loop.time()
        super().resume_writing()

    def is_overdue(self, seconds: float) -> bool:
        """Return whether nothing moved for so long, while the client was to send or to receive."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._moved_at = unsent, now
        if unsent:
            return now - self._moved_at > seconds
        cycle: RequestResponseCycle | None = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        return not is_answering and now - self._waiting_since > seconds

    def drop(self) -> None:
        """End the connection and forget what is not sent."""
        self.transport.abort()


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEAD_BYTES: Final = 32 << 10
_IDLE_SECONDS: Final = 30
_CONNECTIONS_A_REQUEST: Final = 4
_BACKLOG: Final = 256
_TICKS: Final = 10
_TIDYING_TICKS: Final = 300


@contextmanager
def listen(host: str, port: int, option: str = "port") -> Iterator[socket.socket]:
    """Open a socket at an address of this machine; port 0 is any free one.

    option: what chooses the port, for hints.

    Raises BadRequest, Conflict, Unavailable, StorageFailed.
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadRequest("no such address", where=host) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as opened:
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except OSError as error:
            raise _unbound(error, where, option) from error
        yield opened


def _unbound(error: OSError, where: str, option: str) -> MstoreError:
    if error.errno == errno.EADDRINUSE:
        hint = phrase(
            "{other} chooses another, {free} any free one",
            other=Option(option),
            free=Option(option, 0),
        )
        return Conflict("the port is in use", where=where, hint=hint)
    if error.errno == errno.EADDRNOTAVAIL:
        hint = phrase("{host} listens at all of them", host=Option("host", "0.0.0.0"))  # noqa: S104
        return BadRequest("not an address of this machine", where=where, hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        what = "this user may not listen at this port"
        return Unavailable(what, where=where, hint=Option(option, 8080))
    return StorageFailed(f"cannot listen: {error.strerror}", where=where, errno=error.errno)


class Server(uvicorn.Server):
    """Serves an open store at bound sockets until it is told to stop.

    listening: of the HTTP face; s3: of the S3 face; at least one of them, at one host.
    """

    def __init__(
        self,
        store: Store,
        listening: socket.socket | None,
        s3: socket.socket | None = None,
        *,
        names: Sequence[str],
        most: int,
        timeout: float,
        token: str = "",
        s3_keys: S3Keys | None = None,
        reader: PageReader | None = None,
        on_ready: Callable[[ServeInfo], None] | None,
    ) -> None:
        self._listening = [one for one in (listening, s3) if one is not None]
        self._threads = Threads()
        self._seconds = timeout
        self._on_ready = on_ready
        self._info = described(store, listening, s3)
        own = frozenset(name.lower() for name in names) | OWN_NAMES
        self._showing = Showing(store)
        self._http = HttpFace(store, self._showing, token, reader or PageReader())
        faces: dict[int, Face] = {}
        if listening is not None:
            faces[listening.getsockname()[1]] = self._http
        if s3 is not None:
            faces[s3.getsockname()[1]] = S3Face(self._showing, s3_keys)
        names_here = own if self._info.loopback else None
        app = App(faces, self._threads, most=most, names=names_here)
        kind = type("Connection", (Connection,), {"most": _CONNECTIONS_A_REQUEST * most})
        super().__init__(
            uvicorn.Config(
                app,
                http=kind,
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=[("Server", "mstore")],
                backlog=_BACKLOG,
                timeout_keep_alive=int(min(_IDLE_SECONDS, timeout)),
                timeout_graceful_shutdown=max(1, int(timeout)),
                h11_max_incomplete_event_size=_HEAD_BYTES,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; return when the server has ended and its threads have."""
        heap.keep_freed(one_arena=True)
        try:
            super().run(sockets=self._listening)
        finally:
            self._http.close()
            self._threads.close()
            self._showing.close()

    def stop(self) -> None:
        """Tell the server to end, from any thread; a second time, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready(self._info)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            for one in list(self.server_state.connections):
                if isinstance(one, Connection) and one.is_overdue(self._seconds):
                    one.drop()
        if counter % _TIDYING_TICKS == 0:
            self._threads.put(self._tidied)
        return await super().on_tick(counter)

    def _tidied(self) -> None:
        # What fails now, as where the store is away for a moment, is tried again.
        with suppress(MstoreError, OSError):
            self._showing.tidy()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end: then no end would be a clean one.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # What started this may have it ignore a signal, as nohup does.
        heeded = [one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._heard) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.stop()
