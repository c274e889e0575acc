"""Rows of `blocks` and `records`: where each payload is stored.

    blocks      BlockId                    -> location
    records     kind u8 + id               -> location
    location =  pack number u32, offset u64, stored length u32, raw length u32, codec u8, width u8
                [, base BlockId]

The only module that knows these bytes.  Other modules hold a row as an opaque `Row`: they compare
it with a later one, hand it back to the index, or ask a function here.  Payloads and footers prove
these rows, so they end with no check.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NewType

from mstore.blocks.packs import NO_BASE, Entry, Kind
from mstore.ids import ID_BYTES

if TYPE_CHECKING:
    import numpy as np

BLOCKS: Final = "blocks"
RECORDS: Final = "records"

Key = tuple[Kind, bytes]
"""A block or record: its kind and the 32 bytes of its id."""

Row = NewType("Row", object)
"""A row as stored.  Not declared as bytes, so that mypy refuses to slice it elsewhere."""

_LOCATION = struct.Struct(">IQIIBB")
_NUMBER = struct.Struct(">I")
_STORED_LENGTH = slice(12, 16)
_RAW_LENGTH = slice(16, 20)
_CODEC, _WIDTH = 20, 21

BLOCKS_FORM: Final = (
    frozenset({ID_BYTES}),
    frozenset({_LOCATION.size, _LOCATION.size + ID_BYTES}),
)
"""The lengths that keys and rows of `blocks` may have."""
RECORDS_FORM: Final = frozenset({1 + ID_BYTES}), frozenset({_LOCATION.size})
"""The lengths that keys and rows of `records` may have."""


def name(kind: int, id: bytes) -> tuple[str, bytes]:
    """Return the database and the key of a block or record."""
    return (BLOCKS, id) if kind == Kind.BLOCK else (RECORDS, bytes([kind]) + id)


def record_names(kind: Kind, ids: Iterable[bytes]) -> list[bytes]:
    """Return the keys of records of one kind: a fast `name` for many."""
    prefix = bytes([kind])
    return [prefix + id for id in ids]


def encode(number: int, entry: Entry) -> Row:
    """Return the row of an entry of the pack with this number."""
    head = _LOCATION.pack(
        number, entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width
    )
    return Row(head if entry.base == NO_BASE else head + entry.base)


def fields(row: Row) -> tuple[int, int, int, int, int, int, bytes]:
    """Return pack number, offset, stored length, raw length, codec, width and base (or NO_BASE)."""
    data: Any = row
    return *_LOCATION.unpack_from(data), data[_LOCATION.size :] or NO_BASE


def pack_number(row: Row) -> int:
    """Return the number of the pack that a row names."""
    data: Any = row
    number: int = _NUMBER.unpack_from(data)[0]
    return number


def raw_length(row: Row) -> int:
    """Return the length of the plain bytes."""
    data: Any = row
    return int.from_bytes(data[_RAW_LENGTH], "big")


def codec(row: Row) -> int:
    """Return the number of the codec."""
    data: Any = row
    number: int = data[_CODEC]
    return number


def width(row: Row) -> int:
    """Return the width of an element, in bytes."""
    data: Any = row
    number: int = data[_WIDTH]
    return number


def base_of(row: Row) -> bytes | None:
    """Return the base block of a delta; None for a payload that needs none."""
    data: Any = row
    return data[_LOCATION.size :] or None


def moved(row: Row, number: int) -> Row:
    """Return the row of the same payload in the same place of the pack with another number."""
    data: Any = row
    return Row(_NUMBER.pack(number) + data[_NUMBER.size :])


def stored_lengths(rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the stored bytes of many payloads, int64[rows], read from their rows alone."""
    # Rows differ in length (some name a base block); their heads do not.
    import numpy as np  # late: reading a log needs no numpy

    data: Sequence[Any] = rows
    lengths = b"".join([row[_STORED_LENGTH] for row in data])
    return np.frombuffer(lengths, dtype=">u4").astype(np.int64)
