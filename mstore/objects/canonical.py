"""Canonical encoding: one value, one byte string, one id.

Records are MessagePack arrays whose first element names kind and version ("tensor/1").
Integers take their shortest form, floats are 64-bit, strings UTF-8, maps do not occur.  A record
that decodes but does not encode back to the same bytes is refused, so two different byte
strings never mean the same record.

Each record class names its `kind` (where it is stored) and its `id_type` (its hash domain).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, Buffer, Id


def plain_id(value: object) -> bytes:
    """For msgspec, which does not look through subclasses: an id is its 32 bytes."""
    if isinstance(value, Id):
        return bytes(value)
    raise NotImplementedError(f"a record cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_id)
# What a field may hold is checked when it is decoded: records may come from strangers.
IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0)]

_decoders: dict[type[Record], msgspec.msgpack.Decoder[Any]] = {}


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all records: immutable, array-shaped, tagged."""

    kind: ClassVar[Kind]
    id_type: ClassVar[type[Id]]

    def encode(self) -> bytes:
        """The canonical bytes."""
        return _encoder.encode(self)

    def id(self) -> Id:
        """The hash of the canonical bytes in this kind's domain."""
        return self.id_type.of(self.encode())


R = TypeVar("R", bound=Record)


def decode(kind: type[R], data: Buffer, where: str) -> R:
    """Decode and check canonical form.  Raises Corrupt naming `where`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record: R = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a {kind.__name__} record: {error}", where=where) from error
    if record.encode() != bytes(data):
        raise Corrupt(f"a {kind.__name__} record not in canonical form", where=where)
    return record
