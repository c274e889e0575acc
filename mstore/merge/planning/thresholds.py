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

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.kernels import UNLIMITED, count_ties
from mstore.merge.measures import NEEDS_ANALYSIS
from mstore.merge.measures.grid import Ints
from mstore.merge.planning.survey import NOTHING_KEPT, ExpertTensor, SurveyedTensor
from mstore.models.stats import deltas, histogram
from mstore.models.stats.chunks import Bytes, chunk_reader
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import DROPPED, OMITTED, READ, SHARED, TrimThreshold
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter

LOW_VALUES = 1 << 16
# Few chunks at a time: the quota may end in any of them, and chunks after it are read for nothing.
_AHEAD = 8
_READ_TOGETHER = 1 << 18
"""Bytes of the base up to which tensors of one chunk are read together for a second look."""
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
        self._ties: dict[tuple[TensorId, TensorId, int, int], Ints] = {}

    def expect(self, tensors: Iterable[tuple[SurveyedTensor, States]]) -> None:
        """Find what `of_tensor` needs of these tensors and states, many at a time.

        That is what is known of them, and the second looks at tensors of one chunk.  Tells before
        how many bytes of experts the two may read.
        """
        cuts = [cut for tensor, states in tensors for cut in _cuts_of(tensor, states)]
        unknown = self._find(cuts)
        if not self._analyze:
            return
        if self._progress is not None:
            total = self._to_read(cuts)
            self._tick = ProgressCounter("thresholds", total, self._progress if total else None)
            self._tick(0)
        groups = list(_together([cut for cut in unknown if cut.is_read_whole]))
        for some, found in zip(groups, self._pool.map(self._look_together, groups), strict=True):
            for cut, exact in zip(some, found, strict=True):
                self._tick(int(cut.expert.cost.sum()))
                self._learn(cut, exact)

    def _find(self, cuts: Sequence[_Cut]) -> list[_Cut]:
        """Look up thresholds that no histogram shows, and ties, each with one lookup for all.

        Returns a cut for each threshold that only the data tell.
        """
        unknown: dict[tuple[TensorId, TensorId, int], _Cut] = {}
        for cut in cuts:
            key = cut.key
            if key not in self._known and not cut.keeps_nothing:
                shown = cut.of_histogram()
                if shown is None:
                    unknown.setdefault(key, cut)
                else:
                    self._known[key] = shown
        stored = zip(unknown, self._statistics.thresholds(list(unknown)), strict=True)
        self._known.update((key, TrimThreshold(*one)) for key, one in stored if one is not None)
        limited = dict.fromkeys(cut.tie_key for cut in cuts if self._shares_quota(cut))
        counted = zip(limited, self._statistics.ties(list(limited)), strict=True)
        self._ties.update((key, ties) for key, ties in counted if ties is not None)
        return [cut for key, cut in unknown.items() if key not in self._known]

    def _shares_quota(self, cut: _Cut) -> bool:
        """Return whether a known quota is for chunks that are read and for others."""
        whole = self._known.get(cut.key)
        return whole is not None and whole.quota != UNLIMITED and cut.is_read_in_part

    def _to_read(self, cuts: Iterable[_Cut]) -> int:
        """Return the bytes at rest of the chunks that lookups may read, each once."""
        least: dict[int, tuple[ExpertTensor, float]] = {}
        for cut in cuts:
            if cut.keeps_nothing:
                continue
            if cut.key not in self._known or (self._shares_quota(cut) and self._tied(cut) is None):
                before = least.get(id(cut.expert), (cut.expert, math.inf))
                least[id(cut.expert)] = cut.expert, min(before[1], cut.found.value)
        return sum(int(one.cost[_reaching(one, value)].sum()) for one, value in least.values())

    def of_tensor(self, tensor: SurveyedTensor, states: States) -> tuple[TrimThreshold, ...]:
        """Return where the engine is to cut each expert's delta, all experts of a rank together.

        What remains are as many elements as its rank says.  A quota counts the ties that are read,
        lowest index first.  states: uint8[K, chunks], what is read of each; `expect` was told of
        both.  Empty if the tensor's operation trims nothing.  Raises BadRequest if a tensor with
        two thresholds would need a read that is forbidden.
        """
        return tuple([self._of(cut) for cut in _cuts_of(tensor, states)])

    def _of(self, cut: _Cut) -> TrimThreshold:
        whole = self._of_whole(cut)
        if whole is not None and whole.quota == UNLIMITED:
            return whole
        if whole is None:
            self._require_one(cut.tensor)
            self.at_edges |= cut.is_read
            return TrimThreshold(cut.found.value, UNLIMITED)
        if not cut.is_left_out:
            return whole
        if not cut.is_read:
            return TrimThreshold(whole.value, UNLIMITED)
        ties = self._tied(cut)
        if ties is None:
            if not self._analyze:
                self._require_one(cut.tensor)
                self.at_edges = True
                return TrimThreshold(whole.value, UNLIMITED)
            ties = self._count_ties(cut, whole)
            self._keep_ties(cut, ties)
        if not len(ties):
            return TrimThreshold(whole.value, UNLIMITED)
        kept = ties.copy()
        kept[-1] -= int(ties.sum()) - whole.quota
        is_read = _is_read(np.frombuffer(cut.states, dtype=np.uint8))
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

    def _of_whole(self, cut: _Cut) -> TrimThreshold | None:
        """Return the threshold of the whole expert; None if it needs a forbidden read."""
        if cut.keeps_nothing:
            return cut.of_histogram()
        if cut.key not in self._known:
            if self._analyze:
                self._learn(cut, self._second_look(cut))
            else:
                self._known[cut.key] = None
        return self._known[cut.key]

    def _learn(self, cut: _Cut, exact: _Exact) -> None:
        """Keep what a second look found."""
        self._known[cut.key] = TrimThreshold(exact.value, exact.quota)
        self._statistics.put_threshold(*cut.key, exact.value, exact.quota)
        if exact.keeps_ties:
            self._keep_ties(cut, ALL_KEPT)

    def _tied(self, cut: _Cut) -> Ints | None:
        """Return the ties of each chunk, if they are known."""
        ties, whole = self._ties.get(cut.tie_key), self._known[cut.key]
        if ties is None or whole is None or not _fit(ties, whole.quota, cut.tensor.chunks):
            return None
        return ties

    def _keep_ties(self, cut: _Cut, ties: Ints) -> None:
        self._ties[cut.tie_key] = ties
        self._statistics.put_ties(*cut.tie_key, ties)

    def _second_look(self, cut: _Cut) -> _Exact:
        """Find the exact k-th largest magnitude, from the chunks that reach the bin."""
        tensor, expert = cut.tensor, cut.expert
        read = self._reader(tensor, expert)

        def count(number: int) -> Ints:
            low = np.zeros(LOW_VALUES, dtype=np.int64)
            _count_low(cut, *read(number), low)
            return low

        low = np.zeros(LOW_VALUES, dtype=np.int64)
        reach = _reaching(expert, cut.found.value)
        for number, counted in zip(reach, self._pool.map(count, reach), strict=True):
            low += counted
            self._tick(int(expert.cost[number]))
        return _exact(cut, low)

    def _look_together(self, cuts: Sequence[_Cut]) -> list[_Exact]:
        """Take the second look at tensors that are read whole."""
        bases = self._read([cut.tensor.record for cut in cuts], None)
        experts = self._read([cut.expert.record for cut in cuts], self._meter)
        low = np.zeros(LOW_VALUES, dtype=np.int64)
        found = []
        for cut, base, expert in zip(cuts, bases, experts, strict=True):
            _count_low(cut, base, expert, cut.tensor.elements, low)
            found.append(_exact(cut, low))
            low.fill(0)
        return found

    def _read(self, records: Sequence[Tensor], meter: Meter | None) -> list[Bytes]:
        """Read whole tensors, with one lookup where their blocks lie."""
        data = self._catalog.read_blocks([id for one in records for id in one.block_ids()], meter)
        return np.split(data, list(itertools.accumulate([one.nbytes for one in records]))[:-1])

    def _count_ties(self, cut: _Cut, whole: TrimThreshold) -> Ints:
        """Count ties of each chunk up to the one where the quota ends; none if all are kept."""
        tensor, expert = cut.tensor, cut.expert
        read = self._reader(tensor, expert)

        def count(number: int) -> int:
            base, data, n = read(number)
            dtypes = tensor.record.dtype, expert.record.dtype
            return count_ties(base, dtypes[0], data, dtypes[1], n, whole.value)

        ties = np.zeros(tensor.chunks, dtype=np.int64)
        total = 0
        reach = _reaching(expert, whole.value)
        # If the histogram shows the threshold and a quota, there are more ties than that.
        bounded = cut.found.exact
        for start in range(0, len(reach), _AHEAD):
            numbers = reach[start : start + _AHEAD]
            for number, found in zip(numbers, self._pool.map(count, numbers), strict=True):
                ties[number] = found
                total += found
                self._tick(int(expert.cost[number]))
                if total > whole.quota or (bounded and total == whole.quota):
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


class _Cut(NamedTuple):
    """One rank up to which an expert's delta is kept, and what is read of it.

    place: of the rank among the operation's.  states: a byte for each chunk.
    """

    tensor: SurveyedTensor
    expert: ExpertTensor
    place: int
    rank: int
    states: bytes

    @property
    def key(self) -> tuple[TensorId, TensorId, int]:
        return *self.expert.pair, self.rank

    @property
    def tie_key(self) -> tuple[TensorId, TensorId, int, int]:
        return *self.expert.pair, self.rank, self.tensor.chunk_elements

    @property
    def found(self) -> histogram.Threshold:
        return self.expert.thresholds[self.place]

    def of_histogram(self) -> TrimThreshold | None:
        """Return the threshold of the whole expert where that needs no look into the data."""
        return of_histogram(self.found) if self.rank else TrimThreshold(self.found.value, 0)

    @property
    def keeps_nothing(self) -> bool:
        """Whether the expert does not move the tensor, or has no weight.

        Another one with the same content may have a weight.
        """
        return self.found == NOTHING_KEPT

    @property
    def is_read(self) -> bool:
        return READ in self.states or SHARED in self.states

    @property
    def is_left_out(self) -> bool:
        return OMITTED in self.states or DROPPED in self.states

    @property
    def is_read_in_part(self) -> bool:
        return self.is_read and self.is_left_out

    @property
    def is_read_whole(self) -> bool:
        """Whether a look is at blocks alone, and at all of them."""
        is_applied = isinstance(self.tensor.record, AppliedTensor) or self.expert.is_applied
        return self.tensor.chunks == 1 and not is_applied


def _cuts_of(tensor: SurveyedTensor, states: States) -> Iterator[_Cut]:
    """Yield the cuts of a tensor, all experts of a rank together.  states: uint8[K, chunks]."""
    if not tensor.cuts:
        return
    ranks_of = tensor.operation.selection.ranks
    sides = [
        (expert, ranks_of(tensor.elements, k), own.tobytes())
        for k, (expert, own) in enumerate(zip(tensor.experts, states, strict=True))
    ]
    for place in range(tensor.cuts):
        for expert, ranks, own in sides:
            yield _Cut(tensor, expert, place, ranks[place], own)


def _together(cuts: Sequence[_Cut]) -> Iterator[list[_Cut]]:
    """Group cuts of tensors that are read whole, small ones together."""
    some: list[_Cut] = []
    length = 0
    for cut in cuts:
        some.append(cut)
        length += cut.tensor.record.nbytes
        if length >= _READ_TOGETHER:
            yield some
            some, length = [], 0
    if some:
        yield some


class _Exact(NamedTuple):
    """What a second look finds; keeps_ties: all that equal the value are kept."""

    value: float
    quota: int
    keeps_ties: bool


def _exact(cut: _Cut, low: Ints) -> _Exact:
    value, quota = histogram.select_exact(cut.found, low)
    ties = low[int(np.float32(value).view(np.uint32)) % LOW_VALUES]
    return _Exact(value, quota, bool(ties == quota))


def _count_low(cut: _Cut, base: Bytes, expert: Bytes, n: int, low: Ints) -> None:
    dtypes = cut.tensor.record.dtype, cut.expert.record.dtype
    deltas.count_low(base, dtypes[0], expert, dtypes[1], n, cut.found.bin, low)


def of_histogram(found: histogram.Threshold) -> TrimThreshold | None:
    """Return the threshold of a whole expert where its histogram shows it exactly."""
    if not found.exact:
        return None
    on_edge = found.in_bin - found.inexact
    return TrimThreshold(found.value, UNLIMITED if found.quota == on_edge else found.quota)


def _is_read(states: States) -> Flags:
    found: Flags = (states == READ) | (states == SHARED)
    return found


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
