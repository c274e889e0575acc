"""New places for stored blocks: copied or coded again into new packs, published as one step.

Packs are written and published in the order that `mstore.store.transaction` promises. Its index
transaction points rows at the copies, and sets or removes the mark of the pin: a crash before it
leaves only garbage, and after it all is done. Old payloads are garbage that gc frees, once those
who may be reading them have ended.

The lock of garbage collection is held throughout, as by all who change rows of stored blocks: so no
row changes under a copy, and no base of a difference is collected before the difference is
published. `add` and `merge` do not need it: they only add rows.

Belongs to one thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mstore.blocks.codecs import Codec, Encoded
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Row
from mstore.blocks.packs import ENTRY, PAGE, Kind
from mstore.store import leases, unnamed_packs
from mstore.store.catalog import Catalog
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.terms.errors import Conflict, StorageFailed
from mstore.terms.ids import BlockId
from mstore.terms.phrases import call, phrase
from mstore.terms.sizes import format_size
from mstore.upkeep.pins.positions import Position

RESERVE_BYTES = 8 << 20
"""Free space, in bytes, that new packs leave to others."""


class Rewriting:
    """Blocks on the way to new places.  Nothing is visible before `publish` returns.

    blocks: how many it then moved.
    """

    def __init__(self, catalog: Catalog, lease: leases.Lease, max_pack: int) -> None:
        self._catalog = catalog
        self._lease = lease
        self._packs = NewPacks(catalog, lease.directory, prefix="p", max_pack=max_pack)
        self._rows: dict[Key, Row] = {}
        self._bases: set[bytes] = set()
        self._deltas: set[BlockId] = set()
        with catalog.index.env.read() as transaction:
            self._generation = catalog.index.generation(transaction)
        self.blocks = 0

    @classmethod
    @contextmanager
    def begin(
        cls, catalog: Catalog, purpose: str, *, max_pack: int = MAX_PACK_BYTES
    ) -> Iterator[Rewriting]:
        """Lock and take a lease; leaving the block without `publish` removes all that was written.

        Waits for a running collection or repair.  Raises StorageFailed.
        """
        with leases.collecting(catalog.layout):
            with catalog.publishing(packs=True):
                leases.sweep(catalog.layout, catalog.index)
                unnamed_packs.sweep(catalog.layout, catalog.index, catalog.places)
            lease = leases.Lease(catalog.layout, catalog.index, purpose)
            try:
                own = cls(catalog, lease, max_pack)
                try:
                    yield own
                finally:
                    own._packs.abandon()
            finally:
                lease.release()

    def require_room(self, positions: int, plain_bytes: int) -> None:
        """Raise StorageFailed unless the disk has room for so many blocks, stored raw."""
        directory = self._catalog.layout.packs
        packs = 1 + plain_bytes // MAX_PACK_BYTES
        # With footers and alignment.
        needed = plain_bytes + positions * ENTRY.size + packs * 4 * PAGE if positions else 0
        free = max(0, self._catalog.packs.free_bytes() - RESERVE_BYTES)
        if needed > free:
            raise StorageFailed(
                f"the copies take {format_size(needed)}, and the disk has {format_size(free)} free",
                where=str(directory),
                hint=phrase("{gc} frees what nothing needs", gc=call("gc")),
                errno=errno.ENOSPC,
            )

    def put(self, position: Position, row: Row, encoded: Encoded, file: str) -> None:
        """Store a block at a new place.

        row: the one that it has now.  Blocks of one file come in file order.  `encoded` decodes to
        bytes that the caller has checked.
        """
        self._packs.writer.append_encoded(position.block, encoded, file, position.offset)
        self._rows[Kind.BLOCK, position.block] = row
        if encoded.base is not None:
            self._bases.add(encoded.base)
            self._deltas.add(position.block)

    @property
    def bytes_written(self) -> int:
        """Bytes of the packs that are sealed by now."""
        return self._packs.bytes_written

    def publish(self, also: Callable[[IndexTransaction], None]) -> None:
        """Point the rows of all these blocks at their new places, in one index transaction.

        also: changes further rows there.  Raises Conflict, StorageFailed; then nothing is changed.
        """
        catalog = self._catalog
        with self._packs.committing() as transaction:
            for block in self._became_bases(transaction):
                del self._rows[Kind.BLOCK, block]
            moved = 0
            for pack in self._packs.sealed:
                moved += catalog.index.move_into(transaction, pack, self._rows).total()
            if moved != len(self._rows):
                raise Conflict(
                    f"{len(self._rows) - moved} blocks moved while this command was running",
                    hint="run the command again",
                )
            self._require_bases(transaction)
            also(transaction)
            self._lease.drop_row(transaction)
        self.blocks = moved

    def _became_bases(self, transaction: IndexTransaction) -> set[BlockId]:
        """Return blocks that are differences now, and that others refer to since we looked."""
        index = self._catalog.index
        # This very commit is the next generation.
        if not self._deltas or index.generation(transaction) == self._generation + 1:
            return set()
        bases = {place.base for _, place in index.blocks(transaction)}
        return {block for block in self._deltas if block in bases}

    def _require_bases(self, transaction: IndexTransaction) -> None:
        """Raise Conflict unless the base of every new difference is stored, and is none itself."""
        for base in self._bases:
            place = self._catalog.index.block(transaction, BlockId(base))
            if place is None or Codec(place.codec).is_delta:
                raise Conflict(
                    "the base of a difference changed while this command was running",
                    where=f"block {base.hex()}",
                    hint="run the command again",
                )
