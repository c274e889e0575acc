"""Where a payload is stored, and the rows of `blocks` and `records` that say so.

The only module that knows the bytes of these rows.  Other modules hold a row as an opaque `Row`:
they compare it with a later one, hand it back to the index, or ask a function here.  Payloads and
footers prove these rows, so they end with no check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NewType, TypeVar

import msgspec

from mstore.blocks.packs import NO_BASE, Kind, PackEntry
from mstore.blocks.tables import Form
from mstore.terms.ids import ID_BYTES, PackId

if TYPE_CHECKING:
    import numpy as np

Key = tuple[Kind, bytes]
"""A block or record: its kind and the 32 bytes of its id."""

Item = TypeVar("Item")

Row = NewType("Row", object)
"""A row as stored.  Not declared as bytes, so that mypy refuses to slice it elsewhere."""

_LOCATION = struct.Struct(">IQIIBB")
_NUMBER = struct.Struct(">I")
_STORED_LENGTH = slice(12, 16)
_RAW_LENGTH = slice(16, 20)
_CODEC, _WIDTH = 20, 21
_TEXT = (
    "u32 pack number, u64 offset, u32 stored length, u32 plain length, u8 codec, u8 element width"
)


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a payload is stored.  `pack` is resolved, so a location outlives its transaction."""

    pack: PackId
    offset: int
    stored_length: int
    raw_length: int
    codec: int
    width: int
    base: bytes = NO_BASE

    def follows(self, before: Location) -> bool:
        """Return whether the payload lies right behind another one."""
        return (self.pack, self.offset) == (before.pack, before.offset + before.stored_length)


def in_runs(items: Iterable[Item], place: Callable[[Item], Location]) -> Iterator[list[Item]]:
    """Yield items together whose payloads follow each other in a pack, in the order given."""
    run: list[Item] = []
    last: Location | None = None
    for item in items:
        at = place(item)
        if last is not None and not at.follows(last):
            yield run
            run = []
        run.append(item)
        last = at
    if run:
        yield run


def run_of(places: Sequence[Location]) -> tuple[PackId, int, int]:
    """Return pack, offset and length of payloads that follow each other."""
    first, last = places[0], places[-1]
    return first.pack, first.offset, last.offset + last.stored_length - first.offset


def _same(row: Any) -> Any:
    return row


FORM: Final[Form[Row]] = Form(
    f"{_TEXT}, for codec 4 the base BlockId",
    frozenset({_LOCATION.size, _LOCATION.size + ID_BYTES}),
    _same,
    _same,
    b"".join,
)
RECORD_FORM: Final[Form[Row]] = Form(_TEXT, frozenset({_LOCATION.size}), _same, _same, b"".join)


def encode(number: int, entry: PackEntry | Location) -> Row:
    """Return the row of an entry of the pack with this number, or of a place in it."""
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
