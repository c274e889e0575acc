"""Trim thresholds and ties of a pair at the usual densities, found together, before anybody asks.

For those who will plan elsewhere, without the weights: a push finds them and sends them along
(`mstore.remotes.statistics`).  What they are, and how a plan uses them, is in `thresholds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final

import numpy as np

from mstore.merge.arithmetic.kernels import UNLIMITED, count_ties
from mstore.merge.measures.grid import Ints
from mstore.merge.planning.statistics import Side, without_nan
from mstore.merge.planning.thresholds import ALL_KEPT, LOW_VALUES, of_histogram
from mstore.models.stats import deltas, histogram
from mstore.models.stats.chunks import Bytes, chunk_reader
from mstore.models.stats.store import StatsStore
from mstore.models.stats.table import DeltaTable
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import TrimThreshold

DENSITIES: Final = tuple(tenths / 10 for tenths in range(1, 10))


def find_usual(
    catalog: Catalog, statistics: StatsStore, base: Side, expert: Side, pool: ThreadPoolExecutor
) -> None:
    """Find and keep what a plan needs to trim this expert at a usual density, whatever it omits.

    Reads each side at most twice, and nothing where all is known, or the pair was never measured.
    Raises Corrupt, StorageFailed.
    """
    pair = base[0], expert[0]
    table = statistics.pair(*pair)
    if table is None:
        return
    counted, elements = without_nan(table.histogram), table.elements
    ranks = {min(elements, max(1, int(density * elements))) for density in DENSITIES}
    cuts = {rank: histogram.select(counted, rank, elements) for rank in sorted(ranks)}
    chunks = _Chunks(catalog, base, expert, table, pool)
    found: dict[int, TrimThreshold] = {}
    unknown = {}
    for rank, cut in cuts.items():
        known = of_histogram(cut)
        if known is None:
            (stored,) = statistics.thresholds([(*pair, rank)])
            known = None if stored is None else TrimThreshold(*stored)
        if known is None:
            unknown[rank] = cut
        else:
            found[rank] = known
    for (rank, cut), low in zip(unknown.items(), chunks.low_bits(unknown.values()), strict=True):
        value, quota = histogram.select_exact(cut, low)
        statistics.put_threshold(*pair, rank, value, quota)
        found[rank] = TrimThreshold(value, quota)
    asked = {
        rank: whole
        for rank, whole in found.items()
        if whole.quota != UNLIMITED
        and statistics.ties([(*pair, rank, table.chunk_elements)])[0] is None
    }
    counts = chunks.ties([whole.value for whole in asked.values()])
    for (rank, whole), ties in zip(asked.items(), counts, strict=True):
        statistics.put_ties(*pair, rank, table.chunk_elements, _up_to(ties, whole.quota))


class _Chunks:
    """The chunks of one pair that differ."""

    def __init__(
        self,
        catalog: Catalog,
        base: Side,
        expert: Side,
        table: DeltaTable,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._dtypes = base[1].dtype, expert[1].dtype
        self._elements, self._chunk = table.elements, table.chunk_elements
        self._rows = table.rows
        self._read = [chunk_reader(catalog, one[1], self._chunk, None) for one in (base, expert)]
        self._pool = pool

    def low_bits(self, cuts: Iterable[histogram.Threshold]) -> list[Ints]:
        """Count the elements of each cut's bin by their low bits (`histogram.select_exact`)."""
        bins = [cut.bin for cut in cuts]
        values = [cut.value for cut in cuts]
        counted = [np.zeros(LOW_VALUES, dtype=np.int64) for _ in bins]
        lock = Lock()

        def count(number: int, base: Bytes, expert: Bytes, n: int) -> None:
            for place, bin_ in enumerate(bins):
                low = np.zeros(LOW_VALUES, dtype=np.int64)
                deltas.count_low(base, self._dtypes[0], expert, self._dtypes[1], n, bin_, low)
                with lock:
                    counted[place] += low

        self._each(values, count)
        return counted

    def ties(self, values: list[float]) -> list[Ints]:
        """Count the elements of each of these magnitudes in each chunk."""
        counted = [np.zeros(len(self._rows), dtype=np.int64) for _ in values]

        def count(number: int, base: Bytes, expert: Bytes, n: int) -> None:
            for value, chunks in zip(values, counted, strict=True):
                chunks[number] = count_ties(
                    base, self._dtypes[0], expert, self._dtypes[1], n, value
                )

        self._each(values, count)
        return counted

    def _each(self, values: list[float], act: Callable[[int, Bytes, Bytes, int], None]) -> None:
        """Read each chunk that may reach one of these magnitudes."""
        if not values:
            return
        rows = self._rows
        # Not `>=`: a NaN is the largest of all, and compares false.
        reach = np.flatnonzero((rows["nonzeros"] > 0) & ~(rows["max_abs"] < min(values)))

        def take(number: int) -> None:
            base, expert = (read(number) for read in self._read)
            n = min(self._chunk, self._elements - number * self._chunk)
            act(number, base, expert, n)

        for _ in self._pool.map(take, reach.tolist()):
            pass


def _up_to(ties: Ints, quota: int) -> Ints:
    """Return the counts up to the chunk in which the quota ends; none if all are kept."""
    total = np.cumsum(ties)
    if int(total[-1]) <= quota:
        return ALL_KEPT
    return ties[: int(np.searchsorted(total, quota)) + 1]
