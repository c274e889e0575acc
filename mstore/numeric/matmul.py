"""Products of matrices in one order of sums: the same bits on every machine, unlike BLAS.

Factors are float32 and sums float64, by ascending inner index (`matmul.c`).  For decisions that a
plan keeps, and for merges.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.numeric.passes import Pass

Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_matmul: Final = Pass("mstore.numeric.matmul", "matmul", "pippiiiiip", ("numeric/matmul.c",))
_SCRATCH: Final = 1 << 15
"""Bytes that the pass works in."""


def add_blocks(sums: Doubles, left: Singles, right: Singles) -> None:
    """Add left @ R to sums, R the matrix with the blocks `right` on its diagonal.

    sums: float64[rows, B * columns], left: float32[rows, B * n]; rows may be apart, elements of one
    are not. right: float32[B, n, columns], contiguous.
    """
    blocks, inner, columns = right.shape
    rows = left.shape[0]
    assert left.shape[1] == blocks * inner
    assert sums.shape == (rows, blocks * columns)
    assert right.flags.c_contiguous
    assert left.strides[1] == left.itemsize or left.shape[1] <= 1
    assert sums.strides[1] == sums.itemsize or sums.shape[1] <= 1
    scratch = np.empty(_SCRATCH + 64, dtype=np.uint8)
    _matmul(
        *(left.ctypes.data, left.strides[0] // 4, right.ctypes.data),
        *(sums.ctypes.data, sums.strides[0] // 8, rows, inner, columns, blocks),
        scratch.ctypes.data + -scratch.ctypes.data % 64,
    )
