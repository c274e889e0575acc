"""Canonical encoding: one value, one byte string, one id.

Records are MessagePack arrays whose first element names kind and version ("tensor/1").  Integers
take their shortest form, floats are 64-bit, strings UTF-8, maps do not occur.  A record that
decodes but does not encode back to the same bytes is refused, so two different byte strings never
mean the same record.  So is one that contradicts itself or exceeds a limit (`Record.problem`):
records may come from untrusted sources.

Each record class names its `kind` (where it is stored) and its `id_type` (its hash domain).

All limits on records are here.  A decoded record takes time and memory linear in its bytes (at most
about 25 bytes of memory per byte), so bounding the bytes bounds the cost; the counts bound later
work on a record. docs/format.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from mstore.blocks.packs import Kind
from mstore.blocks.reader import RECORD_LIMIT
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, Buffer, Id, plain_id

MIB = 1 << 20
MAX_COUNT = (1 << 63) - 1
"""The largest length, offset, dimension or time in any record: the maximum of an off_t."""


class RecordLimits(msgspec.Struct, frozen=True):
    """Limits on one record; counts are of items, the rest is in bytes.  Raise them if trusted.

    `tensors` are those that a manifest, plan or coverage names; `name_bytes` is for the names of
    tensors, methods, parameters, patterns, authors and origins; `text_bytes` for messages, remarks
    and reasons.
    """

    tensor_record_bytes: int = RECORD_LIMIT
    record_bytes: int = 256 * MIB
    small_record_bytes: int = 4 * MIB
    note_bytes: int = 128 * 1024
    value_bytes: int = 64 * 1024
    value_depth: int = 16
    removed: int = 1000
    files: int = 100_000
    tensors: int = 1_000_000
    rank: int = 64
    parents: int = 4096
    experts: int = 4096
    parameters: int = 256
    operations: int = 100_000
    patterns: int = 10_000
    remarks: int = 10_000
    name_bytes: int = 4096
    text_bytes: int = MIB

    def bytes_of(self, kind: Kind) -> int:
        """Return the most bytes that a record of this kind may take."""
        if kind == Kind.TENSOR:
            return self.tensor_record_bytes
        if kind == Kind.NOTE:
            return self.note_bytes
        if kind in (Kind.MANIFEST, Kind.PLAN, Kind.COVERAGE):
            return self.record_bytes
        return self.small_record_bytes


DEFAULT_LIMITS = RecordLimits()


def too_many(what: str, count: int, limit: int) -> str | None:
    """Return the error message for a count above its limit, or None."""
    return f"{count} {what}; the limit is {limit}" if count > limit else None


def too_long(what: str, text: str, limit: int) -> str | None:
    """Return the error message for a text of more than `limit` bytes of UTF-8, or None."""
    # A character takes at most four bytes, so short names need no encoding.
    if 4 * len(text) > limit and len(text.encode()) > limit:
        return f"{what} of more than {limit} bytes"
    return None


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_id)
# Decoding checks these constraints.
IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]

_decoders: dict[type[Record], Callable[[Buffer], Any]] = {}


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
