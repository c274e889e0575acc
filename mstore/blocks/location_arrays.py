"""All rows of `blocks` and `records` at one moment, as arrays.

About 59 bytes per block. `HEAD` is the form of a location without its base
(`mstore.blocks.location`); the bases are row numbers.

LMDB's binding hands over rows one by one, which takes longer than anything done with ten million of
them (docs/design/036-bulk-reads.md).  So `Pages` maps the same file, and a compiled pass copies the
rows of many pages at a time.

When the pages are safe to read: inside the read transaction that the caller holds.  LMDB writes no
page that a registered reader can reach, and a private copy (`lmdb_copy`) is never written.  The
root comes from LMDB: in that transaction it is the value of the table's name.

Nothing in a page is believed: its number, kind and bounds, the place, key length and value length
of each row, and the counts of pages and rows must be as the tree's record and the form of the table
have them, and the ids must ascend.  If anything is different, the rows are read with a cursor.
Requires a little-endian machine, like `lmdb_pages`, which has the layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import compress, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.blocks.index import Index
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_pages import (
    BRANCH,
    HEAD_BYTES,
    MAX_DEPTH,
    NODE,
    PAGE_HEAD,
    TREE_BYTES,
    BTree,
    page_size,
)
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Row
from mstore.blocks.packs import Kind
from mstore.blocks.schema import BLOCKS, RECORDS
from mstore.numeric.passes import Pass
from mstore.terms.errors import Corrupt, MstoreError
from mstore.terms.ids import ID_BYTES
from mstore.terms.phrases import call

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_SOURCES: Final = ("blocks/id_table.c", "blocks/lanes.h")
_MODULE: Final = "mstore.blocks.location_arrays"
_count: Final = Pass(_MODULE, "count", "iippp", _SOURCES)
_find: Final = Pass(_MODULE, "find", "iipppp", _SOURCES)
_rows: Final = Pass(_MODULE, "rows", "iiiippppppp", ("blocks/leaf_pages.c", "blocks/lanes.h"))

MOST_BITS: Final = 30
"""The most leading bits that choose a bucket."""


def bucket_bits(count: int) -> int:
    """Return how many leading bits choose among the buckets of so many rows."""
    return min(max(1, count.bit_length() - 2), MOST_BITS)


_Fields = npt.NDArray[np.void]
_PAGES = 1 << 12
"""Leaf pages in a batch: some 10^5 rows, whose places fit into a processor's cache."""
_WORD = 2
"""Places in a page are even; they are counted in words of two bytes."""
_KIND, _LOWER, _UPPER = 5, 6, 7
"""Words of a page's head."""
_NODE_HEAD = NODE.size
_CHILD = np.uint64((1 << 48) - 1)

HEAD = np.dtype(
    [
        ("pack", ">u4"),
        ("offset", ">u8"),
        ("stored", ">u4"),
        ("plain", ">u4"),
        ("codec", "u1"),
        ("width", "u1"),
    ]
)
NO_BASE, LOST_BASE = -1, -2
"""Instead of the row number of a base: the payload needs none; its base is not stored."""
_BATCH = 1 << 17
_ID = np.dtype((np.void, ID_BYTES))
_HEAD_BYTES = np.dtype((np.void, HEAD.itemsize))
_DELTA = np.dtype([("head", _HEAD_BYTES), ("base", np.void, ID_BYTES)])


class Unexpected(Exception):
    """The file cannot be mapped, or something in it is not as this module knows it."""


class LocationTable:
    """The rows of one kind in id order; a row's number is its position."""

    def __init__(self, keys: bytearray, heads: bytearray) -> None:
        self.heads = np.frombuffer(heads, HEAD)
        self._keys = memoryview(keys)
        self._heads = memoryview(heads)
        self._bits = bucket_bits(len(self.heads))
        self._starts = np.empty((1 << self._bits) + 1, np.int32)
        self._table = np.frombuffer(keys, np.uint8).ctypes.data
        is_ascending = np.empty(1, np.int64)
        places = (self._table, self._starts.ctypes.data, is_ascending.ctypes.data)
        _count(len(self.heads), self._bits, *places)
        self._is_ascending = bool(is_ascending[0])
        self.base = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self.heads)

    def id(self, number: int) -> bytes:
        """Return the id of a row."""
        return bytes(self._keys[number * ID_BYTES : (number + 1) * ID_BYTES])

    def base_id(self, number: int) -> bytes | None:
        """Return the base of a delta; None if a row has none, or one that is not stored."""
        base = int(self.base[number]) if len(self.base) else NO_BASE
        return None if base < 0 else self.id(base)

    def row(self, number: int) -> Row | None:
        """Return the row as stored in the index; None for a delta whose base is not stored."""
        if len(self.base) and self.base[number] == LOST_BASE:
            return None
        head = bytes(self._heads[number * HEAD.itemsize : (number + 1) * HEAD.itemsize])
        return Row(head + (self.base_id(number) or b""))

    def is_ascending(self) -> bool:
        """Return whether each id is less than the next: else `find` would miss some."""
        return self._is_ascending

    def find(self, ids: bytes) -> Numbers:
        """Return the row numbers of concatenated ids; -1 for an id without a row."""
        asked = np.frombuffer(ids, _ID)
        found = np.empty(len(asked), np.int64)
        places = (asked.ctypes.data, self._table, self._starts.ctypes.data, found.ctypes.data)
        _find(len(asked), self._bits, *places)
        return found

    def resolve(self, inside: slice, named: Flags, bases: bytes) -> None:
        """Set the bases of those of the rows inside that name one, from these concatenated ids."""
        found = self.find(bases)
        self.base[inside][named] = np.where(found < 0, LOST_BASE, found)


def id_at(ids: bytes, place: int) -> bytes:
    """Return one of concatenated ids."""
    return ids[place * ID_BYTES : (place + 1) * ID_BYTES]


def read(index: Index, transaction: IndexTransaction) -> dict[Kind, LocationTable]:
    """Read all rows of blocks and records."""
    return {**_record_tables(index, transaction), Kind.BLOCK: _block_table(index, transaction)}


def _block_table(index: Index, transaction: IndexTransaction) -> LocationTable:
    with suppress(Unexpected):
        table = _table(index.count(transaction, BLOCKS.name), Pages(index, transaction))
        if table.is_ascending():
            return table
    # One row after the other takes several times as long, and needs only LMDB.
    return _table(index.count(transaction, BLOCKS.name), CursorRows(index, transaction))


def fill_lengths(
    index: Index, transaction: IndexTransaction, asked: _Fields, lengths: Numbers
) -> None:
    """Set the bytes at rest of those blocks whose rows are found, by reading all rows in order.

    asked: ids; lengths: one for each, int64. Rows that cannot be read so are not found.
    """
    first = np.ascontiguousarray(asked).view(">u8")[:: ID_BYTES // 8]
    order = first.argsort()
    ascending = first[order]
    with suppress(Unexpected):
        pages = Pages(index, transaction)
        for ids, (heads, *_) in zip(pages.ids(), pages.rows(), strict=True):
            table = LocationTable(bytearray(ids), bytearray(heads))
            _expect(table.is_ascending())
            ends = ids[[0, -1]].view(">u8")[:: ID_BYTES // 8]
            start, end = (
                np.searchsorted(ascending, ends[0]),
                np.searchsorted(ascending, ends[1], "right"),
            )
            mine = order[start:end]
            rows = table.find(asked[mine].tobytes())
            there = rows >= 0
            lengths[mine[there]] = table.heads["stored"][rows[there]]


def _table(count: int, source: Pages | CursorRows) -> LocationTable:
    # Of their final size: arrays that grow take up to twice the memory meanwhile.
    keys, heads = bytearray(count * ID_BYTES), bytearray(count * HEAD.itemsize)
    ids = np.frombuffer(keys, _ID)
    done = 0
    for some in source.ids():
        _require(done + len(some) <= count)
        ids[done : done + len(some)] = some
        done += len(some)
    _require(done == count)
    table = LocationTable(keys, heads)
    table.base = np.full(count, NO_BASE, np.int32)
    places = np.frombuffer(heads, _HEAD_BYTES)
    # The search runs beside the reading: numpy lets other threads run meanwhile.
    with ThreadPoolExecutor(1) as pool:
        searches: deque[Future[None]] = deque()
        done = 0
        for some_heads, named, bases in source.rows():
            _require(done + len(named) <= count)
            inside = slice(done, done + len(named))
            places[inside] = some_heads
            searches.append(pool.submit(table.resolve, inside, named, bases))
            if len(searches) > 1:
                searches.popleft().result()
            done += len(named)
        for search in searches:
            search.result()
    _require(done == count)
    return table


class Pages:
    """The rows of `blocks`, gathered from LMDB's pages in a read transaction.

    Every method raises Unexpected; `rows` and `ids` also at their end.
    """

    def __init__(self, index: Index, transaction: IndexTransaction) -> None:
        """Find the pages."""
        record = transaction.get(BLOCKS.name.encode())
        _expect(record is not None and len(record) == TREE_BYTES)
        tree = BTree.parse(record or b"")
        self._entries = tree.entries
        _expect(tree.flags == 0 and tree.overflows == 0)
        if not tree.entries:
            self._leaves = np.empty(0, np.int64)
            return
        _expect(0 < tree.depth <= MAX_DEPTH and tree.root <= _CHILD)
        self._file = _MappedFile(index.env)
        self._leaves = self._below(tree)

    def _below(self, tree: BTree) -> Numbers:
        """Return the leaf pages in key order."""
        file = self._file
        pages, branches = np.array([tree.root]), 0
        for _ in range(tree.depth - 1):
            branches += len(pages)
            _expect(branches <= tree.branches)
            pages = file.children(pages)
        _expect((branches, len(pages)) == (tree.branches, tree.leaves))
        return pages

    def ids(self) -> Iterator[_Fields]:
        """Yield all ids."""
        done = 0
        for some, most in self._batches():
            ids = np.empty(most, _ID)
            rows, _ = self._file.rows(some, most, ids=ids)
            done += rows
            _expect(done <= self._entries)
            yield ids[:rows]
        _expect(done == self._entries)

    def rows(self) -> Iterator[tuple[_Fields, Flags, bytes]]:
        """Yield heads, which rows name a base, and these bases one after the other."""
        done = 0
        for some, most in self._batches():
            heads, named = np.empty(most, _HEAD_BYTES), np.empty(most, np.bool_)
            bases = np.empty(most, _ID)
            rows, with_base = self._file.rows(some, most, values=(heads, named, bases))
            done += rows
            _expect(done <= self._entries)
            yield heads[:rows], named[:rows], bases[:with_base].tobytes()
        _expect(done == self._entries)

    def _batches(self) -> Iterator[tuple[Numbers, int]]:
        """Yield leaf pages in key order, and the most rows that these have."""
        if not self._entries:
            return
        shortest = _WORD + _NODE_HEAD + ID_BYTES + HEAD.itemsize
        for start in range(0, len(self._leaves), _PAGES):
            some = self._leaves[start : start + _PAGES]
            yield some, len(some) * (self._file.page // shortest)


class _MappedFile:
    """The mapped file.  It is unmapped when the last array that looks into it is gone."""

    def __init__(self, environment: Environment) -> None:
        try:
            self._map = environment.mapped()
            self.page = page_size(self._map[:HEAD_BYTES], environment.path)
        except (OSError, ValueError, MstoreError) as error:
            raise Unexpected from error
        self._pages = len(self._map) // self.page
        self._words = np.frombuffer(self._map, np.uint16, self._pages * self.page // _WORD)

    def children(self, pages: Numbers) -> Numbers:
        """Return the pages that these branch pages name, in order."""
        places = self._places(pages)
        return (self._words_at(places).view(np.uint64)[:, 0] & _CHILD).astype(np.int64)

    def rows(
        self,
        pages: Numbers,
        most: int,
        *,
        ids: _Fields | None = None,
        values: tuple[_Fields, Flags, _Fields] | None = None,
    ) -> tuple[int, int]:
        """Fill arrays of `most` rows from leaf pages; return how many rows, how many bases.

        values: heads, which rows name a base, and these bases.
        """
        told = np.empty(2, np.int64)
        outputs = [0 if ids is None else ids.ctypes.data]
        outputs += [0, 0, 0] if values is None else [one.ctypes.data for one in values]
        numbers = np.ascontiguousarray(pages)
        begin = self._words.ctypes.data
        sizes = (len(pages), self.page, self._pages, most)
        _rows(*sizes, begin, numbers.ctypes.data, *outputs, told.ctypes.data)
        rows, bases = told.tolist()
        _expect(rows >= 0)
        return rows, bases

    def _words_at(self, places: Numbers) -> npt.NDArray[np.uint16]:
        """Return the eight bytes at each of these words, as words."""
        found: npt.NDArray[np.uint16] = self._words[
            places[:, None] + np.arange(_NODE_HEAD // _WORD)
        ]
        return found

    def _places(self, pages: Numbers) -> Numbers:
        """Return the word at which each row of these branch pages begins, in order."""
        _expect(((pages > 1) & (pages < self._pages)).all())
        size = self.page
        starts = pages * (size // _WORD)
        _expect((self._words_at(starts).view(np.int64)[:, 0] == pages).all())
        _expect((self._words[starts + _KIND] == BRANCH).all())
        lower = self._words[starts + _LOWER].astype(np.int64)
        upper = self._words[starts + _UPPER].astype(np.int64)
        # An even number of bytes, and at least one row.
        sound = (lower >= PAGE_HEAD + _WORD) & (lower <= upper) & (upper <= size) & (lower % 2 == 0)
        _expect(sound.all())
        counts = (lower - PAGE_HEAD) // _WORD
        firsts = starts + PAGE_HEAD // _WORD - (np.cumsum(counts) - counts)
        at = self._words[np.repeat(firsts, counts) + np.arange(counts.sum())].astype(np.int64)
        inside = (at >= np.repeat(upper, counts)) & (at <= size - _NODE_HEAD) & (at % _WORD == 0)
        _expect(inside.all())
        places: Numbers = np.repeat(starts, counts) + at // _WORD
        return places


class CursorRows:
    """The rows of `blocks`, read with a cursor of LMDB.

    Methods raise Corrupt for a row of another form.
    """

    def __init__(self, index: Index, transaction: IndexTransaction) -> None:
        self._ask = index, transaction

    def ids(self) -> Iterator[_Fields]:
        """As `Pages`."""
        for some in self._column("keys"):
            ids = b"".join(some)
            _require(len(ids) == len(some) * ID_BYTES)
            yield np.frombuffer(ids, _ID)

    def rows(self) -> Iterator[tuple[_Fields, Flags, bytes]]:
        """As `Pages`."""
        for rows in self._column("rows"):
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            named = lengths == _DELTA.itemsize
            bare = lengths == HEAD.itemsize
            _require(bool((named | bare).all()))
            heads = np.empty(len(rows), _HEAD_BYTES)
            heads[bare] = np.frombuffer(b"".join(compress(rows, bare.tobytes())), _HEAD_BYTES)
            deltas = np.frombuffer(b"".join(compress(rows, named.tobytes())), _DELTA)
            heads[named] = deltas["head"]
            yield heads, named, deltas["base"].tobytes()

    def _column(self, what: str) -> Iterator[list[bytes]]:
        """Yield the keys, or the rows, in batches; both at once take twice as long."""
        index, transaction = self._ask
        with transaction.cursor(db=index.db(BLOCKS.name)) as cursor:
            column: Any = cursor.iternext(keys=what == "keys", values=what == "rows")
            while batch := list(islice(column, _BATCH)):
                yield batch


def _expect(is_known: Any) -> None:
    if not is_known:
        raise Unexpected


def _require(is_sound: bool) -> None:
    if not is_sound:
        raise Corrupt("the index has rows of another form", where=BLOCKS.name, hint=call("reindex"))


def _record_tables(index: Index, transaction: IndexTransaction) -> dict[Kind, LocationTable]:
    keys = {kind: bytearray() for kind in Kind}
    heads = {kind: bytearray() for kind in Kind}
    with transaction.cursor(db=index.db(RECORDS.name)) as cursor:
        for key, row in cursor:
            # Ignore kinds that this version does not know; their packs stay.
            with suppress(ValueError):
                kind = Kind(key[0])
                keys[kind] += key[1:]
                heads[kind] += row[: HEAD.itemsize]
    return {kind: LocationTable(keys[kind], heads[kind]) for kind in Kind}
