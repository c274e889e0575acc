"""The deltas of a tensor's experts, read chunk by chunk: what equals the base's is not read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mstore.blocks.reader import Meter
from mstore.merge.arithmetic import pieces
from mstore.merge.arithmetic.masks import Singles
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_blocks, chunk_reader, tensor_chunk
from mstore.store.catalog import Catalog


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

        A piece is float32[n] of each expert, as `pieces.deltas` cuts them.
        """
        elements = min(self.length, self.elements - number * self.length)
        base, none = self._read_base(number), self._blocks(self._base, number)
        keys = [self._blocks(expert, number) for expert in self._experts]
        sides = {
            key: (self._readers[expert.dtype, expert.blocks](number), expert.dtype)
            for key, expert in dict(zip(keys, self._experts, strict=True)).items()
            if key != none
        }
        cut = pieces.deltas((base, self._base.dtype), list(sides.values()), elements)
        for start, end, moved in cut:
            found = dict(zip(sides, moved, strict=True))
            found[none] = np.zeros(end - start, dtype=np.float32)
            yield [found[key] for key in keys]

    def _blocks(self, record: Tensor, number: int) -> tuple[Any, ...]:
        blocks = chunk_blocks(record, self.length, number, self._catalog.block_size)
        return record.dtype, *blocks
