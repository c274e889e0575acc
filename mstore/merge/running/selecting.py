"""Selecting: which elements of a chunk in memory a method takes, where whole chunks tell.

Owns the masks of methods whose selection follows from ranks, importance, or from what all experts
do to an element.  Those of single elements are the kernel's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mstore.merge.arithmetic import masks, pieces
from mstore.merge.arithmetic.agreement import agreed
from mstore.merge.arithmetic.importance import divergences, importances
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.arithmetic.pieces import Stored
from mstore.merge.arithmetic.spread import Cut, selected, spreads
from mstore.merge.running.loading import Bytes, Loaded


def masks_of(loaded: Loaded) -> Bytes | None:
    """Return uint8[K, n], 1 where an element is taken; None if the kernel itself selects."""
    task, tensor = loaded.task, loaded.task.tensor
    if tensor.mix.ranked:
        return _ranked(loaded)
    if tensor.cut is not None:
        find = _important if tensor.mix.is_important else _varied
        one = find(loaded, tensor.cut)
    elif tensor.mix.needed:
        one = _needed(loaded)
    else:
        return None
    # The same for all experts.
    found = np.empty((len(task.row_of), task.n), dtype=np.uint8)
    found[:] = one
    return found


def _ranked(loaded: Loaded) -> Bytes:
    task, tensor = loaded.task, loaded.task.tensor
    found = np.ones((len(task.row_of), task.n), dtype=np.uint8)
    for k, (row, (density, epsilon)) in enumerate(zip(task.row_of, tensor.mix.ranked, strict=True)):
        if row >= 0 and density < 1:
            moved = masks.deltas(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
            )
            chances = tensor.row_length, density, epsilon
            found[k] = masks.ranked(moved, tensor.keys[k], task.first_index, *chances)
    return found


def _varied(loaded: Loaded, cut: Cut) -> Bools:
    """Return bool[n]: the elements that the spread of what is loaded selects."""
    found = np.empty(loaded.task.n, dtype=np.bool_)
    for start, end, sides in _pieces(loaded):
        at = loaded.task.first_index + start
        found[start:end] = selected(spreads(sides, end - start), cut, at)
    return found


def _needed(loaded: Loaded) -> Bools:
    """Return bool[n]: the elements that enough of what is loaded needs."""
    mix = loaded.task.tensor.mix
    ratios, least = [ratio for ratio, _ in mix.needed], mix.needed[0][1]
    found = np.zeros(loaded.task.n, dtype=np.bool_)
    for start, end, sides in _pieces(loaded):
        one = agreed(sides, mix.weights.tolist(), ratios, least)
        if one is not None:
            found[start:end] = one
    return found


def _important(loaded: Loaded, cut: Cut) -> Bools:
    """Return bool[n]: the elements of the only expert that matter as much as the threshold."""
    task, tensor = loaded.task, loaded.task.tensor
    if not task.rows:
        return np.zeros(task.n, dtype=np.bool_)
    found = np.empty(task.n, dtype=np.bool_)
    sides = _stored(loaded)[:2]
    for start, end, (base, expert) in pieces.rows(sides, tensor.row_length, task.n):
        divergence = divergences(base, expert, tensor.row_length)
        found[start:end] = importances(base, expert, divergence) >= np.float32(cut.value)
    return found


def _pieces(loaded: Loaded) -> Iterator[tuple[int, int, list[Singles | None]]]:
    """Yield where a piece starts and ends, and the deltas of each expert, None for one not read."""
    base, *rows = _stored(loaded)
    for start, end, moved in pieces.deltas(base, rows, loaded.task.n):
        yield start, end, [None if row < 0 else moved[row] for row in loaded.task.row_of]


def _stored(loaded: Loaded) -> list[Stored]:
    """Return the base and the rows that are loaded, with their element types."""
    task = loaded.task
    dtypes = [task.tensor.base_dtype, *(row.dtype for row in task.rows)]
    return list(zip(loaded.sides[: len(dtypes)], dtypes, strict=True))
