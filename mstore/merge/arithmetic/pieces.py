"""Pieces: runs of a chunk's elements, so short that their temporary arrays take no new memory.

Owns how stored bytes of several tensors are cut into pieces, and come as float32 or as deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import TOGETHER, rows_together
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES

Stored = tuple[npt.NDArray[np.uint8], str]
"""The bytes of a chunk, and their element type."""


def deltas(
    base: Stored, experts: Sequence[Stored], n: int
) -> Iterator[tuple[int, int, list[Singles]]]:
    """Yield pieces of n elements: where one starts and ends, and the delta of each expert there."""
    for start in range(0, n, TOGETHER):
        end = min(start + TOGETHER, n)
        ours = _from(base, start)
        yield (
            start,
            end,
            [
                masks.deltas(ours, base[1], _from(one, start), one[1], end - start)
                for one in experts
            ],
        )


def rows(
    sides: Sequence[Stored], row_length: int, n: int
) -> Iterator[tuple[int, int, list[Singles]]]:
    """Yield pieces of whole rows of n elements: where one starts and ends, and each side there."""
    step = rows_together(row_length)
    for start in range(0, n, step):
        end = min(start + step, n)
        yield start, end, [singles(_from(one, start), one[1], end - start) for one in sides]


def of_chunk(chunk: Chunk) -> Iterator[tuple[int, int, list[Singles | None]]]:
    """Yield pieces of a chunk: where one starts and ends, and each expert's deltas there.

    None for an expert that is not read.
    """
    base, *experts = stored(chunk)
    for start, end, moved in deltas(base, experts, chunk.n):
        yield start, end, [None if row < 0 else moved[row] for row in chunk.row_of]


def stored(chunk: Chunk) -> list[Stored]:
    """Return the base and the rows of a chunk, with their element types."""
    rows = [(chunk.rows[k], dtype) for k, dtype in enumerate(chunk.row_dtypes)]
    return [(chunk.base, chunk.base_dtype), *rows]


def _from(side: Stored, start: int) -> npt.NDArray[np.uint8]:
    data, dtype = side
    return data[start * ITEMSIZES[dtype] :]
