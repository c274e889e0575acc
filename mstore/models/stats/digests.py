"""Digests: what planning needs of a pair's statistics, without unpacking them.

A digest follows from a table (`mstore.models.stats.table`) and can be made from it again:

    elements of the tensor u64, elements a chunk u32, then for each chunk the fields of chunk.CHUNK
    up to the sketch, 32 bytes

Little-endian.  A table of one chunk has no digest of its rows: such tables are opened together
(`mstore.models.stats.known`).  Does not own where rows are kept.  Pure functions.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from mstore.models.stats.chunk import CHUNK, SKETCH_BUCKETS, Rows, finite

ROW_BYTES: Final = CHUNK.itemsize - SKETCH_BUCKETS - 2
"""Bytes of a row without exponent and sketch."""

_HEAD: Final = struct.Struct("<QI")


class Digest(msgspec.Struct, frozen=True, eq=False):
    """The rows of a pair's statistics; their sketches are zero.

    is_finite: whether all rows are (`chunk.finite`).
    """

    rows: Rows
    elements: int
    chunk_elements: int
    is_finite: bool


def digest(rows: Rows, elements: int, chunk_elements: int) -> bytes | None:
    """Encode the digest of these rows; None for a single one."""
    if len(rows) < 2:
        return None
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), CHUNK.itemsize)
    return _HEAD.pack(elements, chunk_elements) + raw[:, :ROW_BYTES].tobytes()


def digests(values: Sequence[bytes | None]) -> list[Digest | None]:
    """Decode many digests; None for a missing or invalid one."""
    heads = [None if value is None else _head(value) for value in values]
    plain = [value for value, head in zip(values, heads, strict=True) if value and head]
    raw = b"".join([value[_HEAD.size :] for value in plain])
    whole = np.zeros(len(raw) // ROW_BYTES, dtype=CHUNK)
    narrow = np.frombuffer(raw, dtype=np.uint8).reshape(len(whole), ROW_BYTES)
    whole.view(np.uint8).reshape(len(whole), CHUNK.itemsize)[:, :ROW_BYTES] = narrow
    whole.flags.writeable = False
    # Rows of all pairs together: asking numpy takes as long for one pair as for hundreds.
    odd = np.flatnonzero(~finite(whole)).tolist()
    found: list[Digest | None] = []
    done = 0
    for head in heads:
        if head is None:
            found.append(None)
            continue
        elements, chunk, chunks = head
        is_finite = not odd or bisect_left(odd, done) == bisect_left(odd, done + chunks)
        found.append(Digest(whole[done : done + chunks], elements, chunk, is_finite))
        done += chunks
    return found


def _head(value: bytes) -> tuple[int, int, int] | None:
    """Return elements, elements a chunk, and chunks; None if the length contradicts them."""
    if len(value) < _HEAD.size:
        return None
    elements, chunk = _HEAD.unpack_from(value)
    chunks = -(-elements // chunk) if chunk else 0
    fits = chunks > 0 and len(value) == _HEAD.size + ROW_BYTES * chunks
    return (elements, chunk, chunks) if fits else None
