"""Typed ids: 32 bytes each, parsed strictly, printed short.

A BlockId is the plain BLAKE3 of a block's bytes.  Every record kind has its own
`derive_key` context, so that the bytes of one kind can never pass for another.  The
contexts are part of the format (docs/format.md) and never change.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, Self, runtime_checkable

from blake3 import blake3

from mstore.terms.errors import BadName

ID_BYTES = 32
Buffer = bytes | bytearray | memoryview


def _is_hexadecimal(given: object) -> bool:
    digits = given if isinstance(given, str) else ""
    return len(digits) == 2 * ID_BYTES and set(digits) <= set("0123456789abcdef")


class Id(bytes):
    """A 32-byte name.  Each subclass is its own type; equal bytes of two kinds are not equal."""

    __slots__ = ()
    context: ClassVar[str | None] = None

    def __new__(cls, raw: Buffer) -> Self:
        if len(raw) != ID_BYTES:
            raise ValueError(f"{cls.__name__} takes {ID_BYTES} bytes, not {len(raw)}")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, data: Buffer) -> Self:
        """Hash these bytes in this kind's own hash domain."""
        # A digest has the length of an id: nothing to check.
        if cls.context is None:
            return bytes.__new__(cls, blake3(data).digest())
        return bytes.__new__(cls, blake3(data, derive_key_context=cls.context).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse 64 hexadecimal digits.  Raises BadName for anything else."""
        if not _is_hexadecimal(text):
            raise BadName(f"not a {cls.__name__} (64 lowercase hex digits): {text!r}")
        return cls(bytes.fromhex(text))

    @property
    def short(self) -> str:
        """The first twelve digits, for people."""
        return self.hex()[:12]

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.short})"


def plain_id(value: object) -> bytes:
    """Encode an id as its 32 bytes; msgspec does not handle subclasses."""
    if isinstance(value, Id):
        return bytes(value)
    raise NotImplementedError(f"a record cannot hold {type(value).__name__}")


def split_ids(raw: bytes) -> list[bytes]:
    """Return ids that stand one behind the other."""
    return [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]


class BlockId(Id):
    """Names a block's plain bytes."""

    __slots__ = ()


class TensorId(Id):
    """Names a tensor record: dtype, shape and block list."""

    __slots__ = ()
    context = "mstore 1 tensor record"


class VirtualId(Id):
    """Names a virtual tensor record: dtype, shape, and the plan that computes it."""

    __slots__ = ()
    context = "mstore 1 virtual tensor"


class ManifestId(Id):
    """Names the content of a whole snapshot."""

    __slots__ = ()
    context = "mstore 1 manifest"


class SnapshotId(Id):
    """Names a commit: manifest, parents, message, and how, by whom and when it was made."""

    __slots__ = ()
    context = "mstore 1 snapshot"


class PlanId(Id):
    """Names a plan: inputs, parameters and selection."""

    __slots__ = ()
    context = "mstore 1 plan"


class CoverageId(Id):
    """Names the coverage of one merge."""

    __slots__ = ()
    context = "mstore 1 coverage"


class NoteId(Id):
    """Names a note: what it is about, kind, key, value, author and time."""

    __slots__ = ()
    context = "mstore 1 note"


class PackId(Id):
    """Names a pack file by its header and footer table."""

    __slots__ = ()
    context = "mstore 1 pack"


class SegmentId(Id):
    """Names a segment by its header, which names all its pages."""

    __slots__ = ()
    context = "mstore 1 segment"


@runtime_checkable
class Identified(Protocol):
    """What a SnapshotId names: a `Snapshot`."""

    @property
    def id(self) -> SnapshotId:
        """The id of the snapshot."""


Revision = str | SnapshotId | Identified
"""What names a snapshot: text (a ref, `REF~1`, the beginning of an id), its id, or itself."""
