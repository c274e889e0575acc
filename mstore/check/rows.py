"""Rows of the index in batches: one short read transaction per batch."""

from __future__ import annotations

from collections.abc import Iterator

from mstore.blocks.index import DATABASES, UNCHECKED, Index, opened
from mstore.blocks.packs import Kind

BATCH = 20_000
RAW_LENGTH = slice(16, 20)
CODEC, WIDTH = 20, 21
LOCATION_BYTES = 22


def batches(index: Index, database: str) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield all rows of a named database in key order; may miss concurrent changes."""
    after: bytes | None = None
    while True:
        with (
            index.env.read() as transaction,
            transaction.cursor(db=index.db(database)) as cursor,
        ):
            more = cursor.first() if after is None else cursor.set_range(after + b"\0")
            rows: list[tuple[bytes, bytes]] = []
            while more and len(rows) < BATCH:
                rows.append((bytes(cursor.key()), bytes(cursor.value())))
                more = cursor.next()
        if rows:
            after = rows[-1][0]
            yield rows
        if not more:
            return


def damaged(index: Index) -> Iterator[tuple[str, bytes]]:
    """Yield database and key of every row that does not match its check."""
    for database in DATABASES:
        if database in UNCHECKED:
            continue
        for batch in batches(index, database):
            for key, row in batch:
                if opened(database, key, row) is None:
                    yield database, key


def pack_number(row: bytes) -> bytes:
    """Return the key of the pack that a location row names."""
    return row[:4]


def raw_length(row: bytes) -> int:
    """Return the plain length in a location row."""
    return int.from_bytes(row[RAW_LENGTH], "big")


def base_of(row: bytes) -> bytes | None:
    """Return the base block of a delta; None for a block that needs none."""
    return row[LOCATION_BYTES:] or None


def key_of(database: str, key: bytes) -> tuple[Kind, bytes]:
    """Return kind and id for a key of `blocks` or `records`."""
    return (Kind.BLOCK, key) if database == "blocks" else (Kind(key[0]), key[1:])


def record_key(kind: Kind, id: bytes) -> tuple[str, bytes]:
    """Return the database and the key of a block or record."""
    return ("blocks", id) if kind == Kind.BLOCK else ("records", bytes([kind]) + id)
