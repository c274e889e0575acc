"""Orthogonal matching pursuit: vectors as sums of a few others (Pati 1993).

For the rows of tokens that a model lacks: what they are made of in one model is what they are made
of in another (Goddard and Fernandes Neto 2025, arXiv 2506.06607, and mergekit-tokensurgeon 0.1.5).
Products of matrices are summed in an order that depends on the machine, so what this returns is
stored, and used from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

_BATCH_BYTES: Final = 64 << 20
"""Of the orthogonal vectors of a batch of targets; their products with the atoms take as much."""
_BATCH: Final = 128
"""The most targets of a batch: products of more are no faster, and threads have something to do."""
_SMALL: Final = 1e-5
"""A vector with no more than this part of its length left is a sum of the others."""


def pursue(
    targets: Singles, atoms: Singles, k: int, excluded: Numbers, threads: int = 1
) -> Iterator[tuple[Numbers, Singles]]:
    """Yield, for one batch of targets after the other, which atoms they are made of.

    targets: float32[n, width]. atoms: float32[m, width]. k: how many atoms at most. excluded:
    int64[n], an atom that a target must not be made of, -1 for none. Yields int64[b, k] and
    float32[b, k]: the atoms and their factors, 0 where fewer are enough. threads: batches at a
    time; each takes some 200 MB.
    """
    k = min(k, len(atoms), targets.shape[1])
    size = _BATCH_BYTES // (4 * max(1, k * targets.shape[1], len(atoms)))
    size = min(_BATCH, max(1, size))
    spans = [slice(start, start + size) for start in range(0, len(targets), size)]
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda one: _batch(targets[one], atoms, k, excluded[one]), spans)


def _batch(targets: Singles, atoms: Singles, k: int, excluded: Numbers) -> tuple[Numbers, Singles]:
    count, width = targets.shape
    each = np.arange(count)
    taken = np.zeros((count, k), np.int64)
    axes = np.zeros((count, k, width), np.float32)
    # Of each step, what the atom is in the axes so far; the identity where none was taken.
    parts = np.tile(np.eye(k), (count, 1, 1))
    along = np.zeros((count, k))
    left = targets.copy()
    least = _SMALL * np.linalg.norm(targets, axis=1)
    for step in range(k):
        products = np.abs(left @ atoms.T)
        products[each[excluded >= 0], excluded[excluded >= 0]] = -1.0
        products[each[:, None], taken[:, :step]] = -1.0
        best = products.argmax(axis=1)
        atom = atoms[best]
        own = np.zeros((count, step))
        rest = atom.copy()
        # Twice is enough (Giraud 2005) for axes that are orthogonal to float32's precision.
        for _ in range(2):
            along_axes = np.matmul(axes[:, :step], rest[:, :, None])[:, :, 0]
            rest -= np.matmul(along_axes[:, None, :], axes[:, :step])[:, 0]
            own += along_axes
        length = np.linalg.norm(rest, axis=1)
        is_new = (length > _SMALL * np.linalg.norm(atom, axis=1)) & (
            np.linalg.norm(left, axis=1) > least
        )
        taken[:, step] = best
        axis = np.where(is_new[:, None], rest / np.maximum(length, 1e-30)[:, None], np.float32(0))
        axes[:, step] = axis
        parts[is_new, :step, step] = own[is_new]
        parts[is_new, step, step] = length[is_new]
        share = np.einsum("bd,bd->b", left, axis)
        along[:, step] = share
        left -= share[:, None].astype(np.float32) * axis
    factors: npt.NDArray[Any] = np.linalg.solve(parts, along[:, :, None])[:, :, 0]
    return taken, factors.astype(np.float32)
