"""Trim thresholds: from a histogram's bin to what the engine is to cut at.

At full budget exactly k elements are kept.  Where the bin is too coarse for that, a second look
at the chunks that reach it decides, and its answer is kept for ever.  Under a budget the bin's
edge serves, with all elements on it: how many of them lie in blocks that are not read is not
known (docs/design/002-trim-thresholds.md).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mstore.blocks.meter import Meter
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.arithmetic.operators import keep_count
from mstore.merge.planning.survey import Counts, ExpertTensor, SurveyedTensor
from mstore.objects.plan import Threshold
from mstore.stats import deltas, histogram
from mstore.stats.chunks import read_chunk
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog

LOW_VALUES = 1 << 16


class Thresholds:
    """Finds the thresholds of one plan.

    density: share of a tensor's elements to keep.  full: nothing was left out for the budget.
    analyze: a second look is allowed; `meter` counts the expert bytes that it reads.  `at_edges`
    turns true once a bin's edge had to serve at full budget.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        density: float,
        *,
        full: bool,
        analyze: bool,
        pool: ThreadPoolExecutor,
        meter: Meter,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._density = density
        self._full = full
        self._analyze = analyze
        self.at_edges = False
        self._pool = pool
        self._meter = meter

    def of(self, tensor: SurveyedTensor, expert: ExpertTensor) -> Threshold:
        """What the engine is to cut this expert's delta at."""
        found = expert.threshold
        assert found is not None
        if self._full and found.exact:
            on_edge = found.in_bin - found.inexact
            return Threshold(found.value, UNLIMITED if found.quota == on_edge else found.quota)
        if self._full and self._analyze:
            return self._second_look(tensor, expert, found)
        self.at_edges = self._full
        return Threshold(found.value, UNLIMITED)

    def _second_look(
        self, tensor: SurveyedTensor, expert: ExpertTensor, found: histogram.Threshold
    ) -> Threshold:
        """Exact k-th largest magnitude and quota, from the chunks that reach the bin."""
        keep = keep_count(self._density, tensor.elements)
        known = self._statistics.threshold(*expert.pair, keep)
        if known is not None:
            return Threshold(*known)
        assert expert.rows is not None
        # Not `>=`: a NaN is the largest of all, and compares false.
        reach = np.flatnonzero(~expert.equal & ~(expert.rows["max_abs"] < found.value))
        chunk = tensor.chunk_elements

        def count(number: int) -> Counts:
            low = np.zeros(LOW_VALUES, dtype=np.int64)
            base = read_chunk(self._catalog, tensor.record, chunk, number, None)
            data = read_chunk(self._catalog, expert.record, chunk, number, self._meter)
            n = min(chunk, tensor.elements - number * chunk)
            dtypes = tensor.record.dtype, expert.record.dtype
            deltas.count_low(base, dtypes[0], data, dtypes[1], n, found.bin, low)
            return low

        low = np.zeros(LOW_VALUES, dtype=np.int64)
        for counted in self._pool.map(count, reach.tolist()):
            low += counted
        value, quota = histogram.select_exact(found, low)
        self._statistics.put_threshold(*expert.pair, keep, value, quota)
        return Threshold(value, quota)
