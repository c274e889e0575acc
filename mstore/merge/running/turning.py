"""Turning: the factors of each row of a chunk in memory, where a method mixes rows by angles.

Owns how rows of stored bytes come as what `arithmetic.turns` compares.  The chunk is whole rows.
"""

from __future__ import annotations

import numpy as np

from mstore.merge.arithmetic import masks, turns
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.tiles import rows_together
from mstore.merge.running.loading import Loaded
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.singles import singles


def row_weights_of(loaded: Loaded) -> Singles | None:
    """Return the factor of each row of each expert, float32[R, K]; None if the tensor has them."""
    task, tensor = loaded.task, loaded.task.tensor
    kind = tensor.mix.rows
    if kind is None:
        return None
    weights = tensor.mix.weights.tolist()
    length = tensor.row_length
    found = np.empty((task.n // length, len(task.row_of)), dtype=np.float32)
    step = rows_together(length)
    for start in range(0, task.n, step):
        end = min(start + step, task.n)
        parts = np.zeros((len(task.row_of), (end - start) // length, length), dtype=np.float32)
        for k, row in enumerate(task.row_of):
            if row >= 0 or tensor.mix.is_direct:
                parts[k] = _part(loaded, row, start, end).reshape(-1, length)
        found[start // length : end // length] = turns.factors(kind, parts, weights)
    return found


def _part(loaded: Loaded, row: int, start: int, end: int) -> Singles:
    """Return an expert's elements, or its deltas; of whole experts an absent one is the base."""
    task = loaded.task
    base = loaded.sides[0][start * ITEMSIZES[task.tensor.base_dtype] :]
    if row < 0:
        return singles(base, task.tensor.base_dtype, end - start)
    dtype = task.rows[row].dtype
    stored = loaded.sides[1 + row][start * ITEMSIZES[dtype] :]
    if task.tensor.mix.is_direct:
        return singles(stored, dtype, end - start)
    return masks.deltas(base, task.tensor.base_dtype, stored, dtype, end - start)
