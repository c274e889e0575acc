"""One segment: a sealed, sorted table of where payloads lie in packs that are elsewhere.

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

A SegmentId is BLAKE3 (context "mstore 1 segment") of the header's first 4064 bytes. So a name
stands for every byte. Opening checks the header against its name and the file's size. A page is
read and checked when it is first used, before the map shows it: a page that is flipped, lost, or of
another place or segment is an error that names the file and the page. `verify` checks all pages,
what the header says of them, and the order.

A segment that somebody forged with sound checks may name false places, or hide some: blocks are
proved by their ids when they are read, so a false place is an error. That a block is not here, or
is, must never be the only reason to delete or not to send something.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.location_arrays import Numbers, bucket_bits
from mstore.blocks.pack_tables import PackTable
from mstore.terms.errors import Conflict, Corrupt, Incompatible
from mstore.terms.ids import ID_BYTES, PackId, SegmentId

PAGE: Final = 4096
VERSION: Final = 1
MAGIC: Final = b"MSTORESG"
_BODY: Final = PAGE - 32
_HEADER: Final = struct.Struct(">8sIIQQ32s32s32s32s")
_CONTEXT: Final = "mstore 1 segment page"

_ROW: Final = struct.Struct(">32sBIQIIBB32sx")
ROW: Final = np.dtype(("S", _ROW.size))
"""A row as bytes: numpy compares such as memcmp(3) does, zero bytes at the end included."""
FIELDS: Final = np.dtype(
    {
        "names": [
            "first", "key", "id", "kind",
            "pack", "offset", "stored", "plain", "codec", "width", "base",
        ],
        "formats": [
            ">u8", "S33", "V32", "u1",
            ">u4", ">u8", ">u4", ">u4", "u1", "u1", "V32",
        ],
        "offsets": [0, 0, 0, 32, 33, 37, 45, 49, 53, 54, 55],
        "itemsize": _ROW.size,
    }
)  # fmt: skip
"""What a row is made of.  first: the leading bytes of the id; key: id and kind."""
COLUMNS: Final = ("offset", "stored", "plain", "codec", "width", "base")
KEY: Final = np.dtype({"names": ["first"], "formats": [">u8"], "itemsize": ID_BYTES + 1})
"""A key alone, as `FIELDS` has it."""
_KEY_BYTES: Final = np.dtype(f"S{ID_BYTES + 1}")
_ID: Final = np.dtype((np.void, ID_BYTES))
_START: Final = np.dtype(">u4")
MOST_ROWS: Final = (1 << 32) - 1
Rows = npt.NDArray[np.bytes_]

_READ_ROWS: Final = 1 << 16
"""Rows in memory while all are read."""
_MOST_STARTS: Final = 1 << 16
_COPIED_PAGES: Final = 1 << 10
HINT: Final = "remove the directory of segments: its rows can be made from tables of packs again"


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


class SegmentGone(Corrupt):
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
            raise SegmentGone("the segment is missing", where=str(self.path), hint=HINT) from error
        except OSError as error:
            raise fs.unread(error, self.path, HINT) from error
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
        with fs.reading(self.path, HINT):
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
        bucket = _buckets(keys.view(KEY)["first"].astype(np.uint64), self._bits)
        low = self._items(self._starts, bucket).astype(np.int64)
        high = self._items(self._starts, bucket + 1).astype(np.int64)
        if ((low > high) | (high > self._rows.count)).any():
            raise self._bad("its starts do not ascend")
        found = _lower_bound(low, high, lambda rows: self._keys(rows) < keys)
        return np.where((found < high) & (self._keys(found) == keys), found, -1)

    def _keys(self, numbers: Numbers) -> Rows:
        """Return the keys of rows; of the last one for a number behind it."""
        rows = self._items(self._rows, np.minimum(numbers, self._rows.count - 1))
        keys: Rows = rows.view(FIELDS)["key"]
        return keys

    def places(self, key: bytes) -> Iterator[Location]:
        """Yield what each row of one key says."""
        keys = np.array([key], _KEY_BYTES)
        number = self.find(keys)
        while 0 <= number[0] < len(self) and (self._keys(number) == keys)[0]:
            yield from self.locations(number)
            number = number + 1

    def locations(self, numbers: Numbers) -> list[Location]:
        """Return what rows say."""
        rows = self._items(self._rows, numbers)
        places = packs_of(rows)
        if len(places) and int(places.max()) >= self._packs.count:
            raise self._bad("a row names a pack that it does not have")
        packs = map(PackId, self._items(self._packs, places).tolist())
        fields = rows.view(FIELDS)
        return list(map(Location, packs, *(fields[name].tolist() for name in COLUMNS)))

    def fields(self, numbers: Numbers) -> tuple[list[PackId], Rows]:
        """Return the packs that rows name, and the rows with numbers of these in place of packs."""
        rows = self._items(self._rows, numbers).copy()
        places, own = np.unique(packs_of(rows), return_inverse=True)
        if len(places) and int(places[-1]) >= self._packs.count:
            raise self._bad("a row names a pack that it does not have")
        rows.view(FIELDS)["pack"] = own
        return list(map(PackId, self._items(self._packs, places).tolist())), rows

    def packs(self) -> list[PackId]:
        """Return the packs that rows name, ascending."""
        section = self._packs
        names: list[bytes] = []
        for page in range(section.page, section.end):
            names += self._read(section, page, 1).tolist()
        if any(one >= other for one, other in pairwise(names)):
            raise self._bad("its packs do not ascend")
        return list(map(PackId, names))

    def has_pack(self, pack: PackId) -> bool:
        """Return whether rows name a pack; a page is read for each step of a search."""

        def name(number: int) -> bytes:
            return bytes(self._items(self._packs, np.array([number])).tobytes())

        low, high = 0, self._packs.count
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if name(middle) < pack else (low, middle)
        return low < self._packs.count and name(low) == pack

    def rows(self, about: int = _READ_ROWS) -> Iterator[Rows]:
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
        done = 0
        for some in _starts_of(self.rows(), self._bits):
            if (self._items(self._starts, np.arange(done, done + len(some))) != some).any():
                raise self._bad("its starts do not match its rows")
            done += len(some)

    def copy_to(self, directory: Path) -> None:
        """Write the same segment into another directory, durably, and check every byte there."""
        file = fs.NewFile(directory / f"{os.urandom(8).hex()}.new")
        try:
            for page in range(0, self._packs.end, _COPIED_PAGES):
                count = min(_COPIED_PAGES, self._packs.end - page)
                file.append(self._proved_bytes(page, count))
            file.sync()
            file.protect()
            file.close()
            fs.rename(file.path, path_of(directory, self.id))
        except BaseException:
            file.abandon()
            raise
        Segment(directory, self.id).verify()

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
            raise fs.unread(error, self.path, HINT) from error
        if len(data) < count * PAGE:
            raise self._bad("it ends too early")
        return data

    def _bad(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self.path), hint=HINT)


def _buckets(first: npt.NDArray[np.uint64], bits: int) -> Numbers:
    """Return the bucket of each of these leading numbers."""
    return (first >> np.uint64(64 - bits)).astype(np.int64)


def _edges(start: int, stop: int, bits: int) -> npt.NDArray[np.uint64]:
    """Return the least leading number of each of these buckets."""
    return np.arange(start, stop, dtype=np.uint64) << np.uint64(64 - bits)


def _lower_bound(
    low: Numbers, high: Numbers, is_less: Callable[[Numbers], npt.NDArray[np.bool_]]
) -> Numbers:
    """Return, for each search, the first row from `low` on that is not less; `high` if all are.

    is_less: given a row number for each search, whether that row is less than what is searched
    for. It is asked only for rows from low to high, `high` included where a search has ended.
    """
    while (low < high).any():
        middle = (low + high) >> 1
        less = is_less(middle)
        low = np.where(less, np.minimum(middle + 1, high), low)
        high = np.where(less, high, np.maximum(middle, low))
    return low


def _starts_of(batches: Iterable[Rows], bits: int) -> Iterator[npt.NDArray[Any]]:
    """Yield, for rows in order, the first of each bucket, and last how many rows there are."""
    bucket = count = 0
    for rows in batches:
        first = rows.view(FIELDS)["first"].astype(np.uint64)
        stop = int(_buckets(first[-1:], bits)[0]) + 1
        for begin in range(bucket, stop, _MOST_STARTS):
            wanted = _edges(begin, min(begin + _MOST_STARTS, stop), bits)
            yield (count + np.searchsorted(first, wanted)).astype(_START)
        bucket, count = stop, count + len(rows)
    end = (1 << bits) + 1
    for begin in range(bucket, end, _MOST_STARTS):
        yield np.full(min(_MOST_STARTS, end - begin), count, _START)


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

        for some in _starts_of(written(), bits):
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


def rows_of(tables: Mapping[PackId, PackTable]) -> tuple[list[PackId], Rows]:
    """Return the packs with entries, ascending, and a row for each of these, ascending."""
    packs = sorted(pack for pack, table in tables.items() if len(table))
    rows: Rows = np.zeros(sum(map(len, tables.values())), ROW)
    fields, end = rows.view(FIELDS), 0
    for number, pack in enumerate(packs):
        table = tables[pack]
        some = fields[end : end + len(table)]
        end += len(table)
        some["pack"] = number
        some["id"] = table["id"].view("V32")
        for name in ("kind", *COLUMNS):
            some[name] = table[name]
    return packs, ordered(rows)


def ordered(rows: Rows) -> Rows:
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


def packs_of(rows: Rows) -> Numbers:
    """Return the number of each row's pack."""
    return rows.view(FIELDS)["pack"].astype(np.int64)
