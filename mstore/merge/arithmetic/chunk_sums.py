"""Chunk sums: what is added to the base, made before the pass, where a method mixes columns.

Sums are float64, in an order of their own that depends on no chunk, thread or machine.  The pass
(`summed_passes`) adds them to the base, times lambda and scale, and rounds once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, Mix, pack
from mstore.merge.arithmetic.row_factors import ChunkFactors, deltas_of
from mstore.merge.arithmetic.tiles import TOGETHER
from mstore.numeric.matmul import Doubles
from mstore.numeric.passes import Pass

_summed: Final = Pass(
    "mstore.merge.arithmetic.summed_passes",
    "summed",
    "p",
    (
        *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/tiles.py"),
        *("merge/arithmetic/arguments.py", "merge/arithmetic/summed_passes.py"),
    ),
)


class ChunkSums(ChunkFactors):
    """How the sum of a chunk follows from the experts' deltas and from facts about the tensor."""

    @abstractmethod
    def sums(self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float]) -> Doubles:
        """Return what is added to each element of the base, float64[n]."""

    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> Doubles:
        """Return the sums of a chunk, as `run` takes them."""
        with np.errstate(all="ignore"):
            return np.asarray(self.sums(chunk, shape, weights), dtype=np.float64)

    def each(self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float]) -> Doubles:
        """Return what each expert adds to each element of the base, float64[K, n]."""
        found = np.zeros((len(chunk.row_of), chunk.n))
        for k, row in enumerate(chunk.row_of):
            if row >= 0:
                alone = [own if number == k else -1 for number, own in enumerate(chunk.row_of)]
                found[k] = self.weights(chunk._replace(row_of=alone), shape, weights, whole=False)
        return found

    def bytes_each(self, experts: int) -> int:
        """Return those of a sum; deltas are a few rows."""
        return 8


def parts(chunk: Chunk, row: int) -> list[tuple[int, int, int, int]]:
    """Return the parts of a chunk that are computed together: the first element, rows, the column
    of the tensor where each begins, and columns.

    Rows are whole but for the chunk's first and last one.
    """
    found = []
    first, column = 0, chunk.first_index % row
    together = max(1, TOGETHER // row)
    while first < chunk.n:
        left = chunk.n - first
        if column or left < row:
            rows, columns = 1, min(row - column, left)
        else:
            rows, columns = min(together, left // row), row
        found.append((first, rows, column, columns))
        first, column = first + rows * columns, 0
    return found


def weighted(chunk: Chunk, weights: Sequence[float]) -> Doubles:
    """Return the sum of the deltas times the experts' weights, in their order: float64[n]."""
    found = np.zeros(chunk.n)
    for start in range(0, chunk.n, TOGETHER):
        own = found[start : start + TOGETHER]
        for row, weight in zip(chunk.row_of, weights, strict=True):
            if row >= 0:
                own += weight * deltas_of(chunk, row, start, own.size).astype(np.float64)
    return found


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    sums: Doubles | None = None,
) -> tuple[int, ...]:
    """Merge a chunk into `out`, as `kernels.run`; sums: float64[n], what is added to the base."""
    packed = pack(mix, chunk, out, out_dtype, row_weights=sums)
    _summed(packed.at)
    return ()
