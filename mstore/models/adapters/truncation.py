"""Truncated singular value decomposition: the nearest matrix of a lower rank.

Of one matrix (`truncated`): a small one is decomposed whole; of a large one only the range of the
largest singular vectors is found, by random projections and power iterations (Halko, Martinsson and
Tropp 2011, SIAM Review 53(2), algorithm 4.4).  Of a product of two factors
(`decomposed_product`): exactly, without the product.

Draws are seeded, so a machine gives the same factors each time; another one may differ in the last
places, as its BLAS sums in another order.  So what is stored is what counts, and `linear_algebra`
says what made it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from mstore.terms.report import Report
from mstore.terms.sizes import counted

Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_WHOLE: Final = 512
"""Up to so many rows or columns, a matrix is decomposed whole."""
_MORE: Final = 16
"""So many directions more than the rank are followed."""
_ITERATIONS: Final = 4
_PANEL: Final = 1 << 22


class TruncatedTensor(Report, frozen=True):
    """What a truncated decomposition leaves out of one matrix."""

    tensor: str
    """its name"""
    relative_error: float
    """norm of what is left out, relative to the norm of the matrix"""


def linear_algebra() -> str:
    """Return whose linear algebra this process has: factors depend on it in their last places."""
    config = cast(dict[str, dict[str, Any]], np.show_config(mode="dicts"))
    blas = config["Build Dependencies"]["blas"]
    found = config["SIMD Extensions"].get("found") or [config["Machine Information"]["host"]["cpu"]]
    how = _openblas() or found[-1]
    return f"numpy {np.__version__}, {blas['name']} {blas['version']} ({how})"


def _openblas() -> str | None:
    """Return the processor that OpenBLAS computes for, and its threads; None without OpenBLAS."""
    module = importlib.util.find_spec("numpy.linalg._umath_linalg")
    # What numpy is linked to is found through it, under the names of its wheels or of systems.
    library = ctypes.CDLL(None if module is None else module.origin)
    for before, after in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
        core = getattr(library, f"{before}openblas_get_corename{after}", None)
        threads = getattr(library, f"{before}openblas_get_num_threads{after}", None)
        if core is not None and threads is not None:
            core.restype = ctypes.c_char_p
            return f"{core().decode()}, {counted(threads(), 'thread')}"
    return None


class Errors:
    """What is left out of the matrices of one adapter, and of all of them together."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._left = 0.0
        self._tensors: list[TruncatedTensor] = []

    def add(self, tensor: str, squares: float, left: float) -> None:
        """Count a matrix: its squared norm, and that of what is left out of it."""
        self._squares += squares
        self._left += left
        self._tensors.append(TruncatedTensor(tensor, _relative(squares, left)))

    def add_whole(self, squares: float) -> None:
        """Count a tensor of which nothing is left out."""
        self._squares += squares

    def relative(self) -> float:
        """Return the norm of all that is left out, relative to the norm of all."""
        return _relative(self._squares, self._left)

    def tensors(self) -> tuple[TruncatedTensor, ...]:
        """Return the matrices, those with the largest errors first."""
        return tuple(sorted(self._tensors, key=lambda one: -one.relative_error))


def _relative(squares: float, left: float) -> float:
    return math.sqrt(left / squares) if squares else 0.0


def truncated(matrix: Singles, rank: int, *, seed: int) -> tuple[Singles, Singles]:
    """Return (left [rows, rank], right [rank, columns]) whose product is near the matrix.

    matrix: float32[rows, columns], finite, with at least `rank` of both.  Each has the root of the
    singular values.  Infinite or NaN as for `decomposed`.
    """
    u, values, v = decomposed(matrix, rank, seed=seed)
    roots = np.sqrt(values)
    return u * roots, roots[:, None] * v


def decomposed(matrix: Singles, rank: int, *, seed: int) -> tuple[Singles, Singles, Singles]:
    """Return the largest singular values and their vectors: (u [rows, rank], values, v [rank,
    columns]); arguments as of `truncated`.

    Infinite or NaN where steps or values are beyond float32.
    """
    rows, columns = matrix.shape
    follow = min(rank + _MORE, rows, columns)
    try:
        if min(rows, columns) <= max(_WHOLE, 2 * follow):
            u, values, v = np.linalg.svd(matrix, full_matrices=False)
        else:
            basis = _range(matrix, follow, seed)
            inner, values, v = np.linalg.svd(basis.T @ matrix, full_matrices=False)
            u = basis @ inner
    except np.linalg.LinAlgError:
        shapes = (rows, rank), (rank,), (rank, columns)
        u, values, v = (np.full(shape, np.nan, dtype=np.float32) for shape in shapes)
    return u[:, :rank], values[:rank], v[:rank]


def decomposed_product(left: Doubles, right: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Return all singular values of left @ right that can be other than 0, and their vectors.

    left: float64[rows, n]. right: float64[n, columns].  Costs their size times n.
    """
    one, inner = np.linalg.qr(left)
    other, outer = np.linalg.qr(right.T)
    u, values, v = np.linalg.svd(inner @ outer.T, full_matrices=False)
    return one @ u, values, v @ other.T


def norm_of_product(left: Doubles, right: Doubles) -> float:
    """Return the norm of left @ right, without the product; both as for `decomposed_product`."""
    (_, inner), (_, outer) = (np.linalg.qr(one) for one in (left, right.T))
    return float(np.linalg.norm(inner @ outer.T))


def squares_left(matrix: Singles, left: Singles, right: Singles) -> tuple[float, float]:
    """Return the squared norms of a matrix, and of what left @ right leaves of it."""
    rows, columns = matrix.shape
    squares = rest_squares = 0.0
    step = max(1, _PANEL // max(1, columns))
    for start in range(0, rows, step):
        own = matrix[start : start + step]
        rest: npt.NDArray[Any] = own - left[start : start + step] @ right
        squares += float(np.square(own, dtype=np.float64).sum())
        rest_squares += float(np.square(rest, dtype=np.float64).sum())
    return squares, rest_squares


def _range(matrix: Singles, count: int, seed: int) -> Singles:
    """Return orthonormal columns that nearly span the largest left singular vectors."""
    draw = np.random.Generator(np.random.Philox(seed))
    start = draw.standard_normal((matrix.shape[1], count), dtype=np.float32)
    basis, _ = np.linalg.qr(matrix @ start)
    for _ in range(_ITERATIONS):
        other, _ = np.linalg.qr(matrix.T @ basis)
        basis, _ = np.linalg.qr(matrix @ other)
    return basis
