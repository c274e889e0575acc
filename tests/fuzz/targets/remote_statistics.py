"""Statistics of a remote: nothing of another form comes into a store's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import numpy as np
from mutation import Form

from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.histogram import Histogram
from mstore.models.stats.store import PAIRS, StatsRow, StatsStore
from mstore.models.stats.table import DeltaTable
from mstore.remotes.layout import StatisticsId, StatisticsRow
from mstore.remotes.statistics import decode, encode
from mstore.terms.errors import MstoreError
from mstore.terms.ids import TensorId
from targets.samples import A, B

FORM = Form.MESSAGEPACK
PAIR = TensorId(A), TensorId(B)


def target(data: bytes) -> None:
    """Take it into a store of its own, and read all of it back."""
    row = StatisticsRow(A, 1, bytes(StatisticsId.of(data)), max(1, len(data)))
    stats = _stats()
    with suppress(MstoreError):
        stats.take(decode(row, data, "input"))
    for _ in stats.about([PAIR]):
        pass
    stats.pair(*PAIR)
    stats.squares(PAIR[0])


@cache
def _stats() -> StatsStore:
    return StatsStore(Path(tempfile.mkdtemp(prefix="mstore-fuzz-")) / "stats")


def seeds() -> Iterable[bytes]:
    rows = np.zeros(2, CHUNK)
    rows["nonzeros"] = 3, 1
    counted = Histogram(
        np.array([5, 9], np.uint16), np.array([3, 1], np.uint64), np.array([1, 0], np.uint64)
    )
    table = DeltaTable(rows, counted, 12, 8).encode()
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(StatsStore(Path(directory) / "stats")) as stats,
    ):
        stats.put_threshold(*PAIR, 3, 0.5, 1)
        stats.put_ties(*PAIR, 3, 8, np.array([1, 2]))
        stats.put_squares(PAIR[0], 1.5)
        stats.put_fact(*PAIR, bytes(16), 2.5)
        stats.put_sums(PAIR[0], bytes(16), np.array([1.0, 2.0]))
        found = list(stats.about([PAIR]))
    yield encode([StatsRow(PAIRS.name, PAIRS.key.encode(PAIR), table), *found])
