"""Rows that carry a check of their own, for tables that nothing else could check.

    check    first 8 bytes of BLAKE3 derive_key("mstore 1 row at rest") of the database's name,
             a zero byte, the key, and the value

What the index says is proved by packs and hashes; a threshold or a remembered chunk is just a
number, and a bit of it that turns would give other weights without a word.  So such a row is
believed only while it matches its check, and is otherwise as good as none.  That is for damage; it
keeps nobody out.  Keys of a database have one length, so no two rows are hashed alike.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from blake3 import blake3

from mstore.ids import Buffer

CHECK_BYTES: Final = 8


def check_of(database: str, key: bytes, value: Buffer) -> bytes:
    """The check of a value under a key of a database."""
    hasher = _start(database).copy()
    hasher.update(b"".join((key, value)))
    return hasher.digest(CHECK_BYTES)


@cache
def _start(database: str) -> blake3:
    """What all checks of a database begin with."""
    return blake3(database.encode() + b"\0", derive_key_context="mstore 1 row at rest")


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    """The row of a value: the value, then its check."""
    return value + check_of(database, key, value)


def opened(database: str, key: bytes, row: bytes | None) -> bytes | None:
    """The value of a row; None where there is no row, or one that does not match its check."""
    if row is None or len(row) < CHECK_BYTES:
        return None
    value = row[:-CHECK_BYTES]
    return value if row[-CHECK_BYTES:] == check_of(database, key, value) else None
