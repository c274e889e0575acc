"""The bytes of one answer, piece by piece, from threads that read to a client that may be slow.

**Memory.** One answer of bytes holds at most two pieces: one that the connection is sending, and
one that was read meanwhile. Nothing is read for a client that has no room. A document is whole in
memory for each answer that sends it; answers share the lists of tensors that are kept. What is
decoded ahead of readers lies in the store's cache of blocks, which has a limit of its own and which
all answers share; the more of them, the less far ahead each is read.

**Threads.** Looking up, making documents, making reports, reading and computing have threads of
their own. So a merge that is computed on read delays no plain file, and neither reads nor long
documents delay the answer that something is not there. A thread serves a piece, never a client. A
long document for which nobody waits any more is not begun.

**Errors.** The first piece is read before the status is sent, so what fails there is an error of
the request. What fails later ends the answer before its announced length, with the connection: no
client can take that for the whole.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.types import Message, Receive, Send

from mstore.terms.errors import Corrupt, MstoreError
from mstore.terms.ids import Buffer
from mstore_serve.ranges import Part, Span, length_of
from mstore_serve.shown import ServedBytes, Shown

PIECE: Final = 1 << 20
"""Bytes that are read and sent at once."""

_AHEAD: Final = 8 << 20
_AHEAD_OF_ALL: Final = 32 << 20
"""Half of the store's cache of blocks: what is decoded ahead must not displace itself."""

_LOOKING: Final = 4
_TELLING: Final = 2
_REPORTING: Final = 1
_COMPUTING: Final = 4

T = TypeVar("T")


class Threads:
    """The threads of a server: those that look up, make documents, read, and compute."""

    def __init__(self) -> None:
        readers = max(4, 2 * len(os.sched_getaffinity(0)))
        self._looking = ThreadPoolExecutor(_LOOKING, "look-up")
        self._telling = ThreadPoolExecutor(_TELLING, "tell")
        self._reporting = ThreadPoolExecutor(_REPORTING, "report")
        self._reading = ThreadPoolExecutor(readers, "read")
        self._computing = ThreadPoolExecutor(_COMPUTING, "compute")

    def look_up(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call that reads the index."""
        return asyncio.get_running_loop().run_in_executor(self._looking, call)

    def tell(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call that makes a document, which may have to read thousands of records."""
        return asyncio.get_running_loop().run_in_executor(self._telling, call)

    def report(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call that may read all weights of a model; one runs at a time."""
        return asyncio.get_running_loop().run_in_executor(self._reporting, call)

    def read(self, source: ServedBytes, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call that reads or computes blocks."""
        pool = self._computing if source.is_computed else self._reading
        return asyncio.get_running_loop().run_in_executor(pool, call)

    def put(self, call: Callable[[], None]) -> None:
        """Start a call for which nobody waits."""
        self._looking.submit(call)

    def close(self) -> None:
        """Wait for the calls that have begun; drop those of reads that have not."""
        for pool in (self._telling, self._reporting, self._reading, self._computing):
            pool.shutdown(cancel_futures=True)
        self._looking.shutdown()


class Ahead:
    """How far ahead of each answer blocks are read and decoded.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers = 0

    def begin(self) -> None:
        """Count one more long answer."""
        with self._lock:
            self._answers += 1

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._answers -= 1

    def window(self) -> int:
        """Return the bytes by which reading may now be ahead of one answer."""
        with self._lock:
            return min(_AHEAD, _AHEAD_OF_ALL // max(1, self._answers))


class _Piece(msgspec.Struct, frozen=True):
    """Bytes to read at once; those up to `end` follow."""

    span: Span
    end: int


class Body:
    """The bytes of one answer: `parts` of what is shown.  Sent once."""

    def __init__(self, shown: Shown, parts: Sequence[Part], threads: Threads, ahead: Ahead) -> None:
        self.length = length_of(parts)
        self._shown = shown
        self._parts = parts
        self._threads = threads
        self._ahead = ahead
        self._prepared = 0

    async def send(self, start: Message, receive: Receive, send: Send) -> None:
        """Send the bytes, and the message `start` before them once the first of them are read.

        Raises what reading raises.  Returns early if the client is gone.
        """
        source = self._shown.source
        pieces = self._cut()
        if source is None or self.length <= PIECE:
            await self._send(start, pieces, None, send)
            return
        release = await self._threads.look_up(source.hold)
        self._ahead.begin()
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await self._send(start, pieces, gone, send)
        finally:
            gone.cancel()
            self._ahead.end()
            self._threads.put(release)

    async def _send(
        self,
        start: Message,
        pieces: Iterator[_Piece | bytes],
        gone: asyncio.Future[None] | None,
        send: Send,
    ) -> None:
        """gone: is done once the client has left; None for an answer too short to ask."""
        piece = next(pieces, b"")
        data = await self._begun(piece)
        await send(start)
        while True:
            # Sends nothing, and returns when the connection has room again.
            await send(_message(b"", more=True))
            if gone is not None and gone.done():
                return
            following = next(pieces, None)
            reading = None if following is None else self._begun(following)
            await send(_message(data, more=reading is not None))
            if reading is None:
                return
            data = await reading

    def _cut(self) -> Iterator[_Piece | bytes]:
        """Yield the parts in pieces."""
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
                continue
            for offset in range(part.start, part.stop, PIECE):
                yield _Piece(Span(offset, min(offset + PIECE, part.stop)), part.stop)

    def _begun(self, piece: _Piece | bytes) -> asyncio.Future[Buffer]:
        """Begin to get the bytes of a piece."""
        source = self._shown.source
        if isinstance(piece, _Piece) and source is not None:
            return self._threads.read(source, partial(self._read, source, piece))
        if isinstance(piece, _Piece):
            piece = self._shown.content[piece.span.start : piece.span.stop]
        known: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        known.set_result(piece)
        return known

    def _read(self, source: ServedBytes, piece: _Piece) -> Buffer:
        if source.prefetch is not None:
            self._prepare(source.prefetch, piece)
        data = source.read(piece.span.start, piece.span.length)
        if len(data) != piece.span.length:
            raise Corrupt(f"{len(data)} bytes at {piece.span.start}, not {piece.span.length}")
        return data

    def _prepare(self, prefetch: Callable[[int, int], None], piece: _Piece) -> None:
        """Have what follows a piece read ahead, half a window at a time."""
        window = self._ahead.window()
        start = max(self._prepared, piece.span.stop)
        stop = min(piece.span.stop + window, piece.end)
        if start < stop and start - piece.span.stop <= window // 2:
            self._prepared = stop
            # What is wrong with these bytes is an error when they are read.
            with suppress(MstoreError, OSError):
                prefetch(start, stop - start)


async def _gone(receive: Receive) -> None:
    """Return when the client has left.  What it may send before is no part of its request."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: asyncio.Future[T], receive: Receive) -> T | None:
    """Return what the work returns; None, and drop it unless it has begun, if the client leaves."""
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()


def _message(data: Buffer, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
