"""Packs: where the packs of a store are kept. Owns the contract, and what follows from it.

`blocks.pack_files` keeps packs in a directory; the bytes of a pack are `blocks.packs`'s.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from mstore import fs
from mstore.blocks.packs import Footer, PackGone, SealedPack
from mstore.terms.errors import Corrupt, Incompatible, Unavailable
from mstore.terms.ids import Buffer, PackId

HERE: Final = 0
"""The place of packs that lie in the store's own directory."""


class PackReads(ABC):
    """Packs of one place, to read: all that who computes a slice of a merge needs.

    A pack never changes under its name, and no name comes twice. So any part may be read at any
    time, by any number of threads and processes, and what was read may be kept.

    A read returns exactly the bytes that were asked for, or raises: PackGone for a pack that is not
    there, Corrupt for a place that the pack does not have, Unreadable if the place has lost the
    bytes, StorageFailed if this machine cannot read now. The bytes are not trusted: whoever reads
    checks them against an id.
    """

    @abstractmethod
    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Return `length` bytes of the pack at `offset`."""

    def read_scattered(
        self, pack: PackId, offset: int, targets: Sequence[memoryview], version: int | None = None
    ) -> None:
        """Fill targets with adjacent bytes of the pack. Raises as `read`.

        version: the bytes to read, as `version` gave it; Outdated if these are others now.
        """
        for target in targets:
            target[:] = memoryview(self.read(pack, offset, len(target))).cast("B")
            offset += len(target)

    def will_need(self, pack: PackId, offset: int, length: int) -> None:  # noqa: B027 -- advice
        """Say that these bytes will be read soon; advice only, never an error."""

    def forget(self, pack: PackId, offset: int, length: int) -> bool:
        """Let go of copies of bytes that were damaged; return whether another read may differ."""
        return False


class Packs(PackReads):
    """Packs that are kept at one place: this disk, another one, a bucket.

    *Read.* As `PackReads` says.

    *Put.* After `put` the packs are there, whole, also after a power loss. Before it returns, or
    when it raises StorageFailed, each of them is there whole, or not at all. Nobody but the holder
    of the writer lock puts packs, and he wrote their lines before (`mstore.store.pack_list`).

    *List.* `listed` yields every pack that was put and not removed, sorted; of packs that come and
    go meanwhile, some. If a part cannot be listed, it raises StorageFailed.

    *Remove.* After `remove` the pack is not there, also after a power loss: its line in the list
    goes next. A missing one is no error. Whoever reads it then gets its bytes, or PackGone.

    After `close`, which waits for running reads, each read raises Unavailable. Mapping, cloning,
    descriptors and moving out are abilities that a place may lack.
    """

    # -- what each place does in its own way -------------------------------------------------

    @abstractmethod
    def table(self, pack: PackId) -> Footer:
        """Return what header and footer of the pack say, checked against hash, size and name.

        Raises as `read`; Incompatible for a later version of packs.
        """

    @abstractmethod
    def put(self, packs: Sequence[SealedPack]) -> None:
        """Keep these packs. Their files under temporary names are gone afterwards."""

    @abstractmethod
    def listed(self) -> Iterator[PackId]:
        """Yield the id of every pack, sorted."""

    @abstractmethod
    def remove(self, pack: PackId) -> None:
        """Remove a pack. Raises StorageFailed."""

    @abstractmethod
    def size(self, pack: PackId) -> int:
        """Return the bytes of the pack, whole or not. Raises PackGone, StorageFailed."""

    @abstractmethod
    def where(self, pack: PackId) -> str:
        """Return how errors and reports call the pack: its path, say."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open; idempotent."""

    # -- what follows, and what a place may do better ----------------------------------------

    def is_there(self, pack: PackId) -> bool:
        """Return whether the pack is there; reads none of it. Raises StorageFailed if unknown."""
        return pack in self.listed()

    @abstractmethod
    def read_each(self, pack: PackId, places: Iterable[tuple[int, int]]) -> Iterator[Buffer]:
        """Yield the bytes of each (offset, length); fewer where the pack ends. Raises as `read`."""

    def dead_bytes(self, pack: PackId, rows: int, stored: int) -> int:
        """Return payload bytes beyond those of `rows` live entries of `stored` bytes in all."""
        entries = self.table(pack).entries
        return max(0, sum(entry.stored_length for entry in entries) - stored)

    def version(self, pack: PackId) -> int:
        """Return a number that changes when the pack's name leads to other bytes, as by a repair.

        Raises PackGone, StorageFailed.
        """
        if not self.is_there(pack):
            raise PackGone("the pack is missing", where=self.where(pack))
        return 0

    def forget_removed(self) -> None:
        """Let go of packs that were removed, so that their space is freed."""

    def strays(self) -> Iterator[str]:
        """Yield what lies among the packs and is none, as reports call it."""
        return iter(())

    def free_bytes(self) -> int:
        """Return how many bytes of packs may be put. Raises StorageFailed."""
        return 1 << 62

    def is_elsewhere(self, pack: PackId) -> bool:
        """Return whether reads of this pack go elsewhere (`blocks.elsewhere`)."""
        return False

    # -- abilities ---------------------------------------------------------------------------

    def mapped(self, pack: PackId, is_private: bool) -> mmap.mmap | None:
        """Map a whole pack, read-only; None where packs cannot be mapped.

        is_private: writable, and what is written stays in memory. The mapping outlives this object
        and the pack's name. Raises PackGone, OSError.
        """
        return None

    def clone(self, pack: PackId, offset: int, length: int, file: fs.NewFile, at: int) -> bool:
        """Let bytes of a new file, from `at` on, be extents of the pack; return whether they are.

        Raises PackGone, and as `NewFile.clone` does.
        """
        return False

    def move_out(self, packs: Sequence[PackId], directory: Path) -> Sequence[PackId]:
        """Move packs into a directory of this disk, durably; return those that could be moved."""
        return ()

    def descriptor(self, pack: PackId) -> int:
        """Return an open descriptor of the pack's file, which the caller closes.

        Raises Unavailable where packs are no files; as `read`.
        """
        raise Unavailable("packs of this place are no files", where=self.where(pack))


def is_whole(packs: Packs, pack: PackId, size: int) -> bool:
    """Return whether the whole pack is there, by size, header and footer. Raises StorageFailed."""
    try:
        return packs.table(pack).size == size
    except Corrupt:
        return False


class Places(dict[int, Packs]):
    """The packs of each place that is known, by its number in the index."""

    def __missing__(self, place: int) -> Packs:
        raise unknown_place(place)


def unknown_place(place: int) -> Incompatible:
    """Return the error for a pack at a place that this version does not know."""
    return Incompatible(
        "a pack lies where this mstore cannot read",
        where=f"place {place}",
        hint="pip install -U mstore",
    )
