"""Canonical encoding: one value, one byte string, one id.

Records are MessagePack arrays whose first element names kind and version ("tensor/1").  Integers
take their shortest form, floats are 64-bit, strings UTF-8, maps do not occur.  A record that
decodes but does not encode back to the same bytes is refused, so two different byte strings never
mean the same record.  So is one that contradicts itself or exceeds a limit (`Record.problem`):
records may come from untrusted sources.

Each record class names its `kind` (where it is stored) and its `id_type` (its hash domain).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, Buffer, Id, plain_id
from mstore.objects.limits import DEFAULT_LIMITS, MAX_COUNT, RecordLimits

_encoder = msgspec.msgpack.Encoder(enc_hook=plain_id)
# Decoding checks these constraints.
IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]

_decoders: dict[type[Record], Callable[[Buffer], Any]] = {}


def encode_struct(value: msgspec.Struct) -> bytes:
    """Return the canonical bytes of a struct that stands for a record."""
    return _encoder.encode(value)


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all records: immutable, array-shaped, tagged."""

    kind: ClassVar[Kind]
    id_type: ClassVar[type[Id]]

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return _encoder.encode(self)

    @classmethod
    def decoder(cls) -> Callable[[Buffer], Record]:
        """Return a function that decodes a record of this class; raises as msgspec does."""
        return msgspec.msgpack.Decoder(cls).decode

    def id(self) -> Id:
        """The hash of the canonical bytes in this kind's domain."""
        return self.id_type.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        """Return what is invalid: an exceeded limit, or fields that contradict each other.

        Takes time linear in the record; follows no id to another one.
        """
        raise NotImplementedError


R = TypeVar("R", bound=Record)


def decode(kind: type[R], data: Buffer, where: str, limits: RecordLimits = DEFAULT_LIMITS) -> R:
    """Decode, and check canonical form and validity.  Raises Corrupt naming `where`."""
    if len(data) > limits.bytes_of(kind.kind):
        raise Corrupt(
            f"a {kind.__name__} record of {len(data)} bytes; the limit is "
            f"{limits.bytes_of(kind.kind)}",
            where=where,
        )
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = kind.decoder()
    try:
        record = cast(R, decoder(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a {kind.__name__} record: {error}", where=where) from error
    if record.encode() != bytes(data):
        raise Corrupt(f"a {kind.__name__} record not in canonical form", where=where)
    problem = record.problem(limits)
    if problem is not None:
        raise Corrupt(f"not a sound {kind.__name__} record: {problem}", where=where)
    return record
