"""Deliveries: how the packs of slices come into a merge, here and after an interruption.

Owns what the coordinator does with a pack that a worker delivered, where the inputs lie for
workers, and how the result is published. The merge itself knows none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from mstore.blocks.packs import SealedPack
from mstore.merge.running.leftovers import sound_pack, write_receipt
from mstore.merge.running.slices import Result
from mstore.merge.running.workplace import BlockPlaces, Delivered, InStore, Workplace
from mstore.models.made import Publication
from mstore.store.catalog import Catalog
from mstore.store.leases import PACK
from mstore.store.transaction import Transaction
from mstore.terms.ids import BlockId


class Delivery(ABC):
    """The coordinator's side of a workplace, for one merge. Belongs to one thread.

    places: where the inputs' blocks lie for whoever computes.
    """

    places: BlockPlaces

    @abstractmethod
    def workplace(self, directory: Path) -> Workplace:
        """Return where slices are computed. directory: of the merge's transaction."""

    @abstractmethod
    def keep(self, directory: Path, pack: Delivered, results: Sequence[Result]) -> None:
        """Keep what a slice made, so that an interrupted merge goes on from it."""

    @abstractmethod
    def found(self, receipt: Path) -> Delivered | None:
        """Return the pack of a receipt that an interrupted merge left, if that is sound."""

    def adopt(self, sink: Transaction, pack: Delivered) -> Sequence[BlockId]:
        """Make a pack part of what will be published; return its blocks."""
        assert isinstance(pack, SealedPack)
        sink.adopt(pack)
        return [BlockId(entry.id) for entry in pack.entries]

    @abstractmethod
    def publish(self, publication: Publication) -> int:
        """Publish all, or raise and publish nothing; return the bytes that were written."""


class InStoreDelivery(Delivery):
    """Workers write into the store's own directory, and the store publishes what they wrote."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.places = catalog

    def workplace(self, directory: Path) -> Workplace:
        return InStore(self._catalog.layout.root, directory)

    def keep(self, directory: Path, pack: Delivered, results: Sequence[Result]) -> None:
        assert isinstance(pack, SealedPack)
        write_receipt(pack.path, results)

    def found(self, receipt: Path) -> Delivered | None:
        return sound_pack(receipt.with_suffix(PACK), self._catalog)

    def publish(self, publication: Publication) -> int:
        publication.commit()
        return publication.transaction.bytes_written
