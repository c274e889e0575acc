"""Limits on records, all in one place; a record that exceeds one is refused.

Records may come from untrusted sources.  A decoded record takes time and memory linear in its bytes
(at most about 25 bytes of memory per byte), so bounding the bytes bounds the cost; the counts bound
later work on a record. docs/format.md has the table.
"""

from __future__ import annotations

import msgspec

from mstore.blocks.packs import Kind
from mstore.blocks.reader import RECORD_LIMIT

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
