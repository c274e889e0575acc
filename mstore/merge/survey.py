"""The survey: everything that the planner needs to know, gathered from the catalog.

Compares block lists, looks up what blocks cost to read, and fetches the statistics of each
expert's delta; statistics that are missing are taken now (their reads are metered apart) unless
that was ruled out.  After this, planning touches no disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstore.blocks.meter import Meter
from mstore.errors import BadRequest
from mstore.ids import ID_BYTES, BlockId, ManifestId, TensorId
from mstore.merge.operators import keep_count, needs_thresholds
from mstore.merge.request import Request
from mstore.merge.tied import first_names
from mstore.numeric.floats import ITEMSIZES
from mstore.objects.manifest import Manifest
from mstore.objects.shapes import require_same_shapes
from mstore.objects.tensor import Tensor
from mstore.reports import Progress
from mstore.stats.analysis import measure_pair, measure_squares
from mstore.stats.chunk import CHUNK
from mstore.stats.chunks import blocks_per_chunk, chunk_elements
from mstore.stats.histogram import NAN_BIN, Histogram, Threshold, select
from mstore.stats.store import StatsStore
from mstore.stats.table import DeltaTable
from mstore.store.catalog import Catalog

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


# Of a delta that is zero everywhere nothing has to be kept.
NOTHING_KEPT = Threshold(value=0.0, above=0, needed=0, in_bin=0, inexact=0)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One expert's side of one tensor; `pair` is (base, expert).

    equal: bool[chunks], the chunk's blocks are the base's.  twin: int64[chunks], the first expert
    with the same blocks there (itself, mostly).  cost: int64[chunks], stored bytes of the blocks.
    rows: CHUNK[chunks], None where statistics are missing.  threshold: where trimming cuts.
    """

    pair: tuple[TensorId, TensorId]
    record: Tensor
    equal: Bools
    twin: Counts
    cost: Counts
    rows: np.ndarray[Any, Any] | None
    threshold: Threshold | None


@dataclass(frozen=True, slots=True)
class SurveyedTensor:
    """One tensor that is to be merged; `copies` counts its names (see `mstore.merge.tied`)."""

    name: str
    record: Tensor
    elements: int
    chunk_elements: int
    experts: tuple[ExpertTensor, ...]
    copies: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)


@dataclass(frozen=True, slots=True)
class Survey:
    """The planner's whole input, besides the request.

    base_squares: sum of squares of all floating-point tensors of the base, None if not known.
    copied: (tensor, why) of tensors that are taken from the base although experts differ there.
    """

    base: ManifestId
    experts: tuple[ManifestId, ...]
    block_size: int
    tensors: tuple[SurveyedTensor, ...]
    base_squares: float | None
    copied: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


class Surveyor:
    """Gathers one survey.  `analyzed` counts the expert bytes that missing statistics cost."""

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        request: Request,
        *,
        threads: int,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._request = request
        self._threads = threads
        self._progress = progress
        self.analyzed = Meter("analyzed")
        self._missing: list[str] = []
        self._copied: list[tuple[str, str]] = []

    def survey(self) -> Survey:
        """Raises Incompatible where an expert's tensors do not match the base's."""
        catalog, request = self._catalog, self._request
        base_id = catalog.snapshot(request.base.snapshot).manifest_id()
        expert_ids = [catalog.snapshot(e.snapshot).manifest_id() for e in request.experts]
        base = catalog.manifest(base_id)
        records = _tensors(catalog, base)
        experts = []
        for expert, id in zip(request.experts, expert_ids, strict=True):
            found = _tensors(catalog, catalog.manifest(id))
            require_same_shapes(
                {name: record.shape for name, (_, record) in records.items()},
                {name: record.shape for name, (_, record) in found.items()},
                what=f"cannot be merged into {request.base.name}",
                where=expert.name,
                hint=f"mstore diff {request.base.name} {expert.name}",
            )
            experts.append(found)
        tensors = []
        first = first_names(base.tensors(), [_ids(found) for found in experts])
        copies = Counter(first.values())
        total = sum(record.nbytes for _, record in records.values()) or 1
        done = 0
        with ThreadPoolExecutor(self._threads, "survey") as pool:
            squares = self._base_squares(records, pool)
            for name, (base_tensor, record) in records.items():
                pairs = [found[name] for found in experts]
                if first[name] == name:
                    surveyed = self._tensor(name, base_tensor, record, pairs, copies[name], pool)
                    if surveyed is not None:
                        tensors.append(surveyed)
                done += record.nbytes
                if self._progress is not None:
                    self._progress(Progress("plan", done, total))
        return Survey(
            base=base_id,
            experts=tuple(expert_ids),
            block_size=catalog.block_size,
            tensors=tuple(tensors),
            base_squares=squares,
            copied=tuple(self._copied),
            missing=tuple(self._missing),
        )

    # -- one tensor --------------------------------------------------------------------------

    def _tensor(
        self,
        name: str,
        base_id: TensorId,
        base: Tensor,
        pairs: list[tuple[TensorId, Tensor]],
        copies: int,
        pool: ThreadPoolExecutor,
    ) -> SurveyedTensor | None:
        changed = [id != base_id for id, _ in pairs]
        sources = {base.dtype, *(record.dtype for _, record in pairs)}
        if not sources <= ITEMSIZES.keys():
            if any(changed):
                odd = ", ".join(sorted(sources - ITEMSIZES.keys()))
                self._copied.append((name, f"dtype {odd} is not merged"))
            return None
        elements = math.prod(base.shape)
        if elements == 0:
            return None
        if not any(changed) and not self._always_computed(base.dtype):
            return None
        output = self._request.dtype or base.dtype
        chunk = chunk_elements(self._catalog.block_size, *sources, output)
        experts: list[ExpertTensor] = []
        ids = _chunk_ids(base, chunk, self._catalog.block_size)
        seen: list[tuple[str, Any]] = []
        for number, (id, record) in enumerate(pairs):
            mine = _chunk_ids(record, chunk, self._catalog.block_size)
            equal = _same(mine, ids) if record.dtype == base.dtype else np.zeros(len(ids), bool)
            twin = np.full(len(ids), number, dtype=np.int64)
            for earlier in reversed(range(number)):
                dtype, theirs = seen[earlier]
                if dtype == record.dtype:
                    twin[_same(mine, theirs)] = earlier
            seen.append((record.dtype, mine))
            table = None
            if id != base_id:
                table = self._table(name, number, base_id, base, id, record, pool)
            rows, threshold = self._numbers(
                name, number, base_id, base, id, record, chunk, len(ids), table
            )
            experts.append(
                ExpertTensor(
                    (base_id, id), record, equal, twin, self._costs(mine, equal), rows, threshold
                )
            )
        return SurveyedTensor(name, base, elements, chunk, tuple(experts), copies)

    def _always_computed(self, dtype: str) -> bool:
        """Whether a tensor that no expert changed still has to be computed."""
        request = self._request
        converted = request.dtype is not None and request.dtype != dtype
        scaled = request.method == "linear" and not request.parameters["normalize"]
        return converted or scaled

    def _costs(self, ids: Any, equal: Bools) -> Counts:
        cost = np.zeros(len(ids), dtype=np.int64)
        wanted = np.flatnonzero(~equal)
        flat = [BlockId(raw) for number in wanted for raw in _split(ids[number])]
        counts = [len(list(_split(ids[number]))) for number in wanted]
        locations = iter(self._catalog.locate(flat))
        for number, count in zip(wanted, counts, strict=True):
            cost[number] = sum(next(locations).stored_length for _ in range(count))
        return cost

    def _table(
        self,
        name: str,
        number: int,
        base_id: TensorId,
        base: Tensor,
        id: TensorId,
        record: Tensor,
        pool: ThreadPoolExecutor,
    ) -> DeltaTable | None:
        table = self._statistics.pair(base_id, id)
        if table is not None:
            return table
        if not self._request.analyze:
            self._missing.append(f"{self._request.experts[number].name}: {name}")
            return None
        measure = measure_pair(self._catalog, base, record, pool, self.analyzed)
        self._statistics.put_pair(measure.finish(base_id, id))
        return self._statistics.pair(base_id, id)

    def _numbers(
        self,
        name: str,
        number: int,
        base_id: TensorId,
        base: Tensor,
        id: TensorId,
        record: Tensor,
        chunk: int,
        chunks: int,
        table: DeltaTable | None,
    ) -> tuple[np.ndarray[Any, Any] | None, Threshold | None]:
        """Rows at the plan's chunks, and the trim threshold."""
        if id == base_id:
            return np.zeros(chunks, dtype=CHUNK), NOTHING_KEPT
        trims = needs_thresholds(self._request.method, self._request.parameters)
        if table is None:
            if trims:
                raise BadRequest(
                    "trimming needs the statistics of this expert against the base",
                    where=f"{self._request.experts[number].name}: {name}",
                    hint="run the command without --no-analyze, or add the expert with --base",
                )
            return None, None
        rows = coarsen(table.rows, chunk // table.chunk_elements)
        if not trims:
            return rows, None
        keep = keep_count(float(self._request.parameters["density"]), table.elements)
        return rows, select(_without_nan(table.histogram), keep, table.elements)

    # -- the base ----------------------------------------------------------------------------

    def _base_squares(
        self, records: dict[str, tuple[TensorId, Tensor]], pool: ThreadPoolExecutor
    ) -> float | None:
        """Sum of squares of the base's tensors whose dtype can be merged."""
        sums = []
        for id, record in records.values():
            if record.dtype not in ITEMSIZES:
                continue
            squares = self._statistics.squares(id)
            if squares is None:
                squares = measure_squares(self._catalog, record, pool)
                self._statistics.put_squares(id, squares)
            sums.append(squares)
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.inf
        return total if math.isfinite(total) else None


def _tensors(catalog: Catalog, manifest: Manifest) -> dict[str, tuple[TensorId, Tensor]]:
    return {name: (id, catalog.tensor(id)) for name, id in manifest.tensors().items()}


def _ids(tensors: dict[str, tuple[TensorId, Tensor]]) -> dict[str, TensorId]:
    return {name: id for name, (id, _) in tensors.items()}


def _without_nan(histogram: Histogram) -> Histogram:
    """A NaN is larger than no threshold, so it is never kept and takes no other's place."""
    if not len(histogram.bins) or histogram.bins[-1] < NAN_BIN:
        return histogram
    counted = histogram.bins < NAN_BIN
    return Histogram(histogram.bins[counted], histogram.counts[counted], histogram.inexact[counted])


def coarsen(rows: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    """Rows of chunks that are `factor` times as long; the sketch does not survive."""
    if factor == 1:
        return rows
    starts = np.arange(0, len(rows), factor)
    coarse = np.zeros(len(starts), dtype=CHUNK)
    for field in ("nonzeros", "sum_abs", "sum_squares", "base_squares"):
        coarse[field] = np.add.reduceat(rows[field], starts)
    coarse["max_abs"] = np.maximum.reduceat(rows["max_abs"], starts)
    return coarse


def _chunk_ids(record: Tensor, chunk: int, block_size: int) -> Any:
    """uint8[chunks, 32 * blocks a chunk]: ids as rows, a short last row padded with zeros."""
    width = ID_BYTES * blocks_per_chunk(record.dtype, chunk, block_size)
    raw = np.frombuffer(record.blocks, dtype=np.uint8)
    padded = np.zeros(-(-len(raw) // width) * width, dtype=np.uint8)
    padded[: len(raw)] = raw
    return padded.reshape(-1, width)


def _same(a: Any, b: Any) -> Bools:
    same: Bools = (a == b).all(axis=1)
    return same


def _split(row: Any) -> Iterator[bytes]:
    raw = row.tobytes()
    for start in range(0, len(raw), ID_BYTES):
        id = raw[start : start + ID_BYTES]
        if any(id):
            yield id
