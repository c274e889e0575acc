"""LMDB data files, read without LMDB: page by page, checking every number before using it.

LMDB trusts its file: a page number that points nowhere ends the process with a signal. This module
tells whether a file is sound, and what of a damaged one is still readable. It only reads the file,
and raises errors instead of crashing. It never opens, locks or changes an environment. It requires
a little-endian machine and the page layout of LMDB 0.9 (version 1):

    page    u64 number, u16 pad, u16 flags, u16 lower, u16 upper      (overflow: u32 pages instead)
    meta    (pages 0 and 1) magic, version, address, map size, two trees, last page, transaction
    tree    u32 pad, u16 flags, u16 depth, u64 branches, leaves, overflows, entries, root
    branch  nodes: u16 low, u16 high, u16 top of a page number, u16 key length, key
    leaf    nodes: u16 low, u16 high of a data length, u16 flags, u16 key length, key, data or the
            number of the first overflow page

The pad of tree 0 is the page size: that of the machine that made the file, at most 32 KiB. LMDB and
this module keep to it on any other machine.

Tree 0 lists the free pages by transaction, tree 1 the named databases. A page belongs to exactly
one tree, or is free. LMDB never reads a free page and may never have written one at the end of the
file, so the file may be shorter than its last page number says; a page of a tree always lies within
it. The rows of a page fill it from its end, without gaps.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Self

import msgspec

from mstore import fs
from mstore.terms.errors import Corrupt
from mstore.terms.phrases import call

HEAD_BYTES = 152
"""Page 0 up to the end of its meta record: enough to know the page size."""
_LEAST_PAGE, _MOST_PAGE = 512, 1 << 15
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NOWHERE = (1 << 64) - 1
BRANCH, LEAF, _OVERFLOW, _META = 1, 2, 4, 8
PAGE_HEAD = 16
_BIG_DATA, _SUB_DATA = 1, 2
_INTEGER_KEYS = 8
MAX_DEPTH = 32
_MAX_MAP = 1 << 47
_SLACK = 64 << 20

_HEADER = struct.Struct("<QHHHH")
_OVERFLOW_HEADER = struct.Struct("<QHHI")
_META_HEAD = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_META_END = struct.Struct("<QQ")
NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
TREE_BYTES = _TREE.size
_TREES = PAGE_HEAD + _META_HEAD.size


class Tree(msgspec.Struct, frozen=True):
    """A B-tree as its record describes it."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes) -> Tree:
        """Return the tree of a record, which has TREE_BYTES."""
        return cls(*_TREE.unpack(data))


class _Meta(msgspec.Struct, frozen=True):
    map_size: int
    free: Tree
    main: Tree
    last: int
    transaction: int


def page_size(head: bytes, path: Path) -> int:
    """Return the size of a file's pages in bytes, which its first HEAD_BYTES state.

    Raises Corrupt.
    """
    if len(head) < HEAD_BYTES:
        raise _damaged("the file is cut short", path)
    if _META_HEAD.unpack_from(head, PAGE_HEAD)[:2] != (_MAGIC, _VERSION):
        raise _damaged("page 0 is not the head of an LMDB file", path)
    size = Tree.parse(head[_TREES : _TREES + TREE_BYTES]).pad
    if size & (size - 1) or not _LEAST_PAGE <= size <= _MOST_PAGE:
        allowed = f"{_LEAST_PAGE} to {_MOST_PAGE}"
        raise _damaged(f"its head names pages of {size} bytes, and LMDB has {allowed}", path)
    return size


def _damaged(what: str, path: Path) -> Corrupt:
    return Corrupt(f"damaged index: {what}", where=str(path), hint=call("reindex"))


def newest_transaction(heads: bytes) -> int:
    """Return the newest transaction in the first two pages of a file; checks nothing."""
    at = _TREES + 2 * TREE_BYTES
    first, second = (_META_END.unpack_from(heads, page + at) for page in (0, len(heads) // 2))
    return max(int(first[1]), int(second[1]))


class LmdbFile:
    """One data file as of its newest transaction. Use as a context manager.

    Raises Corrupt if even the first two pages are invalid, Unreadable if the disk has lost pages,
    StorageFailed; Conflict if it is no regular file. Reading a file that others write is consistent
    until they commit twice: `moved` tells whether anything was committed.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Open the file at `path`, or take the descriptor of one that is open, and close it."""
        self.path = path
        with fs.reading(path):
            self._fd = fs.open_file(path) if descriptor is None else descriptor
        try:
            self.page = page_size(self._pread(0, HEAD_BYTES), path)
            self._meta = self._newest()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def transaction(self) -> int:
        """The transaction that committed what is read here."""
        return self._meta.transaction

    def status(self) -> os.stat_result:
        """Return the status of the open file."""
        with fs.reading(self.path):
            return os.fstat(self._fd)

    def moved(self) -> bool:
        """Return whether something was committed since this file was opened."""
        return self._newest().transaction != self._meta.transaction

    def _newest(self) -> _Meta:
        metas = [self._read_meta(number) for number in (0, 1)]
        newest = max(metas, key=lambda meta: meta.transaction)
        # LMDB finds the meta page of a transaction by the parity of its number.
        if newest.transaction and metas[newest.transaction & 1] is not newest:
            raise self._corrupt("the two heads name impossible transactions")
        size = self.status().st_size
        # Free pages at the end may never have been written; reject an absurd size.
        if newest.last < 1 or newest.last * self.page > 2 * size + _SLACK:
            raise self._corrupt("the file is cut short")
        if newest.map_size % self.page or not newest.last * self.page < newest.map_size <= _MAX_MAP:
            raise self._corrupt("the head names an impossible map size")
        if newest.free.flags != _INTEGER_KEYS or newest.main.flags:
            raise self._corrupt("the head names features that mstore does not use")
        return newest

    def _read_meta(self, number: int) -> _Meta:
        page = self._pread(number * self.page, self.page)
        if len(page) < self.page:
            raise self._corrupt("the file is cut short")
        own, _, flags, _, _ = _HEADER.unpack_from(page)
        magic, version, _, map_size = _META_HEAD.unpack_from(page, 16)
        free = Tree(*_TREE.unpack_from(page, _TREES))
        main = Tree(*_TREE.unpack_from(page, _TREES + TREE_BYTES))
        last, transaction = _META_END.unpack_from(page, _TREES + 2 * TREE_BYTES)
        if (magic, version) != (_MAGIC, _VERSION) or flags != _META or own != number:
            raise self._corrupt(f"page {number} is not the head of an LMDB file")
        if free.pad != self.page:
            raise self._corrupt(f"page {number} names another page size")
        return _Meta(map_size, free, main, last, transaction)

    def _pread(self, offset: int, length: int) -> bytes:
        with fs.reading(self.path):
            return os.pread(self._fd, length, offset)

    def _corrupt(self, what: str) -> Corrupt:
        return _damaged(what, self.path)

    # -- reading -----------------------------------------------------------------------------

    def databases(self, tell: Callable[[str], None]) -> dict[bytes, Tree]:
        """Return the named databases; report what is unreadable."""
        return self._named(_Walk(self, tell), tell)

    def _named(self, walk: _Walk, tell: Callable[[str], None]) -> dict[bytes, Tree]:
        found = {}
        for name, data, flags in walk.nodes("the list of databases", self._meta.main):
            if flags != _SUB_DATA or len(data) != _TREE.size:
                tell(f"database {name!r} has no description")
                continue
            tree = Tree.parse(data)
            if tree.flags:
                tell(f"database {name!r} has features that mstore does not use")
            found[name] = tree
        return found

    def rows(
        self, name: bytes, tree: Tree, tell: Callable[[str], None]
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield every readable row in key order; report and skip unreadable ones."""
        for key, data, _ in _Walk(self, tell).nodes(name.decode(errors="replace"), tree):
            yield key, data

    def check(
        self,
        tell: Callable[[str], None],
        look: Callable[[bytes, bytes, bytes], None] | None = None,
    ) -> set[bytes]:
        """Walk everything: each page in its place and only there, keys in order, counts right.

        look: called with database, key and value of every row. Without it values are not read, so
        this tells whether LMDB can safely map the file. Returns the databases' names.
        """
        walk = _Walk(self, tell, counting=True, values=look is not None)
        named = self._named(walk, tell)
        for name, tree in named.items():
            for rows in walk.leaves(name.decode(errors="replace"), tree):
                if look is not None:
                    for key, data, _ in rows:
                        look(name, key, data)
        walk.values = True
        for key, data, _ in walk.nodes("the list of free pages", self._meta.free, integers=True):
            walk.claim_free(key, data)
        return set(named)


class _Walk:
    """One pass over trees: reports faults, and continues where it can.

    Reads each page once, for its first owner, so a pass always ends, whatever points where.
    """

    def __init__(
        self,
        file: LmdbFile,
        tell: Callable[[str], None],
        *,
        counting: bool = False,
        values: bool = True,
    ) -> None:
        self._file = file
        self._tell = tell
        self._counting = counting
        # Whether to read values that have pages of their own.
        self.values = values
        self._page_bytes = file.page
        self._last = file._meta.last
        self._size = file.status().st_size
        # One bit per page.
        self._claimed = bytearray((self._last >> 3) + 1)
        self._counts = [0, 0, 0]

    def nodes(
        self, what: str, tree: Tree, *, integers: bool = False
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield (key, data, flags) of every leaf node."""
        for rows in self.leaves(what, tree, integers=integers):
            yield from rows

    def leaves(
        self, what: str, tree: Tree, *, integers: bool = False
    ) -> Iterator[list[tuple[bytes, bytes, int]]]:
        """Yield the leaf nodes page by page."""
        if tree.root == _NOWHERE:
            if tree.entries or tree.depth:
                self._tell(f"{what}: has {tree.entries} rows and no page")
            return
        if not 0 < tree.depth <= MAX_DEPTH:
            self._tell(f"{what}: is {tree.depth} levels deep")
            return
        self._counts = [0, 0, 0]
        entries = 0
        for rows in self._below(what, tree.root, tree.depth, b"", None, integers=integers):
            entries += len(rows)
            yield rows
        if self._counting:
            counts = (tree.branches, tree.leaves, tree.overflows, tree.entries)
            if counts != (*self._counts, entries):
                self._tell(f"{what}: {entries} rows were found where {tree.entries} should be")

    def _claim(self, what: str, number: int, count: int = 1) -> bool:
        if not 2 <= number <= number + count - 1 <= self._last:
            self._tell(f"{what}: page {number} is outside of the file")
            return False
        for page in range(number, number + count):
            if self._claimed[page >> 3] >> (page & 7) & 1:
                self._tell(f"{what}: page {page} has two owners")
                return False
            self._claimed[page >> 3] |= 1 << (page & 7)
        return True

    def claim_free(self, key: bytes, data: bytes) -> None:
        """Process one row of the list of free pages."""
        what = "the list of free pages"
        if len(key) != 8 or len(data) < 8 or len(data) % 8:
            self._tell(f"{what}: a row of another form")
            return
        count, *pages = struct.unpack(f"<{len(data) // 8}Q", data)
        # LMDB may reserve more room in a row than it needs.
        if count > len(pages):
            self._tell(f"{what}: a row of another form")
            return
        for page in pages[:count]:
            self._claim(what, page)

    def _below(
        self, what: str, number: int, level: int, low: bytes, high: bytes | None, *, integers: bool
    ) -> Iterator[list[tuple[bytes, bytes, int]]]:
        page = self._page(what, number, LEAF if level == 1 else BRANCH)
        if page is None:
            return
        self._counts[1 if level == 1 else 0] += 1
        nodes = self._split(what, number, page, leaf=level == 1)
        if nodes is None:
            return
        keys = [key for key, _, _ in nodes]
        if integers:
            sound = self._numbered(keys, level)
        else:
            # The first key of a branch stands for everything below the second.
            keys[0] = low if level > 1 else keys[0]
            sound = _ordered(keys, low, high)
        if not sound:
            self._tell(f"{what}: page {number} is out of order")
            return
        if level == 1:
            yield self._whole(what, nodes)
            return
        for place, (_, child, _) in enumerate(nodes):
            top = keys[place + 1] if place + 1 < len(keys) else high
            yield from self._below(
                what,
                _NUMBER.unpack(child)[0],
                level - 1,
                keys[place],
                top,
                integers=integers,
            )

    def _numbered(self, keys: list[bytes], level: int) -> bool:
        """Return whether keys of the list of free pages are transaction numbers, in order."""
        if any(len(key) != 8 for key in keys[level > 1 :]):
            return False
        numbers = [_NUMBER.unpack(key)[0] for key in keys[level > 1 :]]
        return all(before < after for before, after in pairwise(numbers)) and (
            not numbers or numbers[-1] <= self._file.transaction
        )

    def _whole(
        self, what: str, nodes: list[tuple[bytes, bytes, int]]
    ) -> list[tuple[bytes, bytes, int]]:
        """Return rows with the values that have pages of their own; drops unreadable ones."""
        if not any(flags & _BIG_DATA for _, _, flags in nodes):
            return nodes
        found = []
        for key, data, flags in nodes:
            whole = self._big(what, data) if flags & _BIG_DATA else data
            if whole is not None:
                found.append((key, whole, flags))
        return found

    def _page(self, what: str, number: int, kind: int) -> bytes | None:
        if not self._claim(what, number):
            return None
        size = self._page_bytes
        page = self._file._pread(number * size, size)
        if len(page) < size:
            self._tell(f"{what}: page {number} is cut off")
            return None
        own, _, flags, _, _ = _HEADER.unpack_from(page)
        if own != number or flags != kind:
            self._tell(f"{what}: page {number} is another page")
            return None
        return page

    def _split(
        self, what: str, number: int, page: bytes, *, leaf: bool
    ) -> list[tuple[bytes, bytes, int]] | None:
        """Return (key, data or child's number, flags) of a page's nodes; None if one overruns."""
        _, _, _, lower, upper = _HEADER.unpack_from(page)
        # LMDB relies on at least one row in a leaf and two in a branch.
        if not (18 if leaf else 20) <= lower <= upper <= len(page) or lower % 2:
            self._tell(f"{what}: page {number} has wrong bounds")
            return None
        places = struct.unpack_from(f"<{(lower - 16) // 2}H", page, 16)
        if min(places) < upper or max(places) + NODE.size > len(page):
            self._tell(f"{what}: page {number} has a row outside of it")
            return None
        nodes = []
        spans = []
        for at in places:
            low, high, flags, key_length = NODE.unpack_from(page, at)
            begin = at + NODE.size
            middle = begin + key_length
            if not leaf:
                child = low | high << 16 | flags << 32
                nodes.append((page[begin:middle], _NUMBER.pack(child), 0))
                end = middle
            elif flags & _BIG_DATA:
                # The number of the first page, and the length.
                end = middle + 8
                data = page[middle:end] + _NUMBER.pack(low | high << 16)
                nodes.append((page[begin:middle], data, flags))
            else:
                end = middle + (low | high << 16)
                nodes.append((page[begin:middle], page[middle:end], flags))
            spans.append((at, end + (end & 1)))
        spans.sort()
        if spans[0][0] != upper or spans[-1][1] != len(page):
            self._tell(f"{what}: page {number} has a row that leaves it")
            return None
        if any(before[1] != after[0] for before, after in pairwise(spans)):
            self._tell(f"{what}: page {number} has rows that overlap")
            return None
        return nodes

    def _big(self, what: str, place: bytes) -> bytes | None:
        number, length = struct.unpack("<QQ", place)
        size = self._page_bytes
        count = -(-(length + 16) // size)
        if not self._claim(what, number, count):
            return None
        head = self._file._pread(number * size, 16).ljust(16, b"\0")
        own, _, flags, pages = _OVERFLOW_HEADER.unpack(head)
        if self._size < (number + count) * size or own != number or flags != _OVERFLOW:
            self._tell(f"{what}: page {number} is another page")
            return None
        if pages != count:
            self._tell(f"{what}: page {number} has another length")
            return None
        self._counts[2] += count
        return self._file._pread(number * size + 16, length) if self.values else b""


def _ordered(keys: list[bytes], low: bytes, high: bytes | None) -> bool:
    if keys[0] < low or (high is not None and keys[-1] >= high):
        return False
    return all(before < after for before, after in pairwise(keys))
