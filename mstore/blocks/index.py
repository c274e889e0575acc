"""The index: which pack holds a block or record, and at what offset.

Named databases of one LMDB environment, keys fixed-width and big-endian:

    blocks      BlockId                    -> location
    records     kind u8 + id               -> location
    packs       pack number u32            -> PackId + size u64
    pack_ids    PackId                     -> pack number u32
    condemned   pack number u32            -> PackId + size u64 + lease names, 16 bytes each
    counters    "packs"                    -> the next pack number, u32
                "generation"               -> how often something was published, u64
    location =  pack number u32, offset u64, stored length u32, raw length u32, codec u8, width u8
                [, base BlockId]

A pack number is never reused, so a remembered number stays valid for ever.  No row names a
condemned pack; its file is deleted once the leases of that moment have ended
(`mstore.store.condemned`).

Payloads and footers prove the rows of blocks and records.  Nothing proves the others, so each ends
with a check of its database, key and value (`checked_rows`), and is read through `get` and `walk`,
which refuse a row that does not match.

Everything here can be rebuilt from packs and the ref mirror.  Functions take an open transaction,
so that the caller decides what is one atomic step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from mstore.blocks import checked_rows
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import IndexTransaction
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
UNCHECKED = frozenset({"blocks", "records", "leases"})
"""Databases whose rows end with no check: payloads prove the first two, locks the third."""
_LOCATION = struct.Struct(">IQIIBB")
_STORED_LENGTH = slice(12, 16)
_NUMBER = struct.Struct(">I")
_SIZE = struct.Struct(">Q")
_NEXT_PACK = b"packs"
GENERATION = b"generation"
_LEASE_NAME_BYTES = 16


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a payload is stored.  `pack` is resolved, so a location outlives its transaction."""

    pack: PackId
    offset: int
    stored_length: int
    raw_length: int
    codec: int
    width: int
    base: bytes = NO_BASE


@dataclass(frozen=True, slots=True)
class Condemned:
    """A pack that no row names any more, with the leases that existed when it was condemned."""

    number: int
    pack: PackId
    size: int
    leases: tuple[str, ...]


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    """Return the row of a value: the value and its check."""
    return checked_rows.sealed(database, _hashed(key), value)


def opened(database: str, key: bytes, row: bytes | None) -> bytes | None:
    """Return the value of a row; None if there is no row or it does not match its check."""
    return checked_rows.opened(database, _hashed(key), row)


def subject(database: str, key: bytes) -> tuple[str, str]:
    """Return what a row is about: a kind and a readable name."""
    match database:
        case "refs":
            return "ref", key.decode(errors="backslashreplace")
        case "reflog":
            # The key is the name, a zero byte, and eight bytes of position.
            return "reflog", key[:-9].decode(errors="backslashreplace")
        case "plans":
            return "plan", key.hex()
    return "index", f"{database} {key.hex()}"


def damaged(database: str, key: bytes) -> Corrupt:
    """Return the error for a row that does not match its check."""
    kind, name = subject(database, key)
    return Corrupt(
        f"the index's row of this {kind} does not match its check",
        where=f"plan {name}" if kind == "plan" else name,
        hint="mstore reindex",
    )


def _hashed(key: bytes) -> bytes:
    # Keys differ in length: without the prefix, a byte could move from a key to its value.
    return len(key).to_bytes(2, "big") + key


def stored_lengths(rows: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the stored bytes of many blocks, int64[rows], read from their rows alone."""
    # Rows differ in length (some name a base block); their heads do not.
    import numpy as np  # late: reading a log needs no numpy

    lengths = b"".join([row[_STORED_LENGTH] for row in rows])
    return np.frombuffer(lengths, dtype=">u4").astype(np.int64)


class Index:
    """The index of one store."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self.env = Environment.acquire(path, DATABASES, create=create)
        self.moved: set[str] = set()
        """Refs that this process moved since the set was cleared; the mirror needs them."""
        self._pack_ids: dict[int, PackId] = {}
        self._epoch = 0
        self._closing = Lock()
        self._released: Environment | None = None

    def close(self) -> None:
        """Release the environment; idempotent.  Raises as `Environment.release` does."""
        with self._closing:
            if self._released is not self.env:
                self.env.release()
                self._released = self.env

    def db(self, name: str) -> Any:
        """Return the handle of a named database."""
        return self.env.databases[name]

    # -- rows with a check -------------------------------------------------------------------

    def get(self, transaction: IndexTransaction, database: str, key: bytes) -> bytes | None:
        """Return the value of a row, None if there is none.  Raises Corrupt if it is damaged."""
        row = transaction.get(key, db=self.db(database))
        return None if row is None else _opened(database, key, row)

    def put(
        self,
        transaction: IndexTransaction,
        database: str,
        key: bytes,
        value: bytes,
        *,
        overwrite: bool = True,
    ) -> None:
        """Write a row with its check."""
        row = sealed(database, key, value)
        transaction.put(key, row, db=self.db(database), overwrite=overwrite)

    def walk(
        self, transaction: IndexTransaction, database: str, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of rows with this key prefix.  Raises Corrupt if one is damaged."""
        with transaction.cursor(db=self.db(database)) as cursor:
            more = cursor.set_range(prefix) if prefix else cursor.first()
            while more and cursor.key().startswith(prefix):
                key = bytes(cursor.key())
                yield key, _opened(database, key, cursor.value())
                more = cursor.next()

    def generation(self, transaction: IndexTransaction) -> int:
        """Return how many commits were published.  Raises Corrupt if the row is damaged."""
        value = self.get(transaction, "counters", GENERATION)
        return 0 if value is None else _SIZE.unpack(value)[0]

    def set_generation(self, transaction: IndexTransaction, generation: int) -> None:
        """Record how many commits were published, in the transaction that publishes one."""
        self.put(transaction, "counters", GENERATION, _SIZE.pack(generation))

    # -- locations ---------------------------------------------------------------------------

    def block(self, transaction: IndexTransaction, block: BlockId) -> Location | None:
        """Return the location of a block, or None."""
        return self._decode(transaction, transaction.get(block, db=self.db("blocks")))

    def block_rows(
        self, transaction: IndexTransaction, blocks: Sequence[bytes]
    ) -> list[bytes | None]:
        """Return the rows of many blocks in one call into LMDB; None for a block not stored."""
        with transaction.cursor(db=self.db("blocks")) as cursor:
            found = cursor.getmulti(blocks)
        if len(found) == len(blocks):
            return [row for _, row in found]
        rows = dict(found)
        return [rows.get(bytes(block)) for block in blocks]

    def location(self, transaction: IndexTransaction, row: bytes) -> Location:
        """Decode the row of a block or record."""
        location = self._decode(transaction, row)
        assert location is not None
        return location

    def has_block(self, transaction: IndexTransaction, block: BlockId) -> bool:
        """Return whether the block is stored."""
        return transaction.get(block, db=self.db("blocks")) is not None

    def record(self, transaction: IndexTransaction, kind: Kind, id: Id) -> Location | None:
        """Return the location of a record, or None."""
        return self._decode(
            transaction, transaction.get(_record_key(kind, id), db=self.db("records"))
        )

    def record_rows(
        self, transaction: IndexTransaction, keys: Sequence[bytes]
    ) -> dict[bytes, bytes]:
        """Return the existing rows of many records, by kind and id, in one call into LMDB."""
        with transaction.cursor(db=self.db("records")) as cursor:
            return dict(cursor.getmulti(keys))

    def span(self, transaction: IndexTransaction, row: bytes) -> tuple[PackId, int, int, int]:
        """Return pack, offset, stored length and codec of a row: a fast `location` for bulk use."""
        number, offset, stored, _, codec, _ = _LOCATION.unpack_from(row)
        return self._pack_id(transaction, number), offset, stored, codec

    def _decode(self, transaction: IndexTransaction, value: bytes | None) -> Location | None:
        if value is None:
            return None
        number, offset, stored, raw, codec, width = _LOCATION.unpack_from(value)
        pack = self._pack_id(transaction, number)
        return Location(pack, offset, stored, raw, codec, width, value[_LOCATION.size :] or NO_BASE)

    def _pack_id(self, transaction: IndexTransaction, number: int) -> PackId:
        if self._epoch != self.env.epoch:
            # A number assigned in an aborted transaction is assigned again.
            self._epoch = self.env.epoch
            self._pack_ids.clear()
        pack = self._pack_ids.get(number)
        if pack is None:
            row = self.get(transaction, "packs", _NUMBER.pack(number))
            if row is None:
                raise Corrupt(
                    "the index names an unknown pack",
                    where=f"pack number {number}",
                    hint="mstore fsck",
                )
            # Numbers are never reused, so caching them is safe.
            pack = self._pack_ids[number] = PackId(row[:32])
        return pack

    # -- writing -----------------------------------------------------------------------------

    def insert_pack(self, transaction: IndexTransaction, pack: SealedPack) -> None:
        """Insert rows for a pack and all its entries.

        A block that another writer stored meanwhile keeps its row; this pack's copy is dead weight
        that gc collects.
        """
        number = self._number_pack(transaction, pack)
        rows: dict[str, list[tuple[bytes, bytes]]] = {"blocks": [], "records": []}
        for entry in pack.entries:
            database, key = _entry_key(entry)
            rows[database].append((key, _encode(number, entry)))
        for database, items in rows.items():
            with transaction.cursor(db=self.db(database)) as cursor:
                cursor.putmulti(items, overwrite=False)

    def _number_pack(self, transaction: IndexTransaction, pack: SealedPack) -> int:
        """Insert rows for the pack itself and return its number, which no pack had before."""
        counter = self.get(transaction, "counters", _NEXT_PACK)
        number = 0 if counter is None else _NUMBER.unpack(counter)[0]
        for database in ("packs", "condemned"):
            with transaction.cursor(db=self.db(database)) as cursor:
                if cursor.last():
                    number = max(number, _NUMBER.unpack(cursor.key())[0] + 1)
        key = _NUMBER.pack(number)
        self.put(transaction, "counters", _NEXT_PACK, _NUMBER.pack(number + 1))
        self.put(transaction, "packs", key, pack.id + _SIZE.pack(pack.size))
        self.put(transaction, "pack_ids", pack.id, key)
        return number

    def move_into(
        self,
        transaction: IndexTransaction,
        pack: SealedPack,
        rows: Mapping[tuple[str, bytes], bytes],
    ) -> list[bytes]:
        """Repoint rows to a pack of copies: each entry whose row is unchanged since the copy.

        rows: by database and key, the row at the time the payload was copied.  Returns the rows
        that were replaced; if none was, no row names the pack at all.
        """
        moved = [
            entry
            for entry in pack.entries
            if (row := rows.get(_entry_key(entry))) is not None
            and self.row(transaction, *_entry_key(entry)) == row
        ]
        if moved:
            number = self._number_pack(transaction, pack)
            for entry in moved:
                database, key = _entry_key(entry)
                transaction.put(key, _encode(number, entry), db=self.db(database))
        return [rows[_entry_key(entry)] for entry in moved]

    def row(self, transaction: IndexTransaction, database: str, key: bytes) -> bytes | None:
        """Return a row as stored."""
        found: bytes | None = transaction.get(key, db=self.db(database))
        return found

    def condemn(self, transaction: IndexTransaction, pack: PackId) -> None:
        """Remove a pack from the index; no row may name it any more.

        Holders of a lease that is in the index now may still read its file.
        """
        number = self.get(transaction, "pack_ids", pack)
        if number is None:
            return
        with transaction.cursor(db=self.db("leases")) as cursor:
            names = b"".join(bytes(key) for key, _ in cursor if len(key) == _LEASE_NAME_BYTES)
        row = self.get(transaction, "packs", number)
        if row is None:
            raise Corrupt("the pack has two numbers, or none", where=f"pack {pack.hex()}")
        self.put(transaction, "condemned", number, row + names)
        transaction.delete(number, db=self.db("packs"))
        transaction.delete(pack, db=self.db("pack_ids"))

    def condemned(self, transaction: IndexTransaction) -> list[Condemned]:
        """Return every condemned pack whose file may still exist."""
        found = []
        for key, value in self.walk(transaction, "condemned"):
            names = value[40:].decode("ascii", "replace")
            found.append(
                Condemned(
                    _NUMBER.unpack(key)[0],
                    PackId(value[:32]),
                    _SIZE.unpack_from(value, 32)[0],
                    tuple(names[at : at + 16] for at in range(0, len(names), 16)),
                )
            )
        return found

    def forget_condemned(self, transaction: IndexTransaction, packs: Iterable[Condemned]) -> None:
        """Remove the rows of condemned packs whose files are deleted."""
        for pack in packs:
            transaction.delete(_NUMBER.pack(pack.number), db=self.db("condemned"))

    # -- walking -----------------------------------------------------------------------------

    def packs(self, transaction: IndexTransaction) -> Iterator[tuple[PackId, int]]:
        """Yield (PackId, size in bytes) of every pack."""
        for _, value in self.walk(transaction, "packs"):
            yield PackId(value[:32]), int.from_bytes(value[32:40], "big")

    def blocks(self, transaction: IndexTransaction) -> Iterator[tuple[BlockId, Location]]:
        """Yield every block with its location, in id order."""
        with transaction.cursor(db=self.db("blocks")) as cursor:
            for key, value in cursor:
                location = self._decode(transaction, value)
                assert location is not None
                yield BlockId(key), location

    def records(self, transaction: IndexTransaction) -> Iterator[tuple[Kind, bytes, Location]]:
        """Yield every record's kind, id and location."""
        with transaction.cursor(db=self.db("records")) as cursor:
            for key, value in cursor:
                location = self._decode(transaction, value)
                assert location is not None
                yield Kind(key[0]), key[1:], location

    def record_ids(self, transaction: IndexTransaction, kind: Kind) -> Iterator[bytes]:
        """Yield the ids of every record of one kind, in order."""
        prefix = bytes([kind])
        with transaction.cursor(db=self.db("records")) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                yield cursor.key()[1:]
                more = cursor.next()

    def count(self, transaction: IndexTransaction, name: str) -> int:
        """Return the number of rows of a named database."""
        return int(transaction.stat(self.db(name))["entries"])


def _opened(database: str, key: bytes, row: bytes) -> bytes:
    value = opened(database, key, row)
    if value is None:
        raise damaged(database, key)
    return value


def _entry_key(entry: Entry) -> tuple[str, bytes]:
    """Return database and key of an entry's row."""
    if entry.kind == Kind.BLOCK:
        return "blocks", entry.id
    return "records", bytes([entry.kind]) + entry.id


def _record_key(kind: Kind, id: Id) -> bytes:
    return bytes([kind]) + id


def _encode(number: int, entry: Entry) -> bytes:
    head = _LOCATION.pack(
        number, entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width
    )
    return head if entry.base == NO_BASE else head + entry.base
