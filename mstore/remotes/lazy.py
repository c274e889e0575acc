"""Blocks of remotes, brought when something reads them.

    where   tables of a remote's packs, as a fetch left them in remotes/NAME/places/
    what    ranges of its packs, joined where a reader says what it needs next, kept in the cache

Nothing of it is believed: whoever reads a block compares it with its id, each time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from threading import Lock
from typing import Final

import msgspec

from mstore.blocks.elsewhere import PartReader, Traffic
from mstore.blocks.packs import PackGone
from mstore.remotes.cache import PartCache
from mstore.remotes.layout import pack_name
from mstore.remotes.objects import Absent
from mstore.remotes.state import Remote
from mstore.terms.errors import MstoreError
from mstore.terms.ids import Buffer, PackId
from mstore.terms.phrases import call, phrase

JOBS: Final = 8
"""Requests at once for what is needed soon."""
_AHEAD_BYTES: Final = 64 << 20
"""Bytes that were asked for ahead and not read yet."""
_REQUEST_BYTES: Final = 4 << 20
_GAP: Final = 64 << 10
"""Bytes between two ranges that are brought, too, rather than asked around."""


class _Span(msgspec.Struct):
    """A range of a pack that was asked for ahead."""

    pack: PackId
    start: int
    end: int
    left: int
    data: Future[Buffer]

    def has(self, pack: PackId, offset: int, length: int) -> bool:
        return self.pack == pack and self.start <= offset and offset + length <= self.end


Opens = Callable[[str], AbstractContextManager[Remote]]
"""Opens a remote by its name."""


class RemoteParts(PartReader):
    """Reads packs of remotes through a cache.  traffic: counts what is brought."""

    def __init__(self, opens: Opens, cache: PartCache) -> None:
        self._opens = opens
        self._cache = cache
        self._lock = Lock()
        self._opening = Lock()
        self._stack = ExitStack()
        self._remotes: dict[str, Remote] = {}
        self._spans: OrderedDict[int, _Span] = OrderedDict()
        self._number = self._held = 0
        self._pool: ThreadPoolExecutor | None = None
        self._process = self._opened_by = 0
        self.traffic = Traffic()

    # -- what --------------------------------------------------------------------------------

    def read(self, name: str, pack: PackId, offset: int, length: int) -> Buffer:
        kept = self._cache.get(pack, offset, length)
        if kept is not None:
            return kept
        data = self._ahead(pack, offset, length)
        if data is None:
            data = self._bring(name, pack, offset, length)
        self._cache.put(pack, offset, data)
        return data

    def forget(self, pack: PackId, offset: int, length: int) -> None:
        self._cache.remove(pack, offset, length)

    def _bring(self, name: str, pack: PackId, offset: int, length: int) -> Buffer:
        """Read a range at the remote."""
        try:
            objects = self._remote(name).objects
            [data] = objects.read_each(pack_name(pack), [(offset, length)])
        except Absent as error:
            raise PackGone(
                f"{name} has removed this pack since the last fetch",
                where=f"{name}: {pack_name(pack)}",
                hint=phrase("{fetch} says what is there now", fetch=call("fetch", name)),
            ) from error
        with self._lock:
            self.traffic.requests += 1
            self.traffic.bytes += length
        return data

    def _remote(self, name: str) -> Remote:
        """Return a remote, opened in this process: connections do not outlive a fork."""
        with self._opening:
            if self._opened_by != os.getpid():
                self._stack, self._opened_by = ExitStack(), os.getpid()
                self._remotes.clear()
            if name not in self._remotes:
                self._remotes[name] = self._stack.enter_context(self._opens(name))
            return self._remotes[name]

    # -- ahead -------------------------------------------------------------------------------

    def will_need(self, name: str, pack: PackId, offset: int, length: int) -> None:
        with suppress(MstoreError, RuntimeError):
            for start, end in self._cache.missing(pack, offset, offset + length):
                for at in range(start, end, _REQUEST_BYTES):
                    self._ask(name, pack, at, min(at + _REQUEST_BYTES, end))

    def _ask(self, name: str, pack: PackId, start: int, end: int) -> None:
        with self._lock:
            if self._process != os.getpid():
                # A forked child has none of its parent's threads.
                self._pool, self._process = ThreadPoolExecutor(JOBS, "bring"), os.getpid()
                self._spans.clear()
                self._held = 0
            if self._span_of(pack, start, end - start) is not None:
                return
            if not self._make_room(end - start):
                return
            assert self._pool is not None
            data = self._pool.submit(self._bring, name, pack, start, end - start)
            self._number += 1
            self._spans[self._number] = _Span(pack, start, end, end - start, data)
            self._held += end - start

    def _make_room(self, size: int) -> bool:
        """Drop what came and was not read, oldest first; return whether there is room."""
        for number, span in list(self._spans.items()):
            if self._held + size <= _AHEAD_BYTES:
                break
            if span.data.done() or span.data.cancel():
                self._drop(number)
        return self._held + size <= _AHEAD_BYTES

    def _span_of(self, pack: PackId, offset: int, length: int) -> int | None:
        found = (number for number, one in self._spans.items() if one.has(pack, offset, length))
        return next(found, None)

    def _drop(self, number: int) -> None:
        span = self._spans.pop(number, None)
        if span is not None:
            self._held -= span.end - span.start

    def _ahead(self, pack: PackId, offset: int, length: int) -> Buffer | None:
        """Return bytes that were asked for ahead; None if they were not, or did not come."""
        with self._lock:
            if self._process != os.getpid():
                return None
            number = self._span_of(pack, offset, length)
            if number is None:
                return None
            span = self._spans[number]
        try:
            data = memoryview(span.data.result()).cast("B")
        except (MstoreError, CancelledError):
            with self._lock:
                self._drop(number)
            return None
        with self._lock:
            span.left -= length
            if span.left <= 0:
                self._drop(number)
        return data[offset - span.start :][:length]

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            is_own = self._process == os.getpid()
            self._spans.clear()
            self._held = 0
        if pool is not None and is_own:
            pool.shutdown(cancel_futures=True)
        with self._opening:
            if self._opened_by == os.getpid():
                self._stack.close()
            self._remotes.clear()
