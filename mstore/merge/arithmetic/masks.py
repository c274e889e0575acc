"""Masks: which elements of an expert's delta a random method keeps, for runs of whole rows.

`passes` draws the masks of methods whose elements all have one probability itself.  This module
makes those of methods whose probabilities follow from the rank of an element within its row, and
what such masks are measured with.  Numpy on float32; only the draws are compiled.

The probability of the element with rank r of n, from 1 for the smallest |d| (of equal ones that
with the lowest index), is density - epsilon + 2 epsilon (r - 1) / (n - 1), in float32 and in the
order of mergekit 0.1.5 (Deep et al. 2024, arXiv 2406.11617, MAGPRUNE).  A row of one element has
the probability density.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import address
from mstore.numeric.code_cache import Pass
from mstore.numeric.singles import singles

_HERE: Final = Path(__file__)
_words: Final = Pass(
    "mstore.merge.arithmetic.mask_passes",
    "words",
    "iiiip",
    (_HERE.with_name("philox.py"), _HERE.with_name("mask_passes.py")),
)
_TOGETHER: Final = 1 << 16
"""Elements that are ranked at a time, at least: the temporary arrays are that large."""

Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


def magnitudes(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
) -> Singles:
    """Return |expert - base| of n elements, float32[n], as the merge's pass has it."""
    return np.abs(deltas(base, base_dtype, row, row_dtype, n))


def deltas(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
) -> Singles:
    """Return expert - base of n elements, float32[n], as the merge's pass has it."""
    one, other = singles(base, base_dtype, n), singles(row, row_dtype, n)
    with np.errstate(invalid="ignore", over="ignore"):
        found: Singles = other - one
    found[one.view(np.uint32) == other.view(np.uint32)] = 0.0
    return found


def draws(key: npt.NDArray[np.uint32], first_index: int, n: int) -> npt.NDArray[np.uint32]:
    """Return the words of elements [first_index, first_index + n): uint32[n]; key: uint32[2]."""
    skipped = first_index % 4
    blocks = (skipped + n + 3) // 4
    found = np.empty(4 * blocks, dtype=np.uint32)
    _words(int(key[0]), int(key[1]), first_index // 4, blocks, address(found))
    return found[skipped : skipped + n]


def even(key: npt.NDArray[np.uint32], first_index: int, n: int, limit: int) -> Bools:
    """Return bool[n]: which elements a mask of one probability, limit / 2^32, keeps."""
    kept: Bools = draws(key, first_index, n).astype(np.uint64) < limit
    return kept


def ranked(
    sizes: Singles,
    key: npt.NDArray[np.uint32],
    first_index: int,
    row_length: int,
    density: float,
    epsilon: float,
) -> Bools:
    """Return bool[n]: which of the elements of whole rows are kept; sizes: their magnitudes."""
    if density >= 1:
        return np.ones(sizes.size, dtype=bool)
    kept = np.empty(sizes.size, dtype=bool)
    step = row_length * max(1, _TOGETHER // row_length)
    for start in range(0, sizes.size, step):
        part = sizes[start : start + step].reshape(-1, row_length)
        chances = probabilities(part, density, epsilon).reshape(-1)
        # Exact: a float32 times 2^32 fits a float64.
        limits = np.rint(chances.astype(np.float64) * 2.0**32)
        kept[start : start + step] = draws(key, first_index + start, part.size) < limits
    return kept


def probabilities(sizes: Singles, density: float, epsilon: float) -> Singles:
    """Return the probability that each element is kept, float32 as sizes[rows, row_length]."""
    length = sizes.shape[1]
    if length == 1:
        return np.full(sizes.shape, density, dtype=np.float32)
    order = np.argsort(sizes, axis=1, kind="stable")
    share = np.arange(length, dtype=np.float32) / np.float32(length - 1)
    chances = share * np.float32(2) * np.float32(epsilon) + np.float32(density - epsilon)
    found = np.empty(sizes.shape, dtype=np.float32)
    np.put_along_axis(found, order, np.broadcast_to(chances, sizes.shape), axis=1)
    return found


def norms(sizes: Singles, kept: Bools) -> Iterator[float]:
    """Yield the sum of the magnitudes, and that of those which are kept, in float64."""
    yield float(sizes.sum(dtype=np.float64))
    yield float(sizes.sum(dtype=np.float64, where=kept))
