"""Blocks of remotes, brought when something reads them.

    where   tables of a remote's packs, as a fetch left them in remotes/NAME/places/
    what    ranges of its packs, joined where a reader says what it needs next, kept in the cache

Nothing of it is believed: whoever reads a block compares it with its id, each time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Final
from weakref import WeakSet

import msgspec

from mstore.blocks.elsewhere import REQUEST_BYTES, REQUESTS, PartReader, Traffic
from mstore.blocks.packs import PackGone
from mstore.remotes.layout import pack_name
from mstore.remotes.objects import Absent
from mstore.remotes.state import Opens, Remote
from mstore.store.disk_cache import DiskCache, PackPart, gaps
from mstore.terms.errors import MstoreError, RemoteAway, Unavailable
from mstore.terms.ids import Buffer, PackId
from mstore.terms.phrases import call, phrase

_AHEAD_BYTES: Final = 64 << 20
"""Bytes that were asked for ahead and not read yet."""
_GAP: Final = 64 << 10
"""Bytes between two ranges that are brought, too, rather than asked around: at most so many."""
_LONG: Final = 20.0
"""Seconds: a request that fails after so many has met a silent server, and another would, too."""
_WASTE: Final = 16
"""And at most this part of what is asked for: a budget is one of the network, too."""


class _Span(msgspec.Struct, eq=False):
    """A range of a pack that was asked for ahead.  left: bytes that nobody has read yet."""

    name: str
    pack: PackId
    start: int
    end: int
    left: int
    data: Future[Buffer]


class RemoteParts(PartReader):
    """Reads packs of remotes through a cache.  traffic: counts what is brought."""

    def __init__(self, opens: Opens, cache: DiskCache) -> None:
        self._opens = opens
        self._cache = cache
        self.traffic = Traffic()
        self._begin()
        _readers.add(self)

    def _begin(self) -> None:
        """Have no connections and no threads, and nothing under way.

        Also in a forked child: threads and connections are the parent's, and a thread may have held
        a lock at the moment of the fork.
        """
        self._lock = Lock()
        self._opening = Lock()
        self._stack = ExitStack()
        self._remotes: dict[str, Remote] = {}
        self._spans: dict[PackId, list[_Span]] = {}
        self._waiting: deque[_Span] = deque()
        self._held = 0
        self._pool: ThreadPoolExecutor | None = None

    # -- what --------------------------------------------------------------------------------

    def read(self, name: str, pack: PackId, offset: int, length: int) -> Buffer:
        part = PackPart(pack, offset, length)
        kept = self._cache.get(part)
        if kept is not None:
            return kept
        data = self._ahead(pack, offset, length)
        if data is None:
            data = self._bring(name, pack, offset, length)
        self._cache.put(part, data)
        return data

    def is_kept(self, pack: PackId, offset: int, length: int) -> bool:
        return self._cache.has(PackPart(pack, offset, length))

    def forget(self, pack: PackId, offset: int, length: int) -> None:
        self._cache.remove(PackPart(pack, offset, length))

    def _bring(self, name: str, pack: PackId, offset: int, length: int) -> Buffer:
        """Read a range at the remote."""
        try:
            objects = self._remote(name).objects
            [data] = objects.read_each(pack_name(pack), [(offset, length)])
        except Absent as error:
            self._require_root(name)
            raise PackGone(
                f"{name} has removed this pack since the last fetch",
                where=f"{name}: {pack_name(pack)}",
                hint=phrase("{fetch} says what is there now", fetch=call("fetch", name)),
            ) from error
        except Unavailable as error:
            what, where, hint = error.texts
            raise RemoteAway(
                what, where=f"{name}: {where}" if where else name, hint=hint
            ) from error
        with self._lock:
            self.traffic.requests += 1
            self.traffic.bytes += length
        return data

    def _require_root(self, name: str) -> None:
        """Raise RemoteAway if a remote has no root: where nothing is, no pack was removed."""
        try:
            self._remote(name).objects.read_root()
        except (Absent, Unavailable) as error:
            what, where, hint = error.texts
            raise RemoteAway(what, where=f"{name}: {where}", hint=hint) from error

    def _remote(self, name: str) -> Remote:
        """Return a remote, opened once."""
        with self._opening:
            if name not in self._remotes:
                self._remotes[name] = self._stack.enter_context(self._opens(name))
            return self._remotes[name]

    # -- ahead -------------------------------------------------------------------------------

    def will_need(self, name: str, pack: PackId, offset: int, length: int) -> None:
        with suppress(MstoreError, RuntimeError):
            for start, end in self._cache.missing(pack, offset, offset + length):
                self._ask(name, pack, start, end)

    def _ask(self, name: str, pack: PackId, start: int, end: int) -> None:
        """Have threads bring what is not under way of a range, if there is room."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(REQUESTS, "bring")
            under_way = [(one.start, one.end) for one in self._spans.get(pack, ())]
            for begin, stop in gaps(under_way, start, end):
                for at in range(begin, stop, REQUEST_BYTES):
                    last = min(at + REQUEST_BYTES, stop)
                    if not self._make_room(last - at):
                        return
                    self._start(_Span(name, pack, at, last, last - at, Future()))

    def _start(self, span: _Span) -> None:
        assert self._pool is not None
        self._spans.setdefault(span.pack, []).append(span)
        self._waiting.append(span)
        self._held += span.end - span.start
        try:
            self._pool.submit(self._bring_some)
        except BaseException:
            # No thread may come, and nobody may wait for one.
            span.data.cancel()
            self._drop(span)
            raise

    def _bring_some(self) -> None:
        """Bring the range that waits longest, and those near it, in one request."""
        with self._lock:
            some = self._neighbours()
        if not some:
            return
        start, end = some[0].start, max(one.end for one in some)
        began = time.monotonic()
        try:
            data = memoryview(self._bring(some[0].name, some[0].pack, start, end - start)).cast("B")
        except BaseException as error:  # noqa: BLE001 -- who waits for it gets it
            if _is_silent(error, began):
                # Others that wait would ask in vain, one after the other.
                with self._lock:
                    some += self._waiting_for(some[0].name)
            for one in some:
                one.data.set_exception(error)
        else:
            for one in some:
                part = data[one.start - start : one.end - start]
                # A part alone would keep all that came with it in memory.
                one.data.set_result(part if len(some) == 1 else bytes(part))

    def _waiting_for(self, name: str) -> list[_Span]:
        """Take all ranges that wait for a remote."""
        some = [one for one in self._waiting if one.name == name]
        for one in some:
            self._waiting.remove(one)
        return [one for one in some if one.data.set_running_or_notify_cancel()]

    def _neighbours(self) -> list[_Span]:
        """Take the first range that waits and those that are worth one request with it."""
        while self._waiting:
            first = self._waiting.popleft()
            if first.data.set_running_or_notify_cancel():
                break
        else:
            return []
        near, start, end = [first], first.start, first.end
        for one in sorted((o for o in self._waiting if o.pack == first.pack), key=_first):
            gap = min(_GAP, (end - start) // _WASTE)
            is_near = start - gap <= one.end and one.start <= end + gap
            if is_near and max(end, one.end) - min(start, one.start) <= REQUEST_BYTES:
                self._waiting.remove(one)
                if one.data.set_running_or_notify_cancel():
                    near.append(one)
                    start, end = min(start, one.start), max(end, one.end)
        return sorted(near, key=_first)

    def _make_room(self, size: int) -> bool:
        """Drop what came and was not read, oldest first; return whether there is room."""
        for span in [one for some in self._spans.values() for one in some]:
            if self._held + size <= _AHEAD_BYTES:
                break
            if span.data.done():
                self._drop(span)
        return self._held + size <= _AHEAD_BYTES

    def _spans_of(self, pack: PackId, offset: int, length: int) -> list[_Span]:
        """Return what was asked for ahead and has these bytes; nothing if some are lacking.

        No two of them overlap.
        """
        found, end = [], offset + length
        for one in sorted(self._spans.get(pack, ()), key=_first):
            if one.start <= offset < one.end:
                found.append(one)
                offset = one.end
                if offset >= end:
                    return found
        return []

    def _drop(self, span: _Span) -> None:
        some = self._spans.get(span.pack, [])
        if span in some:
            some.remove(span)
            self._held -= span.end - span.start
            if not some:
                del self._spans[span.pack]

    def _ahead(self, pack: PackId, offset: int, length: int) -> Buffer | None:
        """Return bytes that were asked for ahead; None if they were not, or did not come.

        Raises RemoteAway where the remote is silent: another request would wait as long again.
        """
        with self._lock:
            spans = self._spans_of(pack, offset, length)
        parts = []
        for span in spans:
            began = time.monotonic()
            try:
                data = memoryview(span.data.result()).cast("B")
            except Exception as error:  # who reads asks again
                with self._lock:
                    self._drop(span)
                if _is_silent(error, began):
                    raise
                return None
            parts.append(data[max(0, offset - span.start) : offset + length - span.start])
        with self._lock:
            for span, part in zip(spans, parts, strict=True):
                span.left -= len(part)
                if span.left <= 0:
                    self._drop(span)
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            for span in self._waiting:
                span.data.cancel()
            self._waiting.clear()
            self._spans.clear()
            self._held = 0
        if pool is not None:
            # What is under way is not waited for: nobody needs it, and a server may be silent.
            pool.shutdown(wait=False, cancel_futures=True)
        with self._opening:
            self._stack.close()
            self._remotes.clear()


_readers: WeakSet[RemoteParts] = WeakSet()


def _begin_anew() -> None:
    for one in list(_readers):
        one._begin()


os.register_at_fork(after_in_child=_begin_anew)


def _is_silent(error: BaseException, began: float) -> bool:
    """Return whether a remote did not answer for long, since this moment."""
    return isinstance(error, RemoteAway) and time.monotonic() - began > _LONG


def _first(span: _Span) -> int:
    return span.start
