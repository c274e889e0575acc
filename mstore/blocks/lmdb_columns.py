"""Rows of a table as arrays, gathered by numpy from the pages that LMDB has mapped.

LMDB's binding hands over rows one by one, which takes longer than anything done with ten million of
them.  `Columns` maps the same file and gathers fields of many rows at a time.

When the pages are safe to read: inside the read transaction that the caller holds.  LMDB writes no
page that a registered reader can reach, and a private copy (`lmdb_copy`) is never written.  The
root comes from LMDB: in that transaction it is the value of the table's name.

Nothing in a page is believed: its number, kind and bounds, the place, key length and value length
of each row, and the counts of pages and rows must be as the tree's record and the form of the table
have them; the caller checks that keys ascend.  Whatever is different raises `Unexpected`, and the
caller reads with a cursor.  Requires a little-endian machine, like `lmdb_pages`, which has the
layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_pages import (
    BRANCH,
    HEAD_BYTES,
    LEAF,
    MAX_DEPTH,
    NODE,
    PAGE_HEAD,
    TREE_BYTES,
    Tree,
    page_size,
)
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import MstoreError

_Numbers = npt.NDArray[np.int64]
_Fields = npt.NDArray[np.void]
_PAGES = 1 << 12
"""Leaf pages in a batch: some 10^5 rows, whose places fit into a processor's cache."""
_WORD = 2
"""Places in a page are even; they are counted in words of two bytes."""
_KIND, _LOWER, _UPPER = 5, 6, 7
"""Words of a page's head."""
_NODE_HEAD = NODE.size
_CHILD = np.uint64((1 << 48) - 1)


class Unexpected(Exception):
    """The file cannot be mapped, or something in it is not as this module knows it."""


class Nodes:
    """Some rows of a table, in key order."""

    def __init__(self, file: _File, places: _Numbers, key_length: int) -> None:
        self._file = file
        self._places = places
        self._key_length = key_length
        heads = file.fields(places, _NODE_HEAD).view(np.uint64)
        # Of 64 bits, from low to high: length of the value, flags, length of the key.
        _require((heads >> np.uint64(32) == np.uint64(key_length << 16)).all())
        self.lengths: npt.NDArray[np.uint32] = heads.astype(np.uint32)
        """The length of each value, in bytes."""

    def __len__(self) -> int:
        return len(self._places)

    def names(self) -> _Fields:
        """Return the keys: void[rows], of the key's length."""
        return self._file.fields(self._places + _NODE_HEAD // _WORD, self._key_length)

    def values(self, start: int, length: int, of: npt.NDArray[np.bool_] | None = None) -> _Fields:
        """Return `length` bytes of each value from `start`, which is even: void[rows].

        of: a flag per row, to read only some.  The caller knows that these values are that long.
        """
        places = self._places if of is None else self._places[of]
        return self._file.fields(places + (_NODE_HEAD + self._key_length + start) // _WORD, length)


class Columns:
    """The rows of one table as they are in a read transaction; used only inside it."""

    def __init__(
        self,
        environment: Environment,
        transaction: IndexTransaction,
        name: str,
        key_length: int,
        value_lengths: Collection[int],
    ) -> None:
        """Find the pages.  Raises Unexpected."""
        record = transaction.get(name.encode())
        _require(record is not None and len(record) == TREE_BYTES)
        tree = Tree.parse(record or b"")
        self._entries = tree.entries
        self._key_length = key_length
        self._value_lengths = np.array(sorted(value_lengths), np.uint32)
        _require(tree.flags == 0 and tree.overflows == 0 and key_length % _WORD == 0)
        if not tree.entries:
            self._leaves = np.empty(0, np.int64)
            return
        _require(0 < tree.depth <= MAX_DEPTH and tree.root <= _CHILD)
        self._file = _File(environment)
        self._leaves = self._below(tree)

    def __len__(self) -> int:
        return self._entries

    def _below(self, tree: Tree) -> _Numbers:
        """Return the leaf pages in key order."""
        file = self._file
        pages, branches = np.array([tree.root]), 0
        for _ in range(tree.depth - 1):
            branches += len(pages)
            _require(branches <= tree.branches)
            children = file.fields(file.rows(pages, BRANCH), _NODE_HEAD).view(np.uint64) & _CHILD
            pages = children.astype(np.int64)
        _require((branches, len(pages)) == (tree.branches, tree.leaves))
        return pages

    def batches(self) -> Iterator[Nodes]:
        """Yield all rows.  Raises Unexpected, also after the last one."""
        done = 0
        for start in range(0, len(self._leaves), _PAGES):
            pages = self._leaves[start : start + _PAGES]
            places = self._file.rows(pages, LEAF)
            nodes = Nodes(self._file, places, self._key_length)
            _require(np.isin(nodes.lengths, self._value_lengths).all())
            size = self._file.page
            ends = places * _WORD % size + _NODE_HEAD + self._key_length + nodes.lengths
            _require((ends <= size).all())
            done += len(nodes)
            _require(done <= self._entries)
            yield nodes
        _require(done == self._entries)


class _File:
    """The mapped file.  It is unmapped when the last array that looks into it is gone."""

    def __init__(self, environment: Environment) -> None:
        try:
            self._map = environment.mapped()
            self.page = page_size(self._map[:HEAD_BYTES], environment.path)
        except (OSError, ValueError, MstoreError) as error:
            raise Unexpected from error
        self._pages = len(self._map) // self.page
        self._words = np.frombuffer(self._map, np.uint16, self._pages * self.page // _WORD)

    def fields(self, places: _Numbers, length: int) -> _Fields:
        """Return so many bytes at each of these words: void[places]."""
        size = len(self._words) * _WORD
        _require(not len(places) or bool((places <= (size - length) // _WORD).all()))
        kind: Any = np.dtype((np.void, length))
        # Overlapping fields, one at each word: indexing copies only those that are asked for.
        shape = ((size - length) // _WORD + 1,)
        return np.ndarray(shape, kind, self._map, strides=(_WORD,))[places]

    def rows(self, pages: _Numbers, kind: int) -> _Numbers:
        """Return the word at which each row of these pages begins, in order."""
        _require(((pages > 1) & (pages < self._pages)).all())
        size = self.page
        starts = pages * (size // _WORD)
        _require((self.fields(starts, 8).view(np.int64) == pages).all())
        _require((self._words[starts + _KIND] == kind).all())
        lower = self._words[starts + _LOWER].astype(np.int64)
        upper = self._words[starts + _UPPER].astype(np.int64)
        # An even number of bytes, and at least one row.
        sound = (lower >= PAGE_HEAD + _WORD) & (lower <= upper) & (upper <= size) & (lower % 2 == 0)
        _require(sound.all())
        counts = (lower - PAGE_HEAD) // _WORD
        firsts = starts + PAGE_HEAD // _WORD - (np.cumsum(counts) - counts)
        at = self._words[np.repeat(firsts, counts) + np.arange(counts.sum())].astype(np.int64)
        inside = (at >= np.repeat(upper, counts)) & (at <= size - _NODE_HEAD) & (at % _WORD == 0)
        _require(inside.all())
        places: _Numbers = np.repeat(starts, counts) + at // _WORD
        return places


def _require(is_known: Any) -> None:
    if not is_known:
        raise Unexpected
