"""Analysis: statistics of stored tensors, block by block on a pool of threads.

Owns `analyze`, which computes the missing statistics of a pair of snapshots, and its steps for one
tensor.  An interrupted analysis keeps its results: the next one resumes there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from mstore.blocks.reader import Meter
from mstore.models.adapters.inputs import Inputs, ModelChoice, Names
from mstore.models.stats import deltas
from mstore.models.stats.chunks import Bytes, ReadChunk, chunk_blocks, chunk_reader, tensor_chunk
from mstore.models.stats.known import keep_apart
from mstore.models.stats.store import StatsStore
from mstore.models.stats.streaming import PairMeasure
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
from mstore.terms.ids import TensorId
from mstore.terms.progress import Progress, ProgressCallback
from mstore.terms.report import Report


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
    require_matches({*bases, *experts}, only, skip)
    wanted = chosen({name: record.shape for name, (_, record) in bases.items()}, only, skip)
    require_same_shapes(
        wanted,
        chosen({name: record.shape for name, (_, record) in experts.items()}, only, skip),
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
    taken = done = 0
    total = sum(record.nbytes for _, record in pairs.values())
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
                done += record.nbytes
                if progress is not None:
                    progress(Progress("analyze", done, total))
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
