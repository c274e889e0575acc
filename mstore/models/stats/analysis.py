"""Analysis: statistics of pairs of tensors, chunk by chunk from any number of threads.

Owns `analyze`, which computes the missing statistics of two stored snapshots, and the bookkeeping
between the compiled passes (`deltas`) and the stored table (`table`): the position of a chunk's
row, and the histogram that counts its deltas.  A pure function of the two tensors' bytes: the order
in which chunks arrive does not change the result.  An interrupted analysis keeps its results.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Lock, get_ident, local
from typing import Any, Self

import numpy as np

from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE
from mstore.blocks.reader import Meter
from mstore.models.adapters.inputs import Inputs, ModelChoice, Names
from mstore.models.optional import optional_differences
from mstore.models.stats import deltas
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.chunks import (
    Bytes,
    ReadChunk,
    chunk_blocks,
    chunk_elements,
    chunk_reader,
    tensor_chunk,
)
from mstore.models.stats.histogram import BINS
from mstore.models.stats.pairs import keep_apart
from mstore.models.stats.store import StatsStore
from mstore.models.stats.table import MeasuredPair, digest, encoded
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.layout import require_writable
from mstore.store.models import Input
from mstore.store.objects.shapes import (
    chosen,
    difference_hint,
    require_matches,
    require_same_shapes,
)
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import BlockId, TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter, Report


class BaseBlocks:
    """Blocks of the base, read into a buffer that each thread reuses: new memory is slow."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._own = local()

    def locate(self, blocks: Sequence[BlockId | None]) -> list[Location | None]:
        """Locate all blocks in one lookup; None for None.  Raises Corrupt."""
        wanted = [block for block in blocks if block is not None]
        found = iter(self._catalog.locate(wanted) if wanted else ())
        return [None if block is None else next(found) for block in blocks]

    def locate_stored(self, blocks: Sequence[BlockId | None]) -> list[Location | None]:
        """Do the same, with None also for each block that is not stored."""
        wanted = [block for block in blocks if block is not None]
        there = dict(zip(wanted, self._catalog.can_read(wanted), strict=True)) if wanted else {}
        return self.locate([block if block and there[block] else None for block in blocks])

    def read(self, block: BlockId, location: Location) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read plain bytes, checked; valid until this thread's next call."""
        return self._read(0, block, location)

    def delta_base(
        self, block: BlockId, location: Location, data: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> tuple[BlockId, memoryview]:
        """Return the base for a delta against this block; `data` was read from it.

        That is this block, or, if this block is itself a delta, its base.  The bytes are valid
        until this thread's next call.
        """
        if location.base == NO_BASE:
            return block, data.data
        base = BlockId(location.base)
        return base, self._read(1, base, self._catalog.locate([base])[0]).data

    def _read(
        self, room: int, block: BlockId, location: Location
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rooms = getattr(self._own, "rooms", None)
        if rooms is None:
            rooms = self._own.rooms = np.empty((2, self._catalog.block_size), dtype=np.uint8)
        data: np.ndarray[Any, np.dtype[np.uint8]] = rooms[room, : location.raw_length]
        self._catalog.read_block_into(block, location, data.data)
        return data


class PairMeasure:
    """The growing statistics of (base tensor, expert tensor).

    Each chunk is added once.  The thread that adds the last one encodes the table and releases the
    dense histograms, so they take half a MiB per tensor in progress, not per tensor of a file.
    """

    def __init__(self, base_dtype: str, expert_dtype: str, elements: int, chunk: int) -> None:
        self.base_dtype = base_dtype
        self.expert_dtype = expert_dtype
        self.elements = elements
        self.chunk = chunk
        self.changed = False
        self._rows = np.zeros(-(-elements // chunk), dtype=CHUNK)
        # One histogram per thread: counting needs no lock, and their sum is exact in any order.
        self._counts: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._lock = Lock()
        self._left = len(self._rows)
        self._table: bytes | None = None
        self._digest: bytes | None = None

    @classmethod
    def begin(
        cls, base: Tensor | None, dtype: str, shape: tuple[int, ...], block_size: int
    ) -> Self | None:
        """Start for a tensor that arrives in blocks; None if a block is not a chunk.

        That is the case without a base, for another dtype or shape than the base's, without
        elements, or for a dtype whose deltas are not measured.
        """
        if base is None or base.dtype != dtype or base.shape != shape or base.nbytes == 0:
            return None
        if dtype not in ITEMSIZES:
            return None
        return cls(dtype, dtype, math.prod(shape), chunk_elements(block_size, dtype))

    def _length(self, number: int) -> int:
        return min(self.chunk, self.elements - number * self.chunk)

    def take_equal(self, number: int, base: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Add chunk `number`, which is equal on both sides."""
        squares = deltas.base_squares(base, self.base_dtype, self._length(number))
        self._rows[number] = deltas.unchanged(squares)[0]
        self._count_down()

    def take_chunk(
        self,
        number: int,
        base: np.ndarray[Any, np.dtype[np.uint8]],
        expert: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> None:
        """Add chunk `number`, which differs or may differ; both sides as stored bytes."""
        counts = self._counts.get(get_ident())
        if counts is None:
            counts = self._counts[get_ident()] = _no_counts()
        row = deltas.measure(
            base,
            self.base_dtype,
            expert,
            self.expert_dtype,
            self._length(number),
            number * self.chunk,
            counts,
        )
        self._rows[number] = row[0]
        self.changed = True
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left or not self.changed:
                return
        # A NaN is the largest of all, both for np.max and by its bit pattern.
        largest = float(self._rows["max_abs"].max())
        whole, *others = self._counts.values()
        for part in others:
            whole += part
            part.fill(0)
        self._table = encoded(self._rows, self.elements, self.chunk, deltas.collect(whole, largest))
        self._digest = digest(self._rows, self.elements, self.chunk)
        _spare.extend(self._counts.values())
        self._counts.clear()

    def base_squares(self) -> float:
        """Sum of squares of the base tensor."""
        return math.fsum(self._rows["base_squares"].tolist())

    def is_finite(self) -> bool:
        """Return whether every difference is; unknown, and so true, where the base is not."""
        known = math.isfinite(self.base_squares())
        return not known or bool(np.isfinite(self._rows["max_abs"]).all())

    def finish(self, base: TensorId, expert: TensorId) -> MeasuredPair:
        """Return the finished statistics; every chunk must have been added."""
        assert not self._left, "a chunk of this tensor was not taken"
        return MeasuredPair(base, expert, self._table, self.base_squares(), self._digest)


# Zeroed histograms for reuse: allocating and scanning half a MiB per tensor would take longer than
# measuring most tensors.  Races between threads only cost time.
_spare: deque[np.ndarray[Any, np.dtype[np.int64]]] = deque(maxlen=16)


def _no_counts() -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return _spare.pop()
    except IndexError:
        return np.zeros((BINS, 2), dtype=np.int64)


class AnalyzeReport(Report, frozen=True):
    """What `analyze` measured.  Tensors with the same content count once."""

    expert: str
    """the expert, as it was named"""
    base: str
    """the base, as it was named"""
    tensors_measured: int
    """tensors whose statistics were computed now"""
    tensors_known: int
    """tensors whose statistics already existed"""
    tensors_equal: int
    """tensors equal to the base's: nothing to measure"""
    expert_bytes_read: int
    """bytes read from the expert"""
    statistics_bytes: int
    """size of the statistics computed now"""
    seconds: float
    """how long it took"""


def measure_pair(
    catalog: Catalog, base: Tensor, expert: Tensor, pool: ThreadPoolExecutor, meter: Meter
) -> PairMeasure:
    """Compute the statistics of a stored pair; only blocks that differ are read twice."""
    chunk = tensor_chunk(catalog.block_size, base, [expert])
    measure = PairMeasure(base.dtype, expert.dtype, math.prod(base.shape), chunk)
    read_base = chunk_reader(catalog, base, chunk, None)
    read_expert = chunk_reader(catalog, expert, chunk, meter)

    def take(number: int) -> None:
        ours = read_base(number)
        same = base.dtype == expert.dtype and chunk_blocks(
            base, chunk, number, catalog.block_size
        ) == chunk_blocks(expert, chunk, number, catalog.block_size)
        if same:
            measure.take_equal(number, ours)
        else:
            measure.take_chunk(number, ours, read_expert(number))

    for _ in pool.map(take, range(-(-measure.elements // chunk))):
        pass
    return measure


def measure_apart(
    catalog: Catalog,
    statistics: StatsStore,
    sides: Sequence[tuple[TensorId, Tensor]],
    pairs: Sequence[tuple[int, int]],
    pool: ThreadPoolExecutor,
    meter: Meter,
) -> list[float]:
    """Return the sum of squares of each difference of two of these tensors, and keep it.

    pairs: positions of the sides.  Each block is read once for all pairs; summed as in
    `measure_pair`.
    """
    records = [record for _, record in sides]
    elements = math.prod(records[0].shape)
    groups: dict[int, list[tuple[int, int]]] = {}
    for one, other in pairs:
        chunk = tensor_chunk(catalog.block_size, records[one], [records[other]])
        groups.setdefault(chunk, []).append((one, other))
    found: dict[tuple[int, int], float] = {}
    for chunk, group in groups.items():
        readers = {k: chunk_reader(catalog, records[k], chunk, meter) for k in {*chain(*group)}}

        def take(
            number: int,
            chunk: int = chunk,
            group: Sequence[tuple[int, int]] = group,
            readers: Mapping[int, ReadChunk] = readers,
        ) -> list[float]:
            n = min(chunk, elements - number * chunk)
            keys = {
                k: (
                    records[k].dtype,
                    *chunk_blocks(records[k], chunk, number, catalog.block_size),
                )
                for k in readers
            }
            data: dict[tuple[object, ...], Bytes] = {}
            sums = []
            for one, other in group:
                if keys[one] == keys[other]:
                    sums.append(0.0)
                    continue
                for k in (one, other):
                    if keys[k] not in data:
                        data[keys[k]] = readers[k](number)
                sides = ((data[keys[k]], records[k].dtype) for k in (one, other))
                (ours, mine), (theirs, others) = sides
                sums.append(deltas.apart(ours, mine, theirs, others, n))
            return sums

        columns = zip(*pool.map(take, range(-(-elements // chunk))), strict=True)
        found |= {pair: math.fsum(sums) for pair, sums in zip(group, columns, strict=True)}
    for (one, other), square in found.items():
        keep_apart(statistics, (sides[one][0], sides[other][0]), square)
    return [found[pair] for pair in pairs]


def measure_squares(
    catalog: Catalog, record: Tensor, pool: ThreadPoolExecutor, meter: Meter | None = None
) -> float:
    """Return the sum of squares of a stored tensor; meter: as for `read_chunk`."""
    chunk = tensor_chunk(catalog.block_size, record, [])
    elements = math.prod(record.shape)
    read = chunk_reader(catalog, record, chunk, meter)

    def take(number: int) -> float:
        return deltas.base_squares(
            read(number), record.dtype, min(chunk, elements - number * chunk)
        )

    return math.fsum(pool.map(take, range(-(-elements // chunk))))


def analyze(
    catalog: Catalog,
    statistics: StatsStore,
    expert: Input,
    base: Input,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    threads: int,
    progress: ProgressCallback | None = None,
) -> AnalyzeReport:
    """Compute the missing statistics of expert minus base, tensor by tensor.

    Also computes the base's own sums of squares, to which error bounds are relative.  Skips tensors
    equal to the base's, which have no difference, and those of other dtypes than BF16, F16 and F32,
    which have no statistics. only, skip: patterns of tensor names; tensors that they leave out may
    be missing, extra or of another shape, and are not read.  Raises Incompatible if names or shapes
    differ, BadRequest for a pattern that matches nothing, Corrupt, StorageFailed (also if something
    is missing and this user may only read the store).
    """
    began = time.monotonic()
    base_id, expert_id = (catalog.snapshot(side.snapshot).manifest_id() for side in (base, expert))
    choice = ModelChoice(base.model, (expert.model,))
    inputs = Inputs(catalog, base_id, [expert_id], [base.name, expert.name], choice=choice)
    bases, experts = (_tensors(inputs, names) for names in inputs.members)
    require_matches({*bases, *experts}, only, skip, base.name)
    odd = optional_differences(
        *({name: one.dtype for name, (_, one) in side.items()} for side in (bases, experts))
    )
    wanted, theirs = (
        chosen({name: one.shape for name, (_, one) in side.items() if name not in odd}, only, skip)
        for side in (bases, experts)
    )
    require_same_shapes(
        wanted,
        theirs,
        what=f"not a fine-tune of {base.name}",
        where=expert.name,
        hint=difference_hint(base.name, expert.name),
    )
    # Keyed by pair of tensors, so tied names count once.
    pairs = {
        (base_id, experts[name][0]): (record, experts[name][1])
        for name, (base_id, record) in bases.items()
        if name in wanted
        and {record.dtype, experts[name][1].dtype} <= ITEMSIZES.keys()
        and 0 not in record.shape
    }
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    known = {
        pair
        for pair, table in zip(differing, statistics.pairs(differing), strict=True)
        if table is not None
    }
    missing = [pair for pair in differing if pair not in known]
    if missing and not catalog.index.env.may_write():
        # Before anything is read: what it would tell cannot be kept.
        require_writable(catalog.layout)
    meter = Meter("analyzed")
    taken = 0
    total = sum(record.nbytes for _, record in pairs.values())
    tick = ProgressCounter("analyze", total, progress)
    with ThreadPoolExecutor(threads, "analyze") as pool:
        try:
            for pair, (base_record, record) in pairs.items():
                if pair[0] != pair[1] and pair not in known:
                    measured = measure_pair(catalog, base_record, record, pool, meter)
                    found = measured.finish(*pair)
                    taken += 0 if found.table is None else len(found.table)
                    statistics.put_pair(found)
                elif statistics.squares(pair[0]) is None:
                    squares = measure_squares(catalog, base_record, pool)
                    statistics.put_squares(pair[0], squares)
                tick(record.nbytes)
        finally:
            statistics.flush()
    return AnalyzeReport(
        expert=expert.name,
        base=base.name,
        tensors_measured=len(missing),
        tensors_known=len(known),
        tensors_equal=len(pairs) - len(differing),
        expert_bytes_read=meter.total,
        statistics_bytes=taken,
        seconds=time.monotonic() - began,
    )


def _tensors(inputs: Inputs, names: Names) -> dict[str, tuple[TensorId, Tensor]]:
    records = inputs.records(list(names.values()))
    return dict(zip(names, zip(names.values(), records, strict=True), strict=True))
