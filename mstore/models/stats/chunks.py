"""Chunks: the runs of elements that statistics and merges work in, and their blocks.

A chunk has as many elements as a block of the narrowest dtype involved, so it is a whole number of
blocks in every other one.  Chunk `number` of a tensor begins at element number * chunk; the last is
short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mstore.blocks.reader import Meter
from mstore.models.adapters.low_rank import Factors, load_factors
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.ids import BlockId


@lru_cache(maxsize=256)
def chunk_elements(block_size: int, *dtypes: str) -> int:
    """Return the elements of a chunk: as many as a block of the narrowest dtype holds."""
    return block_size // min(ITEMSIZES[dtype] for dtype in dtypes)


def row_length(shape: Sequence[int]) -> int:
    """Return the elements of a row: of the last dimension, or all of fewer than two dimensions."""
    return shape[-1] if len(shape) > 1 else math.prod(shape)


def whole_rows(chunk: int, row: int, elements: int) -> int:
    """Return the elements of a chunk of whole rows: a multiple of `chunk`, at most the tensor."""
    return min(math.lcm(chunk, row or 1), max(1, -(-elements // chunk)) * chunk)


def tensor_chunk(
    block_size: int, base: Tensor, others: Sequence[Tensor], *dtypes: str, row: int = 1
) -> int:
    """Return the elements of a chunk of a tensor, for all that take part in it.

    dtypes: further element types.  A chunk is whole rows of `row` elements, and those of a tensor
    that is computed row by row.
    """
    members = (base, *others)
    # An applied tensor is computed from whole blocks of its own base.
    under = [one.base.dtype for one in members if isinstance(one, AppliedTensor)]
    chunk = chunk_elements(block_size, *(one.dtype for one in members), *under, *dtypes)
    together = {one.rows_together for one in members if isinstance(one, AppliedTensor)} - {0}
    if together:
        # Its rows are those of the matrix that a tensor of more dimensions counts as.
        row = math.lcm(row, math.lcm(*together) * math.prod(base.shape[1:]))
    return chunk if row == 1 else whole_rows(chunk, row, math.prod(base.shape))


def chunk_blocks(record: Tensor, chunk: int, number: int, block_size: int) -> list[BlockId]:
    """Return the blocks of chunk `number` of a tensor."""
    per = blocks_per_chunk(record.dtype, chunk, block_size)
    end = min(record.block_count(), (number + 1) * per)
    return [record.block(block) for block in range(number * per, end)]


def blocks_per_chunk(dtype: str, chunk: int, block_size: int) -> int:
    """Return the number of blocks of a full chunk in this dtype."""
    return chunk * ITEMSIZES[dtype] // block_size


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ReadChunk = Callable[[int], Bytes]
"""Returns the plain bytes of a chunk of one tensor, by its number."""


def chunk_reader(catalog: Catalog, record: Tensor, chunk: int, meter: Meter | None) -> ReadChunk:
    """Return what reads chunks of a tensor, in any thread; `meter` counts what it reads.

    An applied tensor is computed from its base and from the adapter, which is read now, and of
    which alone the bytes count.  Raises BudgetExceeded, Corrupt, StorageFailed, now and later.
    """
    if isinstance(record, AppliedTensor):
        [factors] = load_factors(catalog, [record], meter)
        return partial(_apply_chunk, catalog, record, factors, chunk)
    return partial(_read_chunk, catalog, record, chunk, meter)


def read_tensor(catalog: Catalog, record: Tensor, meter: Meter | None) -> np.ndarray[Any, Any]:
    """Read a whole tensor, in its shape: float32, or uint8 of another type's bytes.

    Raises BudgetExceeded, Corrupt, StorageFailed.
    """
    data = catalog.read_blocks([*record.block_ids()], meter)
    if record.dtype not in ITEMSIZES:
        return data.reshape(record.shape)
    return singles(data, record.dtype, math.prod(record.shape)).reshape(record.shape)


def _apply_chunk(
    catalog: Catalog, record: AppliedTensor, factors: Factors, chunk: int, number: int
) -> Bytes:
    base = _read_chunk(catalog, record.base, chunk, None, number)
    n = len(base) // ITEMSIZES[record.base.dtype]
    data = np.empty(4 * n, dtype=np.uint8)
    factors.apply(base, record.base.dtype, number * chunk, n, data)
    return data


def _read_chunk(
    catalog: Catalog, record: Tensor, chunk: int, meter: Meter | None, number: int
) -> Bytes:
    """Read the plain bytes of a chunk, checked."""
    return catalog.read_blocks(chunk_blocks(record, chunk, number, catalog.block_size), meter)
