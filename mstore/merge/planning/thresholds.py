"""Trim thresholds: from a histogram's bin to the value at which the engine cuts.

Exactly k elements of a tensor are kept, the ones with the largest magnitude and, among ties, those
with the lowest index.  The whole expert determines which they are; a budget changes only how much
of it is read.  Two lookups in the data may be needed, once per pair of tensors and k: where in a
bin that is too coarse the k-th largest lies (a second look), and, if a budget leaves some chunks
out, how many ties each chunk has, since those that are left out use up the quota as well
(docs/design/002-trim-thresholds.md).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mstore.blocks.meter import Meter
from mstore.ids import TensorId
from mstore.merge.arithmetic.kernels import UNLIMITED, count_ties
from mstore.merge.methods.method import Operation
from mstore.merge.planning.surveyed import Counts, ExpertTensor, SurveyedTensor
from mstore.objects.plan import DROPPED, OMITTED, READ, SHARED, Threshold
from mstore.stats import deltas, histogram
from mstore.stats.chunks import read_chunk
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog

LOW_VALUES = 1 << 16
# Few chunks at a time: the quota may end in any of them, and chunks after it are read for nothing.
_AHEAD = 8
_LEFT_OUT = frozenset((OMITTED, DROPPED))
_ALL_KEPT = np.zeros(0, dtype=np.int64)

States = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Known:
    """What was found for one survey, to reuse for plans with other budgets.

    whole: thresholds of whole experts by pair of tensors, None if finding one was forbidden.
    singles: those of a tensor of one chunk, per expert, by its name, once all are found.
    """

    whole: dict[tuple[TensorId, TensorId], Threshold | None] = field(default_factory=dict)
    singles: dict[str, tuple[Threshold, ...]] = field(default_factory=dict)


class Thresholds:
    """Finds the thresholds of one plan.

    density: share of a tensor's elements to keep. analyze: the data may be read; `meter` counts the
    expert bytes that this reads.  `at_edges` becomes true once a bin's edge was used, with all
    elements on it, because reading was forbidden. known: earlier results; grows.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        operation: Operation,
        *,
        analyze: bool,
        pool: ThreadPoolExecutor,
        meter: Meter,
        known: Known | None = None,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._operation = operation
        self._analyze = analyze
        self.at_edges = False
        self._pool = pool
        self._meter = meter
        self._known = Known() if known is None else known

    def of_tensor(self, tensor: SurveyedTensor, states: States) -> tuple[Threshold, ...]:
        """Return `of` for each expert; states: uint8[K, chunks]."""
        if states.shape[1] > 1:
            return tuple(map(partial(self.of, tensor), tensor.experts, states))
        whole = self._known.singles.get(tensor.name)
        if whole is None:
            found = [self._of_whole(tensor, expert) for expert in tensor.experts]
            whole = tuple(one for one in found if one is not None)
            if len(whole) < len(found):
                return tuple(map(partial(self.of, tensor), tensor.experts, states))
            self._known.singles[tensor.name] = whole
        column = states.tobytes()
        if _LEFT_OUT.isdisjoint(column):
            return whole
        # Each chunk is read whole or not at all: what is left out uses up no quota.
        return tuple(
            Threshold(cut.value, UNLIMITED) if state in _LEFT_OUT else cut
            for state, cut in zip(column, whole, strict=True)
        )

    def of(self, tensor: SurveyedTensor, expert: ExpertTensor, states: States) -> Threshold:
        """Return where the engine is to cut this expert's delta.

        states: uint8[chunks], what is read of it.  A quota counts the ties that are read, lowest
        index first.
        """
        found = expert.threshold
        assert found is not None
        whole = self._of_whole(tensor, expert)
        is_read = (states == READ) | (states == SHARED)
        left_out = (states == OMITTED) | (states == DROPPED)
        if whole is None:
            self.at_edges |= bool(is_read.any())
            return Threshold(found.value, UNLIMITED)
        if whole.quota == UNLIMITED or not left_out.any():
            return whole
        if not is_read.any():
            return Threshold(whole.value, UNLIMITED)
        keep = self._operation.keep_count(tensor.elements)
        ties = self._statistics.ties(*expert.pair, keep, tensor.chunk_elements)
        if ties is None or not _fit(ties, whole.quota, tensor.chunks):
            if not self._analyze:
                self.at_edges = True
                return Threshold(whole.value, UNLIMITED)
            ties = self._count_ties(tensor, expert, whole, bounded=found.exact)
            self._statistics.put_ties(*expert.pair, keep, tensor.chunk_elements, ties)
        if not len(ties):
            return Threshold(whole.value, UNLIMITED)
        kept = ties.copy()
        kept[-1] -= int(ties.sum()) - whole.quota
        return Threshold(whole.value, int(kept[is_read[: len(kept)]].sum()))

    def _of_whole(self, tensor: SurveyedTensor, expert: ExpertTensor) -> Threshold | None:
        """Return `_whole`, computed once."""
        known = self._known.whole
        if expert.pair not in known:
            assert expert.threshold is not None
            known[expert.pair] = self._whole(tensor, expert, expert.threshold)
        return known[expert.pair]

    def _whole(
        self, tensor: SurveyedTensor, expert: ExpertTensor, found: histogram.Threshold
    ) -> Threshold | None:
        """Return the threshold of the whole expert; None if it needs a forbidden read."""
        if found.exact:
            on_edge = found.in_bin - found.inexact
            return Threshold(found.value, UNLIMITED if found.quota == on_edge else found.quota)
        keep = self._operation.keep_count(tensor.elements)
        known = self._statistics.threshold(*expert.pair, keep)
        if known is not None:
            return Threshold(*known)
        return self._second_look(tensor, expert, found) if self._analyze else None

    def _second_look(
        self, tensor: SurveyedTensor, expert: ExpertTensor, found: histogram.Threshold
    ) -> Threshold:
        """Return the exact k-th largest magnitude and quota, from the chunks that reach the bin."""
        keep = self._operation.keep_count(tensor.elements)
        chunk = tensor.chunk_elements

        def count(number: int) -> Counts:
            low = np.zeros(LOW_VALUES, dtype=np.int64)
            base, data, n = self._read(tensor, expert, number)
            dtypes = tensor.record.dtype, expert.record.dtype
            deltas.count_low(base, dtypes[0], data, dtypes[1], n, found.bin, low)
            return low

        low = np.zeros(LOW_VALUES, dtype=np.int64)
        for counted in self._pool.map(count, _reaching(expert, found.value)):
            low += counted
        value, quota = histogram.select_exact(found, low)
        self._statistics.put_threshold(*expert.pair, keep, value, quota)
        if low[int(np.float32(value).view(np.uint32)) % LOW_VALUES] == quota:
            self._statistics.put_ties(*expert.pair, keep, chunk, _ALL_KEPT)
        return Threshold(value, quota)

    def _count_ties(
        self, tensor: SurveyedTensor, expert: ExpertTensor, cut: Threshold, *, bounded: bool
    ) -> Counts:
        """Count ties of each chunk up to the one where the quota ends; none if all are kept.

        bounded: there are more ties than the quota.
        """

        def count(number: int) -> int:
            base, data, n = self._read(tensor, expert, number)
            dtypes = tensor.record.dtype, expert.record.dtype
            return count_ties(base, dtypes[0], data, dtypes[1], n, cut.value)

        ties = np.zeros(tensor.chunks, dtype=np.int64)
        total = 0
        reach = _reaching(expert, cut.value)
        for start in range(0, len(reach), _AHEAD):
            numbers = reach[start : start + _AHEAD]
            for number, found in zip(numbers, self._pool.map(count, numbers), strict=True):
                ties[number] = found
                total += found
                if total > cut.quota or (bounded and total == cut.quota):
                    return ties[: number + 1]
        return _ALL_KEPT

    def _read(self, tensor: SurveyedTensor, expert: ExpertTensor, number: int) -> Any:
        """Return the bytes of a chunk of the base and of the expert, and its number of elements."""
        chunk = tensor.chunk_elements
        base = read_chunk(self._catalog, tensor.record, chunk, number, None)
        data = read_chunk(self._catalog, expert.record, chunk, number, self._meter)
        return base, data, min(chunk, tensor.elements - number * chunk)


def _fit(ties: Counts, quota: int, chunks: int) -> bool:
    """Return whether cached tie counts can belong to this tensor: the quota ends in the last."""
    if not len(ties):
        return True
    over = int(ties.sum()) - quota
    return len(ties) <= chunks and 0 <= over <= int(ties[-1])


def _reaching(expert: ExpertTensor, value: float) -> list[int]:
    """Return the chunks in which a magnitude reaches `value`, or a NaN hides one that does."""
    assert expert.rows is not None
    # Not `>=`: a NaN is the largest of all, and compares false.
    reach: list[int] = np.flatnonzero(~expert.equal & ~(expert.rows["max_abs"] < value)).tolist()
    return reach
