"""add_cosine_a and add_cosine_b: from the base to one expert, the further the less they agree.

A column is what all rows of a tensor have at one place, a row being all of it at one index of its
first dimension; a tensor of fewer than two dimensions is one column.  With c the cosine of a column
of the base and that of the expert, its elements are base + k d, k = 1 - min(1, max(0, c - alpha)).
add_cosine_b takes the mean of c and of the cosine of both whole tensors.

Columns are the rows of the transposed tensor, whose inner products are those of
`arithmetic.row_factors`.  They need all rows, so a chunk is the whole tensor: memory holds it, and
a budget takes all of an expert's tensor or nothing.  So nothing is measured first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.row_factors import ChunkFactors, at_least, products
from mstore.merge.methods.combinations import Factored
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range
from mstore.merge.methods.selection import Delta, common
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES

ALPHA: Final = Parameter("alpha", "float", 1.0, Range(-MAX_SINGLE, MAX_SINGLE))
_SMALLEST_NORM: Final = 1e-8
_TOGETHER: Final = 1 << 18
"""Elements of the columns that are taken at a time."""


Bytes = npt.NDArray[np.uint8]


class _Cosine(ChunkFactors):
    """A factor of each column; blends: with the cosine of whole tensors."""

    code = 10
    needs_rows = True
    needs_tensor = True

    def __init__(self, alpha: float, *, blends: bool) -> None:
        self._alpha = alpha
        self._blends = blends

    def key(self, shape: Sequence[int]) -> bytes:
        return struct.pack("<d?Q", self._alpha, self._blends, shape[0] if shape else 1)

    def bytes_each(self, experts: int) -> int:
        """Return those of the factor; columns are taken a few at a time."""
        return 4

    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factor of each element, float32[1, n]."""
        rows = shape[0] if shape else 1
        columns, own = chunk.n // rows, chunk.row_of[0]
        sides = [(chunk.base, chunk.base_dtype)]
        sides += [(chunk.rows[own], chunk.row_dtypes[own])] if own >= 0 else sides
        step = max(1, _TOGETHER // rows)
        grams = [
            products(np.stack([_columns(*side, rows, columns, at, step) for side in sides]))
            for at in range(0, columns, step)
        ]
        gram = np.concatenate(grams, axis=2)
        with np.errstate(all="ignore"):
            norms = at_least(np.sqrt(gram[0, 0]), _SMALLEST_NORM), np.sqrt(gram[1, 1])
            cosine = gram[0, 1] / (norms[0] * at_least(norms[1], _SMALLEST_NORM))
            if self._blends:
                dot, one, other = (
                    math.fsum(gram[i, j].tolist()) for i, j in ((0, 1), (0, 0), (1, 1))
                )
                size = math.sqrt(one) * math.sqrt(other)
                # A column of zeros, too, is at right angles to any other.
                cosine = (cosine + (dot / size if size else 0.0)) / 2.0
            agreed = cosine - self._alpha
            agreed = np.where(agreed > 1.0, 1.0, np.where(agreed < 0.0, 0.0, agreed))
            factors = (1.0 - agreed).astype(np.float32)
        return np.ascontiguousarray(np.broadcast_to(factors, (rows, factors.size))).reshape(1, -1)


def _columns(stored: Bytes, dtype: str, rows: int, columns: int, first: int, count: int) -> Singles:
    """Return some columns of a tensor, each as a row."""
    size = ITEMSIZES[dtype]
    table = stored[: rows * columns * size].reshape(rows, columns * size)
    part = np.ascontiguousarray(table[:, first * size : (first + count) * size])
    return singles(part.reshape(-1), dtype, part.size // size).reshape(rows, -1).T


class OneFactored(Factored):
    """The delta of one expert times factors from 0 to 1: what is left out costs at most that."""

    unbounded = None

    def most(self, operation: Operation) -> tuple[float, ...]:
        return (operation.farthest,)


def _declared(name: str, *, blends: bool, cosine: str) -> Method:
    return Method(
        name=name,
        summary="from the base to one expert by the angle between their columns"
        + (" and whole tensors" if blends else ""),
        formula=f"base + k d, k = 1 - min(1, max(0, {cosine} - alpha)), c the cosine of a column "
        "of base and expert",
        source="supermerger, github.com/hako-mikan/sd-webui-supermerger; as in sd-mecha",
        parameters=(ALPHA,),
        select=Delta,
        combine=OneFactored(lambda given: _Cosine(common(given, ALPHA), blends=blends)),
        experts=1,
        weighted=False,
        is_ours=True,
    )


ADD_COSINE_A: Final = _declared("add_cosine_a", blends=False, cosine="c")
ADD_COSINE_B: Final = _declared(
    "add_cosine_b", blends=True, cosine="(c + that of whole tensors) / 2"
)
