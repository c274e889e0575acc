"""The statistics of one tensor pair as one value, and as compact bytes.

Owns DeltaTable (rows of all chunks, histogram, lengths) and its encoding.  Does not
own where the bytes are kept or under which key.  Frozen values, pure functions: safe in any
thread.  Bytes given to `decode` may come from anywhere: they are checked, never executed, and
never take more memory than the limit that the caller sets.

**Encoding**, little-endian:

    4       magic "MDT2"
    rest    one zstd frame, level 3, with content size and content checksum, of:

        8       elements of the tensor, n
        8       elements a chunk, c (the last chunk may be shorter)
        4       occupied bins of the histogram, h
                ceil(n / c) rows, column by column in the order of chunk.CHUNK
        2h      bins, each as its distance from the one before, the first from 0
        8h      elements of the bin that lie on its edge (exact ones)
        8h      elements of the bin off the edge (inexact ones)

A column is split into byte planes: the lowest byte of every entry, then the second of every
entry, and so on.  High bytes of counts and exponents are then long runs, which zstd folds away;
of a row some 60 bytes remain, and of a histogram some 2 bytes a bin.  The bytes are the same for
the same zstd release; another release may pack better, and decodes all the same.

A **digest** is what planning needs of a table, without unpacking it; it can be made again from the
table:

    elements of the tensor u64, elements a chunk u32, then for each chunk the fields of chunk.CHUNK
    up to the sketch, 32 bytes
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from mstore.models.stats.chunk import CHUNK, SKETCH_BUCKETS, Rows, finite
from mstore.models.stats.histogram import NAN_BIN, Histogram
from mstore.terms.errors import BadRequest, Corrupt, InvalidInput
from mstore.terms.ids import Buffer, TensorId

MAGIC: Final = b"MDT2"
LEVEL: Final = 3

DEFAULT_LIMIT: Final = 64 << 20
"""The most plain bytes that `decode` accepts by default: half a million rows."""

MAX_ELEMENTS: Final = 1 << 48
"""The most elements of a tensor: keeps every sum of counts within 64 bits."""

_HEAD: Final = struct.Struct("<QQI")
HEAD_BYTES: Final = _HEAD.size
BIN_BYTES: Final = 2 + 8 + 8
_SINGLE_BYTES: Final = HEAD_BYTES + CHUNK.itemsize + (NAN_BIN + 1) * BIN_BYTES
"""The most plain bytes of a table of one row."""


class DeltaTable(msgspec.Struct, frozen=True, eq=False):
    """Statistics of the delta of one tensor pair.

    Invariants: `rows` is CHUNK[ceil(elements / chunk_elements)], in flat order, read-only; the
    rows' non-zeros add up to the histogram's; no row counts more than its chunk has; no sum is
    negative.  The constructor raises BadRequest if one does not hold.
    """

    rows: Rows
    histogram: Histogram
    elements: int
    chunk_elements: int

    def __post_init__(self) -> None:
        if not (0 <= self.elements <= MAX_ELEMENTS and 1 <= self.chunk_elements < 1 << 32):
            raise BadRequest(f"no table for {self.elements} elements by {self.chunk_elements}")
        chunks = -(-self.elements // self.chunk_elements)
        if self.rows.dtype != CHUNK or self.rows.shape != (chunks,):
            raise BadRequest(f"{self.elements} elements are {chunks} rows, not {self.rows.shape}")
        nonzeros = self.rows["nonzeros"]
        if chunks:
            last = self.elements - (chunks - 1) * self.chunk_elements
            if nonzeros.max() > self.chunk_elements or nonzeros[-1] > last:
                raise BadRequest("a row counts more elements than its chunk has")
        counted = int(nonzeros.sum(dtype=np.uint64))
        if counted != self.histogram.nonzeros:
            raise BadRequest(f"rows count {counted} elements, bins {self.histogram.nonzeros}")
        for name in ("sum_abs", "sum_squares", "max_abs", "base_squares"):
            if (self.rows[name] < 0).any():
                raise BadRequest(f"a row has a negative {name}")
        self.rows.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeltaTable):
            return NotImplemented
        return (
            (self.elements, self.chunk_elements) == (other.elements, other.chunk_elements)
            # Compare bytes, so that a NaN equals itself.
            and self.rows.tobytes() == other.rows.tobytes()
            and self.histogram == other.histogram
        )

    __hash__ = None  # type: ignore[assignment]

    def encode(self) -> bytes:
        """Encode the table; see the module's docstring."""
        hist = self.histogram
        steps = hist.bins.astype("<u2")
        steps[1:] -= hist.bins[:-1]
        exact = (hist.counts - hist.inexact).astype("<u8", copy=False)
        inexact = hist.inexact.astype("<u8", copy=False)
        planes = b"".join(map(_planes, (steps, exact, inexact)))
        return encoded(self.rows, self.elements, self.chunk_elements, planes)

    @classmethod
    def decode(cls, data: Buffer, *, limit: int = DEFAULT_LIMIT) -> Self:
        """Decode the table that `encode` encoded.

        Raises Corrupt for anything else, and if the table takes more than `limit` plain bytes.
        """
        plain = _decompress(bytes(data), limit)
        if len(plain) < _HEAD.size:
            raise Corrupt("statistics end before their lengths", where=_WHERE)
        elements, chunk_elements, occupied = _HEAD.unpack_from(plain)
        if elements > MAX_ELEMENTS or not 1 <= chunk_elements < 1 << 32 or occupied > NAN_BIN + 1:
            raise Corrupt("statistics claim impossible lengths", where=_WHERE)
        chunks = -(-elements // chunk_elements)
        if len(plain) != _HEAD.size + chunks * CHUNK.itemsize + occupied * BIN_BYTES:
            raise Corrupt("statistics are not as long as their lengths say", where=_WHERE)
        rows = _rows(plain, _HEAD.size, chunks)
        steps, exact, inexact = _counts(plain, _HEAD.size + chunks * CHUNK.itemsize, occupied)
        # In 64 bits, so that steps past the last bin are detected instead of wrapping around.
        bins = steps.cumsum(dtype=np.int64)
        # Limits each part to MAX_ELEMENTS, so that neither their sum nor that of all bins
        # overflows.
        if occupied and (bins[-1] > NAN_BIN or max(exact.max(), inexact.max()) > elements):
            raise Corrupt("statistics count elements that cannot be", where=_WHERE)
        try:
            histogram = Histogram(bins.astype(np.uint16), exact + inexact, inexact)
            return cls(rows, histogram, elements, chunk_elements)
        except InvalidInput as error:
            raise Corrupt(f"statistics contradict themselves: {error.what}", where=_WHERE) from None


def unpacked(value: bytes | None) -> bytes:
    """Return the plain bytes of an encoded one-row table; empty if missing or too large."""
    if value is None:
        return b""
    try:
        return _decompress(value, _SINGLE_BYTES)
    except Corrupt:
        return b""


class _Own(threading.local):
    """Each thread's own compressor: it is not thread-safe, and slow to create."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressor = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=True, write_content_size=True
        )


_own: Final = _Own()
_COLUMNS: Final = CHUNK.names or ()
_WHERE: Final = "delta table"


def encoded(rows: Rows, elements: int, chunk_elements: int, histogram: bytes) -> bytes:
    """Encode the table of these rows and of this histogram, given as byte planes.

    Checks nothing: the caller computed them, or has a table, which was checked when created.
    """
    parts = [_HEAD.pack(elements, chunk_elements, len(histogram) // BIN_BYTES)]
    if rows.size == 1:
        # The byte planes of a single entry are the row itself.
        parts.append(rows.tobytes())
    else:
        parts += [_planes(rows[name]) for name in _COLUMNS]
    return MAGIC + _own.compressor.compress(b"".join((*parts, histogram)))


class MeasuredPair(msgspec.Struct, frozen=True):
    """Finished statistics of a pair: the encoded table (None if nothing differs).

    digest: of the table, or None.
    """

    base: TensorId
    expert: TensorId
    table: bytes | None
    base_squares: float
    digest: bytes | None = None


def _rows(plain: bytes, at: int, count: int) -> Rows:
    """Decode rows from their byte planes."""
    rows = np.empty(count, dtype=CHUNK)
    raw = rows.view(np.uint8).reshape(count, CHUNK.itemsize)
    narrow = CHUNK.itemsize - SKETCH_BUCKETS
    split = np.frombuffer(plain, dtype=np.uint8, count=narrow * count, offset=at)
    raw[:, :narrow] = split.reshape(narrow, count).T
    size = SKETCH_BUCKETS * count
    split = np.frombuffer(plain, dtype=np.uint8, count=size, offset=at + narrow * count)
    raw[:, narrow:] = split.reshape(count, SKETCH_BUCKETS)
    return rows


def _counts(plain: bytes, at: int, count: int) -> tuple[Any, Any, Any]:
    """Decode steps u16[count], exact and inexact counts u64[count], from their byte planes."""
    split = np.frombuffer(plain, dtype=np.uint8, count=BIN_BYTES * count, offset=at)
    planes = split.reshape(BIN_BYTES, count)
    return (
        np.ascontiguousarray(planes[:2].T).reshape(-1).view("<u2"),
        np.ascontiguousarray(planes[2:10].T).reshape(-1).view("<u8"),
        np.ascontiguousarray(planes[10:].T).reshape(-1).view("<u8"),
    )


def _planes(column: npt.NDArray[np.generic]) -> bytes:
    """Return the lowest byte of every entry, then the second, ..."""
    flat = np.ascontiguousarray(column).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, flat.itemsize).T.tobytes()


def _decompress(data: bytes, limit: int) -> bytes:
    if data[: len(MAGIC)] != MAGIC:
        raise Corrupt("not statistics, or of a format unknown to this version", where=_WHERE)
    frame = data[len(MAGIC) :]
    try:
        # Check the size before allocating memory of that size.
        claimed = zstandard.get_frame_parameters(frame).content_size
        if not 0 <= claimed <= limit:
            raise Corrupt(
                f"statistics do not say their size, or are over the limit of {limit} bytes",
                where=_WHERE,
            )
        plain = _own.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"statistics cannot be unpacked: {error}", where=_WHERE) from None
    if len(plain) != claimed:
        raise Corrupt("statistics are not as long as they say", where=_WHERE)
    return plain


DIGEST_ROW_BYTES: Final = CHUNK.itemsize - SKETCH_BUCKETS - 2
"""Bytes of a row without exponent and sketch."""

_DIGEST_HEAD: Final = struct.Struct("<QI")


class Digest(msgspec.Struct, frozen=True, eq=False):
    """The rows of a pair's statistics; their sketches are zero.

    is_finite: whether all rows are (`chunk.finite`).
    """

    rows: Rows
    elements: int
    chunk_elements: int
    is_finite: bool


def digest(rows: Rows, elements: int, chunk_elements: int) -> bytes:
    """Encode the digest of these rows."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), CHUNK.itemsize)
    return _DIGEST_HEAD.pack(elements, chunk_elements) + raw[:, :DIGEST_ROW_BYTES].tobytes()


def decoded_digests(values: Sequence[bytes | None]) -> list[Digest | None]:
    """Decode many digests; None for a missing or invalid one."""
    heads = [None if value is None else _digest_head(value) for value in values]
    plain = [value for value, head in zip(values, heads, strict=True) if value and head]
    raw = b"".join([value[_DIGEST_HEAD.size :] for value in plain])
    whole = np.zeros(len(raw) // DIGEST_ROW_BYTES, dtype=CHUNK)
    narrow = np.frombuffer(raw, dtype=np.uint8).reshape(len(whole), DIGEST_ROW_BYTES)
    whole.view(np.uint8).reshape(len(whole), CHUNK.itemsize)[:, :DIGEST_ROW_BYTES] = narrow
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


def _digest_head(value: bytes) -> tuple[int, int, int] | None:
    """Return elements, elements a chunk, and chunks; None if the length contradicts them."""
    if len(value) < _DIGEST_HEAD.size:
        return None
    elements, chunk = _DIGEST_HEAD.unpack_from(value)
    chunks = -(-elements // chunk) if chunk else 0
    fits = chunks > 0 and len(value) == _DIGEST_HEAD.size + DIGEST_ROW_BYTES * chunks
    return (elements, chunk, chunks) if fits else None
