"""What statistics show of each expert's delta, for a survey.

Missing statistics are measured, unless the request forbids it.

**Many at a time.** A table takes some 100 us to unpack, and a survey of 20 experts looks at
thousands; of most it needs the rows and one cut.  So these are kept beside the tables, found for
all tensors together, and made from the table where they are missing.  Tables of one chunk are
opened together where they are cut or have no digest (`models.stats.pairs`): that takes less than
keeping their cuts.  A survey gives the same with digests and without.  Belongs to one survey; not
thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from mstore.blocks.reader import Meter
from mstore.merge.measures import NEEDS_ANALYSIS
from mstore.merge.methods.method import Operation
from mstore.merge.planning.request import Request
from mstore.merge.planning.survey import KEEPS_NONE, Candidate
from mstore.models.adapters import low_rank
from mstore.models.stats.chunk import CHUNK, Rows
from mstore.models.stats.chunks import chunk_elements
from mstore.models.stats.histogram import NAN_BIN, Histogram, Threshold, kept_squares, select
from mstore.models.stats.pairs import SingleTables, keep_products, product_rows
from mstore.models.stats.store import StatsStore
from mstore.models.stats.table import DeltaTable, Digest
from mstore.numeric.codes import ITEMSIZES
from mstore.store.ahead import in_groups, in_order
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option, phrase

# Late: most surveys find statistics.
if TYPE_CHECKING:
    from mstore.merge.measures.facts import Facts

Pair = tuple[TensorId, TensorId]
Side = tuple[TensorId, Tensor]
"""A tensor of a model, with its record."""
_ProductKey = tuple[Pair, int]
"""An adapter's product, and the elements of a chunk."""
_Product = tuple[AppliedTensor, Side]
"""The record of a product, and what it is added to."""
_ENDED: Final = object()
TOGETHER: Final = 1 << 10
"""Tables of one chunk that are opened together."""
_READ_TOGETHER: Final = 2 << 20
"""Bytes of factors that a thread reads together."""
_AHEAD: Final = 16
"""Groups of products that are measured before the first of them is asked for."""
BY_SKETCH: Final = "conflict"
"""The score that compares sketches, which digests leave out."""


class DeltaSummary(NamedTuple):
    """What statistics show of one expert's delta.

    rows: at the plan's chunks, None if there are none. thresholds, band: as in `ExpertTensor`.
    is_finite: whether all rows are known to be.
    """

    rows: np.ndarray[Any, Any] | None
    thresholds: tuple[Threshold, ...]
    band: float = math.nan
    is_finite: bool = False


def has_digest(operation: Operation) -> bool:
    """Return whether a digest tells all of a pair: not between two thresholds."""
    return len(operation.selection.ranks(1)) < 2


class KnownDigests:
    """What one survey knows of pairs without opening each table."""

    def __init__(self, statistics: StatsStore, request: Request) -> None:
        self._statistics = statistics
        self._is_usable = request.score != BY_SKETCH
        self._rows: dict[Pair, Digest] = {}
        self._cuts: dict[tuple[TensorId, TensorId, int], Threshold] = {}

    def fetch(self, wanted: Iterable[tuple[Pair, int, int, Operation, int]]) -> None:
        """Fetch what is known of many pairs: each with elements, chunk, operation, and expert."""
        pairs: dict[Pair, bool] = {}
        without: list[tuple[Pair, int]] = []
        singles: dict[tuple[Pair, int], None] = {}
        cuts: dict[tuple[TensorId, TensorId, int], None] = {}
        for pair, elements, chunk, operation, number in wanted:
            (rank,) = operation.selection.ranks(elements, number) or (0,)
            is_single = elements <= chunk
            if is_single and (rank or not self._is_usable):
                singles[pair, rank] = None
            elif self._is_usable:
                pairs[pair] = is_single
                if rank:
                    cuts[*pair, rank] = None
        for pair, row in zip(pairs, self._statistics.digests(list(pairs)), strict=True):
            if row is not None:
                self._rows[pair] = row
            elif pairs[pair]:
                without.append((pair, 0))
        self._open(list(singles))
        self._open(without)
        found = zip(cuts, self._statistics.cuts(list(cuts)), strict=True)
        self._cuts |= {key: cut for key, cut in found if cut is not None}

    def _open(self, singles: Sequence[tuple[Pair, int]]) -> None:
        """Open tables of one chunk together, each with the rank that it is cut at, 0 for none."""
        for start in range(0, len(singles), TOGETHER):
            some = singles[start : start + TOGETHER]
            ranks = [rank for _, rank in some]
            tables = self._statistics.encoded_pairs([pair for pair, _ in some])
            found = SingleTables.decode(tables, ranks if all(ranks) else None)
            sizes = zip(found.elements.tolist(), found.chunk_elements.tolist(), strict=True)
            rows: dict[Pair, Digest] = {}
            for number, (place, size) in enumerate(zip(found.places.tolist(), sizes, strict=True)):
                pair, rank = some[place]
                rows[pair] = Digest(found.rows[number : number + 1], *size, is_finite=True)
                if not rank and self._is_usable:
                    self._statistics.put_digest(pair[0], pair[1], rows[pair])
                if found.thresholds:
                    self._cuts[*pair, rank] = found.thresholds[number]
            self._statistics.remember(rows)
            self._rows |= rows

    def find(
        self, pair: Pair, elements: int, chunk: int, ranks: Sequence[int]
    ) -> tuple[Digest, tuple[Threshold, ...]] | None:
        """Return rows that fit a tensor's elements and chunks, and the cut at each rank.

        None if one of them is not known: the table has to be read.
        """
        row = self._rows.get(pair)
        if row is None or row.elements != elements or chunk % row.chunk_elements:
            return None
        cuts = []
        for rank in ranks:
            cut = self._cuts.get((*pair, rank)) if rank else KEEPS_NONE
            if cut is None:
                return None
            cuts.append(cut)
        return row, tuple(cuts)

    def learn(
        self, pair: Pair, table: DeltaTable, ranks: Sequence[int], cuts: Sequence[Threshold]
    ) -> None:
        """Keep what was read from a table, for later surveys."""
        if not self._is_usable or len(table.rows) < 2:
            return
        if pair not in self._rows:
            self._statistics.put_digest(*pair, table)
        for rank, cut in zip(ranks, cuts, strict=True):
            if rank and (*pair, rank) not in self._cuts:
                self._statistics.put_cut(*pair, rank, cut)
                self._cuts[*pair, rank] = cut


class DeltaStatistics:
    """What statistics show of the deltas of one survey.

    facts: measures what is missing.  factors: counts what is read for the norms of adapters'
    products.  missing: (expert and tensor, why) of what could not be measured; grows.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        request: Request,
        facts: Callable[[], Facts],
        factors: Meter,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._request = request
        self._facts = facts
        self._factors = factors
        self._known = KnownDigests(statistics, request)
        self._products: dict[_ProductKey, Rows] = {}
        self._measuring: Iterator[None] = iter(())
        self.missing: list[tuple[str, str]] = []

    def fetch(self, candidates: Iterable[Candidate]) -> None:
        """Fetch what is known of these tensors."""
        self._known.fetch(asked for one in candidates for asked in self._measured(one))

    def measure_products(
        self,
        candidates: Iterable[Candidate],
        chunk_of: Callable[[str], int | None],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Begin to measure the products of these tensors, in their order, ahead of `summaries`.

        chunk_of: the elements of a tensor's chunk, None if they are not known yet.
        """
        wanted: dict[_ProductKey, _Product] = {}
        for one in candidates:
            operation, chunk = self._request.operation_of(one.name), chunk_of(one.name)
            if chunk is not None:
                pairs = {k: (one.base_id, id) for k, id, _ in self._moving(one, operation)}
                base = one.base_id, one.base
                wanted |= self._products_of(operation, base, one.pairs, pairs, chunk)
        self._measuring = self._measure(wanted, pool)

    def unmeasured(self, candidates: Iterable[Candidate]) -> list[tuple[str, int]]:
        """Return name and expert of what moves a tensor and has no statistics yet."""
        pairs: dict[Pair, tuple[str, int]] = {}
        for one in candidates:
            for number, id, _ in self._moving(one, self._request.operation_of(one.name)):
                pairs.setdefault((one.base_id, id), (one.name, number))
        tables = self._statistics.encoded_pairs(list(pairs))
        return [place for place, table in zip(pairs.values(), tables, strict=True) if table is None]

    def summaries(
        self,
        name: str,
        operation: Operation,
        base: Side,
        experts: Sequence[Side],
        moving: Mapping[int, Pair],
        chunk: int,
        pool: ThreadPoolExecutor,
    ) -> dict[int, DeltaSummary]:
        """Return what is known of each expert that moves a tensor, by its number."""
        elements = math.prod(base[1].shape)
        found = self._digested(operation, elements, chunk, moving)
        found |= self._product_rows(operation, base, experts, moving, chunk, pool)
        # One lookup for all of them; several experts may share a tensor.
        missing = list(dict.fromkeys(pair for k, pair in moving.items() if k not in found))
        tables = dict(zip(missing, self._statistics.pairs(missing), strict=True)) if missing else {}
        for number, pair in moving.items():
            if number in found:
                continue
            where = f"{self._request.experts[number].name}: {name}"
            table = self._checked(where, base, experts[number], chunk, pool, tables[pair])
            if table is not None:
                tables[pair] = table
            found[number] = self._of_table(where, pair, number, operation, elements, chunk, table)
        return found

    def surplus(
        self,
        pair: Pair,
        number: int,
        operation: Operation,
        cuts: tuple[Threshold, ...],
        elements: int,
        chunk: int,
    ) -> tuple[int, int]:
        """Return `ExpertTensor.surplus`; zeros if the data may be read, or was read before."""
        # Of two thresholds both must be exact (`thresholds`), so they keep no element too many.
        if len(cuts) != 1 or self._request.analyze or cuts[0].needed in (0, cuts[0].in_bin):
            return 0, 0
        (cut,) = cuts
        (keep,) = operation.selection.ranks(elements, number)
        beyond = cut.in_bin - cut.needed
        if not cut.exact and self._statistics.thresholds([(*pair, keep)]) == [None]:
            return beyond, beyond
        (ties,) = self._statistics.ties([(*pair, keep, chunk)])
        return 0, 0 if ties is not None else beyond

    def _measured(self, one: Candidate) -> Iterator[tuple[Pair, int, int, Operation, int]]:
        """Yield what is probably needed of a tensor (`KnownDigests.fetch`)."""
        operation = self._request.operation_of(one.name)
        if not has_digest(operation):
            return
        elements, size = math.prod(one.base.shape), self._catalog.block_size
        for number, id, record in self._moving(one, operation):
            chunk = chunk_elements(size, one.base.dtype, record.dtype)
            yield (one.base_id, id), elements, chunk, operation, number

    def _moving(
        self, one: Candidate, operation: Operation
    ) -> Iterator[tuple[int, TensorId, Tensor]]:
        """Yield number and tensor of each expert that moves a tensor."""
        weightless = operation.weightless
        if one.base.dtype in ITEMSIZES:
            for number, (id, record) in enumerate(one.pairs[: len(self._request.models)]):
                if id != one.base_id and record.dtype in ITEMSIZES and not weightless[number]:
                    yield number, id, record

    def _digested(
        self,
        operation: Operation,
        elements: int,
        chunk: int,
        moving: Mapping[int, Pair],
    ) -> dict[int, DeltaSummary]:
        found: dict[int, DeltaSummary] = {}
        if not has_digest(operation):
            return found
        ranks_of = operation.selection.ranks
        for number, pair in moving.items():
            known = self._known.find(pair, elements, chunk, ranks_of(elements, number))
            if known is not None:
                row, cuts = known
                rows = coarsen(row.rows, chunk // row.chunk_elements)
                # Sums of what is finite are.
                found[number] = DeltaSummary(rows, cuts, is_finite=row.is_finite)
        return found

    def _product_rows(
        self,
        operation: Operation,
        base: Side,
        experts: Sequence[Side],
        moving: Mapping[int, Pair],
        chunk: int,
        pool: ThreadPoolExecutor,
    ) -> dict[int, DeltaSummary]:
        """Return upper bounds on the rows of products, where planning needs no more of them."""
        wanted = self._products_of(operation, base, experts, moving, chunk)
        while missing := wanted.keys() - self._products.keys():
            if next(self._measuring, _ENDED) is _ENDED:
                self._measuring = self._measure({key: wanted[key] for key in missing}, pool)
        keys = {k: (pair, chunk) for k, pair in moving.items()}
        return {
            k: DeltaSummary(self._products[key], ()) for k, key in keys.items() if key in wanted
        }

    def _products_of(
        self,
        operation: Operation,
        base: Side,
        experts: Sequence[Side],
        moving: Mapping[int, Pair],
        chunk: int,
    ) -> dict[_ProductKey, _Product]:
        """Return the products of a tensor of which planning needs only norms."""
        if not (self._request.analyze and operation.needs_only_norms):
            return {}
        return {
            (pair, chunk): (record, base)
            for k, pair in moving.items()
            for record in (experts[k][1],)
            if isinstance(record, AppliedTensor) and record.is_sum
        }

    def _measure(
        self, wanted: Mapping[_ProductKey, _Product], pool: ThreadPoolExecutor
    ) -> Iterator[None]:
        """Measure products, a few with each step."""

        def rows_of(keys: Sequence[_ProductKey], squares: Mapping[TensorId, float]) -> list[Rows]:
            records = [wanted[key][0] for key in keys]
            read = low_rank.load_factors(self._catalog, records, self._factors)
            return [
                product_rows(factors, squares[base], math.prod(record.shape), chunk)
                for factors, record, ((base, _), chunk) in zip(read, records, keys, strict=True)
            ]

        def submit(keys: Sequence[_ProductKey]) -> Future[list[Rows]]:
            bases = dict(wanted[key][1] for key in keys)
            squares = {id: self._facts().squares((id, one), pool) for id, one in bases.items()}
            return pool.submit(rows_of, keys, squares)

        def length(key: _ProductKey) -> int:
            return wanted[key][0].factor_bytes

        for keys, rows in in_order(submit, in_groups(wanted, length, _READ_TOGETHER), ahead=_AHEAD):
            self._products.update(zip(keys, rows, strict=True))
            found = zip((pair for pair, _ in keys), rows, strict=True)
            keep_products(self._statistics, dict(found))
            yield

    def _checked(
        self,
        where: str,
        base: Side,
        expert: Side,
        chunk: int,
        pool: ThreadPoolExecutor,
        table: DeltaTable | None,
    ) -> DeltaTable | None:
        """Return existing or newly computed statistics; None, with the cause noted, if neither."""
        if table is not None and _fits(table, base[1], chunk):
            return table
        if not self._request.analyze:
            cause = "no statistics" if table is None else "statistics of another tensor"
            self.missing.append((where, cause))
            return None
        return self._facts().measured(base, expert, pool)

    def _of_table(
        self,
        where: str,
        pair: Pair,
        number: int,
        operation: Operation,
        elements: int,
        chunk: int,
        table: DeltaTable | None,
    ) -> DeltaSummary:
        """Return what a table shows of an expert that moves the tensor."""
        ranks = operation.selection.ranks(elements, number)
        if table is None:
            if ranks:
                raise BadRequest(
                    "trimming needs the statistics of this expert against the base",
                    where=where,
                    hint=phrase(
                        "{analyze}, or add the expert with {base}",
                        analyze=NEEDS_ANALYSIS,
                        base=Option("base"),
                    ),
                )
            return DeltaSummary(None, ())
        rows = coarsen(table.rows, chunk // table.chunk_elements)
        histogram = without_nan(table.histogram) if ranks else table.histogram
        thresholds = tuple(
            select(histogram, rank, table.elements) if rank else KEEPS_NONE for rank in ranks
        )
        if has_digest(operation):
            self._known.learn(pair, table, ranks, thresholds)
            return DeltaSummary(rows, thresholds)
        squares = [kept_squares(histogram, threshold) for threshold in thresholds]
        return DeltaSummary(rows, thresholds, squares[0] - squares[1])


def without_nan(histogram: Histogram) -> Histogram:
    """Drop NaNs: a NaN exceeds no threshold, so it is never kept and uses up no quota."""
    if not len(histogram.bins) or histogram.bins[-1] < NAN_BIN:
        return histogram
    counted = histogram.bins < NAN_BIN
    return Histogram(histogram.bins[counted], histogram.counts[counted], histogram.inexact[counted])


def coarsen(rows: np.ndarray[Any, Any], factor: int) -> np.ndarray[Any, Any]:
    """Merge the rows of `factor` chunks each into one; drops the sketch."""
    if factor == 1:
        return rows
    starts = np.arange(0, len(rows), factor)
    coarse = np.zeros(len(starts), dtype=CHUNK)
    for name in ("nonzeros", "sum_abs", "sum_squares", "base_squares"):
        coarse[name] = np.add.reduceat(rows[name], starts)
    coarse["max_abs"] = np.maximum.reduceat(rows["max_abs"], starts)
    return coarse


def _fits(table: DeltaTable, base: Tensor, chunk: int) -> bool:
    return table.elements == math.prod(base.shape) and chunk % table.chunk_elements == 0
