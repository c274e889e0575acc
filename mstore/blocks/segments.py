"""Segments: sealed, sorted tables of where payloads lie in packs that are elsewhere.

    directory   list                 names the segments, below
                <SegmentId>.segment  a segment; immutable, read-only
                lock                 held by who changes the list
    segment     pages of 4096 bytes: header, starts, rows, packs; integers are big-endian
    page        4064 bytes, then their check: BLAKE3 of these and the page's number (32 bytes),
                keyed with BLAKE3 (`derive_key`, context "mstore 1 segment page") of the nonce
    header      magic "MSTORESG", u32 version, u32 bits, u64 rows, u64 packs, nonce (32); of starts,
                rows and packs each the BLAKE3 of their pages' checks (32); zero bytes
    starts      1016 u32 a page: for each value of an id's leading `bits` bits the number of the
                first row whose bits are not less, and last the number of rows
    row         46 a page, ascending as bytes: id (32), u8 kind, location as in the index (22) with
                a number that counts in `packs`, base id (32, zero without one), a zero byte
    packs       127 PackIds a page, ascending
    list        a line "mstore segments 1", a line "<SegmentId> <rows>" for each segment, the
                largest first, and a line "blake3 <64 digits>" of all bytes before it

A SegmentId is BLAKE3 (context "mstore 1 segment") of the header's first 4064 bytes. So a name
stands for every byte. Opening checks the list, and each header against its name and its size. A
page is read and checked when it is first used, before the map shows it: a page that is flipped,
lost, or of another place or segment is an error that names the file and the page. `verify` checks
all pages, what the header says of them, and the order.

All rows come from tables of packs and can be made from them again. A segment that somebody forged
with sound checks may name false places, or hide some: blocks are proved by their ids when they are
read, so a false place is an error. That a block is not here, or is, must never be the only reason
to delete or not to send something.

Log-structured: each segment has at least twice the rows of the next, so their number grows with the
logarithm of the rows. Merging streams, with memory for `_MERGED` rows and the PackIds.

Crash promise: the list changes in one step, after the files that it names are durable. A directory
has the rows from before a change or from after it; a file that the list does not name is garbage,
which the next change removes. Any number of threads and processes may read while one changes it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore import fs
from mstore.blocks.id_search import (
    Flags,
    Numbers,
    bucket_bits,
    buckets,
    edges,
    lower_bound,
)
from mstore.blocks.location import Location
from mstore.blocks.packs import Entry, Kind
from mstore.terms.errors import Conflict, Corrupt, Incompatible, StorageFailed
from mstore.terms.ids import ID_BYTES, PackId, SegmentId

PAGE: Final = 4096
VERSION: Final = 1
MAGIC: Final = b"MSTORESG"
LIST: Final = "list"
_BODY: Final = PAGE - 32
_HEADER: Final = struct.Struct(">8sIIQQ32s32s32s32s")
_CONTEXT: Final = "mstore 1 segment page"

_ROW: Final = struct.Struct(">32sBIQIIBB32sx")
ROW: Final = np.dtype(("S", _ROW.size))
"""A row as bytes: numpy compares such as memcmp(3) does, zero bytes at the end included."""
FIELDS: Final = np.dtype(
    {
        "names": ["first", "key", "pack", "offset", "stored", "plain", "codec", "width", "base"],
        "formats": [">u8", "S33", ">u4", ">u8", ">u4", ">u4", "u1", "u1", "V32"],
        "offsets": [0, 0, 33, 37, 45, 49, 53, 54, 55],
        "itemsize": _ROW.size,
    }
)
"""What a row is made of.  first: the leading bytes of the id; key: id and kind."""
_ID_KIND: Final = np.dtype(
    {"names": ["id", "kind"], "formats": ["V32", "u1"], "itemsize": _ROW.size}
)
_COLUMNS: Final = ("offset", "stored", "plain", "codec", "width", "base")
_KEY: Final = np.dtype({"names": ["first"], "formats": [">u8"], "itemsize": ID_BYTES + 1})
_ID: Final = np.dtype((np.void, ID_BYTES))
_START: Final = np.dtype(">u4")
MOST_ROWS: Final = (1 << 32) - 1
Rows = npt.NDArray[np.bytes_]

_GATHERED: Final = 1 << 18
"""Rows that are sorted in memory."""
_MERGED: Final = 1 << 16
"""Rows in memory while segments are merged."""
_MOST_RUNS: Final = 16
_MOST_STARTS: Final = 1 << 16
_MOST_LISTED: Final = 1 << 16
"""Longest list that is read, in bytes."""
_HEAD: Final = b"mstore segments 1\n"
_LINE: Final = re.compile(rb"([0-9a-f]{64}) ([1-9][0-9]{0,9})")
_END: Final = len("blake3 \n") + 64
_GARBAGE: Final = re.compile(r"[0-9a-f]{64}\.segment|[0-9a-f]{16}\.new|\.list\.[0-9a-f]{8}")
_HINT: Final = "remove the directory of segments: its rows can be made from tables of packs again"


# -- one segment -----------------------------------------------------------------------------------


class _Section(msgspec.Struct, frozen=True):
    """Pages that hold `count` items of one form, from `page` on."""

    form: np.dtype[Any]
    page: int
    count: int

    @property
    def each(self) -> int:
        """Items a page."""
        return _BODY // self.form.itemsize

    @property
    def end(self) -> int:
        """The page behind the last one."""
        return self.page - (-self.count // self.each)

    def view(self, pages: Any) -> npt.NDArray[Any]:
        """Return the items in these bytes of the whole section as items[pages, each]."""
        shape, strides = (self.end - self.page, self.each), (PAGE, self.form.itemsize)
        return np.ndarray(shape, self.form, pages, self.page * PAGE, strides)


def _sections(bits: int, rows: int, packs: int) -> tuple[_Section, _Section, _Section]:
    starts = _Section(_START, 1, (1 << bits) + 1)
    ordered = _Section(ROW, starts.end, rows)
    return starts, ordered, _Section(_ID, ordered.end, packs)


def _check(key: bytes, number: int, body: bytes) -> bytes:
    # Of 4096 bytes at once: BLAKE3 then hashes four parts side by side.
    return blake3(body + number.to_bytes(32, "big"), key=key).digest()


def path_of(directory: Path, id: SegmentId) -> Path:
    """Return the path of a segment."""
    return directory / f"{id}.segment"


class _Gone(Corrupt):
    """A file that the list names is missing."""


class Segment:
    """An open segment.  Any number of threads may use it; its name may be removed meanwhile.

    Every method may raise Corrupt or StorageFailed, which names the file.
    """

    def __init__(self, directory: Path, id: SegmentId) -> None:
        """Open a segment and check its header.  Raises Corrupt, Incompatible, StorageFailed."""
        self.id = id
        self.path = path_of(directory, id)
        try:
            self._fd = fs.open_file(self.path)
        except Conflict as error:
            raise self._bad("this is not a regular file") from error
        except FileNotFoundError as error:
            raise _Gone("the segment is missing", where=str(self.path), hint=_HINT) from error
        except OSError as error:
            raise fs.unread(error, self.path, _HINT) from error
        weakref.finalize(self, os.close, self._fd)
        head = self._bytes(0, 1)
        magic, version, self._bits, rows, packs, nonce, *self._digests = _HEADER.unpack(
            head[: _HEADER.size]
        )
        if magic != MAGIC:
            raise self._bad("this is not a segment")
        if SegmentId.of(head[:_BODY]) != id:
            raise self._bad("its header does not match its name")
        if version != VERSION:
            raise Incompatible(f"this is a segment of version {version}", where=str(self.path))
        self._page_key = blake3(nonce, derive_key_context=_CONTEXT).digest()
        if not (1 <= self._bits <= 32 and 1 <= packs <= rows <= MOST_ROWS):
            raise self._bad("its header has impossible numbers")
        self._sections = self._starts, self._rows, self._packs = _sections(self._bits, rows, packs)
        with fs.reading(self.path, _HINT):
            size = os.fstat(self._fd).st_size
            if size != self._packs.end * PAGE:
                raise self._bad(f"it has {size} bytes, and not {self._packs.end * PAGE}")
            self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        self._views = {section.page: section.view(self._map) for section in self._sections}
        self._proved = np.zeros(self._packs.end, np.bool_)
        self._proved_bytes(0, 1)

    def __len__(self) -> int:
        return self._rows.count

    def find(self, keys: Rows) -> Numbers:
        """Return the number of the first row of each key (id and kind); -1 for a key without one.

        Fastest for keys that ascend.
        """
        bucket = buckets(keys.view(_KEY)["first"].astype(np.uint64), self._bits)
        low = self._items(self._starts, bucket).astype(np.int64)
        high = self._items(self._starts, bucket + 1).astype(np.int64)
        if ((low > high) | (high > self._rows.count)).any():
            raise self._bad("its starts do not ascend")
        found = lower_bound(low, high, lambda rows: self._keys(rows) < keys)
        return np.where((found < high) & (self._keys(found) == keys), found, -1)

    def _keys(self, numbers: Numbers) -> Rows:
        """Return the keys of rows; of the last one for a number behind it."""
        rows = self._items(self._rows, np.minimum(numbers, self._rows.count - 1))
        keys: Rows = rows.view(FIELDS)["key"]
        return keys

    def places(self, key: bytes) -> Iterator[Location]:
        """Yield what each row of one key says: `find` takes 20 times as long for one."""
        bucket = int.from_bytes(key[:8], "big") >> (64 - self._bits)
        start, end = (
            int.from_bytes(self._item(self._starts, number), "big")
            for number in (bucket, bucket + 1)
        )
        if not start <= end <= self._rows.count:
            raise self._bad("its starts do not ascend")
        number, high = start, end
        while number < high:
            middle = (number + high) // 2
            if self._item(self._rows, middle)[: len(key)] < key:
                number = middle + 1
            else:
                high = middle
        while number < end and (row := self._item(self._rows, number)).startswith(key):
            _, _, pack, *rest = _ROW.unpack(row)
            if pack >= self._packs.count:
                raise self._bad("a row names a pack that it does not have")
            yield Location(PackId(self._item(self._packs, pack)), *rest)
            number += 1

    def locations(self, numbers: Numbers) -> list[Location]:
        """Return what rows say."""
        rows = self._items(self._rows, numbers)
        places = _packs_of(rows)
        if len(places) and int(places.max()) >= self._packs.count:
            raise self._bad("a row names a pack that it does not have")
        packs = map(PackId, self._items(self._packs, places).tolist())
        fields = rows.view(FIELDS)
        return list(map(Location, packs, *(fields[name].tolist() for name in _COLUMNS)))

    def packs(self) -> list[PackId]:
        """Return the packs that rows name, ascending."""
        section = self._packs
        names: list[bytes] = []
        for page in range(section.page, section.end):
            names += self._read(section, page, 1).tolist()
        if any(one >= other for one, other in pairwise(names)):
            raise self._bad("its packs do not ascend")
        return list(map(PackId, names))

    def rows(self, about: int = _MERGED) -> Iterator[Rows]:
        """Yield all rows, ascending, about so many at a time, past the map."""
        section, last = self._rows, None
        step = max(1, about // section.each)
        for page in range(section.page, section.end, step):
            rows = self._read(section, page, min(step, section.end - page))
            if (last is not None and rows[0] <= last) or (rows[1:] <= rows[:-1]).any():
                raise self._bad("its rows do not ascend")
            if int(rows.view(FIELDS)["pack"].max()) >= self._packs.count:
                raise self._bad("a row names a pack that it does not have")
            last = rows[-1]
            yield rows

    def verify(self) -> None:
        """Check every byte, and that the starts say where the rows are."""
        for section, digest in zip(self._sections, self._digests, strict=True):
            hasher = blake3()
            for page in range(section.page, section.end):
                hasher.update(self._proved_bytes(page, 1)[_BODY:])
            if hasher.digest() != digest:
                raise self._bad("its pages do not match its header")
        self.packs()
        starts = _Starts(self._bits)
        done = 0
        for some in starts.of(self.rows()):
            told = self._items(self._starts, np.arange(done, done + len(some)))
            if (told != some).any():
                raise self._bad("its starts do not match its rows")
            done += len(some)

    def _item(self, section: _Section, number: int) -> bytes:
        """Return one item, from the map, whose page is checked before."""
        page, place = divmod(number, section.each)
        page += section.page
        if not self._proved[page]:
            self._proved_bytes(page, 1)
        start = page * PAGE + place * section.form.itemsize
        return self._map[start : start + section.form.itemsize]

    def _items(self, section: _Section, numbers: Numbers) -> npt.NDArray[Any]:
        """Return these items, from the map, whose pages are checked before."""
        pages, places = np.divmod(numbers, section.each)
        there = pages + section.page
        if not self._proved[there].all():
            for page in sorted(set(there[~self._proved[there]].tolist())):
                self._proved_bytes(page, 1)
        items: npt.NDArray[Any] = self._views[section.page][pages, places]
        return items

    def _read(self, section: _Section, page: int, count: int) -> npt.NDArray[Any]:
        """Return all items of these pages."""
        part = _Section(section.form, 0, count * section.each)
        items = np.array(part.view(self._proved_bytes(page, count))).reshape(-1)
        return items[: section.count - (page - section.page) * section.each]

    def _proved_bytes(self, page: int, count: int) -> bytes:
        # Read from the file, not from the map: there a lost page or a cut file is no signal.
        data = self._bytes(page, count)
        for number in range(count):
            start = number * PAGE
            if (
                _check(self._page_key, page + number, data[start : start + _BODY])
                != (data[start + _BODY : start + PAGE])
            ):
                raise self._bad(f"page {page + number} does not match its check")
        self._proved[page : page + count] = True
        return data

    def _bytes(self, page: int, count: int) -> bytes:
        try:
            data = os.pread(self._fd, count * PAGE, page * PAGE)
        except OSError as error:
            raise fs.unread(error, self.path, _HINT) from error
        if len(data) < count * PAGE:
            raise self._bad("it ends too early")
        return data

    def _bad(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self.path), hint=_HINT)


class _Starts:
    """For each bucket the number of its first row, and last the number of rows."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def of(self, batches: Iterable[Rows]) -> Iterator[npt.NDArray[Any]]:
        """Yield the starts of these rows, in order, piece by piece."""
        bucket = count = 0
        for rows in batches:
            first = rows.view(FIELDS)["first"].astype(np.uint64)
            stop = int(buckets(first[-1:], self._bits)[0]) + 1
            for begin in range(bucket, stop, _MOST_STARTS):
                wanted = edges(begin, min(begin + _MOST_STARTS, stop), self._bits)
                yield (count + np.searchsorted(first, wanted)).astype(_START)
            bucket, count = stop, count + len(rows)
        for begin in range(bucket, (1 << self._bits) + 1, _MOST_STARTS):
            left = (1 << self._bits) + 1 - begin
            yield np.full(min(_MOST_STARTS, left), count, _START)


class _Writer:
    """Writes the pages of a section, in order."""

    def __init__(self, file: fs.NewFile, key: bytes, section: _Section) -> None:
        self._file = file
        self._key = key
        self._section = section
        self._page = section.page
        self._left = np.empty(0, section.form)
        self._hasher = blake3()

    def append(self, items: npt.NDArray[Any]) -> None:
        """Write the whole pages; keep the rest."""
        items = np.concatenate((self._left, items))
        whole = len(items) - len(items) % self._section.each
        self._left = items[whole:].copy()
        self._write(items[:whole])

    def close(self) -> tuple[int, bytes]:
        """Write the rest; return the page behind, and the hash of the checks."""
        self._write(self._left)
        return self._page, self._hasher.digest()

    def _write(self, items: npt.NDArray[Any]) -> None:
        each = self._section.each
        part = _Section(self._section.form, 0, len(items))
        pages = bytearray(part.end * PAGE)
        view = part.view(pages)
        whole, rest = divmod(len(items), each)
        view[:whole] = items[: whole * each].reshape(whole, each)
        if rest:
            view[whole, :rest] = items[whole * each :]
        for start in range(0, len(pages), PAGE):
            check = _check(self._key, self._page, bytes(pages[start : start + _BODY]))
            pages[start + _BODY : start + PAGE] = check
            self._hasher.update(check)
            self._page += 1
        self._file.write_at((self._page - part.end) * PAGE, pages)


def write(
    directory: Path, packs: Sequence[PackId], batches: Iterable[Rows], most: int
) -> SegmentId | None:
    """Write a segment, durably; None if there are no rows.

    packs: ascending, what the numbers in rows mean. batches: all rows, ascending, without empty
    batches. most: at least the number of rows. Raises StorageFailed.
    """
    bits = bucket_bits(most)
    nonce = os.urandom(32)
    key = blake3(nonce, derive_key_context=_CONTEXT).digest()
    file = fs.NewFile(directory / f"{os.urandom(8).hex()}.new")
    try:
        empty = _sections(bits, 0, 0)
        starts, rows = (_Writer(file, key, section) for section in empty[:2])
        count = 0

        def written() -> Iterator[Rows]:
            nonlocal count
            for some in batches:
                rows.append(some)
                count += len(some)
                yield some

        for some in _Starts(bits).of(written()):
            starts.append(some)
        if not count:
            file.abandon()
            return None
        end, rows_digest = rows.close()
        named = _Writer(file, key, _Section(_ID, end, 0))
        named.append(np.frombuffer(b"".join(packs), _ID))
        digests = starts.close()[1], rows_digest, named.close()[1]
        head = _HEADER.pack(MAGIC, VERSION, bits, count, len(packs), nonce, *digests)
        body = head.ljust(_BODY, b"\0")
        file.write_at(0, body + _check(key, 0, body))
        file.sync()
        file.protect()
        file.close()
        id = SegmentId.of(body)
        fs.rename(file.path, path_of(directory, id))
    except BaseException:
        file.abandon()
        raise
    fs.sync_directory(directory)
    return id


def rows_of(tables: Mapping[PackId, Sequence[Entry]]) -> tuple[list[PackId], Rows]:
    """Return the packs with entries, ascending, and a row for each of these, ascending."""
    packs = sorted(pack for pack, entries in tables.items() if entries)
    encoded = [
        _ROW.pack(
            entry.id, entry.kind, number, entry.offset, entry.stored_length, entry.raw_length,
            entry.codec, entry.width, entry.base,
        )
        for number, pack in enumerate(packs)
        for entry in tables[pack]
    ]  # fmt: skip
    return packs, _ordered(np.frombuffer(b"".join(encoded), ROW))


def _ordered(rows: Rows) -> Rows:
    """Return these rows ascending, each once."""
    first = rows.view(FIELDS)["first"].astype(np.uint64)
    # Mostly runs that ascend already, and numbers are faster to compare than bytes.
    order = np.argsort(first, kind="stable")
    first = first[order]
    alike = np.zeros(len(rows) + 1, np.bool_)
    alike[1:-1] = first[1:] == first[:-1]
    places = np.flatnonzero(alike[1:] | alike[:-1])
    order[places] = order[places][np.argsort(rows[order[places]])]
    rows = rows[order]
    again = np.flatnonzero(alike[:-1])
    again = again[rows[again] == rows[again - 1]]
    return np.delete(rows, again) if len(again) else rows


def merged(streams: Iterable[Iterator[Rows]]) -> Iterator[Rows]:
    """Yield the rows of ascending streams, ascending, each once, and no empty batch.

    Holds one batch of each stream.
    """
    waiting = list(streams)
    held: list[Rows] = [np.empty(0, ROW)] * len(waiting)
    while True:
        for place in reversed(range(len(waiting))):
            while not len(held[place]):
                some = next(waiting[place], None)
                if some is None:
                    del waiting[place], held[place]
                    break
                held[place] = some
        if not held:
            return
        # What comes later is greater than the least of these.
        limit = min(rows[-1] for rows in held)
        cuts = [int(np.searchsorted(rows, limit, side="right")) for rows in held]
        ready = [rows[:cut] for rows, cut in zip(held, cuts, strict=True)]
        held = [rows[cut:] for rows, cut in zip(held, cuts, strict=True)]
        yield _ordered(np.concatenate(ready))


def _merge(
    directory: Path, segments: Sequence[Segment], dropped: Collection[PackId]
) -> list[Segment]:
    """Write one segment of several, without the rows of some packs; none if no row is left."""
    names = [segment.packs() for segment in segments]
    packs = sorted({pack for some in names for pack in some} - set(dropped))
    most = sum(map(len, segments))
    id = write(directory, packs, _joined(segments, names, packs), most)
    return [] if id is None else [Segment(directory, id)]


def _joined(
    segments: Sequence[Segment], names: Sequence[Sequence[PackId]], packs: Sequence[PackId]
) -> Iterator[Rows]:
    """Yield the rows of segments, ascending, numbered by `packs`, without those of other packs."""
    numbers = {pack: number for number, pack in enumerate(packs)}
    most = sum(map(len, segments))
    streams = []
    for segment, some in zip(segments, names, strict=True):
        new = np.array([numbers.get(pack, -1) for pack in some], np.int64)
        # Batches end at about the same ids, so that none waits long.
        streams.append(_renumbered(segment.rows(_MERGED * len(segment) // most), new))
    return merged(streams)


def _renumbered(batches: Iterator[Rows], numbers: Numbers) -> Iterator[Rows]:
    """Yield rows with new numbers of packs, without those whose pack has none."""
    for rows in batches:
        new = numbers[_packs_of(rows)]
        kept = rows[new >= 0]
        kept.view(FIELDS)["pack"] = new[new >= 0]
        yield kept


# -- the segments of a directory -------------------------------------------------------------------


class Segments:
    """The segments of a directory as its list named them when they were opened, or changed here.

    Any number of threads may read, also while another process changes the directory: what is open
    stays. Every method may raise Corrupt or StorageFailed, which names the file.
    """

    def __init__(self, directory: Path) -> None:
        """Open what the list names.  Raises Corrupt, Incompatible, StorageFailed."""
        self.directory = directory
        self._segments = _opened(directory)

    @classmethod
    def create(cls, directory: Path) -> Segments:
        """Open a directory; make it, with an empty list, if it is missing."""
        if fs.make_directory(directory, exist_ok=True):
            fs.sync_directory(directory.parent)
        with _locked(directory):
            if not fs.is_there(directory / LIST):
                _write_list(directory, ())
        return cls(directory)

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(map(len, self._segments))

    def sizes(self) -> list[int]:
        """Return the number of rows of each segment, the largest first."""
        return list(map(len, self._segments))

    def packs(self) -> set[PackId]:
        """Return the packs whose tables were added."""
        return {pack for segment in self._segments for pack in segment.packs()}

    def has(self, kind: Kind, ids: bytes) -> Flags:
        """Return for each of concatenated ids whether it has a row."""
        there = np.zeros(len(ids) // ID_BYTES, np.bool_)
        for _, places, _ in self._found(kind, ids):
            there[places] = True
        return there

    def locations(self, kind: Kind, ids: bytes) -> list[Location | None]:
        """Return a place of each of concatenated ids; None for one without a row."""
        result: list[Location | None] = [None] * (len(ids) // ID_BYTES)
        for segment, places, numbers in self._found(kind, ids):
            for place, found in zip(places.tolist(), segment.locations(numbers), strict=True):
                result[place] = found
        return result

    def places(self, kind: Kind, id: bytes) -> Iterator[Location]:
        """Yield every place of one block or record."""
        key = id + bytes([kind])
        for segment in self._segments:
            yield from segment.places(key)

    def walk(self) -> Iterator[tuple[int, bytes, Location]]:
        """Yield kind, id and place of every row, in order of ids."""
        names = [segment.packs() for segment in self._segments]
        packs = sorted({pack for some in names for pack in some})
        for rows in _joined(self._segments, names, packs):
            fields = rows.view(FIELDS)
            places = [packs[number] for number in fields["pack"].tolist()]
            columns = (fields[name].tolist() for name in _COLUMNS)
            keys = rows.view(_ID_KIND)
            found = map(Location, places, *columns)
            yield from zip(keys["kind"].tolist(), keys["id"].tolist(), found, strict=True)

    def verify(self) -> None:
        """Check every byte of every segment."""
        for segment in self._segments:
            segment.verify()

    def add(self, tables: Iterable[tuple[PackId, Sequence[Entry]]]) -> None:
        """Add the rows of packs, given their tables; pass over packs that are there already.

        Holds the tables of a quarter of a million rows, and at least of one pack.  An error, or
        the end of the process, leaves the rows as they were.
        """
        with self._changing() as segments:
            known = self.packs()
            runs: list[Segment] = []
            gathered: dict[PackId, Sequence[Entry]] = {}
            count = 0
            for pack, entries in tables:
                if pack in known or not entries:
                    continue
                known.add(pack)
                gathered[pack] = entries
                count += len(entries)
                if count >= _GATHERED:
                    runs += self._run(gathered)
                    gathered, count = {}, 0
                if len(runs) == _MOST_RUNS:
                    runs = _merge(self.directory, runs, ())
            runs += self._run(gathered)
            self._settle(segments, runs, sum(map(len, runs)))

    def drop(self, packs: Collection[PackId]) -> None:
        """Remove the rows of packs; those of other packs stay, also of the same blocks."""
        with self._changing() as segments:
            gone = set(packs)
            touched = [one for one in segments if not gone.isdisjoint(one.packs())]
            left = 0
            for segment in touched:
                names = segment.packs()
                kept = np.array([pack not in gone for pack in names])
                left += sum(int(kept[_packs_of(rows)].sum()) for rows in segment.rows())
            if touched:
                self._settle([one for one in segments if one not in touched], touched, left, gone)

    def _run(self, tables: Mapping[PackId, Sequence[Entry]]) -> list[Segment]:
        if not tables:
            return []
        packs, rows = rows_of(tables)
        id = write(self.directory, packs, iter([rows] if len(rows) else []), len(rows))
        return [] if id is None else [Segment(self.directory, id)]

    def _settle(
        self,
        kept: list[Segment],
        changed: list[Segment],
        rows: int,
        dropped: Collection[PackId] = (),
    ) -> None:
        """Merge what changed, and what is too near in size, and publish the result.

        rows: how many rows of `changed` stay.
        """
        while near := [
            one
            for one in kept
            if len(one) < 2 * rows and rows < 2 * len(one) and rows + len(one) <= MOST_ROWS
        ]:
            changed, kept = changed + near, [one for one in kept if one not in near]
            rows += sum(map(len, near))
        if len(changed) > 1 or dropped:
            changed = _merge(self.directory, changed, dropped)
        self._publish(sorted(kept + changed, key=len, reverse=True))

    def _publish(self, segments: list[Segment]) -> None:
        _write_list(self.directory, [(one.id, len(one)) for one in segments])
        self._segments = segments
        self._tidy()

    def _tidy(self) -> None:
        """Remove what a change left that did not end, and what the last one replaced."""
        named = {one.path.name for one in self._segments}
        with fs.translated(self.directory):
            names = fs.listed(self.directory)
        garbage = [name for name in names if _GARBAGE.fullmatch(name) and name not in named]
        if garbage:
            # Who replaced the list may have ended before that was durable: the one before needs
            # what is removed here.
            fs.sync_directory(self.directory)
        for name in garbage:
            fs.unlink(self.directory / name, missing_ok=True)

    @contextmanager
    def _changing(self) -> Iterator[list[Segment]]:
        """Yield the segments as they are now, while no other process changes them."""
        with _locked(self.directory):
            listed = _read_list(self.directory)
            if [(one.id, len(one)) for one in self._segments] != listed:
                self._segments = _opened(self.directory)
            self._tidy()
            yield list(self._segments)

    def _found(self, kind: Kind, ids: bytes) -> Iterator[tuple[Segment, Numbers, Numbers]]:
        return _search(self._segments, kind, ids)


def _search(
    segments: Iterable[Segment], kind: Kind, ids: bytes
) -> Iterator[tuple[Segment, Numbers, Numbers]]:
    """Yield, for each segment, the places of the ids that are first found in it, and their rows."""
    bytes_ = np.full((len(ids) // ID_BYTES, ID_BYTES + 1), int(kind), np.uint8)
    bytes_[:, :ID_BYTES] = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)
    keys = bytes_.view(("S", ID_BYTES + 1))[:, 0]
    # In sorted order, each search finds the page of the one before in the processor's cache.
    order = np.argsort(keys.view(_KEY)["first"].astype(np.uint64))
    keys = keys[order]
    for segment in segments:
        if not len(keys):
            return
        found = segment.find(keys)
        there = found >= 0
        if there.any():
            yield segment, order[there], found[there]
            keys, order = keys[~there], order[~there]


def _packs_of(rows: Rows) -> Numbers:
    return rows.view(FIELDS)["pack"].astype(np.int64)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = fs.LockFile(directory / "lock")
    try:
        lock.acquire()
        yield
    finally:
        lock.release()


def _opened(directory: Path) -> list[Segment]:
    """Open what the list names."""
    while True:
        listed = _read_list(directory)
        try:
            segments = [Segment(directory, id) for id, _ in listed]
        except _Gone:
            # Another process may have replaced the list, and then removed what it named.
            if _read_list(directory) == listed:
                raise
            continue
        for segment, (_, rows) in zip(segments, listed, strict=True):
            if len(segment) != rows:
                raise Corrupt(
                    f"the list says that {segment.path.name} has {rows} rows, and it has "
                    f"{len(segment)}",
                    where=str(directory / LIST),
                    hint=_HINT,
                )
        return segments


def _write_list(directory: Path, segments: Iterable[tuple[SegmentId, int]]) -> None:
    lines = "".join(f"{id} {rows}\n" for id, rows in segments)
    body = _HEAD + lines.encode()
    fs.replace_file(directory / LIST, body + f"blake3 {blake3(body).hexdigest()}\n".encode())


def _read_list(directory: Path) -> list[tuple[SegmentId, int]]:
    path = directory / LIST
    try:
        data = fs.read_file(path, _MOST_LISTED)
    except StorageFailed as error:
        if error.errno != errno.ENOENT:
            raise
        raise Corrupt("the list of segments is missing", where=str(path), hint=_HINT) from error
    body, check = data[:-_END], data[-_END:]
    if check != f"blake3 {blake3(body).hexdigest()}\n".encode() or not body.startswith(_HEAD):
        raise Corrupt("the list of segments is damaged", where=str(path), hint=_HINT)
    segments = []
    for line in body[len(_HEAD) :].splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise Corrupt("the list of segments is damaged", where=str(path), hint=_HINT)
        segments.append((SegmentId.parse(found[1].decode()), int(found[2])))
    return segments
