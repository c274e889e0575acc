"""The index: which pack holds a block or record, at what offset, and the tables of the store.

Named databases of one LMDB environment, keys fixed-width and big-endian.  One module knows the
bytes of each:

    blocks, records               blocks.location_rows
    packs, pack_ids, condemned    blocks.pack_numbers
    counters    "packs"           -> the next pack number, u32: this module
                "generation"      -> how often something was published, u64: this module
                "backup"          store.backup_row
                "pinned" + id     store.pin_rows
    snapshots, edges              store.snapshot_rows
    refs, reflog                  store.refs
    plans                         store.plan_rows
    pruned                        store.pruned_rows
    signatures                    store.signature_rows
    leases                        store.leases

Others ask `Index` or a function of these modules, and get ids, numbers, locations and records.
`get`, `put`, `delete`, `keys`, `walk` and `db` are for these modules alone (a house-rules test
checks).

Payloads and footers prove the rows of blocks and records.  Nothing proves the others, so each ends
with a check of its database, key and value (`checked_rows`), and is read through `get` and `walk`,
which refuse a row that does not match.

Everything here can be rebuilt from packs and the ref mirror.  Functions take an open transaction,
so that the caller decides what is one atomic step.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mstore.blocks import checked_rows, location_rows, pack_numbers
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Location
from mstore.blocks.location_rows import BLOCKS, RECORDS, Key, Row
from mstore.blocks.pack_numbers import CONDEMNED, PACK_IDS, PACKS, Condemned, NamedPack
from mstore.blocks.packs import Footer, Kind, SealedPack
from mstore.errors import Corrupt
from mstore.ids import BlockId, PackId
from mstore.phrases import call

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
COUNTERS = "counters"
_NEXT_PACK = b"packs"
_GENERATION = b"generation"
_COUNT = struct.Struct(">Q")


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
        hint=call("reindex"),
    )


def _hashed(key: bytes) -> bytes:
    # Keys differ in length: without the prefix, a byte could move from a key to its value.
    return len(key).to_bytes(2, "big") + key


def read_generation(key: bytes, value: bytes) -> int | None:
    """Return the generation that a row of `counters` states; None for another counter."""
    return int.from_bytes(value, "big") if key == _GENERATION else None


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

    def delete(self, transaction: IndexTransaction, database: str, key: bytes) -> bool:
        """Delete a row; return whether there was one."""
        return transaction.delete(key, db=self.db(database))

    def keys(
        self, transaction: IndexTransaction, database: str, start: bytes = b""
    ) -> Iterator[bytes]:
        """Yield the keys from `start` on, in order.  Neither reads nor checks values."""
        with transaction.cursor(db=self.db(database)) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from map(bytes, cursor.iternext(values=False))

    def count(self, transaction: IndexTransaction, name: str) -> int:
        """Return the number of rows of a named database."""
        return int(transaction.stat(self.db(name))["entries"])

    # -- generations -------------------------------------------------------------------------

    def generation(self, transaction: IndexTransaction) -> int:
        """Return how many commits were published.  Raises Corrupt if the row is damaged."""
        value = self.get(transaction, COUNTERS, _GENERATION)
        return 0 if value is None else _COUNT.unpack(value)[0]

    def set_generation(self, transaction: IndexTransaction, generation: int) -> None:
        """Record how many commits were published, in the transaction that publishes one."""
        self.put(transaction, COUNTERS, _GENERATION, _COUNT.pack(generation))

    # -- locations ---------------------------------------------------------------------------

    def block(self, transaction: IndexTransaction, block: BlockId) -> Location | None:
        """Return the location of a block, or None."""
        return self._located(transaction, transaction.get(block, db=self.db(BLOCKS)))

    def has_block(self, transaction: IndexTransaction, block: BlockId) -> bool:
        """Return whether the block is stored."""
        return transaction.get(block, db=self.db(BLOCKS)) is not None

    def has_blocks(self, transaction: IndexTransaction, blocks: Sequence[bytes]) -> list[bool]:
        """Return whether each block is stored, with one call into LMDB."""
        return [row is not None for row in self.block_rows(transaction, blocks)]

    def record(self, transaction: IndexTransaction, kind: Kind, id: bytes) -> Location | None:
        """Return the location of a record, or None."""
        database, key = location_rows.name(kind, id)
        return self._located(transaction, transaction.get(key, db=self.db(database)))

    def has_record(self, transaction: IndexTransaction, kind: Kind, id: bytes) -> bool:
        """Return whether the record is stored.  Raises Corrupt if its row names an unknown pack."""
        return self.record(transaction, kind, id) is not None

    def has_records(self, transaction: IndexTransaction, keys: Iterable[Key]) -> set[Key]:
        """Return those of these records that are stored, with one call into LMDB."""
        names = {location_rows.name(*key)[1]: key for key in keys}
        with transaction.cursor(db=self.db(RECORDS)) as cursor:
            return {names[name] for name, _ in cursor.getmulti(list(names))}

    def record_spans(
        self, transaction: IndexTransaction, kind: Kind, ids: Iterable[bytes]
    ) -> list[tuple[PackId, int, int, int, bytes]]:
        """Return pack, offset, stored length, codec and id of those records that are stored.

        A fast `record` for many, with one call into LMDB.
        """
        names = location_rows.record_names(kind, ids)
        with transaction.cursor(db=self.db(RECORDS)) as cursor:
            rows: Any = cursor.getmulti(names)
        spans = []
        packs = _Packs(self, transaction)
        for name, row in rows:
            number, offset, stored, _, codec, _, _ = location_rows.fields(row)
            spans.append((packs[number], offset, stored, codec, name[1:]))
        return spans

    def blocks(self, transaction: IndexTransaction) -> Iterator[tuple[BlockId, Location]]:
        """Yield every block with its location, in id order."""
        row: Any
        with transaction.cursor(db=self.db(BLOCKS)) as cursor:
            for key, row in cursor:
                yield BlockId(key), self.location(transaction, row)

    def records(self, transaction: IndexTransaction) -> Iterator[tuple[Kind, bytes, Location]]:
        """Yield every record's kind, id and location."""
        row: Any
        with transaction.cursor(db=self.db(RECORDS)) as cursor:
            for key, row in cursor:
                yield Kind(key[0]), key[1:], self.location(transaction, row)

    def record_ids(self, transaction: IndexTransaction, kind: Kind) -> Iterator[bytes]:
        """Yield the ids of every record of one kind, in order."""
        for key in self.keys(transaction, RECORDS, bytes([kind])):
            if key[0] != kind:
                break
            yield key[1:]

    # -- rows of locations -------------------------------------------------------------------

    def row(self, transaction: IndexTransaction, key: tuple[int, bytes]) -> Row | None:
        """Return the row of a block or record, or None.  A record may be of an unknown kind."""
        database, name = location_rows.name(*key)
        found: Any = transaction.get(name, db=self.db(database))
        row: Row | None = found
        return row

    def block_rows(
        self, transaction: IndexTransaction, blocks: Sequence[bytes]
    ) -> list[Row | None]:
        """Return the rows of many blocks in one call into LMDB; None for a block not stored."""
        with transaction.cursor(db=self.db(BLOCKS)) as cursor:
            found: Any = cursor.getmulti(blocks)
        if len(found) == len(blocks):
            return [row for _, row in found]
        rows: dict[bytes, Row] = dict(found)
        return [rows.get(bytes(block)) for block in blocks]

    def location(self, transaction: IndexTransaction, row: Row) -> Location:
        """Return where the row of a block or record says that its payload lies."""
        number, offset, stored, raw, codec, width, base = location_rows.fields(row)
        pack = self._pack_id(transaction, number)
        return Location(pack, offset, stored, raw, codec, width, base)

    def locations(self, transaction: IndexTransaction, rows: Iterable[Row]) -> list[Location]:
        """Return the locations of many rows: a fast `location`."""
        packs = _Packs(self, transaction)
        found = []
        for row in rows:
            number, offset, stored, raw, codec, width, base = location_rows.fields(row)
            found.append(Location(packs[number], offset, stored, raw, codec, width, base))
        return found

    def put_row(self, transaction: IndexTransaction, key: Key, row: Row) -> None:
        """Write the row of a block or record."""
        database, name = location_rows.name(*key)
        data: Any = row
        transaction.put(name, data, db=self.db(database))

    def delete_row(self, transaction: IndexTransaction, key: Key) -> None:
        """Delete the row of a block or record, if there is one."""
        database, name = location_rows.name(*key)
        transaction.delete(name, db=self.db(database))

    def delete_row_if(self, transaction: IndexTransaction, key: Key, row: Row) -> bool:
        """Delete the row of a block or record if it is still this one; return whether it was."""
        if self.row(transaction, key) != row:
            return False
        self.delete_row(transaction, key)
        return True

    def _located(self, transaction: IndexTransaction, row: Any) -> Location | None:
        return None if row is None else self.location(transaction, row)

    def _pack_id(self, transaction: IndexTransaction, number: int) -> PackId:
        if self._epoch != self.env.epoch:
            # A number assigned in an aborted transaction is assigned again.
            self._epoch = self.env.epoch
            self._pack_ids.clear()
        id = self._pack_ids.get(number)
        if id is None:
            pack = self.numbered_pack(transaction, number)
            if pack is None:
                raise Corrupt(
                    "the index names an unknown pack",
                    where=f"pack number {number}",
                    hint=call("fsck"),
                )
            # Numbers are never reused, so caching them is safe.
            id = self._pack_ids[number] = pack.id
        return id

    # -- packs -------------------------------------------------------------------------------

    def packs(self, transaction: IndexTransaction) -> Iterator[tuple[PackId, int]]:
        """Yield (PackId, size in bytes) of every pack."""
        for pack in self.named_packs(transaction):
            yield pack.id, pack.size

    def pack_ids(self, transaction: IndexTransaction) -> Iterator[bytes]:
        """Yield the id of every pack that the index names.  Neither reads nor checks rows."""
        return self.keys(transaction, PACK_IDS)

    def named_packs(self, transaction: IndexTransaction) -> Iterator[NamedPack]:
        """Yield every pack that the index names, by number."""
        for key, value in self.walk(transaction, PACKS):
            yield pack_numbers.decode_pack(key, value)

    def numbered_pack(self, transaction: IndexTransaction, number: int) -> NamedPack | None:
        """Return the pack that has this number, or None."""
        key = pack_numbers.encode_number(number)
        value = self.get(transaction, PACKS, key)
        return None if value is None else pack_numbers.decode_pack(key, value)

    def has_number(self, transaction: IndexTransaction, number: int) -> bool:
        """Return whether a pack has this number; does not check the row."""
        return transaction.get(pack_numbers.encode_number(number), db=self.db(PACKS)) is not None

    def pack_number(self, transaction: IndexTransaction, pack: PackId) -> int | None:
        """Return the number of a pack; None for a pack that the index does not name."""
        value = self.get(transaction, PACK_IDS, pack)
        return None if value is None else pack_numbers.decode_number(value)

    def name_packs(self, transaction: IndexTransaction, packs: Iterable[NamedPack]) -> None:
        """Insert the rows of packs under the numbers that they have."""
        for pack in packs:
            number = pack_numbers.encode_number(pack.number)
            self.put(transaction, PACKS, number, pack_numbers.encode_pack(pack))
            self.put(transaction, PACK_IDS, pack.id, number)

    def insert_pack(self, transaction: IndexTransaction, pack: SealedPack | Footer) -> None:
        """Insert rows for a pack and all its entries.

        A block that another writer stored meanwhile keeps its row; this pack's copy is dead weight
        that gc collects.
        """
        number = self._number_pack(transaction, pack)
        rows: dict[str, list[tuple[bytes, Any]]] = {BLOCKS: [], RECORDS: []}
        for entry in pack.entries:
            database, key = location_rows.name(entry.kind, entry.id)
            rows[database].append((key, location_rows.encode(number, entry)))
        for database, items in rows.items():
            with transaction.cursor(db=self.db(database)) as cursor:
                cursor.putmulti(items, overwrite=False)

    def _number_pack(self, transaction: IndexTransaction, pack: SealedPack | Footer) -> int:
        """Insert rows for the pack itself and return its number, which no pack had before."""
        counter = self.get(transaction, COUNTERS, _NEXT_PACK)
        number = 0 if counter is None else pack_numbers.decode_number(counter)
        for database in (PACKS, CONDEMNED):
            with transaction.cursor(db=self.db(database)) as cursor:
                if cursor.last():
                    number = max(number, pack_numbers.decode_number(cursor.key()) + 1)
        self.put(transaction, COUNTERS, _NEXT_PACK, pack_numbers.encode_number(number + 1))
        self.name_packs(transaction, [NamedPack(number, pack.id, pack.size)])
        return number

    def move_into(
        self, transaction: IndexTransaction, pack: SealedPack, rows: Mapping[Key, Row]
    ) -> Counter[int]:
        """Repoint rows to a pack of copies: each entry whose row is unchanged since the copy.

        rows: the row of each at the time when its payload was copied.  Returns how many rows were
        taken from each pack, by its number; if none was, no row names the pack of copies at all.
        """
        moved = []
        for entry in pack.entries:
            key = (Kind(entry.kind), entry.id)
            row = rows.get(key)
            if row is not None and self.row(transaction, key) == row:
                moved.append((key, entry, row))
        if moved:
            number = self._number_pack(transaction, pack)
            for key, entry, _ in moved:
                self.put_row(transaction, key, location_rows.encode(number, entry))
        return Counter(location_rows.pack_number(row) for _, _, row in moved)

    # -- condemned packs ---------------------------------------------------------------------

    def condemn(self, transaction: IndexTransaction, pack: PackId, leases: Iterable[str]) -> None:
        """Remove a pack from the index; no row may name it any more.

        leases: those that are in the index now; their holders may still read its file.
        """
        number = self.pack_number(transaction, pack)
        if number is None:
            return
        named = self.numbered_pack(transaction, number)
        if named is None:
            raise Corrupt("the pack has two numbers, or none", where=f"pack {pack.hex()}")
        key = pack_numbers.encode_number(number)
        self.put(transaction, CONDEMNED, key, pack_numbers.encode_condemned(named, leases))
        self.delete(transaction, PACKS, key)
        self.delete(transaction, PACK_IDS, pack)

    def condemned(self, transaction: IndexTransaction) -> list[Condemned]:
        """Return every condemned pack whose file may still exist."""
        rows = self.walk(transaction, CONDEMNED)
        return [pack_numbers.decode_condemned(key, value) for key, value in rows]

    def forget_condemned(self, transaction: IndexTransaction, packs: Iterable[Condemned]) -> None:
        """Remove the rows of condemned packs whose files are deleted."""
        for pack in packs:
            self.delete(transaction, CONDEMNED, pack_numbers.encode_number(pack.number))


class _Packs(dict[int, PackId]):
    """Packs by number, each looked up when it is first needed."""

    def __init__(self, index: Index, transaction: IndexTransaction) -> None:
        self._index = index
        self._transaction = transaction

    def __missing__(self, number: int) -> PackId:
        pack = self[number] = self._index._pack_id(self._transaction, number)
        return pack


def _opened(database: str, key: bytes, row: bytes) -> bytes:
    value = opened(database, key, row)
    if value is None:
        raise damaged(database, key)
    return value
