"""All rows of `blocks` and `records` at one moment, as arrays.

About 67 bytes per block. `HEAD` is the form of a location without its base
(`mstore.blocks.location_rows`); the bases are row numbers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location_rows import BLOCKS, RECORDS, Row
from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES
from mstore.phrases import call

_Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
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
_WORDS = ID_BYTES // 8
_IS_LITTLE = sys.byteorder == "little"
_ALL_EQUAL = np.uint32(0x01010101)
"""Four flags that are true, as one number."""
_HEAD_BYTES = np.dtype((np.void, HEAD.itemsize))
_DELTA = np.dtype([("head", _HEAD_BYTES), ("base", np.void, ID_BYTES)])


class Table:
    """The rows of one kind in id order; a row's number is its position."""

    def __init__(self, keys: bytearray, heads: bytearray) -> None:
        self.heads = np.frombuffer(heads, HEAD)
        self._keys = memoryview(keys)
        self._heads = memoryview(heads)
        # For equality alone the order of bytes does not matter.
        self._words = np.frombuffer(keys, np.uint64).reshape(-1, _WORDS)
        self._first = _numbers(self._words)
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

    def find(self, ids: bytes) -> Numbers:
        """Return the row numbers of concatenated ids; -1 for an id without a row."""
        wanted = np.frombuffer(ids, np.uint64).reshape(-1, _WORDS)
        result = np.full(len(wanted), -1, np.int64)
        if not len(self):
            return result
        first = _numbers(wanted)
        # In sorted order, each search finds the data of the one before in the processor's cache.
        order = np.argsort(first)
        first, wanted = first[order], wanted[order]
        found = np.searchsorted(self._first, first)
        same = self._are(np.minimum(found, len(self) - 1), wanted)
        result[order] = np.where(same, found, -1)
        # Ids with the same first eight bytes are neighbours: step through them.
        open_ = np.flatnonzero(~same)
        while len(open_):
            open_ = open_[found[open_] < len(self)]
            open_ = open_[self._first[found[open_]] == first[open_]]
            same = self._are(found[open_], wanted[open_])
            result[order[open_[same]]] = found[open_[same]]
            open_ = open_[~same]
            found[open_] += 1
        return result

    def resolve(self, inside: slice, named: Flags, bases: bytes) -> None:
        """Set the bases of those of the rows inside that name one, from these concatenated ids."""
        found = self.find(bases)
        self.base[inside][named] = np.where(found < 0, LOST_BASE, found)

    def _are(self, numbers: Numbers, wanted: _Words) -> Flags:
        """Return whether the ids of these rows are the wanted ones."""
        equal = self._words[numbers] == wanted
        return np.asarray(equal.view(np.uint32)[:, 0] == _ALL_EQUAL)


def id_at(ids: bytes, place: int) -> bytes:
    """Return one of concatenated ids."""
    return ids[place * ID_BYTES : (place + 1) * ID_BYTES]


def _numbers(words: _Words) -> _Words:
    """Return the first eight bytes of ids as numbers, in whose order the ids are."""
    return words[:, 0].byteswap() if _IS_LITTLE else words[:, 0].copy()


def read(index: Index, transaction: IndexTransaction) -> dict[Kind, Table]:
    """Read all rows of blocks and records."""
    return {**_record_tables(index, transaction), Kind.BLOCK: _block_table(index, transaction)}


def _block_table(index: Index, transaction: IndexTransaction) -> Table:
    count = index.count(transaction, BLOCKS)
    # Of their final size: arrays that grow take up to twice the memory meanwhile.
    keys, heads = bytearray(count * ID_BYTES), bytearray(count * HEAD.itemsize)
    done = 0
    for some in _columns(index, transaction, "keys"):
        ids = b"".join(some)
        _require(len(ids) == len(some) * ID_BYTES)
        keys[done : done + len(ids)] = ids
        done += len(ids)
    _require(done == count * ID_BYTES)
    table = Table(keys, heads)
    table.base = np.full(count, NO_BASE, np.int32)
    places = np.frombuffer(heads, _HEAD_BYTES)
    # The search runs beside the reading: numpy lets other threads run meanwhile.
    with ThreadPoolExecutor(1) as pool:
        searches: deque[Future[None]] = deque()
        done = 0
        for some in _columns(index, transaction, "rows"):
            _require(done + len(some) <= count)
            inside = slice(done, done + len(some))
            bases, chosen = _split(some, places[inside])
            searches.append(pool.submit(table.resolve, inside, chosen, bases))
            if len(searches) > 1:
                searches.popleft().result()
            done += len(some)
        for search in searches:
            search.result()
    _require(done == count)
    return table


def _columns(index: Index, transaction: IndexTransaction, what: str) -> Iterator[list[bytes]]:
    """Yield the keys, or the rows, of all blocks in batches; both at once take twice as long."""
    with transaction.cursor(db=index.db(BLOCKS)) as cursor:
        column: Any = cursor.iternext(keys=what == "keys", values=what == "rows")
        while batch := list(islice(column, _BATCH)):
            yield batch


def _split(rows: list[bytes], into: npt.NDArray[np.void]) -> tuple[bytes, Flags]:
    """Write the heads of rows; return the bases that they name, and which rows name one."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    named = lengths == _DELTA.itemsize
    bare = lengths == HEAD.itemsize
    _require(bool((named | bare).all()))
    into[bare] = np.frombuffer(b"".join(compress(rows, bare.tobytes())), _HEAD_BYTES)
    deltas = np.frombuffer(b"".join(compress(rows, named.tobytes())), _DELTA)
    into[named] = deltas["head"]
    return deltas["base"].tobytes(), named


def _require(is_sound: bool) -> None:
    if not is_sound:
        raise Corrupt("the index has rows of another form", where=BLOCKS, hint=call("reindex"))


def _record_tables(index: Index, transaction: IndexTransaction) -> dict[Kind, Table]:
    keys = {kind: bytearray() for kind in Kind}
    heads = {kind: bytearray() for kind in Kind}
    with transaction.cursor(db=index.db(RECORDS)) as cursor:
        for key, row in cursor:
            # Ignore kinds that this version does not know; their packs stay.
            with suppress(ValueError):
                kind = Kind(key[0])
                keys[kind] += key[1:]
                heads[kind] += row[: HEAD.itemsize]
    return {kind: Table(keys[kind], heads[kind]) for kind in Kind}
