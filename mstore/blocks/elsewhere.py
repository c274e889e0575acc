"""Blocks that this store does not have, and can read: in packs at other places.

Owns the contract, and the packs of a store that reads so: its own, and those elsewhere. What lies
elsewhere has no row in the index (`blocks.index` asks here where it finds none), is never written
or removed here, and is only looked for by who reads: whoever counts what is stored sees none of it.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Footer, SealedPack
from mstore.terms.ids import Buffer, PackId


class Elsewhere(ABC):
    """Where blocks lie that are not here. Any number of threads may use it.

    A place says where a block was when this was made; whether it still is there shows when it is
    read. Every place can be read: the base of a difference is elsewhere, too.
    """

    @abstractmethod
    def locate(self, blocks: Sequence[bytes], *, alone: bool = False) -> list[Location | None]:
        """Return a place of each block, None for one that is nowhere else. Raises Corrupt.

        alone: only in a form that needs no base.
        """

    @abstractmethod
    def has_pack(self, pack: PackId) -> bool:
        """Return whether places may name this pack."""

    @abstractmethod
    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Return bytes of a pack: those of one or several payloads. Raises as `Packs.read`.

        Also raises Unavailable where the place does not answer, within bounded time.
        """

    @abstractmethod
    def forget(self, pack: PackId, offset: int, length: int) -> None:
        """Let go of kept copies of bytes that did not match their id: the next read asks there."""

    @abstractmethod
    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        """Begin to bring bytes that are read soon; a hint, never an error."""

    @abstractmethod
    def where(self, pack: PackId) -> str:
        """Return how errors call the pack."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads; idempotent."""


class PacksAndElsewhere(Packs):
    """The packs of a directory; for reading, also those elsewhere."""

    def __init__(self, here: Packs, elsewhere: Elsewhere) -> None:
        self._here = here
        self.elsewhere = elsewhere

    def is_elsewhere(self, pack: PackId) -> bool:
        return self.elsewhere.has_pack(pack) and not self._here.is_there(pack)

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        if self.is_elsewhere(pack):
            return self.elsewhere.read(pack, offset, length)
        return self._here.read(pack, offset, length)

    def read_scattered(
        self, pack: PackId, offset: int, targets: Sequence[memoryview], version: int | None = None
    ) -> None:
        if not self.is_elsewhere(pack):
            self._here.read_scattered(pack, offset, targets, version)
            return
        for target in targets:
            target[:] = memoryview(self.elsewhere.read(pack, offset, len(target))).cast("B")
            offset += len(target)

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
        if not self.is_elsewhere(pack):
            return False
        self.elsewhere.forget(pack, offset, length)
        return True

    def where(self, pack: PackId) -> str:
        return (self.elsewhere if self.is_elsewhere(pack) else self._here).where(pack)

    def mapped(self, pack: PackId, is_private: bool) -> mmap.mmap | None:
        return None if self.is_elsewhere(pack) else self._here.mapped(pack, is_private)

    def clone(self, pack: PackId, offset: int, length: int, file: fs.NewFile, at: int) -> bool:
        return not self.is_elsewhere(pack) and self._here.clone(pack, offset, length, file, at)

    def close(self) -> None:
        self._here.close()
        self.elsewhere.close()

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
        return self._here.descriptor(pack)
