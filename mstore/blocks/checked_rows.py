"""Rows that carry their own checksum, for tables that nothing else verifies.

    check    first 8 bytes of BLAKE3 derive_key("mstore 1 row at rest") of the database's name,
             a zero byte, the key, and the value

Packs and hashes prove what the index says.  A threshold or a memo entry is just a number: one
flipped bit would silently give other weights.  So such a row counts only while it matches its
check, and otherwise counts as missing.  The check detects damage; it does not stop an attacker.
All keys of a database have one length, so no two rows hash the same input.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from blake3 import blake3

from mstore.ids import Buffer

CHECK_BYTES: Final = 8


def check_of(database: str, key: bytes, value: Buffer) -> bytes:
    """Return the check of a value under a key of a database."""
    hasher = _start(database).copy()
    hasher.update(b"".join((key, value)))
    return hasher.digest(CHECK_BYTES)


@cache
def _start(database: str) -> blake3:
    """Return the hasher fed with the prefix that all checks of a database share."""
    return blake3(database.encode() + b"\0", derive_key_context="mstore 1 row at rest")


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    """Return the row of a value: the value, then its check."""
    return value + check_of(database, key, value)


def opened(database: str, key: bytes, row: bytes | None) -> bytes | None:
    """Return the value of a row; None if there is no row or it does not match its check."""
    if row is None or len(row) < CHECK_BYTES:
        return None
    value = row[:-CHECK_BYTES]
    return value if row[-CHECK_BYTES:] == check_of(database, key, value) else None
