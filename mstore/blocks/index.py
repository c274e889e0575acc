"""The index: which pack holds a block or record, at what offset, and the tables of the store.

Named databases of one LMDB environment.  `mstore.blocks.schema` declares the tables, and so the
bytes of their rows; `mstore.blocks.location` knows those of locations.  Modules above ask `Index`
with a table and typed keys, and get values.  `db` and cursors are for the modules that handle rows
as bytes (a house-rules test lists them).

Payloads and footers prove the rows of blocks and records.  Nothing proves the others, so each ends
with a check of its database, key and value, and a row that does not match is refused.

Everything here can be rebuilt from packs and the ref mirror.  Functions take an open transaction,
so that the caller decides what is one atomic step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mstore.blocks import location
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import Cursor, IndexTransaction
from mstore.blocks.location import Key, Location, Row
from mstore.blocks.pack_store import HERE, unknown_place
from mstore.blocks.packs import Footer, Kind, SealedPack
from mstore.blocks.schema import (
    BACKUP,
    BLOCKS,
    CONDEMNED,
    COUNTERS,
    DATABASES,
    PACK_IDS,
    PACKS,
    RECORDS,
    TABLES,
    BackupRow,
    Condemned,
    NamedPack,
)
from mstore.blocks.tables import Table
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, BlockId, PackId, SnapshotId
from mstore.terms.phrases import call

if TYPE_CHECKING:
    from mstore.blocks.elsewhere import RemoteBlocks

_NEXT_PACK: Final = "packs"
GENERATION: Final = "generation"
_BATCH = 20_000
_ELSEWHERE = 1 << 31
"""Numbers of packs in made-up rows begin here; no store has had so many packs."""
_K = TypeVar("_K")
_V = TypeVar("_V")


class Index:
    """The index of one store."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self.env = Environment.acquire(path, DATABASES, create=create)
        self.moved: set[str] = set()
        """Refs that this process moved since the set was cleared; the mirror needs them."""
        self.places: Container[int] = (HERE,)
        """Where packs may lie.  A row of a pack elsewhere raises Incompatible when it is read."""
        self.elsewhere: RemoteBlocks | None = None
        """Where else blocks can be read.  What is stored is here only; see `readable_rows`."""
        self._pack_ids: dict[int, PackId] = {}
        self._epoch = 0
        self._numbers: dict[PackId, int] = {}
        self._packs_elsewhere: list[PackId] = []
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

    # -- rows of any table -------------------------------------------------------------------

    def get(self, transaction: IndexTransaction, table: Table[_K, _V], key: _K) -> _V | None:
        """Return the value of a row, None if there is none.  Raises Corrupt if it is damaged."""
        data = table.key.encode(key)
        row = transaction.get(data, db=self.db(table.name))
        return None if row is None else table.read(data, row)

    def has(self, transaction: IndexTransaction, table: Table[_K, Any], key: _K) -> bool:
        """Return whether there is a row; does not check it."""
        return transaction.get(table.key.encode(key), db=self.db(table.name)) is not None

    def put(
        self,
        transaction: IndexTransaction,
        table: Table[_K, _V],
        key: _K,
        value: _V,
        *,
        overwrite: bool = True,
    ) -> None:
        """Write a row."""
        data, row = table.row(key, value)
        transaction.put(data, row, db=self.db(table.name), overwrite=overwrite)

    def delete(self, transaction: IndexTransaction, table: Table[_K, Any], key: _K) -> None:
        """Delete a row, if there is one."""
        transaction.delete(table.key.encode(key), db=self.db(table.name))

    def delete_all(
        self, transaction: IndexTransaction, table: Table[Any, Any], *begin: object
    ) -> None:
        """Delete the rows whose keys begin with these fields, damaged ones too."""
        prefix = table.key.begin(begin)
        with transaction.cursor(db=self.db(table.name)) as cursor:
            while cursor.set_range(prefix) and cursor.key().startswith(prefix):
                cursor.delete()

    def marked(self, table: Table[SnapshotId, Any]) -> set[SnapshotId]:
        """Return the snapshots that have a row in this table, which marks them."""
        with self.env.read() as transaction:
            return {id for id, _ in self.walk(transaction, table)}

    def walk(
        self, transaction: IndexTransaction, table: Table[_K, _V], *begin: object
    ) -> Iterator[tuple[_K, _V]]:
        """Yield key and value of the rows whose keys begin with these fields, in order.

        Raises Corrupt if one is damaged.
        """
        prefix, item = table.key.begin(begin), table.item
        with transaction.cursor(db=self.db(table.name)) as cursor:
            more = _go(cursor, prefix)
            while more:
                key = cursor.key()
                if not key.startswith(prefix):
                    break
                yield item(key, cursor.value())
                more = cursor.next()

    def keys(
        self, transaction: IndexTransaction, table: Table[Any, Any], *begin: object
    ) -> Iterator[bytes]:
        """Yield the bytes of the keys that begin with these fields, in order.

        Neither reads nor checks values, so a key may be damaged.
        """
        return self._keys(transaction, table, table.key.begin(begin))

    def keys_with(
        self, transaction: IndexTransaction, table: Table[Any, Any], digits: str
    ) -> Iterator[bytes]:
        """Yield the bytes of the keys that begin with these hex digits, as `keys` does."""
        half = len(digits) // 2 * 2
        for key in self._keys(transaction, table, bytes.fromhex(digits[:half])):
            if key.hex().startswith(digits):
                yield key

    def _keys(
        self, transaction: IndexTransaction, table: Table[Any, Any], prefix: bytes
    ) -> Iterator[bytes]:
        with transaction.cursor(db=self.db(table.name)) as cursor:
            if _go(cursor, prefix):
                for key in cursor.iternext(values=False):
                    if not key.startswith(prefix):
                        break
                    yield bytes(key)

    def last(
        self, transaction: IndexTransaction, table: Table[_K, Any], *begin: object
    ) -> _K | None:
        """Return the last key that begins with these fields; None if there is none."""
        prefix = table.key.begin(begin)
        with transaction.cursor(db=self.db(table.name)) as cursor:
            beyond = bool(prefix) and cursor.set_range(prefix + b"\xff" * ID_BYTES)
            if not (cursor.prev() if beyond else cursor.last()):
                return None
            key = cursor.key()
            return table.key_of(key) if key.startswith(prefix) else None

    def count(self, transaction: IndexTransaction, name: str) -> int:
        """Return the number of rows of a named database."""
        return int(transaction.stat(self.db(name))["entries"])

    def batches(self, table: Table[Any, Any]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the keys and rows of a table, in key order: one short transaction per batch.

        For passes over a whole index that must not hold one transaction open.  May miss concurrent
        changes.
        """
        after: bytes | None = None
        while True:
            with (
                self.env.read() as transaction,
                transaction.cursor(db=self.db(table.name)) as cursor,
            ):
                more = cursor.first() if after is None else cursor.set_range(after + b"\0")
                rows: list[tuple[bytes, bytes]] = []
                while more and len(rows) < _BATCH:
                    rows.append((bytes(cursor.key()), bytes(cursor.value())))
                    more = cursor.next()
            if rows:
                after = rows[-1][0]
                yield rows
            if not more:
                return

    def unsound(self) -> Iterator[tuple[Table[Any, Any], bytes]]:
        """Yield table and key of every row that does not match its check or has another form."""
        for table in TABLES:
            if table.has_check:
                for batch in self.batches(table):
                    for key, row in batch:
                        if not table.is_sound(key, row):
                            yield table, key

    # -- what is one row ---------------------------------------------------------------------

    def generation(self, transaction: IndexTransaction) -> int:
        """Return how many commits were published.  Raises Corrupt if the row is damaged."""
        return self.get(transaction, COUNTERS, GENERATION) or 0

    def set_generation(self, transaction: IndexTransaction, generation: int) -> None:
        """Record how many commits were published, in the transaction that publishes one."""
        self.put(transaction, COUNTERS, GENERATION, generation)

    def backup(self, transaction: IndexTransaction) -> BackupRow | None:
        """Return what a backup is of; None if this index is not a backup's.

        One whose generation is another than the row's was written to since.  Raises Corrupt if the
        row is damaged.
        """
        found = next(self.walk(transaction, BACKUP), None)
        return None if found is None else BackupRow(*found)

    # -- locations ---------------------------------------------------------------------------

    def block(self, transaction: IndexTransaction, block: BlockId) -> Location | None:
        """Return the location of a block, or None."""
        return self._located(transaction, (Kind.BLOCK, block))

    def has_blocks(self, transaction: IndexTransaction, blocks: Sequence[bytes]) -> list[bool]:
        """Return whether each block is stored, with one call into LMDB."""
        return [row is not None for row in self.block_rows(transaction, blocks)]

    def record(self, transaction: IndexTransaction, kind: Kind, id: bytes) -> Location | None:
        """Return the location of a record, or None."""
        return self._located(transaction, (kind, id))

    def has_record(self, transaction: IndexTransaction, kind: Kind, id: bytes) -> bool:
        """Return whether the record is stored.  Raises Corrupt if its row names an unknown pack."""
        return self.record(transaction, kind, id) is not None

    def has_records(self, transaction: IndexTransaction, keys: Iterable[Key]) -> set[Key]:
        """Return those of these records that are stored, with one call into LMDB."""
        names = {_place(*key)[1]: key for key in keys}
        with transaction.cursor(db=self.db(RECORDS.name)) as cursor:
            return {names[name] for name, _ in cursor.getmulti(list(names))}

    def record_spans(
        self, transaction: IndexTransaction, kind: Kind, ids: Iterable[bytes]
    ) -> list[tuple[PackId, int, int, int, bytes]]:
        """Return pack, offset, stored length, codec and id of those records that are stored.

        A fast `record` for many, with one call into LMDB.
        """
        names = [bytes([kind]) + id for id in ids]
        with transaction.cursor(db=self.db(RECORDS.name)) as cursor:
            rows: Any = cursor.getmulti(names)
        spans = []
        for name, row in rows:
            number, offset, stored, _, codec, _, _ = location.fields(row)
            spans.append((self._pack_id(transaction, number), offset, stored, codec, name[1:]))
        return spans

    def blocks(self, transaction: IndexTransaction) -> Iterator[tuple[BlockId, Location]]:
        """Yield every block with its location, in id order."""
        row: Any
        with transaction.cursor(db=self.db(BLOCKS.name)) as cursor:
            for key, row in cursor:
                yield BlockId(key), self.location(transaction, row)

    def records(self, transaction: IndexTransaction) -> Iterator[tuple[Kind, bytes, Location]]:
        """Yield every record's kind, id and location."""
        row: Any
        with transaction.cursor(db=self.db(RECORDS.name)) as cursor:
            for key, row in cursor:
                yield Kind(key[0]), key[1:], self.location(transaction, row)

    def record_ids(self, transaction: IndexTransaction, kind: Kind) -> Iterator[bytes]:
        """Yield the ids of every record of one kind, in order."""
        for key in self.keys(transaction, RECORDS, kind):
            yield key[1:]

    # -- rows of locations -------------------------------------------------------------------

    def row(self, transaction: IndexTransaction, key: tuple[int, bytes]) -> Row | None:
        """Return the row of a block or record, or None.  A record may be of an unknown kind."""
        database, name = _place(*key)
        found: Any = transaction.get(name, db=self.db(database))
        row: Row | None = found
        return row

    def block_rows(
        self, transaction: IndexTransaction, blocks: Sequence[bytes]
    ) -> list[Row | None]:
        """Return the rows of many blocks in one call into LMDB; None for a block not stored."""
        with transaction.cursor(db=self.db(BLOCKS.name)) as cursor:
            found: Any = cursor.getmulti(blocks)
        if len(found) == len(blocks):
            return [row for _, row in found]
        rows: dict[bytes, Row] = dict(found)
        return [rows.get(bytes(block)) for block in blocks]

    def readable_rows(
        self, transaction: IndexTransaction, blocks: Sequence[bytes]
    ) -> list[Row | None]:
        """Return the rows of blocks that are stored, and made-up ones of those elsewhere.

        A made-up row is good for `location` of this object, and for nothing that is written.
        """
        rows = self.block_rows(transaction, blocks)
        if self.elsewhere is None or None not in rows:
            return rows
        missing = [at for at, row in enumerate(rows) if row is None]
        found = self.elsewhere.locate([blocks[at] for at in missing])
        for at, place in zip(missing, found, strict=True):
            rows[at] = None if place is None else self._made_up(place)
        return rows

    def base(self, transaction: IndexTransaction, block: BlockId) -> Location | None:
        """Return where a block lies that others are differences to, None if it is nowhere."""
        [row] = self.base_rows(transaction, [block])
        return None if row is None else self.location(transaction, row)

    def base_rows(self, transaction: IndexTransaction, blocks: Sequence[bytes]) -> list[Row | None]:
        """Return `readable_rows` of blocks that others are differences to.

        One that is a difference itself here, and alone elsewhere, has the row of that place.
        """
        rows = self.block_rows(transaction, blocks)
        if self.elsewhere is None:
            return rows
        lacking = [at for at, row in enumerate(rows) if row is None or location.base_of(row)]
        there = self.elsewhere.locate([blocks[at] for at in lacking], alone=True)
        for at, place in zip(lacking, there, strict=True):
            if place is not None:
                rows[at] = self._made_up(place)
        return rows

    def _made_up(self, place: Location) -> Row:
        with self._closing:
            number = self._numbers.get(place.pack)
            if number is None:
                number = _ELSEWHERE + len(self._packs_elsewhere)
                self._packs_elsewhere.append(place.pack)
                self._numbers[place.pack] = number
        return location.encode(number, place)

    def location(self, transaction: IndexTransaction, row: Row) -> Location:
        """Return where the row of a block or record says that its payload lies."""
        number, offset, stored, raw, codec, width, base = location.fields(row)
        pack = self._pack_id(transaction, number)
        return Location(pack, offset, stored, raw, codec, width, base)

    def locations(self, transaction: IndexTransaction, rows: Iterable[Row]) -> list[Location]:
        """Return where the rows of blocks or records say that their payloads lie."""
        return [self.location(transaction, row) for row in rows]

    def put_row(self, transaction: IndexTransaction, key: Key, row: Row) -> None:
        """Write the row of a block or record."""
        database, name = _place(*key)
        data: Any = row
        transaction.put(name, data, db=self.db(database))

    def delete_row(self, transaction: IndexTransaction, key: Key) -> None:
        """Delete the row of a block or record, if there is one."""
        database, name = _place(*key)
        transaction.delete(name, db=self.db(database))

    def delete_row_if(self, transaction: IndexTransaction, key: Key, row: Row) -> bool:
        """Delete the row of a block or record if it is still this one; return whether it was."""
        if self.row(transaction, key) != row:
            return False
        self.delete_row(transaction, key)
        return True

    def _located(self, transaction: IndexTransaction, key: Key) -> Location | None:
        row = self.row(transaction, key)
        return None if row is None else self.location(transaction, row)

    def _pack_id(self, transaction: IndexTransaction, number: int) -> PackId:
        if number >= _ELSEWHERE and number - _ELSEWHERE < len(self._packs_elsewhere):
            return self._packs_elsewhere[number - _ELSEWHERE]
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

    def location_batches(self) -> Iterator[list[tuple[int, bytes, Row]]]:
        """Yield kind, id and row of every block, then of every record, as `batches` does.

        A kind may be unknown.
        """
        batch: Any
        for batch in self.batches(BLOCKS):
            yield [(Kind.BLOCK, id, row) for id, row in batch]
        for batch in self.batches(RECORDS):
            yield [(key[0], key[1:], row) for key, row in batch]

    def block_batches(self) -> Iterator[list[tuple[bytes, Row]]]:
        """Yield id and row of every block, as `batches` does."""
        batches: Any = self.batches(BLOCKS)
        yield from batches

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
        for number, named in self.walk(transaction, PACKS):
            yield self._named(number, *named)

    def numbered_pack(self, transaction: IndexTransaction, number: int) -> NamedPack | None:
        """Return the pack that has this number, or None."""
        named = self.get(transaction, PACKS, number)
        return None if named is None else self._named(number, *named)

    def _named(self, number: int, id: PackId, size: int, place: int) -> NamedPack:
        if place not in self.places:
            raise unknown_place(place)
        return NamedPack(number, id, size, place)

    def has_number(self, transaction: IndexTransaction, number: int) -> bool:
        """Return whether a pack has this number; does not check the row."""
        return self.has(transaction, PACKS, number)

    def pack_number(self, transaction: IndexTransaction, pack: PackId) -> int | None:
        """Return the number of a pack; None for a pack that the index does not name."""
        return self.get(transaction, PACK_IDS, pack)

    def taken(self, transaction: IndexTransaction, packs: Iterable[PackId]) -> set[PackId]:
        """Return those of these packs that the index names, also as condemned ones."""
        condemned = {one.pack for one in self.condemned(transaction)}
        return {
            pack
            for pack in packs
            if pack in condemned or self.pack_number(transaction, pack) is not None
        }

    def name_packs(self, transaction: IndexTransaction, packs: Iterable[NamedPack]) -> None:
        """Insert the rows of packs of this directory, under the numbers that they have."""
        for pack in packs:
            self.put(transaction, PACKS, pack.number, (pack.id, pack.size, HERE))
            self.put(transaction, PACK_IDS, pack.id, pack.number)

    def insert_pack(self, transaction: IndexTransaction, pack: SealedPack | Footer) -> None:
        """Insert rows for a pack and all its entries.

        A block that another writer stored meanwhile keeps its row; this pack's copy is dead weight
        that gc collects.
        """
        number = self._number_pack(transaction, pack)
        rows: dict[str, list[tuple[bytes, Any]]] = {BLOCKS.name: [], RECORDS.name: []}
        for entry in pack.entries:
            database, key = _place(entry.kind, entry.id)
            rows[database].append((key, location.encode(number, entry)))
        for database, items in rows.items():
            with transaction.cursor(db=self.db(database)) as cursor:
                cursor.putmulti(items, overwrite=False)

    def _number_pack(self, transaction: IndexTransaction, pack: SealedPack | Footer) -> int:
        """Insert rows for the pack itself and return its number, which no pack had before."""
        number = self.get(transaction, COUNTERS, _NEXT_PACK) or 0
        for table in (PACKS, CONDEMNED):
            last = self.last(transaction, table)
            if last is not None:
                number = max(number, last + 1)
        self.put(transaction, COUNTERS, _NEXT_PACK, number + 1)
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
                self.put_row(transaction, key, location.encode(number, entry))
        return Counter(location.pack_number(row) for _, _, row in moved)

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
        names = tuple(lease.encode("ascii", "replace") for lease in leases)
        self.put(transaction, CONDEMNED, number, (named.id, named.size, named.place, names))
        self.delete(transaction, PACKS, number)
        self.delete(transaction, PACK_IDS, pack)

    def condemned(self, transaction: IndexTransaction) -> list[Condemned]:
        """Return every condemned pack whose file may still exist."""
        return [
            Condemned(
                number, pack, size, tuple(name.decode("ascii", "replace") for name in names), place
            )
            for number, (pack, size, place, names) in self.walk(transaction, CONDEMNED)
        ]

    def forget_condemned(self, transaction: IndexTransaction, packs: Iterable[Condemned]) -> None:
        """Remove the rows of condemned packs whose files are deleted."""
        for pack in packs:
            self.delete(transaction, CONDEMNED, pack.number)


def _place(kind: int, id: bytes) -> tuple[str, bytes]:
    """Return the database and the key of a block or record."""
    return (BLOCKS.name, id) if kind == Kind.BLOCK else (RECORDS.name, bytes([kind]) + id)


def _go(cursor: Cursor, prefix: bytes) -> bool:
    # LMDB goes to no empty key.
    return cursor.set_range(prefix) if prefix else cursor.first()
