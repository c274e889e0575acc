"""One connection: how many there may be, and which are too slow.

uvicorn closes a connection that is idle after an answer. It has no limit for one that never sends a
whole request, nor for one that takes nothing of its answer: `Connection.is_overdue` tells these,
and the server asks it about each connection every second. A client that takes any byte has its
whole time again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


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
