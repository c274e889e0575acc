"""Truncated singular value decomposition of one matrix: the nearest one of a lower rank.

Small matrices are decomposed whole.  Of large ones only the range of the largest singular vectors
is found, by random projections and power iterations (Halko, Martinsson and Tropp 2011, SIAM Review
53(2), algorithm 4.4).  Draws are seeded, so a machine gives the same factors each time; another one
may differ in the last places, as its BLAS sums in another order.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]

_WHOLE: Final = 512
"""Up to so many rows or columns, a matrix is decomposed whole."""
_MORE: Final = 16
"""So many directions more than the rank are followed."""
_ITERATIONS: Final = 4


def truncated(matrix: Singles, rank: int, *, seed: int) -> tuple[Singles, Singles]:
    """Return (left [rows, rank], right [rank, columns]) whose product is near the matrix.

    matrix: float32[rows, columns], finite, with at least `rank` of both.  Each has the root of the
    singular values.
    """
    rows, columns = matrix.shape
    follow = min(rank + _MORE, rows, columns)
    if min(rows, columns) <= max(_WHOLE, 2 * follow):
        u, values, v = np.linalg.svd(matrix, full_matrices=False)
    else:
        basis = _range(matrix, follow, seed)
        inner, values, v = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        u = basis @ inner
    roots = np.sqrt(values[:rank])
    return u[:, :rank] * roots, roots[:, None] * v[:rank]


def _range(matrix: Singles, count: int, seed: int) -> Singles:
    """Return orthonormal columns that nearly span the largest left singular vectors."""
    draw = np.random.Generator(np.random.Philox(seed))
    start = draw.standard_normal((matrix.shape[1], count), dtype=np.float32)
    basis, _ = np.linalg.qr(matrix @ start)
    for _ in range(_ITERATIONS):
        other, _ = np.linalg.qr(matrix.T @ basis)
        basis, _ = np.linalg.qr(matrix @ other)
    return basis
