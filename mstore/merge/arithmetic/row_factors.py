"""Row factors: the factors of each row, where a method mixes rows by the angles between them.

A row is the last dimension of a tensor; a tensor with fewer than two dimensions is one row.  The
inner products of a row's parts are float64 sums in an order of their own (`row_factor_passes`).
What follows from them is computed without the functions of a C library, which differ from machine
to machine in the last place, as numpy's do: arc cosine and sine are made of sums, products,
quotients and roots, each of which IEEE 754 rounds in one way, and which numpy does one by one.
Both are within 2^-49 of their result.  So factors are the same for any chunks, threads and
machines.  The formulas are the methods' own.

A part of zeros is at right angles to any other.  A part that is not finite makes its row's factors
NaN, which is all that then becomes of what the row's parts move.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import LANES, address, rows_together
from mstore.models.stats.chunks import row_length as length_of
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass

_products: Final = Pass(
    "mstore.merge.arithmetic.row_factor_passes",
    "products",
    "piiipp",
    ("merge/arithmetic/tiles.py", "merge/arithmetic/row_factor_passes.py"),
)


def products(parts: Singles) -> Doubles:
    """Return the inner products of each row's parts, float64[K, K, R]; parts: float32[K, R, N]."""
    parts = np.ascontiguousarray(parts)
    sides, rows, length = parts.shape
    found = np.empty((sides, sides, rows), dtype=np.float64)
    lanes = np.empty(LANES, dtype=np.float64)
    _products(address(parts), sides, rows, length, address(lanes), address(found))
    return found


Facts = Sequence[Sequence[npt.NDArray[Any] | None]]
"""What a tensor's companions are that are facts, of each role that a method asks for: whole arrays,
None for what is lacking."""


class ChunkFactors(ABC):
    """How factors follow from a chunk, where a tensor has none: of rows, or of single elements.

    code: what stands for it in a kernel's flags, and so in memo keys; a package needs none of its
    own, since its method's name is in those. needs_rows: whether a chunk
    must be whole rows. needs_tensor: whether it must be the whole tensor. likely: roughly what a
    weighted delta is multiplied by; None: its share of the weights.
    """

    code: ClassVar[int] = 255
    unbounded: ClassVar[str | None] = None
    """What it does, where the error of leaving something out has no bound because of it."""
    needs_rows: ClassVar[bool] = False
    needs_tensor: ClassVar[bool] = False
    likely: ClassVar[float | None] = None

    @abstractmethod
    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> npt.NDArray[Any]:
        """Return the factors of a chunk of a tensor of this shape, as the kernel takes them.

        weights: of the experts. whole: experts are mixed, not their deltas; an absent one is the
        base.
        """

    @abstractmethod
    def bytes_each(self, experts: int) -> int:
        """Return how many bytes it takes for each element."""

    def key(self, shape: Sequence[int]) -> bytes:
        """Return what factors follow from besides the chunk and the weights."""
        return b""

    def row(self, shape: Sequence[int]) -> int:
        """Return of how many elements each the runs are that a chunk of a tensor is whole."""
        if self.needs_tensor:
            return math.prod(shape)
        return length_of(shape) if self.needs_rows else 1

    def bound(self, given: Sequence[float], facts: Facts) -> ChunkFactors:
        """Return those of one tensor; given: the experts' weights, as they were asked for."""
        return self

    def tensor_bytes(self, shape: Sequence[int], experts: int) -> int:
        """Return how many bytes all threads share while a tensor of this shape is merged."""
        return 0


class RowFactors(ChunkFactors):
    """How the factors of a row follow from its parts, one an expert.  Has no state."""

    unbounded = "turns each row by what is read of it"
    needs_rows = True

    @abstractmethod
    def factors(self, parts: Singles, weights: Sequence[float]) -> Doubles:
        """Return the factor of each row of each expert, float64[K, R].

        parts: float32[K, R, N], zeros for one that moves nothing; deltas, or whole experts if those
        are mixed.  weights: of the experts.
        """

    def bytes_each(self, experts: int) -> int:
        """Return those of all parts, and of a float64 product."""
        return 4 * (experts + 4)

    def of_rows(self, parts: Singles, weights: Sequence[float]) -> Singles:
        """Return `factors` as the kernel takes them, float32[R, K]."""
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(self.factors(parts, weights).T, dtype=np.float32)

    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factor of each row of each expert of a chunk, float32[R, K]."""
        row_length = length_of(shape)
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
    if row >= 0 and not whole:
        return deltas_of(chunk, row, start, end - start)
    side, dtype = chunk.base, chunk.base_dtype
    if row >= 0:
        side, dtype = chunk.rows[row], chunk.row_dtypes[row]
    return singles(side[start * ITEMSIZES[dtype] :], dtype, end - start)


def deltas_of(chunk: Chunk, row: int, start: int, n: int) -> Singles:
    """Return the deltas of n elements of a row of the chunk, from its element `start` on."""
    base = chunk.base[start * ITEMSIZES[chunk.base_dtype] :]
    dtype = chunk.row_dtypes[row]
    stored = chunk.rows[row][start * ITEMSIZES[dtype] :]
    return masks.deltas(base, chunk.base_dtype, stored, dtype, n)


def clipped(cosine: Doubles) -> Doubles:
    """Return cosines that rounding has left above 1 or below -1 as these; a NaN stays one."""
    return np.where(cosine > 1.0, 1.0, np.where(cosine < -1.0, -1.0, cosine))


def at_least(values: Doubles, least: float) -> Doubles:
    """Return values, `least` where they are smaller; a NaN stays one."""
    return np.where(values < least, least, values)


Doubles = npt.NDArray[np.float64]

_HALF_PI: Final = float.fromhex("0x1.921fb54442d18p+0")
# pi / 2 in three parts; the first two have so many zeros that their products with a number of
# quarter turns up to 2^20 are exact.
_PARTS: Final = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
_ARC_TERMS: Final = tuple((-1) ** k / (2 * k + 1) for k in range(14))
_SINE_TERMS: Final = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(10))
_COSINE_TERMS: Final = tuple((-1) ** k / math.factorial(2 * k) for k in range(11))


def arc_cosine(cosine: Doubles) -> Doubles:
    """Return the angle from 0 to pi of each cosine, from -1 to 1; float64[n]."""
    below, above = 1.0 - cosine, 1.0 + cosine
    acute = below <= above
    with np.errstate(invalid="ignore", divide="ignore"):
        tangent = np.sqrt(np.where(acute, below / above, above / below))
    half = _arc_tangent(tangent)
    return np.where(acute, 2.0 * half, 2.0 * (_HALF_PI - half))


def _arc_tangent(tangent: Doubles) -> Doubles:
    """Return the angle of each tangent, from 0 to 1."""
    # tan(a / 2) = tan(a) / (1 + sqrt(1 + tan(a)^2)), twice: then a is pi / 16 at most.
    for _ in range(2):
        tangent = tangent / (1.0 + np.sqrt(1.0 + tangent * tangent))
    return 4.0 * (tangent * _series(_ARC_TERMS, tangent * tangent))


def sine(angle: Doubles) -> Doubles:
    """Return the sine of each angle, of up to 2^20 quarter turns; float64[n]."""
    turns = np.rint(angle / _HALF_PI)
    rest = angle
    for part in _PARTS:
        rest = rest - turns * part
    square = rest * rest
    # Exact: both are whole numbers.
    quarter = turns - 4.0 * np.floor(turns / 4.0)
    odd = (quarter == 1.0) | (quarter == 3.0)
    found = np.where(odd, _series(_COSINE_TERMS, square), rest * _series(_SINE_TERMS, square))
    return np.where(quarter >= 2.0, -found, found)


def _series(terms: tuple[float, ...], x: Doubles) -> Doubles:
    """Return the sum of terms times powers of x, from the smallest term on."""
    found: Doubles = np.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        found = found * x + term
    return found
