"""Copying payloads out of packs, in their stored form, after checking each.

Neighbours stay neighbours, and raw runs keep their alignment within a page. A payload that does not
match its id is not copied: its row and its pack stay. The copies lie in the directory of a lease
until they are published.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

from mstore.blocks.location import Key, Location, Row
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.reader import BlockReader, decoded, verify
from mstore.store.catalog import Catalog
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.ids import BlockId, Buffer
from mstore.upkeep.check.findings import typed_id
from mstore.upkeep.gc.survey import Place
from mstore.upkeep.reachability import Inventory


class Copies:
    """Packs of copies. Belongs to one thread.

    rows: each row as it was when its payload was copied, also for a pack that was not sealed.
    """

    def __init__(
        self,
        catalog: Catalog,
        inventory: Inventory,
        directory: Path,
        *,
        max_pack: int = MAX_PACK_BYTES,
    ) -> None:
        self._catalog = catalog
        self._reader = BlockReader(catalog.packs, catalog.block_size)
        self._inventory = inventory
        self.packs = NewPacks(catalog, directory, prefix="c", max_pack=max_pack)
        self.rows: dict[Key, Row] = {}
        self.left: list[str] = []
        self.ran_out = False

    def copy(self, places: Iterable[Place], tick: Callable[[int], None]) -> None:
        """Copy the payloads at these places, and seal.

        A full disk ends this early, without an error: `ran_out` is then True.
        """
        try:
            for place in places:
                tick(self._copy(place))
            self.packs.seal()
        except StorageFailed as error:
            self.packs.abandon()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.ran_out = True
            self.left.append("the disk is full: not all packs could be rewritten")
        except BaseException:
            self.packs.abandon()
            raise

    @property
    def copied_bytes(self) -> int:
        """Payload bytes in the sealed packs."""
        return sum(entry.stored_length for pack in self.packs.sealed for entry in pack.entries)

    def _copy(self, place: Place) -> int:
        table = self._inventory.tables[place.kind]
        id, row = table.id(place.row), table.row(place.row)
        location = self._inventory.location(table, place.row)
        length = location.stored_length
        if row is None:
            self.left.append(f"{place.kind.name.lower()} {id.hex()}: its base is missing")
            return length
        try:
            payload = self._payload(place.kind, id, location)
        except Corrupt as error:
            self.left.append(f"{place.kind.name.lower()} {id.hex()}: {error.what}")
            return length
        self.packs.copy((place.kind, id), location, payload)
        self.rows[place.kind, id] = row
        return length

    def _payload(self, kind: Kind, id: bytes, location: Location) -> Buffer:
        """Return the stored bytes, after checking them against the id."""
        if kind != Kind.BLOCK:
            return self._catalog.record_bytes(typed_id(kind, id), location)
        block = BlockId(id)
        payload = self._reader.payload(block, location)
        base: Buffer | None = None
        if location.base != NO_BASE:
            base = memoryview(bytearray(location.raw_length))
            [lies] = self._catalog.locate([BlockId(location.base)])
            self._catalog.read_block_into(BlockId(location.base), lies, base)
        verify(block, location, decoded(block, location, payload, base), base)
        return payload
