"""Gram matrices at rest, and what they make of deltas, written a second time in numpy.

Nothing here imports the code under test.  Float64, one numpy operation at a time, sums by ascending
index: `turns` has the bits of the promise, and `nearest` the least squares that they solve.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Double = npt.NDArray[np.float64]


def packed(rng: np.random.Generator, inputs: int, width: int) -> Array:
    """A Gram matrix of random inputs that vary together, of blocks of `width`: uint8[blocks, n].

    Every ninth input is nothing.
    """
    width = min(width, inputs)
    rows = []
    for first in range(0, inputs, width):
        count = min(width, inputs - first)
        drawn = rng.standard_normal((count + 8, count)) + rng.standard_normal((count + 8, 1))
        drawn *= 10.0 ** rng.uniform(-1, 1, count)
        drawn[:, ::9] = 0 if count > 1 else drawn[:, ::9]
        gram = np.zeros((width, width))
        gram[:count, :count] = drawn.T @ drawn / len(drawn)
        roots = np.sqrt(np.diag(gram)).astype(np.float32)
        both = np.outer(roots, roots)[np.tril_indices(width, -1)]
        below = gram[np.tril_indices(width, -1)]
        near = np.rint(127 * np.divide(below, both, out=np.zeros(below.size), where=both > 0))
        row = struct.pack(f"<{width}f", *roots) + near.astype(np.int8).tobytes()
        rows.append(np.frombuffer(row, dtype=np.uint8))
    return np.array(rows)


def unpacked(stored: Array, width: int) -> tuple[Double, Double]:
    """The roots of mean squares, float64[width], and the correlations, of one block."""
    roots = np.array(struct.unpack(f"<{width}f", stored[: 4 * width].tobytes()))
    below = struct.unpack(f"{width * (width - 1) // 2}b", stored[4 * width :].tobytes())
    found, at = np.eye(width), 0
    for i in range(width):
        found[i, :i] = np.array(below[at : at + i]) / 127.0
        found[:i, i] = found[i, :i]
        at += i
    return roots, found


def turns(grams: Sequence[Array], weights: Sequence[float], shrink: float, width: int) -> Array:
    """M_k of each expert, float32[K, blocks, width, width]; those of equal blocks are made once."""
    count, blocks = len(grams), len(grams[0])
    found = np.empty((count, blocks, width, width), dtype=np.float32)
    for block in range(blocks):
        sides = [unpacked(one[block], width) for one in grams]
        squares = np.zeros(width)
        for (roots, _), weight in zip(sides, weights, strict=True):
            squares = squares + weight * (roots * roots)
        root = np.sqrt(squares)
        there = root > 0
        safe = np.where(there, root, 1.0)
        own = []
        for (roots, correlations), weight in zip(sides, weights, strict=True):
            ours = np.where(there, roots / safe, 0.0)
            part = (weight * ours)[:, None] * ours * (shrink * correlations)
            lower = np.tril(part, -1)
            alone = weight / sum(weights)
            own.append(lower + lower.T + np.diag(np.where(there, weight * ours * ours, alone)))
        total = np.zeros((width, width))
        for one in own:
            total = total + one
        np.fill_diagonal(total, 1.0)
        inverse = inverted(total)
        for k, one in enumerate(own):
            made = np.zeros((width, width))
            for inner in range(width):
                made = made + one[:, inner, None] * inverse[inner]
            found[k, block] = safe[:, None] * made / safe
    return found


def inverted(matrix: Double) -> Double:
    """The inverse, by elimination without pivots."""
    found = matrix.copy()
    for p in range(len(found)):
        pivot = found[p, p]
        assert pivot > 1e-9
        found[p, p] = 1.0
        found[p] = found[p] / pivot
        factors = found[:, p].copy()
        factors[p] = 0.0
        others = np.arange(len(found)) != p
        found[others, p] = 0.0
        found = found - factors[:, None] * found[p]
    return found


def turned(deltas: Sequence[Double], matrices: Array) -> Double:
    """The sum of the deltas, float64[rows, columns], each times its matrix."""
    count, blocks, width, _ = matrices.shape
    rows, columns = deltas[0].shape
    total = np.zeros((rows, blocks * width))
    for k in range(count):
        wide = np.zeros((rows, blocks * width))
        wide[:, :columns] = deltas[k]
        parts = wide.reshape(rows, blocks, width)
        for inner in range(width):
            step = parts[:, :, inner, None] * matrices[k, :, inner].astype(np.float64)
            total = total + step.reshape(rows, -1)
    return total[:, :columns]
