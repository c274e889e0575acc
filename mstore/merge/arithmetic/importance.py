"""Importance: how much an element of an expert matters, for runs of whole rows.

It is |expert - base| times the Kullback-Leibler divergence of the row: of the softmax of the
expert's row from that of the base's, 1e-8 added to each share.  (As in mergekit 0.1.5, which
computes it in the type of the tensors; here it is computed in float64 and rounded to float32.)  A
tensor with fewer than two dimensions is one row.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import address
from mstore.numeric.passes import Pass

_divergences: Final = Pass(
    "mstore.merge.arithmetic.importance_passes",
    "divergences",
    "ppiipp",
    ("merge/arithmetic/importance_passes.py",),
)


def divergences(base: Singles, expert: Singles, row_length: int) -> Singles:
    """Return the divergence of each row, float32[n / row_length], NaN if it is not finite.

    base, expert: float32[n], contiguous, whole rows.
    """
    rows = base.size // row_length
    found = np.empty(rows, dtype=np.float32)
    scratch = np.empty((2, row_length), dtype=np.float64)
    base, expert = np.ascontiguousarray(base), np.ascontiguousarray(expert)
    _divergences(address(base), address(expert), rows, row_length, address(scratch), address(found))
    return found


def importances(base: Singles, expert: Singles, divergence: Singles) -> Singles:
    """Return float32[n]; divergence: of each row.  Equal elements have none."""
    sizes = np.abs(expert - base).reshape(divergence.size, -1)
    found: Singles = sizes * divergence[:, None]
    return found.reshape(-1)
