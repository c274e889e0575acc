"""Statistics at rest: an LMDB environment of its own, because it can be thrown away.

    pairs        base TensorId + expert TensorId             -> table (see `mstore.stats.table`)
    squares      TensorId                                    -> sum of squares, f64
    thresholds   base TensorId + expert TensorId + k u64     -> value f32, quota u64

All of it is a pure function of tensors, so nothing is ever updated; a row that is missing or
damaged is taken again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from mstore.blocks.lmdb_env import Environment
from mstore.errors import Corrupt
from mstore.ids import TensorId
from mstore.stats.table import DeltaTable, MeasuredPair

DATABASES = ("pairs", "squares", "thresholds")
_SQUARES = struct.Struct(">d")
_THRESHOLD = struct.Struct(">fQ")


class StatsStore:
    """Open statistics of one store; safe for any number of threads."""

    def __init__(self, path: Path) -> None:
        self._env = Environment.acquire(path, DATABASES)

    def close(self) -> None:
        """Release the environment."""
        self._env.release()

    def pair(self, base: TensorId, expert: TensorId) -> DeltaTable | None:
        """Statistics of expert minus base, or None."""
        with self._env.read() as transaction:
            value = transaction.get(base + expert, db=self._env.databases["pairs"])
        if value is None:
            return None
        try:
            return DeltaTable.decode(value)
        except Corrupt:
            return None

    def put_pairs(self, pairs: Iterable[MeasuredPair]) -> None:
        """Keep finished measures; pairs without a difference leave only the base's squares."""
        kept = list(pairs)
        if not kept:
            return
        with self._env.write() as transaction:
            for pair in kept:
                if pair.table is not None:
                    key = pair.base + pair.expert
                    transaction.put(key, pair.table, db=self._env.databases["pairs"])
                squares = _SQUARES.pack(pair.base_squares)
                transaction.put(pair.base, squares, db=self._env.databases["squares"])

    def squares(self, tensor: TensorId) -> float | None:
        """Sum of squares of a tensor, or None."""
        with self._env.read() as transaction:
            value = transaction.get(tensor, db=self._env.databases["squares"])
        return None if value is None else float(_SQUARES.unpack(value)[0])

    def put_squares(self, squares: Iterable[tuple[TensorId, float]]) -> None:
        """Keep sums of squares."""
        with self._env.write() as transaction:
            for tensor, value in squares:
                transaction.put(tensor, _SQUARES.pack(value), db=self._env.databases["squares"])

    def threshold(self, base: TensorId, expert: TensorId, keep: int) -> tuple[float, int] | None:
        """Exact magnitude of the `keep`-th largest delta and its quota, or None."""
        key = base + expert + keep.to_bytes(8, "big")
        with self._env.read() as transaction:
            value = transaction.get(key, db=self._env.databases["thresholds"])
        return None if value is None else _THRESHOLD.unpack(value)

    def put_threshold(
        self, base: TensorId, expert: TensorId, keep: int, value: float, quota: int
    ) -> None:
        """Keep an exact threshold."""
        key = base + expert + keep.to_bytes(8, "big")
        with self._env.write() as transaction:
            row = _THRESHOLD.pack(value, quota)
            transaction.put(key, row, db=self._env.databases["thresholds"])

    def file_bytes(self) -> int:
        """Size on disk."""
        return self._env.file_bytes()
