"""The index: which pack holds a block or record, and at what offset.

Named databases of one LMDB environment, keys fixed-width and big-endian:

    blocks      BlockId                    -> location
    records     kind u8 + id               -> location
    packs       pack number u32            -> PackId + size u64
    pack_ids    PackId                     -> pack number u32
    location =  pack number u32, offset u64, stored length u32, raw length u32, codec u8, width u8
                [, base BlockId]

Everything here can be rebuilt from packs and the ref mirror.  Functions take an open
transaction, so that the caller decides what is one atomic step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstore.blocks.lmdb_env import Environment
from mstore.blocks.packs import NO_BASE, Entry, Kind, SealedPack
from mstore.errors import Corrupt
from mstore.ids import BlockId, Id, PackId

if TYPE_CHECKING:
    import numpy as np

DATABASES = (
    "blocks",
    "records",
    "packs",
    "pack_ids",
    "snapshots",
    "edges",
    "refs",
    "reflog",
    "leases",
    "plans",
    "condemned",
    "counters",
    "pruned",
    "signatures",
)
_LOCATION = struct.Struct(">IQIIBB")
_STORED_LENGTH = slice(12, 16)
_NUMBER = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a payload lies.  `pack` is resolved, so a location outlives its transaction."""

    pack: PackId
    offset: int
    stored_length: int
    raw_length: int
    codec: int
    width: int
    base: bytes = NO_BASE


def stored_lengths(rows: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes at rest of many blocks: int64[rows], from their rows alone."""
    # Rows differ in length (some name a base block); their heads do not.
    import numpy as np  # late: reading a log needs no numpy

    lengths = b"".join([row[_STORED_LENGTH] for row in rows])
    return np.frombuffer(lengths, dtype=">u4").astype(np.int64)


class Index:
    """The index of one store."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self.env = Environment.acquire(path, DATABASES, create=create)
        self._pack_ids: dict[int, PackId] = {}

    def close(self) -> None:
        """Release the environment."""
        self.env.release()

    def db(self, name: str) -> Any:
        """The handle of a named database."""
        return self.env.databases[name]

    # -- locations ---------------------------------------------------------------------------

    def block(self, transaction: Any, block: BlockId) -> Location | None:
        """Where a block lies, or None."""
        return self._decode(transaction, transaction.get(block, db=self.db("blocks")))

    def block_rows(self, transaction: Any, blocks: Sequence[bytes]) -> list[bytes | None]:
        """The rows of many blocks, in one call into LMDB; None for one that is not stored."""
        with transaction.cursor(db=self.db("blocks")) as cursor:
            found = cursor.getmulti(blocks)
        if len(found) == len(blocks):
            return [row for _, row in found]
        rows = dict(found)
        return [rows.get(bytes(block)) for block in blocks]

    def location(self, transaction: Any, row: bytes) -> Location:
        """What a row of a block or record says."""
        location = self._decode(transaction, row)
        assert location is not None
        return location

    def has_block(self, transaction: Any, block: BlockId) -> bool:
        """Whether the block is stored."""
        return transaction.get(block, db=self.db("blocks")) is not None

    def record(self, transaction: Any, kind: Kind, id: Id) -> Location | None:
        """Where a record lies, or None."""
        return self._decode(
            transaction, transaction.get(_record_key(kind, id), db=self.db("records"))
        )

    def _decode(self, transaction: Any, value: bytes | None) -> Location | None:
        if value is None:
            return None
        number, offset, stored, raw, codec, width = _LOCATION.unpack_from(value)
        pack = self._pack_ids.get(number)
        if pack is None:
            row = transaction.get(_NUMBER.pack(number), db=self.db("packs"))
            if row is None:
                raise Corrupt(f"the index names an unknown pack {number}", hint="mstore fsck")
            # Numbers are never given twice, so remembering them is safe.
            pack = self._pack_ids[number] = PackId(row[:32])
        return Location(pack, offset, stored, raw, codec, width, value[_LOCATION.size :] or NO_BASE)

    # -- writing -----------------------------------------------------------------------------

    def insert_pack(self, transaction: Any, pack: SealedPack) -> None:
        """Rows for a pack and all its entries.

        A block that another writer stored meanwhile keeps its row; this pack's copy is dead
        weight that gc collects.
        """
        with transaction.cursor(db=self.db("packs")) as cursor:
            number = _NUMBER.unpack(cursor.key())[0] + 1 if cursor.last() else 0
        key = _NUMBER.pack(number)
        transaction.put(key, pack.id + struct.pack(">Q", pack.size), db=self.db("packs"))
        transaction.put(pack.id, key, db=self.db("pack_ids"))
        for entry in pack.entries:
            value = _encode(number, entry)
            if entry.kind == Kind.BLOCK:
                transaction.put(entry.id, value, db=self.db("blocks"), overwrite=False)
            else:
                name = bytes([entry.kind]) + entry.id
                transaction.put(name, value, db=self.db("records"), overwrite=False)

    # -- walking -----------------------------------------------------------------------------

    def packs(self, transaction: Any) -> Iterator[tuple[PackId, int]]:
        """(PackId, size in bytes) of every pack."""
        with transaction.cursor(db=self.db("packs")) as cursor:
            for _, value in cursor:
                yield PackId(value[:32]), int.from_bytes(value[32:40], "big")

    def blocks(self, transaction: Any) -> Iterator[tuple[BlockId, Location]]:
        """Every block and its location, in id order."""
        with transaction.cursor(db=self.db("blocks")) as cursor:
            for key, value in cursor:
                location = self._decode(transaction, value)
                assert location is not None
                yield BlockId(key), location

    def records(self, transaction: Any) -> Iterator[tuple[Kind, bytes, Location]]:
        """Every record's kind, id and location."""
        with transaction.cursor(db=self.db("records")) as cursor:
            for key, value in cursor:
                location = self._decode(transaction, value)
                assert location is not None
                yield Kind(key[0]), key[1:], location

    def count(self, transaction: Any, name: str) -> int:
        """Rows of a named database."""
        return int(transaction.stat(self.db(name))["entries"])


def _record_key(kind: Kind, id: Id) -> bytes:
    return bytes([kind]) + id


def _encode(number: int, entry: Entry) -> bytes:
    head = _LOCATION.pack(
        number, entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width
    )
    return head if entry.base == NO_BASE else head + entry.base
