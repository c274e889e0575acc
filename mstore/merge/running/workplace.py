"""Workplaces: where slices are computed, and how the packs that they make come into the merge.

Owns both sides of it. A worker enters a `Workplace`, which travels with its slice: there it reads
packs, has a directory for the one that it writes, and delivers that. The coordinator, the process
that called, has a `Delivery`: it says where the inputs lie for the workers, and takes what they
delivered.

Here, both are the store's own directory, which the workers must see. `mstore.clusters` has those of
remotes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import PackReads
from mstore.blocks.packs import SealedPack, SentPack
from mstore.merge.planning.costs import Lengths
from mstore.terms.errors import MstoreError, Unavailable
from mstore.terms.ids import BlockId
from mstore.terms.phrases import Option, Text, phrase

Delivered = SealedPack | SentPack
"""A pack as its worker left it: a file that the coordinator sees, or an object at a remote."""


class Bench(ABC):
    """An entered workplace, of one slice.

    packs: of the inputs. directory: for a pack being written; the worker's alone, or its name is.
    is_scratch: whether what is written there is only copied from there.
    """

    packs: PackReads
    directory: Path
    is_scratch: bool = False

    def deliver(self, pack: SealedPack) -> Delivered:
        """Leave a pack where the coordinator finds it. Raises StorageFailed, Unavailable."""
        return pack


class Workplace(ABC):
    """Where a slice is computed. It is pickled: it names things, and holds nothing and no secret.

    Values: equal workplaces are one place.
    """

    @abstractmethod
    def entered(self) -> AbstractContextManager[Bench]:
        """Open it. Raises NotFound, StorageFailed, Unavailable, Incompatible."""

    @abstractmethod
    def check(self) -> None:
        """Raise what a worker would meet that cannot read or write here."""

    @abstractmethod
    def hint(self) -> Text:
        """Return what to do for a worker that cannot."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes that are free for packs being written; 0 if that is unknown."""


class BlockPlaces(Lengths, Protocol):
    """Where blocks lie for who reads them: the catalog says it of the store."""

    def locate_with_bases(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        """Locate blocks, and those that they are differences to. Raises Corrupt, Conflict."""


@dataclass(frozen=True)
class InStore(Workplace):
    """The directory of a store, for packs to read, and one in it, for packs to write."""

    store: Path
    directory: Path

    @contextmanager
    def entered(self) -> Iterator[Bench]:
        # In a process of its own, nobody else has the store open.
        with closing(fs.Root(self.store)), closing(PackFiles(self.store / "packs")) as packs:
            yield _StoreBench(packs, self.directory)

    def check(self) -> None:
        for path in (self.store / "packs", self.directory):
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                what = "cannot be written" if path.is_dir() else "there is no such directory"
                raise Unavailable(what, where=str(path))

    def hint(self) -> Text:
        return phrase(
            "workers need the store's directory, or a remote in its place: {remote}",
            remote=Option("remote", "NAME"),
        )

    def free_bytes(self) -> int:
        with suppress(MstoreError, OSError):
            return fs.free_bytes(self.directory)
        return 0


class _StoreBench(Bench):
    def __init__(self, packs: PackReads, directory: Path) -> None:
        self.packs = packs
        self.directory = directory
