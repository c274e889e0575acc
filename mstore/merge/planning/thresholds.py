"""Trim thresholds: from a histogram's bin to the value at which the engine cuts.

Exactly k elements of a tensor are kept, the ones with the largest magnitude and, among ties, those
with the lowest index.  The whole expert determines which they are; a budget changes only how much
of it is read.  Two lookups in the data may be needed, once per pair of tensors and k: where in a
bin that is too coarse the k-th largest lies (a second look), and, if a budget leaves some chunks
out, how many ties each chunk has, since those that are left out use up the quota as well
(docs/design/002-trim-thresholds.md).

A method that drops the largest elements, too, has two thresholds per expert, each found in the same
way for its own k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.kernels import UNLIMITED, count_ties
from mstore.merge.measures import NEEDS_ANALYSIS
from mstore.merge.measures.grid import Ints
from mstore.merge.planning.survey import ExpertTensor, SurveyedTensor
from mstore.models.stats import deltas, histogram
from mstore.models.stats.chunks import Bytes, chunk_reader
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import DROPPED, OMITTED, READ, SHARED, TrimThreshold
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter

LOW_VALUES = 1 << 16
# Few chunks at a time: the quota may end in any of them, and chunks after it are read for nothing.
_AHEAD = 8
ALL_KEPT = np.zeros(0, dtype=np.int64)
"""Tie counts of a threshold that keeps all its ties."""

States = np.ndarray[Any, np.dtype[np.uint8]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


Found = dict[tuple[TensorId, TensorId, int], TrimThreshold | None]
"""Thresholds of whole experts by pair of tensors and rank, None if finding one was forbidden."""


class Thresholds:
    """Finds the thresholds of one plan.

    analyze: the data may be read; `meter` counts the expert bytes that this reads.  `at_edges`
    becomes true once a bin's edge was used, with all elements on it, because reading was forbidden.
    known: what was found for other budgets of the same survey; grows.  progress: is told how many
    bytes of experts may be read, before the first is.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        *,
        analyze: bool,
        pool: ThreadPoolExecutor,
        meter: Meter,
        known: Found | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._progress = progress
        self._tick = ProgressCounter("thresholds", 0, None)
        self._catalog = catalog
        self._statistics = statistics
        self._analyze = analyze
        self.at_edges = False
        self._pool = pool
        self._meter = meter
        self._known: Found = {} if known is None else known

    def expect(self, tensors: Iterable[tuple[SurveyedTensor, States]]) -> None:
        """Tell how many bytes of experts `of_tensor` may read for these tensors and states."""
        if self._analyze and self._progress is not None:
            total = sum(self._looks(tensor, states) for tensor, states in tensors)
            self._tick = ProgressCounter("thresholds", total, self._progress if total else None)
            self._tick(0)

    def _looks(self, tensor: SurveyedTensor, states: States) -> int:
        """Return the bytes at rest of the chunks that lookups in a tensor may read, each once."""
        total = 0
        for k, (expert, own) in enumerate(zip(tensor.experts, states, strict=True)):
            ranks = tensor.operation.selection.ranks(tensor.elements, k)[: tensor.cuts]
            values = [
                expert.thresholds[place].value
                for place, rank in enumerate(ranks)
                if self._is_looked_up(tensor, expert, place, rank, own)
            ]
            if values:
                total += int(expert.cost[_reaching(expert, min(values))].sum())
        return total

    def _is_looked_up(
        self, tensor: SurveyedTensor, expert: ExpertTensor, place: int, rank: int, states: States
    ) -> bool:
        whole = self._at_hand(expert, place, rank)
        if whole is None:
            return True
        if whole.quota == UNLIMITED or not _leaves_ties(states):
            return False
        ties = self._statistics.ties(*expert.pair, rank, tensor.chunk_elements)
        return ties is None or not _fit(ties, whole.quota, tensor.chunks)

    def of_tensor(self, tensor: SurveyedTensor, states: States) -> tuple[TrimThreshold, ...]:
        """Return `of` for each expert and rank, all experts of a rank together.

        states: uint8[K, chunks].  Empty if the tensor's operation trims nothing.
        """
        if not tensor.cuts:
            return ()
        ranks_of = tensor.operation.selection.ranks
        ranks = [ranks_of(tensor.elements, k) for k in range(len(tensor.experts))]
        return tuple(
            self.of(tensor, expert, place, own_ranks[place], own)
            for place in range(tensor.cuts)
            for expert, own, own_ranks in zip(tensor.experts, states, ranks, strict=True)
        )

    def of(
        self, tensor: SurveyedTensor, expert: ExpertTensor, place: int, rank: int, states: States
    ) -> TrimThreshold:
        """Return where the engine is to cut this expert's delta, so that `rank` elements remain.

        place: of the rank among the operation's. states: uint8[chunks], what is read of it.  A
        quota counts the ties that are read, lowest index first.  Raises BadRequest if a tensor with
        two thresholds would need a read that is forbidden.
        """
        found = expert.thresholds[place]
        whole = self._of_whole(tensor, expert, place, rank)
        if whole is not None and whole.quota == UNLIMITED:
            return whole
        is_read = _is_read(states)
        if whole is None:
            self._require_one(tensor)
            self.at_edges |= bool(is_read.any())
            return TrimThreshold(found.value, UNLIMITED)
        if not _is_left_out(states).any():
            return whole
        if not is_read.any():
            return TrimThreshold(whole.value, UNLIMITED)
        ties = self._statistics.ties(*expert.pair, rank, tensor.chunk_elements)
        if ties is None or not _fit(ties, whole.quota, tensor.chunks):
            if not self._analyze:
                self._require_one(tensor)
                self.at_edges = True
                return TrimThreshold(whole.value, UNLIMITED)
            ties = self._count_ties(tensor, expert, whole, bounded=found.exact)
            self._statistics.put_ties(*expert.pair, rank, tensor.chunk_elements, ties)
        if not len(ties):
            return TrimThreshold(whole.value, UNLIMITED)
        kept = ties.copy()
        kept[-1] -= int(ties.sum()) - whole.quota
        return TrimThreshold(whole.value, int(kept[is_read[: len(kept)]].sum()))

    def _require_one(self, tensor: SurveyedTensor) -> None:
        """Raise BadRequest for a tensor with two thresholds: both must be exact."""
        if tensor.cuts > 1:
            raise BadRequest(
                f"{tensor.operation.method.name} needs exact thresholds, which the statistics of "
                "this tensor do not show",
                where=tensor.name,
                hint=NEEDS_ANALYSIS,
            )

    def _of_whole(
        self, tensor: SurveyedTensor, expert: ExpertTensor, place: int, rank: int
    ) -> TrimThreshold | None:
        """Return the threshold of the whole expert; None if it needs a forbidden read."""
        known, key = self._known, (*expert.pair, rank)
        if key not in known and self._at_hand(expert, place, rank) is None:
            found = expert.thresholds[place]
            known[key] = self._second_look(tensor, expert, found, rank) if self._analyze else None
        return known[key]

    def _at_hand(self, expert: ExpertTensor, place: int, rank: int) -> TrimThreshold | None:
        """Return the threshold of the whole expert; None if only the data tell it."""
        key = (*expert.pair, rank)
        if key not in self._known:
            whole = self._of_statistics(expert, place, rank)
            if whole is None:
                return None
            self._known[key] = whole
        return self._known[key]

    def _of_statistics(self, expert: ExpertTensor, place: int, rank: int) -> TrimThreshold | None:
        found = expert.thresholds[place]
        if not rank:
            return TrimThreshold(found.value, 0)
        exact = of_histogram(found)
        if exact is not None:
            return exact
        known = self._statistics.threshold(*expert.pair, rank)
        return None if known is None else TrimThreshold(*known)

    def _second_look(
        self, tensor: SurveyedTensor, expert: ExpertTensor, found: histogram.Threshold, rank: int
    ) -> TrimThreshold:
        """Return the exact k-th largest magnitude and quota, from the chunks that reach the bin."""
        chunk = tensor.chunk_elements
        read = self._reader(tensor, expert)

        def count(number: int) -> Ints:
            low = np.zeros(LOW_VALUES, dtype=np.int64)
            base, data, n = read(number)
            dtypes = tensor.record.dtype, expert.record.dtype
            deltas.count_low(base, dtypes[0], data, dtypes[1], n, found.bin, low)
            return low

        low = np.zeros(LOW_VALUES, dtype=np.int64)
        reach = _reaching(expert, found.value)
        for number, counted in zip(reach, self._pool.map(count, reach), strict=True):
            low += counted
            self._tick(int(expert.cost[number]))
        value, quota = histogram.select_exact(found, low)
        self._statistics.put_threshold(*expert.pair, rank, value, quota)
        if low[int(np.float32(value).view(np.uint32)) % LOW_VALUES] == quota:
            self._statistics.put_ties(*expert.pair, rank, chunk, ALL_KEPT)
        return TrimThreshold(value, quota)

    def _count_ties(
        self, tensor: SurveyedTensor, expert: ExpertTensor, cut: TrimThreshold, *, bounded: bool
    ) -> Ints:
        """Count ties of each chunk up to the one where the quota ends; none if all are kept.

        bounded: there are more ties than the quota.
        """
        read = self._reader(tensor, expert)

        def count(number: int) -> int:
            base, data, n = read(number)
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
                self._tick(int(expert.cost[number]))
                if total > cut.quota or (bounded and total == cut.quota):
                    return ties[: number + 1]
        return ALL_KEPT

    def _reader(
        self, tensor: SurveyedTensor, expert: ExpertTensor
    ) -> Callable[[int], tuple[Bytes, Bytes, int]]:
        """Return what reads a chunk of the base and of the expert, and counts its elements."""
        chunk = tensor.chunk_elements
        base = chunk_reader(self._catalog, tensor.record, chunk, None)
        data = chunk_reader(self._catalog, expert.record, chunk, self._meter)
        return lambda number: (
            base(number),
            data(number),
            min(chunk, tensor.elements - number * chunk),
        )


def of_histogram(found: histogram.Threshold) -> TrimThreshold | None:
    """Return the threshold of a whole expert where its histogram shows it exactly."""
    if not found.exact:
        return None
    on_edge = found.in_bin - found.inexact
    return TrimThreshold(found.value, UNLIMITED if found.quota == on_edge else found.quota)


def _is_read(states: States) -> Flags:
    found: Flags = (states == READ) | (states == SHARED)
    return found


def _is_left_out(states: States) -> Flags:
    found: Flags = (states == OMITTED) | (states == DROPPED)
    return found


def _leaves_ties(states: States) -> bool:
    """Return whether some chunks are read, and what others have counts against the quota."""
    return bool(_is_read(states).any() and _is_left_out(states).any())


def _fit(ties: Ints, quota: int, chunks: int) -> bool:
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
