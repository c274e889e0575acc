"""The grid: a survey as whole arrays, experts by the chunks of all tensors in order.

A plan of a large model has hundreds of thousands of (expert, chunk) pairs.  The grid holds the
facts about all of them in arrays, so that planning is a few passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mstore.merge.measures.companions import Together

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Grid(msgspec.Struct, frozen=True):
    """K experts by C chunks.

    starts: int64[tensors + 1], the first chunk of each tensor; tensor: int64[C]. elements:
    float64[C], of each chunk. copies: float64[C], how many names the chunk's tensor has. equal,
    known: bool[K, C], the blocks are the base's; statistics exist. twin, cost: int64[K, C] (see
    `ExpertTensor`). rows: CHUNK[C] per expert, zeros if not known. threshold: float64[K, C], where
    trimming cuts, and `ceiling`, from where all is dropped; NaN for no threshold. band:
    float64[K, C], that of each chunk's tensor (see `ExpertTensor`), and surplus: float64[tensors,
    K, 2]. together: experts with their companions, if any are read with them.
    """

    starts: Ints
    tensor: Ints
    elements: Floats
    copies: Floats
    equal: Bools
    known: Bools
    twin: Ints
    cost: Ints
    rows: tuple[np.ndarray[Any, Any], ...]
    threshold: Floats
    ceiling: Floats
    band: Floats
    surplus: Floats
    together: Together | None = None

    def part(self, tensors: Sequence[int]) -> Grid:
        """Return the grid of some of its tensors, by their positions in order."""
        own = np.isin(self.tensor, tensors)
        chunks = np.diff(self.starts)[list(tensors)]
        return Grid(
            starts=np.array([0, *itertools.accumulate(chunks.tolist())], dtype=np.int64),
            tensor=np.repeat(np.arange(len(chunks)), chunks),
            elements=self.elements[own],
            copies=self.copies[own],
            equal=self.equal[:, own],
            known=self.known[:, own],
            twin=self.twin[:, own],
            cost=self.cost[:, own],
            rows=tuple(rows[own] for rows in self.rows),
            threshold=self.threshold[:, own],
            ceiling=self.ceiling[:, own],
            band=self.band[:, own],
            surplus=self.surplus[list(tensors)],
            together=None if self.together is None else self.together.part(own),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of experts and chunks."""
        return len(self.equal), len(self.tensor)

    def column(self, name: str) -> Floats:
        """Return a field of the rows: float64[K, C]."""
        columns = [rows[name].astype(np.float64) for rows in self.rows]
        return np.array(columns).reshape(self.shape)

    @property
    def nothing(self) -> Bools:
        """bool[K, C]: where an expert is known to move no element."""
        still: Bools = self.known & (self.column("nonzeros") == 0)
        return still

    @property
    def moved(self) -> Floats:
        """float64[K, C]: the share of a chunk's elements that an expert moves."""
        share: Floats = self.column("nonzeros") / self.elements
        return share

    @property
    def whole(self) -> Floats:
        """float64[K, C]: ||d_k||^2; infinite if unknown."""
        squares = self.column("sum_squares")
        # A NaN would make every comparison false; such a chunk is read first.
        return np.where(self.known & ~np.isnan(squares), squares, np.inf)

    def fitted(self, squares: Sequence[Floats]) -> Floats:
        """Return squares of chunks, scaled so that they add up to the `band` of each tensor.

        A few large elements may have most of a chunk's squares; their share is known of the whole
        tensor only.  No chunk gets more than it has.
        """
        starts = self.starts.tolist()
        for own, whole, band in zip(squares, self.whole, self.band, strict=True):
            for start, end in itertools.pairwise(starts):
                wanted = float(band[start]) if end > start else math.nan
                part = own[start:end]
                total = math.fsum(part[np.isfinite(part)].tolist())
                if math.isfinite(wanted) and wanted >= 0 and total > 0:
                    scaled = np.minimum(part * (wanted / total), whole[start:end])
                    part[:] = np.where(np.isfinite(part), scaled, part)
        return np.array(squares).reshape(self.shape)

    def split(self, table: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Split [K, C] into a list of [K, chunks], one per tensor."""
        bounds = self.starts.tolist()
        return [table[:, start:end] for start, end in itertools.pairwise(bounds)]


def added(rows: Sequence[Floats] | Floats) -> Floats:
    """Return their sum, from the first to the last: the same bits on every machine."""
    total = np.zeros_like(rows[0]) if len(rows) else np.zeros(0)
    for row in rows:
        total = total + row
    return total
