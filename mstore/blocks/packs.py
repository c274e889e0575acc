"""Packs: sealed, immutable files of payloads with a footer table.

    offset            size   what
    0                 4096   header: magic "MSTOREPK", u32 version, 4 zero bytes, nonce (32), zero
                             bytes
    4096              ...    payloads, anywhere, with zero bytes between them where a run is aligned
    table_offset      88*n   entries sorted by (kind, id)
                      ...    zero bytes up to the tail
    size - 64         64     tail: u64 table_offset, u64 table_bytes, BLAKE3 of the table (32),
                             u32 version, 4 zero bytes, magic "KPEROTSM"

    entry: id (32), base (32, zero unless delta), u64 offset, u32 stored length, u32 raw length,
           u8 kind, u8 codec, u8 element width, 5 zero bytes

All integers are little-endian.  The file's size is a multiple of 4096.  PackId = BLAKE3 with the
"mstore 1 pack" context over the first 48 header bytes and the table.  The nonce is random: no two
packs have one name, whatever is in them.  A pack does not say whose it is: the store does
(`mstore.store.pack_list`).  Raw payloads of one file follow each other in file order; such a run
starts at a pack offset congruent to its file offset modulo 4096, so that whole pages of the file
are whole pages of the pack.

Crash promise: a pack is sealed once its bytes are synced.  A writer belongs to one thread.  Where
packs are kept is `blocks.pack_store`'s.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.codecs import Codec, Encoded
from mstore.terms.errors import Conflict, Corrupt, Incompatible
from mstore.terms.ids import Buffer, PackId
from mstore.terms.phrases import call

PAGE = 4096
VERSION = 3
MAGIC = b"MSTOREPK"
TAIL_MAGIC = b"KPEROTSM"
NONCE_BYTES = 32
NO_BASE = bytes(32)
MOST_OFFSET = (1 << 63) - 1
WRITE_BACK_BYTES = 8 << 20
"""Start write-back after this many bytes, so that the final sync has little left to wait for."""
GATHERED_BYTES = 1 << 20
"""Small payloads are gathered and written together once they reach this many bytes."""

_HEADER = struct.Struct("<8sI4x32s")
_TAIL = struct.Struct("<QQ32sI4x8s")
HEADER_BYTES = _HEADER.size
"""First bytes of a pack, which its name covers, as it does its table."""
TAIL_BYTES = _TAIL.size
ENTRY = struct.Struct("<32s32sQIIBBB5x")


class Outdated(Corrupt):
    """What a location says is not so.

    If the location was looked up earlier, the payload may have moved, or have been stored in
    another form: look it up again. Otherwise the store is damaged.
    """


class PackGone(Outdated):
    """A pack's file is missing: gc may have moved the payload that was looked up there."""


class Kind(IntEnum):
    """What an entry's payload is; part of the sort key and of the record key."""

    BLOCK = 0
    TENSOR = 1
    MANIFEST = 2
    SNAPSHOT = 3
    PLAN = 4
    COVERAGE = 5
    VIRTUAL = 6
    NOTE = 7


class PackEntry(msgspec.Struct, frozen=True, gc=False):
    """One row of a footer table: where a payload lies in its pack, and what it is."""

    id: bytes
    kind: int
    codec: int
    width: int
    offset: int
    stored_length: int
    raw_length: int
    base: bytes = NO_BASE

    def encode(self) -> bytes:
        """Encode this entry in 88 bytes."""
        where = self.offset, self.stored_length, self.raw_length
        return ENTRY.pack(self.id, self.base, *where, self.kind, self.codec, self.width)


class SealedPack(msgspec.Struct, frozen=True):
    """A complete and synced pack, still under its temporary name."""

    id: PackId
    path: Path
    size: int
    entries: tuple[PackEntry, ...]


class SentPack(msgspec.Struct, frozen=True):
    """A pack that lies at a remote: name, bytes, and its table behind the bytes of its header."""

    id: PackId
    size: int
    table: bytes

    @classmethod
    def of(cls, pack: SealedPack) -> SentPack:
        """Return the description of a sealed pack. Raises PackGone, StorageFailed."""
        with opened(pack.path) as file:
            head = file.read(HEADER_BYTES)
        return cls(pack.id, pack.size, head + table_of(pack.entries)[1])


def header(nonce: bytes) -> bytes:
    """Return the first bytes of a pack's header; zero bytes fill its page."""
    return _HEADER.pack(MAGIC, VERSION, nonce)


def table_of(entries: Iterable[PackEntry]) -> tuple[tuple[PackEntry, ...], bytes]:
    """Return entries in the order of a table, and the table."""
    ordered = tuple(sorted(entries, key=lambda entry: (entry.kind, entry.id)))
    return ordered, b"".join(entry.encode() for entry in ordered)


def footer_bytes(table: bytes, offset: int) -> bytes:
    """Return what follows the payloads of a pack, which end at `offset`: table, padding, tail."""
    padding = bytes(-(offset + len(table) + _TAIL.size) % PAGE)
    tail = _TAIL.pack(offset, len(table), blake3(table).digest(), VERSION, TAIL_MAGIC)
    return table + padding + tail


def require_header(head: bytes, where: str) -> None:
    """Raise Corrupt, or Incompatible, unless these are the first bytes of a pack's header."""
    magic, version, _ = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    if magic != MAGIC:
        raise Corrupt("not the header of a pack", where=where)
    if version != VERSION:
        raise Incompatible(f"pack version {version}; this mstore reads {VERSION}", where=where)


class PackWriter:
    """Writes one pack under a temporary name.

    Holds back small payloads (records, constants) and writes them behind the raw runs, so that they
    never break a run, except for one flush every `held_limit` bytes.  Gathers other short payloads
    into one write.  After `seal` or `abandon` the writer is done.  durable: False for a file that
    is only copied, and need not survive a power loss.
    """

    def __init__(self, path: Path, *, held_limit: int = 8 << 20, durable: bool = True) -> None:
        self._held_limit = held_limit
        self._durable = durable
        self._file = fs.NewFile(path)
        self._head = header(os.urandom(NONCE_BYTES))
        self._entries: list[PackEntry] = []
        self._gathered = bytearray()
        self._held: list[tuple[PackEntry, bytes]] = []
        self._held_bytes = 0
        self._run: tuple[str, int] | None = None
        self._written_back = 0
        try:
            self._file.append(self._head.ljust(PAGE, b"\0"))
        except BaseException:
            self.abandon()
            raise

    @property
    def size(self) -> int:
        """Size of the pack so far, without its footer."""
        return self._end + self._held_bytes

    @property
    def _end(self) -> int:
        """The offset of the next payload."""
        return self._file.size + len(self._gathered)

    def append_raw(self, id: bytes, data: Buffer, width: int, file: str, file_offset: int) -> None:
        """Append a raw block that lies at `file_offset` of `file` (any name for that file)."""
        if self._run != (file, file_offset):
            gap = (file_offset - self._end) % PAGE
            if gap:
                self._gathered += bytes(gap)
        offset = self._append(data)
        self._run = (file, file_offset + len(data))
        self._entries.append(
            PackEntry(id, Kind.BLOCK, Codec.RAW, width, offset, len(data), len(data))
        )

    def append_encoded(self, id: bytes, encoded: Encoded, file: str, file_offset: int) -> None:
        """Append a block that lies at `file_offset` of `file`, however it is encoded.

        Except for constants, payloads are stored in the order of the calls.
        """
        if encoded.codec is Codec.RAW:
            self.append_raw(id, encoded.payload, encoded.width, file, file_offset)
            return
        if encoded.codec is Codec.CONSTANT:
            codec, width, length = encoded.codec, encoded.width, encoded.raw_length
            self.append_small(id, Kind.BLOCK, codec, width, bytes(encoded.payload), length)
            return
        self._run = None
        offset, stored = self._append(encoded.payload), len(encoded.payload)
        base = NO_BASE if encoded.base is None else encoded.base
        where = offset, stored, encoded.raw_length, base
        self._entries.append(PackEntry(id, Kind.BLOCK, encoded.codec, encoded.width, *where))

    def _append(self, data: Buffer) -> int:
        offset = self._end
        if len(data) < GATHERED_BYTES:
            # A copy: the caller may reuse its memory.
            self._gathered += data
            if len(self._gathered) >= GATHERED_BYTES:
                self._write_gathered()
        else:
            self._write_gathered()
            self._file.append(data)
        waiting = self._file.size - self._written_back
        if self._durable and waiting >= WRITE_BACK_BYTES:
            self._file.begin_writing_back(self._written_back, waiting)
            self._written_back = self._file.size
        return offset

    def _write_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._file.append(gathered)

    def append_small(
        self, id: bytes, kind: Kind, codec: Codec, width: int, payload: bytes, raw_length: int
    ) -> None:
        """Append a record or an encoded block whose position does not matter."""
        entry = PackEntry(id, kind, codec, width, 0, len(payload), raw_length)
        self._held.append((entry, payload))
        self._held_bytes += len(payload)
        if self._held_bytes > self._held_limit:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        self._run = None
        self._write_gathered()
        offset = self._file.append(b"".join(payload for _, payload in self._held))
        for entry, payload in self._held:
            self._entries.append(msgspec.structs.replace(entry, offset=offset))
            offset += len(payload)
        self._held.clear()
        self._held_bytes = 0

    def seal(self) -> SealedPack:
        """Write the footer and sync.  On any failure, remove the file and re-raise the error."""
        try:
            self._flush()
            self._write_gathered()
            entries, table = table_of(self._entries)
            self._file.append(footer_bytes(table, self._file.size))
            self._file.protect()
            if self._durable:
                self._file.sync()
            size = self._file.size
            self._file.close()
        except BaseException:
            self.abandon()
            raise
        return SealedPack(PackId.of(self._head + table), self._file.path, size, entries)

    def abandon(self) -> None:
        """Remove the file."""
        self._file.abandon()


def open_pack(path: Path | str) -> int:
    """Open a regular file that is not a symbolic link.

    Raises PackGone if there is none, Corrupt if it is something else, Unreadable, StorageFailed.
    """
    try:
        return fs.open_file(path)
    except Conflict as error:
        raise Corrupt("not a regular file", where=str(path)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PackGone("the file is missing", where=str(path), hint=call("fsck")) from error
    except OSError as error:
        raise fs.unread(error, path) from error


class Footer(msgspec.Struct, frozen=True):
    """What a pack says of itself."""

    id: PackId
    entries: tuple[PackEntry, ...]
    size: int


def read_footer(path: Path) -> Footer:
    """Return what a pack says of itself, checked against its footer's hash and its own size.

    Raises Corrupt naming the pack, PackGone if there is none, Unreadable if the disk has lost it,
    Incompatible for a newer version, StorageFailed for what says nothing about the pack.
    """
    with opened(path) as file:
        return footer(file, str(path))


def footer(file: BinaryIO, where: str) -> Footer:
    """Return what the pack in an open file says of itself. Raises Corrupt, Incompatible."""
    size = file.seek(0, os.SEEK_END)
    head, offset, length, digest = _ends(file, where)
    # Late: most commands read no footer, and need no numpy.
    from mstore.blocks.pack_tables import entries_of, parsed

    table = _table(file, offset, length, digest, where)
    return Footer(PackId.of(head + table), entries_of(parsed(table, offset, where)), size)


def dead_bytes(file: BinaryIO, where: str, rows: int, stored: int) -> int:
    """Return the payload bytes beyond those of `rows` live entries of `stored` bytes in all.

    Reads the footer's table only if there are more entries.  Raises as `footer` does.
    """
    _, offset, length, digest = _ends(file, where)
    if length == rows * ENTRY.size:
        return 0
    table = _table(file, offset, length, digest, where)
    return max(0, sum(int(entry[3]) for entry in ENTRY.iter_unpack(table)) - stored)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a pack for reading; raises as `open_pack` does, also for what its block reads."""
    with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
        yield file


def _ends(file: BinaryIO, where: str) -> tuple[bytes, int, int, bytes]:
    """Return the header bytes that a PackId covers, and the table's offset, length and hash."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_HEADER.size)
    file.seek(max(0, size - _TAIL.size))
    return head, *table_place(head, file.read(_TAIL.size), size, where)


def table_place(head: bytes, tail: bytes, size: int, where: str) -> tuple[int, int, bytes]:
    """Return offset, length and hash of a pack's table, as its first and last bytes say.

    Raises Corrupt, Incompatible.
    """
    if size < PAGE + _TAIL.size or size % PAGE:
        raise Corrupt("truncated pack", where=where, hint=call("fsck", read_data=True))
    offset, length, digest, version, magic = _TAIL.unpack(tail)
    head_magic, head_version, _ = _HEADER.unpack(head)
    if magic != TAIL_MAGIC or head_magic != MAGIC:
        raise Corrupt("not a pack, or damaged at an end", where=where)
    if version != head_version:
        raise Corrupt(f"of version {head_version}, and of {version} by its footer", where=where)
    if version != VERSION:
        raise Incompatible(f"pack version {version}; this mstore reads {VERSION}", where=where)
    if length % ENTRY.size or offset < PAGE or offset + length + _TAIL.size > size:
        raise Corrupt("the footer does not fit the file", where=where)
    if tail != _TAIL.pack(offset, length, digest, version, magic):
        raise Corrupt("the tail padding is not zero", where=where)
    return offset, length, digest


def _table(file: BinaryIO, offset: int, length: int, digest: bytes, where: str) -> bytes:
    file.seek(offset)
    table = file.read(length)
    if blake3(table).digest() != digest:
        raise Corrupt("the footer table does not match its hash", where=where)
    return table
