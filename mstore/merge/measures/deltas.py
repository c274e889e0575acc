"""The deltas of a tensor's experts: in pieces, read chunk by chunk, or kept as ordered bits.

A piece is a run of a chunk's elements, so short that its temporary arrays take no new memory.
What equals the base's is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.blocks.reader import Meter
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import TOGETHER
from mstore.models.stats.chunks import chunk_blocks, chunk_reader, tensor_chunk
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.halves import Bits
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor

Stored = tuple[npt.NDArray[np.uint8], str]
"""The bytes of a chunk, and their element type."""


def pieces_of_deltas(
    base: Stored, experts: Sequence[Stored], n: int
) -> Iterator[tuple[int, int, list[Singles]]]:
    """Yield pieces of n elements: where one starts and ends, and the delta of each expert there."""
    for start in range(0, n, TOGETHER):
        end = min(start + TOGETHER, n)
        side = _from(base, start), base[1]
        yield start, end, [masks.deltas(*side, _from(e, start), e[1], end - start) for e in experts]


def pieces_of_chunk(chunk: Chunk) -> Iterator[tuple[int, int, list[Singles | None]]]:
    """Yield pieces of a chunk: where one starts and ends, and each expert's deltas there.

    None for an expert that is not read.
    """
    base, *experts = stored(chunk)
    for start, end, moved in pieces_of_deltas(base, experts, chunk.n):
        yield start, end, [None if row < 0 else moved[row] for row in chunk.row_of]


def stored(chunk: Chunk) -> list[Stored]:
    """Return the base and the rows of a chunk, with their element types."""
    rows = [(chunk.rows[k], dtype) for k, dtype in enumerate(chunk.row_dtypes)]
    return [(chunk.base, chunk.base_dtype), *rows]


def _from(side: Stored, start: int) -> npt.NDArray[np.uint8]:
    data, dtype = side
    return data[start * ITEMSIZES[dtype] :]


_MOST_KEPT: Final = 1 << 25
"""So many numbers of a tensor are kept: 128 MiB."""


class Chunks:
    """The deltas of experts, chunk by chunk.  records: of the base and of each expert."""

    def __init__(self, catalog: Catalog, records: Sequence[Tensor], meter: Meter) -> None:
        self._catalog = catalog
        self._base, *self._experts = records
        self.elements = math.prod(self._base.shape)
        self.length = tensor_chunk(catalog.block_size, self._base, self._experts)
        self._read_base = chunk_reader(catalog, self._base, self.length, None)
        # What is equal in two of them is read once.
        alike = {(one.dtype, one.blocks): one for one in self._experts}
        self._readers = {
            key: chunk_reader(catalog, one, self.length, meter) for key, one in alike.items()
        }
        self.numbers = range(-(-self.elements // self.length))
        self.experts = len(self._experts)

    def deltas(self, number: int) -> Iterator[list[Singles]]:
        """Read a chunk of base and experts, equal blocks once; yield the deltas of all, in pieces.

        A piece is float32[n] of each expert, as `pieces_of_deltas` cuts them.
        """
        elements = min(self.length, self.elements - number * self.length)
        base, none = self._read_base(number), self._blocks(self._base, number)
        keys = [self._blocks(expert, number) for expert in self._experts]
        sides = {
            key: (self._readers[expert.dtype, expert.blocks](number), expert.dtype)
            for key, expert in dict(zip(keys, self._experts, strict=True)).items()
            if key != none
        }
        cut = pieces_of_deltas((base, self._base.dtype), list(sides.values()), elements)
        for start, end, moved in cut:
            found = dict(zip(sides, moved, strict=True))
            found[none] = np.zeros(end - start, dtype=np.float32)
            yield [found[key] for key in keys]

    def _blocks(self, record: Tensor, number: int) -> tuple[Any, ...]:
        blocks = chunk_blocks(record, self.length, number, self._catalog.block_size)
        return record.dtype, *blocks


class Ordered:
    """Numbers of a tensor, chunk by chunk, as bits that order as they do; few are kept in memory.

    of: makes those of a piece, uint32[..., n], of its deltas. count: how many there are.  Any
    thread may ask for a chunk.
    """

    def __init__(self, chunks: Chunks, of: Callable[[list[Singles]], Bits], count: int) -> None:
        self._chunks = chunks
        self._of = of
        self._keeps = count <= _MOST_KEPT
        self._kept: dict[int, list[Bits]] = {}

    def bits(self, number: int) -> Iterable[Bits]:
        """Return those of a chunk, in pieces."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        found = map(self._of, self._chunks.deltas(number))
        return self._kept.setdefault(number, list(found)) if self._keeps else found

    def with_deltas(self, number: int) -> Iterator[tuple[list[Singles], Bits]]:
        """Yield the deltas of a chunk, and its bits, in pieces."""
        kept = self._kept.get(number)
        every = self._chunks.deltas(number)
        if kept is None:
            yield from ((deltas, self._of(deltas)) for deltas in every)
        else:
            yield from zip(every, kept, strict=True)
