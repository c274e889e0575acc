"""Packs: sealed, immutable files of payloads with a footer table.

    offset            size   what
    0                 4096   header: magic "MSTOREPK", u32 version, 4 zero bytes, store UUID (16),
                             nonce (32), u64 generation, zero bytes
    4096              ...    payloads, anywhere, with zero bytes between them where a run is aligned
    table_offset      88*n   entries sorted by (kind, id)
                      ...    zero bytes up to the tail
    size - 64         64     tail: u64 table_offset, u64 table_bytes, BLAKE3 of the table (32),
                             u32 version, 4 zero bytes, magic "KPEROTSM"

    entry: id (32), base (32, zero unless delta), u64 offset, u32 stored length, u32 raw length,
           u8 kind, u8 codec, u8 element width, 5 zero bytes

All integers are little-endian.  The file's size is a multiple of 4096.  PackId = BLAKE3 with the
"mstore 1 pack" context over the first 72 header bytes and the table.  The generation is the one
after the index's when the writer began: the commit that publishes the pack has this generation or a
later one (`mstore.store.generation`).  Raw payloads of one file follow each other in file order;
such a run starts at a pack offset congruent to its file offset modulo 4096, so that whole pages of
the file are whole pages of the pack.

Crash promise: a pack gets its final name only after its bytes are synced, so every name in packs/
is a complete pack.  A writer belongs to one thread; any number of threads may use `PackFiles`.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from threading import Condition
from typing import BinaryIO

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.codecs import Codec, Encoded
from mstore.errors import Conflict, Corrupt, Incompatible, MstoreError, Unavailable
from mstore.ids import Buffer, PackId
from mstore.phrases import call

PAGE = 4096
VERSION = 2
MAGIC = b"MSTOREPK"
TAIL_MAGIC = b"KPEROTSM"
NONCE_BYTES = 32
NO_BASE = bytes(32)
WRITE_BACK_BYTES = 8 << 20
"""Start write-back after this many bytes, so that the final sync has little left to wait for."""
GATHERED_BYTES = 1 << 20
"""Small payloads are gathered and written together once they reach this many bytes."""
IOV_MAX = 1024
"""The most buffers that Linux takes in one call (readv(2))."""
MOST_OPEN = 128
"""The most packs that one `PackFiles` keeps open."""
_SHARE = 8

_NAME = re.compile(r"[0-9a-f]{64}\.pack")
_HEADER = struct.Struct("<8sI4x16s32sQ")
_STORE_UUID = slice(16, 32)
_TAIL = struct.Struct("<QQ32sI4x8s")
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
    SIGNATURE = 7


class Entry(msgspec.Struct, frozen=True, gc=False):
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
        return ENTRY.pack(
            self.id,
            self.base,
            self.offset,
            self.stored_length,
            self.raw_length,
            self.kind,
            self.codec,
            self.width,
        )


class SealedPack(msgspec.Struct, frozen=True):
    """A complete and synced pack, still under its temporary name."""

    id: PackId
    path: Path
    size: int
    entries: tuple[Entry, ...]


def pack_path(packs: Path, pack: PackId) -> Path:
    """Return the path of a pack below the packs directory."""
    name = pack.hex()
    return packs / name[:2] / f"{name}.pack"


def listed(directory: Path | str) -> Iterator[str]:
    """Yield every file of the directories in this one that has the name of a pack, sorted.

    Raises StorageFailed if one of them cannot be listed: then it is unknown what is there.
    """
    # Every `add` and merge looks at all packs: a Path for each would take longer than the rest.
    with fs.translated(directory):
        for below, names in fs.listed_below(directory):
            yield from (f"{directory}/{below}/{name}" for name in names if _NAME.fullmatch(name))


class PackWriter:
    """Writes one pack under a temporary name.

    Holds back small payloads (records, constants) and writes them behind the raw runs, so that they
    never break a run, except for one flush every `held_limit` bytes.  Gathers other short payloads
    into one write.  After `seal` or `abandon` the writer is done.
    """

    def __init__(
        self, path: Path, store_uuid: bytes, generation: int, *, held_limit: int = 8 << 20
    ) -> None:
        self._held_limit = held_limit
        self._file = fs.NewFile(path)
        nonce = os.urandom(NONCE_BYTES)
        self._head = _HEADER.pack(MAGIC, VERSION, store_uuid, nonce, generation)
        self._entries: list[Entry] = []
        self._gathered = bytearray()
        self._held: list[tuple[Entry, bytes]] = []
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
        self._entries.append(Entry(id, Kind.BLOCK, Codec.RAW, width, offset, len(data), len(data)))

    def append_encoded(self, id: bytes, encoded: Encoded, file: str, file_offset: int) -> None:
        """Append a block that lies at `file_offset` of `file`, however it is encoded.

        Except for constants, payloads are stored in the order of the calls.
        """
        if encoded.codec is Codec.RAW:
            self.append_raw(id, encoded.payload, encoded.width, file, file_offset)
            return
        if encoded.codec is Codec.CONSTANT:
            self.append_small(
                id,
                Kind.BLOCK,
                encoded.codec,
                encoded.width,
                bytes(encoded.payload),
                encoded.raw_length,
            )
            return
        self._run = None
        offset = self._append(encoded.payload)
        self._entries.append(
            Entry(
                id,
                Kind.BLOCK,
                encoded.codec,
                encoded.width,
                offset,
                len(encoded.payload),
                encoded.raw_length,
                NO_BASE if encoded.base is None else encoded.base,
            )
        )

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
        if waiting >= WRITE_BACK_BYTES:
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
        entry = Entry(id, kind, codec, width, 0, len(payload), raw_length)
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
            self._entries.append(
                Entry(
                    entry.id, entry.kind, entry.codec, entry.width,
                    offset, entry.stored_length, entry.raw_length,
                )
            )  # fmt: skip
            offset += len(payload)
        self._held.clear()
        self._held_bytes = 0

    def seal(self) -> SealedPack:
        """Write the footer and sync.  On any failure, remove the file and re-raise the error."""
        try:
            self._flush()
            self._write_gathered()
            entries = tuple(sorted(self._entries, key=lambda entry: (entry.kind, entry.id)))
            table = b"".join(entry.encode() for entry in entries)
            offset = self._file.size
            end = offset + len(table) + _TAIL.size
            padding = bytes(-end % PAGE)
            tail = _TAIL.pack(offset, len(table), blake3(table).digest(), VERSION, TAIL_MAGIC)
            self._file.append(table + padding + tail)
            self._file.protect()
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
    """What a pack says of itself; the store is a UUID."""

    id: PackId
    entries: tuple[Entry, ...]
    store: bytes
    size: int


def read_footer(path: Path) -> Footer:
    """Return what a pack says of itself, checked against its footer's hash and its own size.

    Raises Corrupt naming the pack, PackGone if there is none, Unreadable if the disk has lost it,
    Incompatible for a newer version, StorageFailed for what says nothing about the pack.
    """
    where = str(path)
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head, offset, length, digest = _ends(file, where)
        table = _table(file, offset, length, digest, where)
    entries = tuple(_entries(table, offset, where))
    return Footer(PackId.of(head + table), entries, head[_STORE_UUID], size)


def read_table(path: Path) -> tuple[PackId, tuple[Entry, ...]]:
    """Return the id and entries of a pack.  Raises as `read_footer` does."""
    footer = read_footer(path)
    return footer.id, footer.entries


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
        yield file


def store_of(path: Path) -> bytes:
    """Return the UUID of the store that a pack was written for.  Raises as `read_footer` does."""
    return _covered_head(path)[_STORE_UUID]


def generation_of(path: Path) -> int:
    """Return a pack's generation.  Raises as `read_footer` does."""
    return int(_HEADER.unpack(_covered_head(path))[4])


def _covered_head(path: Path) -> bytes:
    with _opened(path) as file:
        return _ends(file, str(path))[0]


def dead_bytes(path: Path, rows: int, stored: int) -> int:
    """Return a pack's payload bytes beyond those of `rows` live entries of `stored` bytes in all.

    Reads the footer's table only if there are more entries.  Raises as `read_footer` does.
    """
    where = str(path)
    with _opened(path) as file:
        _, offset, length, digest = _ends(file, where)
        if length == rows * ENTRY.size:
            return 0
        table = _table(file, offset, length, digest, where)
    return max(0, sum(int(entry[3]) for entry in ENTRY.iter_unpack(table)) - stored)


def _ends(file: BinaryIO, where: str) -> tuple[bytes, int, int, bytes]:
    """Return the header bytes that a PackId covers, and the table's offset, length and hash."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEADER.size)
    if size < PAGE + _TAIL.size or size % PAGE:
        raise Corrupt("truncated pack", where=where, hint=call("fsck", read_data=True))
    file.seek(size - _TAIL.size)
    tail = file.read(_TAIL.size)
    offset, length, digest, version, magic = _TAIL.unpack(tail)
    head_magic, head_version, *_ = _HEADER.unpack(head)
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
    return head, offset, length, digest


def _table(file: BinaryIO, offset: int, length: int, digest: bytes, where: str) -> bytes:
    file.seek(offset)
    table = file.read(length)
    if blake3(table).digest() != digest:
        raise Corrupt("the footer table does not match its hash", where=where)
    return table


def _entries(table: bytes, end: int, where: str) -> Iterator[Entry]:
    previous = (-1, b"")
    for id, base, offset, stored, raw, kind, codec, width in ENTRY.iter_unpack(table):
        if offset < PAGE or offset + stored > end or (kind, id) <= previous:
            raise Corrupt(f"footer entry {id.hex()[:12]} is out of bounds or order", where=where)
        previous = (kind, id)
        yield Entry(id, kind, codec, width, offset, stored, raw, base)


class PackFiles:
    """Open packs for reading: a bounded number of descriptors, positioned reads from any thread.

    max_open: how many stay open; None: an eighth of what this process may open, because a command
    may read several stores, and at most MOST_OPEN.  Those that are read at this moment come on top.
    """

    def __init__(self, directory: Path, *, max_open: int | None = None) -> None:
        self.directory = directory
        self._max_open = _share_of_descriptors() if max_open is None else max_open
        self._lock = Condition()
        self._pid = os.getpid()
        self._is_closed = False
        self._open: OrderedDict[PackId, _OpenPack] = OrderedDict()
        self._seen: dict[PackId, tuple[_Identity, int]] = {}

    def _acquire(self, pack: PackId) -> _OpenPack:
        with self._lock:
            if self._is_closed:
                raise Unavailable(
                    "this store was closed", where=str(self.directory.parent), hint="open it again"
                )
            opened = self._open.get(pack)
            if opened is not None and os.fstat(opened.fd).st_nlink == 0:
                # gc deleted the file meanwhile: an open descriptor would keep its space occupied.
                self._drop_unlinked()
                opened = None
            if opened is None:
                path = self.place(pack)
                try:
                    fd = open_pack(path)
                except PackGone as error:
                    raise PackGone(
                        "a pack that the index names is missing",
                        where=path,
                        hint=call("fsck"),
                    ) from error
                opened = self._open[pack] = _OpenPack(fd, self._version(pack, fd))
                # Count the user before eviction: if all others are in use, this one would be
                # evicted.
                opened.users += 1
                self._evict()
            else:
                self._open.move_to_end(pack)
                opened.users += 1
            return opened

    def _version(self, pack: PackId, fd: int) -> int:
        """Return which file of this name it is: one more when it is not the one seen before."""
        identity = _identity(fd)
        seen = self._seen.get(pack)
        version = 0 if seen is None else seen[1] + (seen[0] != identity)
        self._seen[pack] = (identity, version)
        return version

    def version(self, pack: PackId) -> int:
        """Return a number that changes when the pack's name leads to another file.

        Raises PackGone, Unreadable, StorageFailed.
        """
        opened = self._acquire(pack)
        self._release(opened)
        return opened.version

    def _evict(self) -> None:
        while len(self._open) > self._max_open:
            unused = (pack for pack, opened in self._open.items() if opened.users == 0)
            oldest = next(unused, None)
            if oldest is None:
                return
            os.close(self._open.pop(oldest).fd)

    def forget_removed(self) -> None:
        """Close packs whose files were removed, so that their space is freed."""
        with self._lock:
            self._drop_unlinked()

    def _drop_unlinked(self) -> None:
        for pack, opened in list(self._open.items()):
            if os.fstat(opened.fd).st_nlink == 0:
                del self._open[pack]
                opened.dropped = True
                if opened.users == 0:
                    os.close(opened.fd)

    def _release(self, opened: _OpenPack) -> None:
        with self._lock:
            opened.users -= 1
            if opened.dropped and opened.users == 0:
                os.close(opened.fd)
            if self._is_closed:
                self._lock.notify_all()

    @contextmanager
    def _reading(self, pack: PackId, version: int | None = None) -> Iterator[int]:
        """Yield a descriptor of the pack; an OSError becomes an error that names the file.

        Raises Corrupt for an impossible offset, Outdated if the file is not of this version,
        Unreadable if the disk has lost the bytes, else StorageFailed.
        """
        opened = self._acquire(pack)
        try:
            if version not in (None, opened.version):
                raise Outdated("the pack is another file now", where=str(self.path(pack)))
            yield opened.fd
        except OSError as error:
            raise fs.unread(error, self.place(pack), call("fsck", read_data=True)) from error
        except OverflowError as error:
            # A damaged row may name an offset that no file can have.
            raise self._too_short(pack) from error
        finally:
            self._release(opened)

    def read_into(self, pack: PackId, offset: int, target: memoryview) -> None:
        """Fill `target` from the pack.

        Raises Corrupt if the file is too short, PackGone, Unreadable, StorageFailed.
        """
        self.read_scattered(pack, offset, [target])

    def read_scattered(
        self,
        pack: PackId,
        offset: int,
        targets: Sequence[memoryview],
        version: int | None = None,
    ) -> None:
        """Fill targets with adjacent bytes of the pack, in one system call if possible.

        version: the file to read, as `version` gave it; None: whatever the name leads to.

        Raises as `read_into`, and Outdated if the pack is another file now.
        """
        with self._reading(pack, version) as fd:
            for first in range(0, len(targets), IOV_MAX):
                waiting = deque(targets[first : first + IOV_MAX])
                while waiting:
                    got = os.preadv(fd, waiting, offset)
                    if got == 0:
                        raise self._too_short(pack)
                    offset += got
                    while waiting and got >= len(waiting[0]):
                        got -= len(waiting.popleft())
                    if waiting:
                        waiting[0] = waiting[0][got:]

    def read(self, pack: PackId, offset: int, length: int) -> bytes:
        """Return `length` bytes of the pack at `offset`.  Raises as `read_into`."""
        with self._reading(pack) as fd:
            data = os.pread(fd, length, offset)
        if len(data) != length:
            raise self._too_short(pack)
        return data

    def read_each(self, pack: PackId, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each (offset, length); fewer where the pack ends.

        A `read` of many places that opens the pack once.  Raises as `read_into`.
        """
        with self._reading(pack) as fd:
            for offset, length in places:
                yield os.pread(fd, length, offset)

    def mapped(self, pack: PackId, is_private: bool) -> mmap.mmap:
        """Map a whole pack, read-only; `is_private`: writable, and what is written stays in memory.

        The mapping outlives this object and the file's name.  Raises PackGone, OSError.
        """
        access = mmap.ACCESS_COPY if is_private else mmap.ACCESS_READ
        opened = self._acquire(pack)
        try:
            return mmap.mmap(opened.fd, 0, access=access)
        finally:
            self._release(opened)

    def clone(self, pack: PackId, offset: int, length: int, file: fs.NewFile, at: int) -> None:
        """Let bytes of a new file, from `at` on, be extents of the pack.

        Raises PackGone, and as `NewFile.clone` does.
        """
        opened = self._acquire(pack)
        try:
            file.clone(opened.fd, offset, length, at)
        finally:
            self._release(opened)

    def _too_short(self, pack: PackId) -> Corrupt:
        return Corrupt("the pack ends too early", where=str(self.path(pack)), hint=call("fsck"))

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        """Ask the kernel to read ahead; advice only, never an error."""
        with suppress(MstoreError), self._reading(pack) as fd:
            # The advice scans every page, which costs as much as copying some of them.
            if not _is_cached(fd, offset + length - 1):
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)

    def is_there(self, pack: PackId) -> bool:
        """Return whether the pack has a file; opens none.  Raises StorageFailed if unknown."""
        return fs.is_there(self.place(pack))

    def place(self, pack: PackId) -> str:
        """Return where this pack lies: some ask for thousands, and a path takes ten times as long.

        The one method to override where packs lie elsewhere.
        """
        name = pack.hex()
        return f"{self.directory}/{name[:2]}/{name}.pack"

    def path(self, pack: PackId) -> Path:
        """Return the path of this pack."""
        return Path(self.place(pack))

    def close(self) -> None:
        """Close all descriptors once running reads have ended; idempotent.

        Later reads raise Unavailable.
        """
        if self._pid != os.getpid():
            # In a forked child, a thread that does not exist there may hold the lock.
            self._close_all()
            return
        with self._lock:
            self._is_closed = True
            while any(opened.users for opened in self._open.values()):
                self._lock.wait()
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            _, opened = self._open.popitem()
            os.close(opened.fd)


def _share_of_descriptors() -> int:
    """Return how many packs to keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_OPEN
    return max(1, min(MOST_OPEN, soft // _SHARE))


def _is_cached(fd: int, offset: int) -> bool:
    """Return whether reading the byte at `offset` would not block; False if unknown."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


_Identity = tuple[int, int, int, int]


def _identity(fd: int) -> _Identity:
    """Return what tells a file from another one of the same name, and from itself if rewritten."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _OpenPack:
    __slots__ = ("dropped", "fd", "users", "version")

    def __init__(self, fd: int, version: int) -> None:
        self.fd = fd
        self.version = version
        self.users = 0
        # No longer in the table of open packs: the last reader closes it.
        self.dropped = False
