"""An index with the rows of another, as of one commit.

Inserts rows into a new environment instead of copying pages: leftovers in old pages stay behind,
every row that carries a check is checked, and the copy has a lock file of its own. Leases and
condemned packs are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator

from mstore.blocks.index import DATABASES, UNCHECKED, Index, damaged, opened
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_numbers import CONDEMNED, PACK_IDS, PACKS, NamedPack

_LEFT = frozenset({"leases", CONDEMNED, PACKS, PACK_IDS})


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
        return list(source.named_packs(reading))


def _checked(
    index: Index, transaction: IndexTransaction, database: str
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=index.db(database)) as cursor:
        for key, row in cursor:
            if database not in UNCHECKED and opened(database, key, row) is None:
                raise damaged(database, key)
            yield key, row
