"""Blocks of remotes, brought when something reads them.

    where   tables of a remote's packs, as a fetch left them in remotes/NAME/places/
    what    ranges of its packs, joined where a reader says what it needs next, kept in the cache

Nothing of it is believed: whoever reads a block compares it with its id, each time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from mstore.blocks.elsewhere import Elsewhere
from mstore.blocks.location import Location
from mstore.blocks.packs import Kind, PackGone
from mstore.blocks.segments import LIST, Segments
from mstore.remotes.cache import PartCache
from mstore.remotes.layout import pack_name
from mstore.remotes.objects import Absent
from mstore.remotes.places import KnownPlaces, directory_of
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


class Traffic(msgspec.Struct):
    """What came over the network since the store was opened."""

    requests: int = 0
    bytes: int = 0


class _Span(msgspec.Struct):
    """A range of a pack that was asked for ahead."""

    pack: PackId
    start: int
    end: int
    left: int
    data: Future[Buffer]

    def has(self, pack: PackId, offset: int, length: int) -> bool:
        return self.pack == pack and self.start <= offset and offset + length <= self.end


class _Source:
    """What is known of one remote, and its connection once something is read there."""

    def __init__(self, name: str, directory: Path, opened: _Opens) -> None:
        self.name = name
        self._directory = directory_of(directory)
        self._opened = opened
        self._lock = Lock()
        self._seen: object = None
        self._places: KnownPlaces | None = None
        self.packs: frozenset[PackId] = frozenset()
        self._process = 0
        self._stack = ExitStack()
        self._remote: Remote | None = None

    def locate(self, blocks: Sequence[bytes], *, alone: bool) -> list[Location | None]:
        with self._lock:
            self.follow()
            if self._places is None:
                return [None] * len(blocks)
            if alone:
                return self._places.alone(blocks)
            return self._places.locate(Kind.BLOCK, blocks)

    def follow(self) -> None:
        """Open the tables again if a fetch has changed them."""
        try:
            status = os.stat(self._directory / LIST)
        except OSError:
            self._places, self.packs, self._seen = None, frozenset(), None
            return
        seen = status.st_mtime_ns, status.st_ino, status.st_size
        if seen != self._seen:
            segments = Segments(self._directory)
            self._places = KnownPlaces(segments)
            self.packs, self._seen = frozenset(segments.packs()), seen

    def remote(self) -> Remote:
        """Return the remote, opened in this process."""
        with self._lock:
            if self._remote is None or self._process != os.getpid():
                # A forked child leaves what its parent opened alone.
                self._stack, self._process = ExitStack(), os.getpid()
                self._remote = self._stack.enter_context(self._opened(self.name))
            return self._remote

    def close(self) -> None:
        with self._lock:
            if self._process == os.getpid():
                self._stack.close()
            self._remote = None


_Opens = Callable[[str], AbstractContextManager[Remote]]
"""Opens a remote by its name."""


class RemoteBlocks(Elsewhere):
    """The blocks of some remotes, of the first that has one.

    remotes: their names, and where what is kept of each is. traffic: counts what is brought.
    """

    def __init__(
        self, remotes: Sequence[tuple[str, Path]], opened: _Opens, cache: PartCache
    ) -> None:
        self._sources = [_Source(name, directory, opened) for name, directory in remotes]
        self._cache = cache
        self._lock = Lock()
        self._spans: OrderedDict[int, _Span] = OrderedDict()
        self._number = self._held = 0
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self.traffic = Traffic()

    # -- where -------------------------------------------------------------------------------

    def locate(self, blocks: Sequence[bytes], *, alone: bool = False) -> list[Location | None]:
        found: list[Location | None] = [None] * len(blocks)
        for source in self._sources:
            left = [at for at, place in enumerate(found) if place is None]
            if not left:
                break
            there = source.locate([blocks[at] for at in left], alone=alone)
            for at, place in zip(left, there, strict=True):
                found[at] = place
        return found

    def has_pack(self, pack: PackId) -> bool:
        return any(pack in source.packs for source in self._sources)

    def name_of(self, pack: PackId) -> str:
        """Return the remote that has a pack; empty if none has."""
        return next((one.name for one in self._sources if pack in one.packs), "")

    def where(self, pack: PackId) -> str:
        return f"{self.name_of(pack)}: {pack_name(pack)}"

    # -- what --------------------------------------------------------------------------------

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        kept = self._cache.get(pack, offset, length)
        if kept is not None:
            return kept
        data = self._ahead(pack, offset, length)
        if data is None:
            data = self._bring(pack, offset, length)
        self._cache.put(pack, offset, data)
        return data

    def forget(self, pack: PackId, offset: int, length: int) -> None:
        self._cache.remove(pack, offset, length)

    def _bring(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Read a range at the remote that has the pack."""
        for source in self._sources:
            if pack not in source.packs:
                continue
            try:
                [data] = source.remote().objects.read_each(pack_name(pack), [(offset, length)])
            except Absent as error:
                raise PackGone(
                    f"{source.name} has removed this pack since the last fetch",
                    where=f"{source.name}: {pack_name(pack)}",
                    hint=phrase("{fetch} says what is there now", fetch=call("fetch", source.name)),
                ) from error
            with self._lock:
                self.traffic.requests += 1
                self.traffic.bytes += length
            return data
        raise PackGone("no remote has this pack", where=pack_name(pack), hint=call("remotes"))

    # -- ahead -------------------------------------------------------------------------------

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        with suppress(MstoreError, RuntimeError):
            for start, end in self._cache.missing(pack, offset, offset + length):
                for at in range(start, end, _REQUEST_BYTES):
                    self._ask(pack, at, min(at + _REQUEST_BYTES, end))

    def _ask(self, pack: PackId, start: int, end: int) -> None:
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
            data = self._pool.submit(self._bring, pack, start, end - start)
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
        for source in self._sources:
            source.close()
