"""Memory for one block in each thread: what is reused stays in the processor's cache."""

from __future__ import annotations

from threading import local


class Room:
    """Memory that every thread has of its own, of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = local()

    def __call__(self, length: int) -> memoryview:
        """Return the calling thread's first `length` bytes: valid until it asks again."""
        room: memoryview | None = getattr(self._own, "room", None)
        if room is None:
            room = self._own.room = memoryview(bytearray(self._size))
        return room[:length]
