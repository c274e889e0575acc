"""tensor_sum: one expert in a range of the rows of each tensor, the base in the others.

A row is all of a tensor at one index of its first dimension.  Of n rows the range begins at row
`offset` * n and has `width` * n of them, both ends rounded to whole rows, half to even; what would
be past the last row is at the first ones.  A number is the expert's if `width` is above a half.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combinations import Alone
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import Parameter, Range, Value
from mstore.merge.methods.selection import (
    ChunkFacts,
    Cut,
    Masks,
    Region,
    Selection,
    Whole,
    alike,
    common,
)
from mstore.store.objects.plan import TrimThreshold

WIDTH: Final = Parameter("width", "float", 0.5, Range(0.0, 1.0))
OFFSET: Final = Parameter("offset", "float", 0.0, Range(0.0, 1.0))


class Stretch(Whole, frozen=True):
    """The expert in a range of rows; elsewhere the base."""

    width: float
    offset: float

    lists_base = False
    leaves_base = True
    masked = 9

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        return cls(experts, common(parameters, WIDTH), common(parameters, OFFSET))

    def weightless(self, weights: Sequence[float]) -> tuple[bool, ...]:
        return tuple([weight == 0 or self.width == 0 for weight in weights])

    def region(self, shape: Sequence[int]) -> Region:
        """Return the range of a tensor of this shape."""
        if not shape:
            return Region(0, int(self.width > 0.5))
        rows, length = shape[0], math.prod(shape[1:])
        offset = math.fmod(self.offset, 1.0)
        end = self.width + offset
        if end <= 1:
            return Region(round(offset * rows) * length, round(end * rows) * length)
        start, end = round(offset * rows), round((end - 1) * rows)
        # All of it, and not nothing, if both ends are one.
        return Region(start * length, end * length) if end < start else Region(0, rows * length)

    def _shares(self, grid: Grid) -> Floats:
        """Return what part of each chunk is the expert's, float64[C]."""
        found = np.zeros(len(grid.elements))
        for number, shape in enumerate(grid.shapes):
            region, first = self.region(shape), 0
            for at in range(grid.starts[number], grid.starts[number + 1]):
                length = int(grid.elements[at])
                runs = region.within(first, length)
                found[at] = sum(end - start for start, end in runs) / length
                first += length
        return found

    def idle(self, grid: Grid) -> Bools:
        found: Bools = grid.nothing | (self._shares(grid) == 0)
        return found

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those of the range: its part of each chunk's."""
        shares = self._shares(grid)
        return np.where(shares > 0, grid.whole * np.where(shares > 0, shares, 1.0), 0.0)

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return those of the whole chunk, where any of it is the expert's."""
        return np.where(self._shares(grid) > 0, grid.whole, 0.0)

    def kept(self, grid: Grid) -> Floats:
        return grid.moved * self._shares(grid)

    def cut(self, planned: Sequence[TrimThreshold], shape: Sequence[int]) -> Region:
        return self.region(shape)

    def mask_bytes(self, read: int) -> int:
        return 2 * self.experts

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks:
        assert isinstance(facts.cut, Region)
        found = np.zeros(chunk.n, dtype=np.bool_)
        for start, end in facts.cut.within(chunk.first_index, chunk.n):
            found[start:end] = True
        # The base may be a summand, too.
        return alike(found, len(facts.weights))

    def place(self, cut: Cut | Region | None, first_index: int, length: int) -> bytes:
        """Return which part of a chunk is the expert's."""
        assert isinstance(cut, Region)
        return b"".join([struct.pack("<2Q", *run) for run in cut.within(first_index, length)])


TENSOR_SUM: Final = Method(
    name="tensor_sum",
    summary="one expert in a range of the rows of each tensor, the base in the others",
    formula="expert in the rows from offset n to (offset + width) n of n, beyond the last one from "
    "the first on; base in the others",
    source="supermerger, github.com/hako-mikan/sd-webui-supermerger; as in sd-mecha",
    parameters=(WIDTH, OFFSET),
    select=Stretch,
    combine=Alone(),
    experts=1,
    weighted=False,
    is_ours=True,
)
