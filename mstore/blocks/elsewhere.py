"""Blocks that this store does not have, and can read: in packs of remotes.

Owns where they lie, the contract of who reads there (`mstore.remotes.lazy` does), and the packs of
a store that reads so: its own, and those elsewhere.

What lies elsewhere has no row in the index (`blocks.index` asks here where it finds none), is never
written or removed here, and is only looked for by who reads: whoever counts what is stored sees
none of it.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.pack_store import PackReads, Packs
from mstore.blocks.packs import NO_BASE, Footer, Kind, PackGone, SealedPack
from mstore.blocks.segments import LIST, Found, Segments
from mstore.terms.errors import RemoteAway
from mstore.terms.ids import Buffer, PackId
from mstore.terms.phrases import call

REQUESTS: Final = 32
"""Requests at once for what is needed soon."""
REQUEST_BYTES: Final = 2 << 20
"""Bytes of one request at most: smaller ones keep all connections busy, each at its own pace."""


class Traffic(msgspec.Struct):
    """What a reader has brought: requests, and bytes."""

    requests: int = 0
    bytes: int = 0


class PartReader(ABC):
    """Reads packs of other places. Any number of threads may use it."""

    traffic: Traffic
    """What it has brought until now."""

    @abstractmethod
    def read(self, name: str, pack: PackId, offset: int, length: int) -> Buffer:
        """Return bytes of a pack that the remote `name` has: those of one or several payloads.

        Raises PackGone where the remote has removed it, and RemoteAway where it does not answer,
        within bounded time.
        """

    @abstractmethod
    def is_kept(self, pack: PackId, offset: int, length: int) -> bool:
        """Return whether a read of this payload would probably bring nothing."""

    @abstractmethod
    def forget(self, pack: PackId, offset: int, length: int) -> None:
        """Let go of kept copies of bytes that did not match their id: the next read asks there."""

    @abstractmethod
    def will_need(self, name: str, pack: PackId, offset: int, length: int) -> None:
        """Begin to bring bytes that are read soon; a hint, never an error."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads; idempotent."""


class KnownPlaces:
    """Where a remote's packs have blocks and records, as their tables say. For one thread.

    there: the packs that count.
    """

    def __init__(self, segments: Segments, there: Container[bytes]) -> None:
        self._segments = segments
        self._there = there

    def locate(self, kind: Kind, ids: Sequence[bytes]) -> list[Location | None]:
        """Return where the remote has each of these, readable; None for what it does not have.

        A difference is readable if the remote has its base in a form that needs none.
        """
        found = self._segments.locations(kind, b"".join(ids))
        found = [
            at if at is None or at.pack in self._there else self._other(kind, id)
            for id, at in zip(ids, found, strict=True)
        ]
        bases = list(dict.fromkeys(at.base for at in found if at and at.base != NO_BASE))
        if not bases:
            return found
        lost = {base for base, at in zip(bases, self.alone(bases), strict=True) if at is None}
        return [
            self._readable(id) if at is not None and at.base in lost else at
            for id, at in zip(ids, found, strict=True)
        ]

    def found(self, blocks: Sequence[bytes]) -> Found:
        """Return what `locate` does of blocks, as arrays; of packs, all that have a table count."""
        found = self._segments.found(Kind.BLOCK, b"".join(blocks))
        bases = found.bases()
        alone = self._segments.found(Kind.BLOCK, b"".join(bases)).is_alone.tolist()
        doubtful = [base for base, is_alone in zip(bases, alone, strict=True) if not is_alone]
        places = zip(doubtful, self.alone(doubtful), strict=True)
        lost = {base for base, at in places if at is None}
        if lost:
            for number, base in enumerate(found.base.tolist()):
                if base in lost and found.stored[number] >= 0:
                    found.put_one(number, self._readable(blocks[number]))
        return found

    def _other(self, kind: Kind, id: bytes) -> Location | None:
        places = self._segments.places(kind, id)
        return next((at for at in places if at.pack in self._there), None)

    def _readable(self, block: bytes) -> Location | None:
        for at in self._segments.places(Kind.BLOCK, block):
            if at.pack in self._there and (at.base == NO_BASE or self.alone([at.base])[0]):
                return at
        return None

    def alone(self, blocks: Sequence[bytes]) -> list[Location | None]:
        """Return where the remote has each block in a form that needs no base: it can be one."""
        found = self._segments.locations(Kind.BLOCK, b"".join(blocks))
        return [
            at if at is None or self._is_alone(at) else self._other_alone(id)
            for id, at in zip(blocks, found, strict=True)
        ]

    def _is_alone(self, at: Location) -> bool:
        return at.pack in self._there and at.base == NO_BASE

    def _other_alone(self, block: bytes) -> Location | None:
        return next(filter(self._is_alone, self._segments.places(Kind.BLOCK, block)), None)


class _PacksOf(Container[bytes]):
    """The packs of segments. To open these takes no time: each pack is looked for once."""

    def __init__(self, segments: Segments | None) -> None:
        self._segments = segments
        self._known: dict[bytes, bool] = {}

    def __contains__(self, pack: object) -> bool:
        if self._segments is None or not isinstance(pack, bytes):
            return False
        known = self._known.get(pack)
        if known is None:
            known = self._known[pack] = self._segments.has_pack(PackId(pack))
        return known


class _Remote:
    """The tables of one remote's packs, as a fetch left them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._seen: object = None
        self._places: KnownPlaces | None = None
        self.packs = _PacksOf(None)

    def follow(self) -> KnownPlaces | None:
        """Return what the tables say; opens them again if a fetch has changed them."""
        try:
            status = os.stat(self.directory / LIST)
        except OSError:
            self._places, self.packs, self._seen = None, _PacksOf(None), None
            return None
        seen = status.st_mtime_ns, status.st_ino, status.st_size
        if seen != self._seen:
            segments = Segments(self.directory)
            self.packs, self._seen = _PacksOf(segments), seen
            self._places = KnownPlaces(segments, self.packs)
        return self._places


class RemoteBlocks(PackReads):
    """Where blocks lie that are not here: in packs of remotes, whose tables are here.

    remotes: names, and directories of tables (`blocks.segments`). A place says where a block was at
    the last fetch; whether it still is there shows when it is read. Of several places that of the
    first remote counts. Every place can be read: the base of a difference is there, too.
    """

    def __init__(self, remotes: Sequence[tuple[str, Path]]) -> None:
        self._remotes = [_Remote(name, directory) for name, directory in remotes]
        self._lock = Lock()
        self.reader: PartReader | None = None
        """Reads there; None: nothing does, and what is not here cannot be read."""

    def follow(self, remotes: Sequence[tuple[str, Path]]) -> None:
        """Look at these remotes from now on; what is known of those that stay is kept."""
        with self._lock:
            known = {(one.name, one.directory): one for one in self._remotes}
            self._remotes = [known.get(one) or _Remote(*one) for one in remotes]

    def locate(self, blocks: Sequence[bytes], *, alone: bool = False) -> list[Location | None]:
        """Return a place of each block, None for one that is nowhere else. Raises Corrupt.

        alone: only in a form that needs no base.
        """
        found: list[Location | None] = [None] * len(blocks)
        with self._lock:
            for remote in self._remotes:
                left = [at for at, place in enumerate(found) if place is None]
                places = remote.follow() if left else None
                if places is None:
                    continue
                ids = [blocks[at] for at in left]
                there = places.alone(ids) if alone else places.locate(Kind.BLOCK, ids)
                for at, place in zip(left, there, strict=True):
                    found[at] = place
        return found

    def name_of(self, pack: PackId) -> str | None:
        """Return the remote that has a pack; None if none has."""
        return next((one.name for one in self._remotes if pack in one.packs), None)

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Return bytes of a pack. Raises as `PartReader.read`, RemoteAway if nothing reads."""
        name = self.name_of(pack)
        if name is None:
            raise PackGone("no remote has this pack", where=f"pack {pack}", hint=call("remotes"))
        if self.reader is None:
            raise RemoteAway(
                f"this block is only at {name}, and nothing here reads there",
                where=f"pack {pack}",
                hint=call("prefetch", "REF"),
            )
        return self.reader.read(name, pack, offset, length)

    def is_kept(self, at: Location) -> bool:
        """Return whether a payload elsewhere is at hand; see `PartReader.is_kept`."""
        return self.reader is not None and self.reader.is_kept(at.pack, at.offset, at.stored_length)

    def forget(self, pack: PackId, offset: int, length: int) -> bool:
        if self.reader is not None:
            self.reader.forget(pack, offset, length)
        return True

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        name = self.name_of(pack)
        if name is not None and self.reader is not None:
            self.reader.will_need(name, pack, offset, length)

    def where(self, pack: PackId) -> str:
        """Return how errors call a pack."""
        return f"pack {pack} of {self.name_of(pack)}"


class PacksAndRemotes(Packs):
    """The packs of a directory; for reading, also those elsewhere."""

    def __init__(self, here: Packs, elsewhere: RemoteBlocks) -> None:
        self._here = here
        self.elsewhere = elsewhere

    def is_elsewhere(self, pack: PackId) -> bool:
        return self.elsewhere.name_of(pack) is not None and not self._here.is_there(pack)

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        if self.is_elsewhere(pack):
            return self.elsewhere.read(pack, offset, length)
        return self._here.read(pack, offset, length)

    def read_scattered(
        self, pack: PackId, offset: int, targets: Sequence[memoryview], version: int | None = None
    ) -> None:
        if self.is_elsewhere(pack):
            self.elsewhere.read_scattered(pack, offset, targets)
        else:
            self._here.read_scattered(pack, offset, targets, version)

    def read_each(self, pack: PackId, places: Iterable[tuple[int, int]]) -> Iterator[Buffer]:
        if not self.is_elsewhere(pack):
            yield from self._here.read_each(pack, places)
            return
        for offset, length in places:
            yield self.elsewhere.read(pack, offset, length)

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        there = self.elsewhere if self.is_elsewhere(pack) else self._here
        there.will_need(pack, offset, length)

    def version(self, pack: PackId) -> int:
        return 0 if self.is_elsewhere(pack) else self._here.version(pack)

    def forget(self, pack: PackId, offset: int, length: int) -> bool:
        return self.is_elsewhere(pack) and self.elsewhere.forget(pack, offset, length)

    def where(self, pack: PackId) -> str:
        return (self.elsewhere if self.is_elsewhere(pack) else self._here).where(pack)

    def mapped(self, pack: PackId, is_private: bool) -> mmap.mmap | None:
        return None if self.is_elsewhere(pack) else self._here.mapped(pack, is_private)

    def clone(self, pack: PackId, offset: int, length: int, file: fs.NewFile, at: int) -> bool:
        return not self.is_elsewhere(pack) and self._here.clone(pack, offset, length, file, at)

    def close(self) -> None:
        self._here.close()

    # -- only here ---------------------------------------------------------------------------

    def is_there(self, pack: PackId) -> bool:
        return self._here.is_there(pack)

    def table(self, pack: PackId) -> Footer:
        return self._here.table(pack)

    def put(self, packs: Sequence[SealedPack]) -> None:
        self._here.put(packs)

    def listed(self) -> Iterator[PackId]:
        return self._here.listed()

    def remove(self, pack: PackId) -> None:
        self._here.remove(pack)

    def size(self, pack: PackId) -> int:
        return self._here.size(pack)

    def dead_bytes(self, pack: PackId, rows: int, stored: int) -> int:
        return self._here.dead_bytes(pack, rows, stored)

    def forget_removed(self) -> None:
        self._here.forget_removed()

    def strays(self) -> Iterator[str]:
        return self._here.strays()

    def free_bytes(self) -> int:
        return self._here.free_bytes()

    def move_out(self, packs: Sequence[PackId], directory: Path) -> Sequence[PackId]:
        return self._here.move_out(packs, directory)

    def descriptor(self, pack: PackId) -> int:
        return super().descriptor(pack) if self.is_elsewhere(pack) else self._here.descriptor(pack)
