"""Statistics at rest, in an LMDB environment of their own, because they can be discarded.

    pairs        base TensorId + expert TensorId             -> batch u32, offset u32, length u32,
                                                                check of the table
    tables       batch u32                                   -> tables (`mstore.stats.table`), one
                                                                after the other
    squares      TensorId                                    -> sum of squares f64, check
                 base TensorId + expert TensorId             -> another fact about the difference
                 + hash of what it is, 16 bytes                 (`merge.measures.facts`), f64, check
                 base TensorId + expert TensorId             -> a digest of their table, check
                 + what it is, 16 bytes                         (`mstore.stats.digests`)
                 TensorId + hash of what it is, 16 bytes     -> sums over its chunks, f64, check
    thresholds   base TensorId + expert TensorId + k u64     -> value f32, quota u64, check
    ties         base TensorId + expert TensorId + k u64     -> elements with |d| = value in each
                 + elements a chunk u64                         chunk, u32, up to the one in which
                                                                the quota ends, check; nothing but
                                                                the check where all are kept

All of it is a pure function of tensors, so nothing is ever updated.  A row that is missing or does
not match its check (`mstore.blocks.checked_rows`) is computed again.  Tables are stored in batches
because LMDB rounds values above half a page up to whole pages, and most tables are about that
large.  Integers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from mstore.blocks import disposable
from mstore.blocks.checked_rows import CHECK_BYTES, check_of, opened, sealed
from mstore.blocks.disposable import Tell, silent
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, TensorId
from mstore.stats import digests
from mstore.stats.digests import Digest
from mstore.stats.histogram import Threshold
from mstore.stats.table import DeltaTable, MeasuredPair

DATABASES = ("pairs", "tables", "squares", "thresholds", "ties")
PENDING_ROWS = 256
PENDING_BYTES = 4 << 20
BATCH_BYTES = 1 << 16
_OF_ROW = 256
"""Memory overhead of a pending row, beside its bytes."""
_PLACE = struct.Struct(f">III{CHECK_BYTES}s")
_NUMBER = struct.Struct(">I")
_SQUARES = struct.Struct(">d")
_THRESHOLD = struct.Struct(">fQ")
_KEEP = struct.Struct(">QQ")
_TIES = np.dtype(">u4")
_SUMS = np.dtype(">f8")


class StatsStore:
    """Open statistics of one store; safe for any number of threads.

    New entries are visible at once, and on disk after `flush`: a synced commit per tensor would
    cost more than the statistics themselves.  Entries lost in a crash are computed again.  For a
    user without write permission, new entries stay in this object.
    """

    def __init__(self, path: Path, tell: Tell = silent) -> None:
        """Open the statistics; recreate them if missing or damaged, and report damage to `tell`."""
        self._env = disposable.acquire(path, DATABASES, "statistics table", tell)
        self._lock = Lock()
        self._is_closed = False
        self._pending: dict[tuple[str, bytes], bytes] = {}
        self._pending_bytes = 0

    def close(self) -> None:
        """Release the environment once running reads have ended; idempotent.

        Raises Unavailable inside a call of this thread's own.
        """
        self.require_outside()
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first and self._env is not None:
            self._env.release()

    def require_outside(self) -> None:
        """Raise Unavailable inside a transaction of this thread's own."""
        if self._env is not None:
            self._env.require_outside()

    def _get(self, database: str, key: bytes) -> bytes | None:
        with self._lock:
            waiting = self._pending.get((database, key))
        if waiting is not None:
            return waiting
        env = self._env
        if env is None:
            return None
        with env.read() as transaction:
            return opened(database, key, transaction.get(key, db=env.databases[database]))

    def _put(self, database: str, key: bytes, value: bytes) -> None:
        with self._lock:
            self._pending[database, key] = value
            self._pending_bytes += len(key) + len(value) + _OF_ROW
            full = self._pending_bytes >= PENDING_BYTES
        if full:
            self.flush()

    def flush(self) -> None:
        """Write pending entries in one transaction.  Raises StorageFailed."""
        env = self._env
        if env is None or not env.may_write():
            return
        with self._lock:
            waiting, self._pending = self._pending, {}
            self._pending_bytes = 0
        if waiting:
            # Nothing in it depends on the files that were there before.
            env.follow()
            tables = {key: value for (name, key), value in waiting.items() if name == "pairs"}
            with env.write() as transaction:
                for (database, key), value in waiting.items():
                    if database != "pairs":
                        row = sealed(database, key, value)
                        transaction.put(key, row, db=env.databases[database])
                self._insert_tables(env, transaction, tables)

    def _insert_tables(
        self, env: Environment, transaction: IndexTransaction, tables: dict[bytes, bytes]
    ) -> None:
        pairs, batches = env.databases["pairs"], env.databases["tables"]
        with transaction.cursor(db=batches) as cursor:
            number = 1 + _NUMBER.unpack(cursor.key())[0] if cursor.last() else 0
        batch = bytearray()
        for key, table in tables.items():
            if batch and len(batch) + len(table) > BATCH_BYTES:
                transaction.put(_NUMBER.pack(number), bytes(batch), db=batches)
                batch.clear()
                number += 1
            place = _PLACE.pack(number, len(batch), len(table), check_of("pairs", key, table))
            transaction.put(key, place, db=pairs)
            batch += table
        if batch:
            transaction.put(_NUMBER.pack(number), bytes(batch), db=batches)

    def pair(self, base: TensorId, expert: TensorId) -> DeltaTable | None:
        """Return statistics of expert minus base, or None."""
        return self.pairs([(base, expert)])[0]

    def pairs(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[DeltaTable | None]:
        """Return `pair` of each (base, expert), with one lookup for all of them."""
        return [readable(value) for value in self.encoded_pairs(keys)]

    def encoded_pairs(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[bytes | None]:
        """Return encoded statistics, for callers that decode many at once (`mstore.stats.many`)."""
        wanted = [base + expert for base, expert in keys]
        with self._lock:
            found = {key: self._pending.get(("pairs", key)) for key in wanted}
        asked = sorted(key for key, value in found.items() if value is None)
        env = self._env
        if asked and env is not None:
            with env.read() as transaction:
                rows = _many(env, transaction, "pairs", asked)
                # A row of another length counts as missing.
                places = {k: _PLACE.unpack(r) for k, r in rows.items() if len(r) == _PLACE.size}
                numbers = sorted({_NUMBER.pack(number) for number, *_ in places.values()})
                batches = _many(env, transaction, "tables", numbers)
            for key, (number, offset, length, check) in places.items():
                table = batches.get(_NUMBER.pack(number), b"")[offset : offset + length]
                if check_of("pairs", key, table) == check:
                    found[key] = table
        return [found[key] for key in wanted]

    def digests(self, keys: Sequence[tuple[TensorId, TensorId]]) -> list[Digest | None]:
        """Return the rows of these pairs' tables, with one lookup; None where there is no digest.

        A digest that is missing says nothing of the table.
        """
        return digests.digests(self._facts([base + one + digests.ROWS for base, one in keys]))

    def cuts(self, keys: Sequence[tuple[TensorId, TensorId, int]]) -> list[Threshold | None]:
        """Return where these pairs' tables are cut at a rank (`histogram.select`), if known."""
        rows = self._facts([base + one + digests.cut_at(rank) for base, one, rank in keys])
        return [digests.decode_cut(row) for row in rows]

    def put_digest(self, base: TensorId, expert: TensorId, table: DeltaTable) -> None:
        """Add the digest of a pair's table, if it has one."""
        row = digests.digest(table.rows, table.elements, table.chunk_elements)
        if row is not None:
            self._put("squares", base + expert + digests.ROWS, row)

    def put_cut(self, base: TensorId, expert: TensorId, rank: int, cut: Threshold) -> None:
        """Add where a pair's table is cut at a rank."""
        self._put("squares", base + expert + digests.cut_at(rank), digests.encode_cut(cut))

    def _facts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return rows of `squares`, each sound or None, with one lookup."""
        with self._lock:
            found = {key: self._pending.get(("squares", key)) for key in keys}
        # In the order of the table: neighbours are found without another descent.
        asked = sorted(key for key, value in found.items() if value is None)
        env = self._env
        if asked and env is not None:
            with env.read() as transaction:
                rows = _many(env, transaction, "squares", asked)
            found |= {key: opened("squares", key, rows.get(key)) for key in asked}
        return [found[key] for key in keys]

    def put_pair(self, pair: MeasuredPair) -> None:
        """Add a finished measurement; a pair without a difference adds only the base's squares."""
        if pair.table is not None:
            self._put("pairs", pair.base + pair.expert, pair.table)
        if pair.digest is not None:
            self._put("squares", pair.base + pair.expert + digests.ROWS, pair.digest)
        self.put_squares(pair.base, pair.base_squares)

    def squares(self, tensor: TensorId) -> float | None:
        """Return the sum of squares of a tensor, or None."""
        value = self._get("squares", tensor)
        return None if value is None else float(_SQUARES.unpack(value)[0])

    def squares_of(self, tensors: Sequence[TensorId]) -> list[float | None]:
        """Return `squares` of each tensor, with one lookup for all of them."""
        values = self._facts(tensors)
        return [None if value is None else float(_SQUARES.unpack(value)[0]) for value in values]

    def put_squares(self, tensor: TensorId, value: float) -> None:
        """Add a sum of squares."""
        self._put("squares", bytes(tensor), _SQUARES.pack(value))

    def fact(self, base: TensorId, expert: TensorId, what: bytes) -> float | None:
        """Return a fact about a difference, or None.  what: 16 bytes that stand for it."""
        value = self._get("squares", base + expert + what)
        return None if value is None else float(_SQUARES.unpack(value)[0])

    def facts(self, keys: Sequence[tuple[TensorId, TensorId, bytes]]) -> list[float | None]:
        """Return `fact` of each key, with one lookup for all of them."""
        values = self._facts([base + expert + what for base, expert, what in keys])
        return [None if value is None else float(_SQUARES.unpack(value)[0]) for value in values]

    def put_fact(self, base: TensorId, expert: TensorId, what: bytes, value: float) -> None:
        """Add such a fact."""
        self._put("squares", base + expert + what, _SQUARES.pack(value))

    def sums(self, tensor: TensorId, what: bytes) -> npt.NDArray[np.float64] | None:
        """Return sums over the chunks of a tensor, or None.  what: 16 bytes that stand for them."""
        value = self._get("squares", tensor + what)
        if value is None or len(value) % _SUMS.itemsize:
            return None
        return np.frombuffer(value, dtype=_SUMS).astype(np.float64)

    def put_sums(self, tensor: TensorId, what: bytes, sums: npt.NDArray[np.float64]) -> None:
        """Add such sums."""
        self._put("squares", tensor + what, sums.astype(_SUMS).tobytes())

    def threshold(self, base: TensorId, expert: TensorId, keep: int) -> tuple[float, int] | None:
        """Return the exact magnitude of the `keep`-th largest delta and its quota, or None."""
        value = self._get("thresholds", base + expert + keep.to_bytes(8, "big"))
        return None if value is None else _THRESHOLD.unpack(value)

    def put_threshold(
        self, base: TensorId, expert: TensorId, keep: int, value: float, quota: int
    ) -> None:
        """Add an exact threshold."""
        key = base + expert + keep.to_bytes(8, "big")
        self._put("thresholds", key, _THRESHOLD.pack(value, quota))

    def ties(
        self, base: TensorId, expert: TensorId, keep: int, chunk: int
    ) -> npt.NDArray[np.int64] | None:
        """Return the elements at the threshold per chunk, or None; empty: all of them are kept."""
        value = self._get("ties", base + expert + _KEEP.pack(keep, chunk))
        if value is None or len(value) % _TIES.itemsize:
            return None
        return np.frombuffer(value, dtype=_TIES).astype(np.int64)

    def put_ties(
        self,
        base: TensorId,
        expert: TensorId,
        keep: int,
        chunk: int,
        counts: npt.NDArray[np.int64],
    ) -> None:
        """Add such counts: int64[chunks], up to the chunk where the quota ends."""
        key = base + expert + _KEEP.pack(keep, chunk)
        self._put("ties", key, counts.astype(_TIES).tobytes())

    def tidy(self, stored: Callable[[Sequence[bytes]], list[bool]]) -> None:
        """Drop entries of tensors that are not stored, and empty batches."""
        env = self._env
        if env is None:
            return
        with env.write() as transaction:
            for database in ("pairs", "squares", "thresholds", "ties"):
                for key in _gone(env, transaction, database, stored):
                    transaction.delete(key, db=env.databases[database])
            with transaction.cursor(db=env.databases["pairs"]) as cursor:
                used = {bytes(place[: _NUMBER.size]) for _, place in cursor}
            tables = env.databases["tables"]
            with transaction.cursor(db=tables) as cursor:
                unused = [key for key in cursor.iternext(values=False) if key not in used]
            for key in unused:
                transaction.delete(key, db=tables)

    def file_bytes(self) -> int:
        """Return the size on disk; 0 if there are no statistics, or this user cannot read them."""
        return 0 if self._env is None else self._env.file_bytes()


def _gone(
    env: Environment,
    transaction: IndexTransaction,
    database: str,
    stored: Callable[[Sequence[bytes]], list[bool]],
) -> list[bytes]:
    gone = []
    with transaction.cursor(db=env.databases[database]) as cursor:
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


def _many(
    env: Environment, transaction: IndexTransaction, database: str, keys: Sequence[bytes]
) -> dict[bytes, bytes]:
    with transaction.cursor(db=env.databases[database]) as cursor:
        return dict(cursor.getmulti(keys))


def _tensors(key: bytes) -> list[bytes]:
    """Return the one or two tensors that a key begins with."""
    return [key[at : at + ID_BYTES] for at in range(0, len(key) // ID_BYTES * ID_BYTES, ID_BYTES)]


def readable(value: bytes | None) -> DeltaTable | None:
    """Decode a stored table; a damaged one counts as missing: it can be measured again."""
    if value is None:
        return None
    try:
        return DeltaTable.decode(value)
    except Corrupt:
        return None
