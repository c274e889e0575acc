"""Turns: the factors of each row, where a method mixes rows by the angles between them.

A row is the last dimension of a tensor; a tensor with fewer than two dimensions is one row.  The
inner products of a row's parts are float64 sums in an order of their own (`turn_passes`), and what
follows from them is computed without the functions of a C library (`angles`): the same factors for
any chunks, threads and machines.  The formulas are the methods' own.

A part of zeros is at right angles to any other.  A part that is not finite makes its row's factors
NaN, which is all that then becomes of what the row's parts move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.angles import Doubles
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import LANES, address, rows_together
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass

_products: Final = Pass(
    "mstore.merge.arithmetic.turn_passes",
    "products",
    "piiipp",
    ("merge/arithmetic/tiles.py", "merge/arithmetic/turn_passes.py"),
)


def products(parts: Singles) -> Doubles:
    """Return the inner products of each row's parts, float64[K, K, R]; parts: float32[K, R, N]."""
    parts = np.ascontiguousarray(parts)
    sides, rows, length = parts.shape
    found = np.empty((sides, sides, rows), dtype=np.float64)
    lanes = np.empty(LANES, dtype=np.float64)
    _products(address(parts), sides, rows, length, address(lanes), address(found))
    return found


class Turn:
    """How factors follow from what is read of a chunk; of this class: not at all.

    Has no state; code: what stands for it in a kernel's flags, and so in memo keys; 0 where the
    factors are those of the tensor.
    """

    code: ClassVar[int] = 0

    def weights(
        self, chunk: Chunk, row_length: int, weights: Sequence[float], *, whole: bool
    ) -> Singles | None:
        """Return the factor of each row of each expert of a chunk, float32[R, K].

        None for those of the tensor. whole: experts are mixed, not their deltas; an absent one is
        the base.
        """
        return None

    def room(self, experts: int) -> int:
        """Return how many bytes it takes for each element."""
        return 0


STILL: Final = Turn()
"""That of tensors with factors of their own."""


class RowTurn(Turn, ABC):
    """How the factors of a row follow from its parts, one an expert."""

    @abstractmethod
    def factors(self, parts: Singles, weights: Sequence[float]) -> Doubles:
        """Return the factor of each row of each expert, float64[K, R].

        parts: float32[K, R, N], zeros for one that moves nothing; deltas, or whole experts if those
        are mixed.  weights: of the experts.
        """

    def room(self, experts: int) -> int:
        """Return how many bytes it takes for each element: of all parts, and a float64 product."""
        return 4 * (experts + 4)

    def of_rows(self, parts: Singles, weights: Sequence[float]) -> Singles:
        """Return `factors` as the kernel takes them, float32[R, K]."""
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(self.factors(parts, weights).T, dtype=np.float32)

    def weights(
        self, chunk: Chunk, row_length: int, weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factor of each row of each expert of a chunk, float32[R, K]."""
        found = np.empty((chunk.n // row_length, len(chunk.row_of)), dtype=np.float32)
        step = rows_together(row_length)
        for start in range(0, chunk.n, step):
            end = min(start + step, chunk.n)
            shape = len(chunk.row_of), (end - start) // row_length, row_length
            parts = np.zeros(shape, dtype=np.float32)
            for k, row in enumerate(chunk.row_of):
                if row >= 0 or whole:
                    parts[k] = _part(chunk, row, start, end, whole=whole).reshape(-1, row_length)
            found[start // row_length : end // row_length] = self.of_rows(parts, weights)
        return found


def _part(chunk: Chunk, row: int, start: int, end: int, *, whole: bool) -> Singles:
    """Return an expert's elements, or its deltas; of whole experts an absent one is the base."""
    base = chunk.base[start * ITEMSIZES[chunk.base_dtype] :]
    if row < 0:
        return singles(base, chunk.base_dtype, end - start)
    dtype = chunk.row_dtypes[row]
    stored = chunk.rows[row][start * ITEMSIZES[dtype] :]
    if whole:
        return singles(stored, dtype, end - start)
    return masks.deltas(base, chunk.base_dtype, stored, dtype, end - start)


def clipped(cosine: Doubles) -> Doubles:
    """Return cosines that rounding has left above 1 or below -1 as these; a NaN stays one."""
    return np.where(cosine > 1.0, 1.0, np.where(cosine < -1.0, -1.0, cosine))


def at_least(values: Doubles, least: float) -> Doubles:
    """Return values, `least` where they are smaller; a NaN stays one."""
    return np.where(values < least, least, values)
