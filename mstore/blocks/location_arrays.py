"""All rows of `blocks` and `records` at one moment, as arrays.

About 67 bytes per block. `HEAD` is the form of a location without its base
(`mstore.blocks.location_rows`); the bases are row numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
import numpy.typing as npt

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location_rows import BLOCKS, RECORDS, Row
from mstore.blocks.packs import Kind
from mstore.ids import ID_BYTES

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
_BATCH = 1 << 16


class Table:
    """The rows of one kind in id order; a row's number is its position."""

    def __init__(self, keys: bytearray, heads: bytearray) -> None:
        self.ids = np.frombuffer(keys, ">u8").reshape(-1, ID_BYTES // 8)
        self.heads = np.frombuffer(heads, HEAD)
        self._keys = memoryview(keys)
        self._heads = memoryview(heads)
        self._first = self.ids[:, 0].astype(np.uint64)
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
        wanted = np.frombuffer(ids, ">u8").reshape(-1, ID_BYTES // 8)
        first = wanted[:, 0].astype(np.uint64)
        # In sorted order, each search finds the data of the one before in the processor's cache.
        order = np.argsort(first)
        found = np.empty(len(first), np.int64)
        found[order] = np.searchsorted(self._first, first[order])
        result = np.full(len(wanted), -1, np.int64)
        open_ = np.flatnonzero(found < len(self))
        # Ids with the same first eight bytes are neighbours: step through them.
        while len(open_):
            open_ = open_[self._first[found[open_]] == first[open_]]
            same = (self.ids[found[open_]] == wanted[open_]).all(axis=1)
            result[open_[same]] = found[open_[same]]
            open_ = open_[~same]
            found[open_] += 1
            open_ = open_[found[open_] < len(self)]
        return result

    def resolve_bases(self, deltas: Iterable[tuple[list[int], bytes]]) -> None:
        """Set the bases of rows from (row numbers, concatenated ids of their bases)."""
        self.base = np.full(len(self), NO_BASE, np.int32)
        for numbers, bases in deltas:
            found = self.find(bases)
            self.base[numbers] = np.where(found < 0, LOST_BASE, found)


def read(index: Index, transaction: IndexTransaction) -> dict[Kind, Table]:
    """Read all rows of blocks and records."""
    return {**_record_tables(index, transaction), Kind.BLOCK: _block_table(index, transaction)}


def _block_table(index: Index, transaction: IndexTransaction) -> Table:
    keys, heads = bytearray(), bytearray()
    size = HEAD.itemsize
    for batch in _batches(index, transaction):
        keys += b"".join([key for key, _ in batch])
        heads += b"".join([row[:size] for _, row in batch])
    table = Table(keys, heads)
    # Read the rows again: kept from the first pass, the bases would take as much memory as all ids.
    table.resolve_bases(_deltas(_batches(index, transaction)))
    return table


def _batches(index: Index, transaction: IndexTransaction) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield all rows of blocks in batches."""
    with transaction.cursor(db=index.db(BLOCKS)) as cursor:
        rows = iter(cursor)
        while batch := list(islice(rows, _BATCH)):
            yield batch


def _deltas(batches: Iterable[list[tuple[bytes, bytes]]]) -> Iterator[tuple[list[int], bytes]]:
    """Yield the numbers of rows that name a base, with those bases."""
    start = 0
    for batch in batches:
        found = [
            (number, row[HEAD.itemsize :])
            for number, (_, row) in enumerate(batch, start)
            if len(row) > HEAD.itemsize
        ]
        yield [number for number, _ in found], b"".join([base for _, base in found])
        start += len(batch)


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
