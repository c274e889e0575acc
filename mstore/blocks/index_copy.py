"""An index with the rows of another, as of one commit.

Inserts rows into a new environment instead of copying pages: leftovers in old pages stay behind,
every row that carries a check is checked, and the copy has a lock file of its own. Tables of the
source alone, such as leases and condemned packs, are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import PACK_IDS, PACKS, TABLES, NamedPack
from mstore.blocks.tables import Table


def copy(source: Index, target: Index) -> list[NamedPack]:
    """Put all rows except those of packs into an empty index; return the packs, by number.

    Raises Corrupt at a row that does not match its check, StorageFailed.
    """
    source.env.refresh()
    with source.env.read() as reading, target.env.write() as writing:
        for table in TABLES:
            if not (table.is_own or table in (PACKS, PACK_IDS)):
                with writing.cursor(db=target.db(table.name)) as cursor:
                    cursor.putmulti(_checked(source, reading, table), append=True)
        return list(source.named_packs(reading))


def _checked(
    index: Index, transaction: IndexTransaction, table: Table[Any, Any]
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=index.db(table.name)) as cursor:
        for key, row in cursor:
            if table.has_check:
                table.item(key, row)
            yield key, row
