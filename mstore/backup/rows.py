"""An index with the rows of another, as of one commit.

Inserts rows into a new environment instead of copying pages: leftovers in old pages stay behind,
every row that carries a check is checked, and the copy has a lock file of its own. Leases and
condemned packs are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mstore.blocks.index import DATABASES, UNCHECKED, Index, damaged, opened
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.ids import PackId

_PACKS = ("packs", "pack_ids")
_LEFT = frozenset({"leases", "condemned", *_PACKS})


@dataclass(frozen=True, slots=True)
class NamedPack:
    """A pack by its number in the index, its id, and its size in bytes."""

    number: bytes
    id: PackId
    size: int


def copy(source: Index, target: Index) -> list[NamedPack]:
    """Put all rows except those of packs into an empty index; return the packs, by number.

    Raises Corrupt at a row that does not match its check, StorageFailed.
    """
    source.env.refresh()
    with source.env.read() as reading, target.env.write() as writing:
        for database in DATABASES:
            if database not in _LEFT:
                with writing.cursor(db=target.db(database)) as cursor:
                    cursor.putmulti(_checked(source, reading, database), append=True)
        return packs(source, reading)


def _checked(
    index: Index, transaction: IndexTransaction, database: str
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=index.db(database)) as cursor:
        for key, row in cursor:
            if database not in UNCHECKED and opened(database, key, row) is None:
                raise damaged(database, key)
            yield key, row


def packs(index: Index, transaction: IndexTransaction) -> list[NamedPack]:
    """Return every pack that the index names."""
    return [
        NamedPack(number, PackId(value[:32]), int.from_bytes(value[32:40], "big"))
        for number, value in index.walk(transaction, "packs")
    ]


def name(index: Index, transaction: IndexTransaction, packs: Iterable[NamedPack]) -> None:
    """Insert rows for packs under the numbers that they have."""
    for pack in packs:
        index.put(transaction, "packs", pack.number, pack.id + pack.size.to_bytes(8, "big"))
        index.put(transaction, "pack_ids", pack.id, pack.number)
