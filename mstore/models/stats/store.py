"""Statistics at rest, in an LMDB environment of their own, because they can be discarded.

All of it is a pure function of tensors, so nothing is ever updated.  A row that is missing or does
not match its check (`mstore.blocks.tables`) is computed again.  Tables of deltas are stored in
batches because LMDB rounds values above half a page up to whole pages, and most are about that
large.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.disposable import DisposableTables, Tell, rows_of, silent
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.tables import (
    CHECK_BYTES,
    Field,
    Table,
    form,
    id_of,
    number,
    numbers,
    raw,
)
from mstore.models.stats.histogram import Threshold
from mstore.models.stats.table import DeltaTable, Digest, MeasuredPair, decoded_digests, digest
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, TensorId, split_ids

PENDING_ROWS = 256
PENDING_BYTES = 4 << 20
BATCH_BYTES = 1 << 16
_K = TypeVar("_K")
_V = TypeVar("_V")


def _array(code: str, text: str) -> Field[npt.NDArray[Any]]:
    """Return a field of any number of numbers."""
    dtype = np.dtype(code)

    def decode(data: bytes) -> npt.NDArray[Any]:
        return np.frombuffer(data, dtype=dtype).astype(dtype.newbyteorder("="))

    return Field(text, None, lambda values: values.astype(dtype).tobytes(), decode)


_TENSOR = id_of(TensorId)
_BASE, _EXPERT = id_of(TensorId, "base"), id_of(TensorId, "expert")
_WHAT = raw("hash of what it is", 16)
_FLOAT = numbers(">d", "f64")

PAIRS: Final = Table(
    "pairs",
    form(_BASE, _EXPERT),
    form(numbers(f">III{CHECK_BYTES}s", "u32 batch, u32 offset, u32 length, check of the table")),
    "where the table of their difference is",
    proof="the table's check",
)
BATCHES: Final = Table(
    "tables",
    form(number(4, "batch")),
    form(raw("tables")),
    "one after the other (`mstore/models/stats/table.py`)",
    proof="checks in `pairs`",
)
SQUARES: Final = Table("squares", form(_TENSOR), form(_FLOAT), "sum of squares")
FACTS: Final = Table(
    "facts",
    form(_BASE, _EXPERT, _WHAT),
    form(_FLOAT),
    "a fact about the difference (`mstore/merge/measures/facts.py`)",
)
SUMS: Final = Table(
    "sums", form(_TENSOR, _WHAT), form(_array(">f8", "f64 each")), "sums over chunks"
)
DIGESTS: Final = Table(
    "digests",
    form(_BASE, _EXPERT),
    form(raw("digest")),
    "rows of the table (`mstore/models/stats/table.py`)",
)
CUTS: Final = Table(
    "cuts",
    form(_BASE, _EXPERT, number(8, "rank")),
    form(numbers(">fQQQQ", "f32 value, u64 above, u64 needed, u64 in bin, u64 inexact")),
    "where the table is cut at a rank",
)
THRESHOLDS: Final = Table(
    "thresholds",
    form(_BASE, _EXPERT, number(8, "k")),
    form(numbers(">fQ", "f32 magnitude, u64 quota")),
    "the k-th largest magnitude of the difference, and how many elements of it are kept",
)
TIES: Final = Table(
    "ties",
    form(_BASE, _EXPERT, number(8, "k"), number(8, "elements per chunk")),
    form(_array(">u4", "u32 each")),
    "elements of that magnitude in each chunk up to the one in which the quota ends; "
    "none where all are kept",
)
TABLES: Final[tuple[Table[Any, Any], ...]] = tuple(
    one for one in list(globals().values()) if isinstance(one, Table)
)
DATABASES: Final = tuple(table.name for table in TABLES)


class StatsRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A row as it goes to another store: the table's name, and the encoded key and value."""

    table: str
    key: bytes
    value: bytes


MOST_OPENED: Final = 1 << 16
"""Pairs whose rows are kept in memory: about 50 MiB."""


class StatsStore(DisposableTables):
    """Open statistics of one store."""

    def __init__(self, path: Path, tell: Tell = silent) -> None:
        """Open the statistics; recreate them if missing or damaged, and report damage to `tell`."""
        super().__init__(path, DATABASES, "statistics table", tell, most_pending=PENDING_BYTES)
        self._open(create=True)
        self._opened: dict[tuple[TensorId, TensorId], Digest] = {}

    def _get(self, table: Table[_K, _V], key: _K) -> _V | None:
        return self._many(table, [key])[0]

    def _many(self, table: Table[_K, _V], keys: Iterable[_K]) -> list[_V | None]:
        return self._found(table, list(map(table.key.encode, keys)))

    def _add(self, table: Table[_K, _V], key: _K, value: _V) -> None:
        self._put(table, [(table.key.encode(key), table.value.encode(value))])

    def _insert(
        self,
        env: Environment,
        transaction: IndexTransaction,
        rows: Mapping[tuple[Table[Any, Any], bytes], bytes],
    ) -> None:
        others = {place: value for place, value in rows.items() if place[0] is not PAIRS}
        super()._insert(env, transaction, others)
        pairs = {key: value for (table, key), value in rows.items() if table is PAIRS}
        self._insert_pairs(env, transaction, pairs)

    def _insert_pairs(
        self, env: Environment, transaction: IndexTransaction, pairs: dict[bytes, bytes]
    ) -> None:
        places, batches = env.databases[PAIRS.name], env.databases[BATCHES.name]
        with transaction.cursor(db=batches) as cursor:
            number = 1 + BATCHES.key.decode(cursor.key()) if cursor.last() else 0
        batch = bytearray()
        for key, table in pairs.items():
            if batch and len(batch) + len(table) > BATCH_BYTES:
                transaction.put(BATCHES.key.encode(number), bytes(batch), db=batches)
                batch.clear()
                number += 1
            place = number, len(batch), len(table), PAIRS.check(key, table)
            transaction.put(key, PAIRS.value.encode(place), db=places)
            batch += table
        if batch:
            transaction.put(BATCHES.key.encode(number), bytes(batch), db=batches)

    def pair(self, base: TensorId, expert: TensorId) -> DeltaTable | None:
        """Return statistics of expert minus base, or None."""
        return self.pairs([(base, expert)])[0]

    def pairs(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[DeltaTable | None]:
        """Return `pair` of each (base, expert), with one lookup for all of them."""
        return [readable(value) for value in self.encoded_pairs(keys)]

    def encoded_pairs(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[bytes | None]:
        """Return encoded statistics, for callers that decode many at once."""
        wanted = list(map(PAIRS.key.encode, keys))
        with self._lock:
            found = {key: self._pending.get((PAIRS, key)) for key in wanted}
        asked = sorted(key for key, value in found.items() if value is None)
        env = self._open(create=False) if asked else None
        if env is not None:
            with env.read() as transaction:
                rows = rows_of(env, transaction, PAIRS, asked)
                places = {key: PAIRS.found(key, row) for key, row in rows.items()}
                numbers = {BATCHES.key.encode(place[0]) for place in places.values() if place}
                batches = rows_of(env, transaction, BATCHES, sorted(numbers))
            for key, place in places.items():
                if place is not None:
                    number, offset, length, check = place
                    batch = batches.get(BATCHES.key.encode(number), b"")
                    table = batch[offset : offset + length]
                    if PAIRS.check(key, table) == check:
                        found[key] = table
        return [found[key] for key in wanted]

    def digests(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[Digest | None]:
        """Return the rows of these pairs' tables, with one lookup; None where there is no digest.

        A digest that is missing says nothing of the table.
        """
        rows = self._many(DIGESTS, keys)
        return decoded_digests(rows)

    def opened(self, keys: Iterable[tuple[TensorId, TensorId]]) -> dict[Any, Digest]:
        """Return the rows of tables that `remember` was told of, with their sketches, by pair."""
        with self._lock:
            return {key: self._opened[key] for key in keys if key in self._opened}

    def remember(self, rows: Mapping[tuple[TensorId, TensorId], Digest]) -> None:
        """Keep the rows of tables of one chunk that were opened, for whoever asks next.

        In memory, of the last MOST_OPENED pairs at least.
        """
        with self._lock:
            if len(self._opened) > MOST_OPENED:
                self._opened.clear()
            self._opened.update(rows)

    def cuts(self, keys: Sequence[tuple[TensorId, TensorId, int]]) -> list[Threshold | None]:
        """Return where these pairs' tables are cut at a rank (`histogram.select`), if known."""
        return [None if cut is None else Threshold(*cut) for cut in self._many(CUTS, keys)]

    def put_digest(self, base: TensorId, expert: TensorId, table: DeltaTable | Digest) -> None:
        """Add the digest of a pair's table."""
        row = digest(table.rows, table.elements, table.chunk_elements)
        self._add(DIGESTS, (base, expert), row)

    def put_cut(self, base: TensorId, expert: TensorId, rank: int, cut: Threshold) -> None:
        """Add where a pair's table is cut at a rank."""
        told = cut.value, cut.above, cut.needed, cut.in_bin, cut.inexact
        self._add(CUTS, (base, expert, rank), told)

    def put_pair(self, pair: MeasuredPair) -> None:
        """Add a finished measurement; a pair without a difference adds only the base's squares."""
        if pair.table is not None:
            self._put(PAIRS, [(pair.base + pair.expert, pair.table)])
        if pair.digest is not None:
            self._add(DIGESTS, (pair.base, pair.expert), pair.digest)
        self.put_squares(pair.base, pair.base_squares)

    def squares(self, tensor: TensorId) -> float | None:
        """Return the sum of squares of a tensor, or None."""
        return self.squares_of([tensor])[0]

    def squares_of(self, tensors: Sequence[TensorId]) -> list[float | None]:
        """Return `squares` of each tensor, with one lookup for all of them."""
        return [None if value is None else value[0] for value in self._many(SQUARES, tensors)]

    def put_squares(self, tensor: TensorId, value: float) -> None:
        """Add a sum of squares."""
        self._add(SQUARES, tensor, (value,))

    def facts(self, keys: Sequence[tuple[TensorId, TensorId, bytes]]) -> list[float | None]:
        """Return a fact about each difference, or None.  A key ends in 16 bytes that name it."""
        return [None if value is None else value[0] for value in self._many(FACTS, keys)]

    def put_fact(self, base: TensorId, expert: TensorId, what: bytes, value: float) -> None:
        """Add such a fact."""
        self._add(FACTS, (base, expert, what), (value,))

    def sums(self, tensor: TensorId, what: bytes) -> npt.NDArray[np.float64] | None:
        """Return sums over the chunks of a tensor, or None.  what: 16 bytes that stand for them."""
        return self._get(SUMS, (tensor, what))

    def put_sums(self, tensor: TensorId, what: bytes, sums: npt.NDArray[np.float64]) -> None:
        """Add such sums."""
        self._add(SUMS, (tensor, what), sums)

    def thresholds(
        self, keys: Sequence[tuple[TensorId, TensorId, int]]
    ) -> list[tuple[float, int] | None]:
        """Return the exact magnitude of the k-th largest delta and its quota; None if unknown.

        A key is base, expert, and k.
        """
        found = self._many(THRESHOLDS, keys)
        return [None if value is None else (value[0], value[1]) for value in found]

    def put_threshold(
        self, base: TensorId, expert: TensorId, keep: int, value: float, quota: int
    ) -> None:
        """Add an exact threshold."""
        self._add(THRESHOLDS, (base, expert, keep), (value, quota))

    def ties(
        self, keys: Sequence[tuple[TensorId, TensorId, int, int]]
    ) -> list[npt.NDArray[np.int64] | None]:
        """Return the elements at the threshold per chunk, or None; empty: all of them are kept.

        A key is base, expert, k, and the elements of a chunk.
        """
        found = self._many(TIES, keys)
        return [None if value is None else value.astype(np.int64) for value in found]

    def put_ties(
        self,
        base: TensorId,
        expert: TensorId,
        keep: int,
        chunk: int,
        counts: npt.NDArray[np.int64],
    ) -> None:
        """Add such counts: int64[chunks], up to the chunk where the quota ends."""
        self._add(TIES, (base, expert, keep, chunk), counts)

    # -- elsewhere ---------------------------------------------------------------------------

    def bases_of(self, experts: Collection[bytes]) -> dict[TensorId, list[TensorId]]:
        """Return the bases against which tensors were measured, by the measured tensor."""
        self.flush()
        found: dict[TensorId, list[TensorId]] = {}
        env = self._open(create=False)
        if env is None:
            return found
        with env.read() as transaction, transaction.cursor(db=env.databases[PAIRS.name]) as cursor:
            for key in cursor.iternext(values=False):
                if key[ID_BYTES:] in experts:
                    base, expert = PAIRS.key.decode(key)
                    found.setdefault(expert, []).append(base)
        return found

    def about(
        self, pairs: Sequence[tuple[TensorId, TensorId]], alone: Iterable[TensorId] = ()
    ) -> Iterator[StatsRow]:
        """Yield what is known of pairs, of their tensors, and of others, but for what tables show.

        alone: the others: tensors that are equal to their base's, say.
        """
        self.flush()
        for pair, value in zip(pairs, self.encoded_pairs(pairs), strict=True):
            if value is not None:
                yield StatsRow(PAIRS.name, PAIRS.key.encode(pair), value)
        env = self._open(create=False)
        if env is None:
            return
        tensors = dict.fromkeys((*(id for pair in pairs for id in pair), *alone))
        begins: dict[Table[Any, Any], list[bytes]] = {
            **{table: list(tensors) for table in (SQUARES, SUMS)},
            **{table: list(map(PAIRS.key.encode, pairs)) for table in (FACTS, THRESHOLDS, TIES)},
        }
        with env.read() as transaction:
            for table, beginnings in begins.items():
                with transaction.cursor(db=env.databases[table.name]) as cursor:
                    for begin in beginnings:
                        for key, row in _beginning(cursor, begin):
                            value = table.found(key, row)
                            if value is not None:
                                yield StatsRow(table.name, key, table.value.encode(value))

    def take(self, rows: Iterable[StatsRow]) -> None:
        """Add what another store knows, where this one knows nothing.

        Raises Corrupt for a row of another form.
        """
        by_name = {table.name: table for table in TABLES if table is not BATCHES}
        wanted: dict[Table[Any, Any], dict[bytes, bytes]] = {}
        for row in rows:
            table = by_name.get(row.table)
            if table is None or not _is_possible(table, row):
                raise Corrupt(f"statistics have a row of {row.table[:20]!r} that cannot be")
            wanted.setdefault(table, {})[row.key] = row.value
        for table, some in wanted.items():
            keys = list(some)
            if table is PAIRS:
                there = self.encoded_pairs([PAIRS.key.decode(key) for key in keys])
            else:
                there = self._found(table, keys)
            new = [key for key, value in zip(keys, there, strict=True) if value is None]
            self._put(table, [(key, some[key]) for key in new])
        self.flush()

    def tidy(self, stored: Callable[[Sequence[bytes]], list[bool]]) -> None:
        """Drop entries of tensors that are not stored, and empty batches."""
        env = self._open(create=False)
        if env is None:
            return
        with env.write() as transaction:
            for table in TABLES:
                if table is not BATCHES:
                    for key in _gone(env, transaction, table, stored):
                        transaction.delete(key, db=env.databases[table.name])
            with transaction.cursor(db=env.databases[PAIRS.name]) as cursor:
                places = [PAIRS.found(key, row) for key, row in cursor]
            used = {BATCHES.key.encode(place[0]) for place in places if place is not None}
            tables = env.databases[BATCHES.name]
            with transaction.cursor(db=tables) as cursor:
                unused = [key for key in cursor.iternext(values=False) if key not in used]
            for key in unused:
                transaction.delete(key, db=tables)


def _is_possible(table: Table[Any, Any], row: StatsRow) -> bool:
    try:
        key = table.key.decode(row.key)
        value = table.value.decode(row.value) if table is not PAIRS else readable(row.value)
        return table.key.encode(key) == row.key and value is not None
    except (ValueError, struct.error):
        return False


def _beginning(cursor: Any, begin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows whose keys begin so."""
    is_there = cursor.set_range(begin)
    while is_there and cursor.key().startswith(begin):
        yield cursor.item()
        is_there = cursor.next()


def _gone(
    env: Environment,
    transaction: IndexTransaction,
    table: Table[Any, Any],
    stored: Callable[[Sequence[bytes]], list[bool]],
) -> list[bytes]:
    gone = []
    with transaction.cursor(db=env.databases[table.name]) as cursor:
        keys = iter(cursor.iternext(values=False))
        while batch := list(islice(keys, PENDING_ROWS)):
            named = [_tensors(key) for key in batch]
            wanted = sorted({id for ids in named for id in ids})
            there = dict(zip(wanted, stored(wanted), strict=True))
            gone += [
                key
                for key, ids in zip(batch, named, strict=True)
                if not all(there[id] for id in ids)
            ]
    return gone


def _tensors(key: bytes) -> list[bytes]:
    """Return the one or two tensors that a key begins with."""
    return split_ids(key[: len(key) // ID_BYTES * ID_BYTES])


def readable(value: bytes | None) -> DeltaTable | None:
    """Decode a stored table; a damaged one counts as missing: it can be measured again."""
    if value is None:
        return None
    try:
        return DeltaTable.decode(value)
    except Corrupt:
        return None
