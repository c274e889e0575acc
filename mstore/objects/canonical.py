"""Canonical encoding: one value, one byte string, one id.

Records are MessagePack arrays whose first element names kind and version ("tensor/1").
Integers take their shortest form, floats are 64-bit, strings UTF-8, maps do not occur.  A record
that decodes but does not encode back to the same bytes is refused, so two different byte
strings never mean the same record.  So is one that contradicts itself or breaks a limit
(`Record.problem`): records may come from strangers.

Each record class names its `kind` (where it is stored) and its `id_type` (its hash domain).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, Buffer, Id
from mstore.objects.limits import DEFAULT_LIMITS, MAX_COUNT, RecordLimits


def plain_id(value: object) -> bytes:
    """For msgspec, which does not look through subclasses: an id is its 32 bytes."""
    if isinstance(value, Id):
        return bytes(value)
    raise NotImplementedError(f"a record cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_id)
# What a field may hold is checked when it is decoded.
IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]

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

    def problem(self, limits: RecordLimits) -> str | None:
        """What is unsound about it: a limit that it breaks, or fields that contradict each other.

        Takes time linear in the record; follows no id to another one.
        """
        raise NotImplementedError


R = TypeVar("R", bound=Record)


def decode(kind: type[R], data: Buffer, where: str, limits: RecordLimits = DEFAULT_LIMITS) -> R:
    """Decode, check canonical form and that the record is sound.  Raises Corrupt naming `where`."""
    if len(data) > limits.bytes_of(kind.kind):
        raise Corrupt(
            f"a {kind.__name__} record of {len(data)} bytes; the limit is "
            f"{limits.bytes_of(kind.kind)}",
            where=where,
        )
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record: R = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a {kind.__name__} record: {error}", where=where) from error
    if record.encode() != bytes(data):
        raise Corrupt(f"a {kind.__name__} record not in canonical form", where=where)
    problem = record.problem(limits)
    if problem is not None:
        raise Corrupt(f"not a sound {kind.__name__} record: {problem}", where=where)
    return record
