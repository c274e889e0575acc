"""Objects that send and receive at most so many bytes a second, all threads together.

Owns when the next piece may go. A piece goes when its time at this rate has passed, so at no moment
has more gone than the rate allows since the first. Roots are not counted, nor what HTTP adds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from mstore.remotes.objects import PIECE_BYTES, Listed, Objects, RootStamp
from mstore.store.ahead import in_groups
from mstore.terms.errors import BadRequest, Interrupted
from mstore.terms.ids import Buffer
from mstore.terms.phrases import Text

_LEAST_READ: Final = 64 << 10
"""Bytes of a request: below that, most of the time is answers."""


class RateLimit:
    """When the next bytes may go.

    rate: bytes a second, 1 or more. clock: seconds. sleep: waits for so many seconds, less if the
    limit was ended; then it returns True. Any number of threads may use it.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        if rate < 1:
            raise BadRequest(f"a rate is 1 byte a second or more, not {rate}")
        self.rate = rate
        self._clock = clock
        self._ended = threading.Event()
        self._sleep = sleep or self._ended.wait
        self._lock = threading.Lock()
        self._free = 0.0
        """When all bytes that were asked for have had their time."""

    def wait(self, size: int) -> None:
        """Return when so many bytes may go.  Raises Interrupted if the limit was ended."""
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now) + size / self.rate
            seconds = self._free - now
        if self._sleep(seconds):
            raise Interrupted("the transfer was ended")

    def end(self) -> None:
        """Let all who wait, or will, raise Interrupted."""
        self._ended.set()


class LimitedObjects(Objects):
    """The objects of another place, within a limit."""

    def __init__(self, objects: Objects, limit: RateLimit) -> None:
        self._objects = objects
        self._limit = limit
        # About a second's: so progress is steady at low rates, and nobody waits for long.
        self._most_read = min(max(limit.rate, _LEAST_READ), PIECE_BYTES)
        self.where = objects.where

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        return self._objects.read_root(known)

    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        return self._objects.swap_root(data, before)

    def probe(self, name: str) -> None:
        self._objects.probe(name)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        for some in in_groups(spans, lambda span: span[1], self._most_read):
            size = sum(length for _, length in some)
            if size > self._most_read:
                found.append(self._in_parts(name, *some[0]))
                continue
            self._limit.wait(size)
            found += self._objects.read_each(name, some)
        return found

    def _in_parts(self, name: str, offset: int, length: int) -> Buffer:
        data = bytearray()
        while len(data) < length:
            part = min(self._most_read, length - len(data))
            self._limit.wait(part)
            data += self._objects.read_each(name, [(offset + len(data), part)])[0]
        return data

    def size(self, name: str) -> int:
        return self._objects.size(name)

    def time_ns(self, name: str) -> int:
        return self._objects.time_ns(name)

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        def in_time() -> Iterator[Buffer]:
            for piece in pieces:
                self._limit.wait(len(piece))
                yield piece

        self._objects.put(name, size, in_time(), jobs=jobs)

    def names(self, below: str) -> Iterator[Listed]:
        return self._objects.names(below)

    def remove(self, name: str) -> None:
        self._objects.remove(name)

    def require_writable(self) -> None:
        self._objects.require_writable()

    def how_to_begin(self, name: str) -> Text:
        return self._objects.how_to_begin(name)

    def wake(self) -> None:
        self._limit.end()

    def close(self) -> None:
        self._objects.close()


def limited(objects: Objects, rate: int | None) -> Objects:
    """Return these objects within a limit of bytes a second; None is none.  Raises BadRequest."""
    return objects if rate is None else LimitedObjects(objects, RateLimit(rate))
