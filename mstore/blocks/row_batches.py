"""All rows of a table in batches: one short read transaction per batch.

For passes over a whole index that must not hold one transaction open.  May miss concurrent changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mstore.blocks.index import DATABASES, UNCHECKED, Index, opened
from mstore.blocks.location_rows import BLOCKS, RECORDS, Row
from mstore.blocks.packs import Kind

_BATCH = 20_000


def of_table(index: Index, database: str) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the keys and rows of a named database, in key order; for the module that owns it."""
    after: bytes | None = None
    while True:
        with (
            index.env.read() as transaction,
            transaction.cursor(db=index.db(database)) as cursor,
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


def blocks(index: Index) -> Iterator[list[tuple[bytes, Row]]]:
    """Yield id and row of every block."""
    batches: Any = of_table(index, BLOCKS)
    yield from batches


def locations(index: Index) -> Iterator[list[tuple[int, bytes, Row]]]:
    """Yield kind, id and row of every block, then of every record; a kind may be unknown."""
    batch: Any
    for batch in of_table(index, BLOCKS):
        yield [(Kind.BLOCK, id, row) for id, row in batch]
    for batch in of_table(index, RECORDS):
        yield [(key[0], key[1:], row) for key, row in batch]


def damaged(index: Index) -> Iterator[tuple[str, bytes]]:
    """Yield database and key of every row that does not match its check."""
    for database in DATABASES:
        if database in UNCHECKED:
            continue
        for batch in of_table(index, database):
            for key, row in batch:
                if opened(database, key, row) is None:
                    yield database, key
