"""Analysis: statistics of tensors that are stored already, block by block on a pool of threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from mstore.blocks.meter import Meter
from mstore.objects.tensor import Tensor
from mstore.stats import deltas
from mstore.stats.chunks import chunk_blocks, chunk_elements, read_chunk
from mstore.stats.streaming import PairMeasure
from mstore.store.catalog import Catalog


def measure_pair(
    catalog: Catalog, base: Tensor, expert: Tensor, pool: ThreadPoolExecutor, meter: Meter
) -> PairMeasure:
    """Take the statistics of a stored pair; only blocks that differ are read twice."""
    chunk = chunk_elements(catalog.block_size, base.dtype, expert.dtype)
    measure = PairMeasure(base.dtype, expert.dtype, math.prod(base.shape), chunk)

    def take(number: int) -> None:
        ours = read_chunk(catalog, base, chunk, number, None)
        same = base.dtype == expert.dtype and chunk_blocks(
            base, chunk, number, catalog.block_size
        ) == chunk_blocks(expert, chunk, number, catalog.block_size)
        if same:
            measure.take_equal(number, ours)
        else:
            theirs = read_chunk(catalog, expert, chunk, number, meter)
            measure.take_chunk(number, ours, theirs)

    for _ in pool.map(take, range(-(-measure.elements // chunk))):
        pass
    return measure


def measure_squares(catalog: Catalog, record: Tensor, pool: ThreadPoolExecutor) -> float:
    """Sum of squares of a stored tensor."""
    chunk = chunk_elements(catalog.block_size, record.dtype)
    elements = math.prod(record.shape)

    def take(number: int) -> float:
        data = read_chunk(catalog, record, chunk, number, None)
        return deltas.base_squares(data, record.dtype, min(chunk, elements - number * chunk))

    return math.fsum(pool.map(take, range(-(-elements // chunk))))
