"""Pack numbers: the rows that give packs their numbers, and those of condemned packs.

    packs       pack number u32            -> PackId + size u64
    pack_ids    PackId                     -> pack number u32
    condemned   pack number u32            -> PackId + size u64 + lease names, 16 bytes each

The only module that knows these bytes; the index puts the check behind each value.  A number is
never reused, so a remembered number stays valid for ever.  No location names a condemned pack.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from mstore.blocks.checked_rows import CHECK_BYTES
from mstore.ids import ID_BYTES, PackId

PACKS: Final = "packs"
PACK_IDS: Final = "pack_ids"
CONDEMNED: Final = "condemned"
LEASE_NAME_BYTES: Final = 16

_NUMBER = struct.Struct(">I")
_SIZE_BYTES = 8
_SIZE = slice(ID_BYTES, ID_BYTES + _SIZE_BYTES)
_LEASES = slice(ID_BYTES + _SIZE_BYTES, None)

PACKS_FORM: Final = (
    frozenset({_NUMBER.size}),
    frozenset({ID_BYTES + _SIZE_BYTES + CHECK_BYTES}),
)
"""The lengths that keys and rows of `packs` may have."""
PACK_IDS_FORM: Final = frozenset({ID_BYTES}), frozenset({_NUMBER.size + CHECK_BYTES})
"""The lengths that keys and rows of `pack_ids` may have."""


class NamedPack(msgspec.Struct, frozen=True):
    """A pack by its number in the index, its id, and its size in bytes."""

    number: int
    id: PackId
    size: int


class Condemned(msgspec.Struct, frozen=True):
    """A pack that no row names any more, with the leases that existed when it was condemned."""

    number: int
    pack: PackId
    size: int
    leases: tuple[str, ...]


def encode_number(number: int) -> bytes:
    """Return the key of `packs` and `condemned`, and the value of `pack_ids`."""
    return _NUMBER.pack(number)


def decode_number(data: bytes) -> int:
    """Return the number in a key of `packs` and `condemned`, or a value of `pack_ids`."""
    return int.from_bytes(data, "big")


def encode_pack(pack: NamedPack) -> bytes:
    """Return the value of `packs`."""
    return pack.id + pack.size.to_bytes(_SIZE_BYTES, "big")


def decode_pack(key: bytes, value: bytes) -> NamedPack:
    """Parse a row of `packs`.  Raises ValueError."""
    size = int.from_bytes(value[_SIZE], "big")
    return NamedPack(decode_number(key), PackId(value[:ID_BYTES]), size)


def encode_condemned(pack: NamedPack, leases: Iterable[str]) -> bytes:
    """Return the value of `condemned`."""
    return encode_pack(pack) + "".join(leases).encode("ascii", "replace")


def decode_condemned(key: bytes, value: bytes) -> Condemned:
    """Parse a row of `condemned`.  Raises ValueError."""
    pack = decode_pack(key, value)
    names = value[_LEASES].decode("ascii", "replace")
    starts = range(0, len(names), LEASE_NAME_BYTES)
    leases = tuple(names[at : at + LEASE_NAME_BYTES] for at in starts)
    return Condemned(pack.number, pack.id, pack.size, leases)
