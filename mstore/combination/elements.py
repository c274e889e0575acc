"""The arithmetic of combinations: several matrices of one shape to one, element by element.

In float32, in the order of the adapters, one operation after the other as PEFT's, never fused: so
the result depends on nothing but the elements.  Matrices come in runs of elements, those of all in
the same steps, and may come several times: thresholds are found by counting, so none is in memory
as a whole.  Does not own what a matrix is, a factor or a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mstore.combination.methods import FREQUENCY, Select, Setting
from mstore.frozen import frozen
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.random import mask_key
from mstore.numeric import halves
from mstore.numeric.codes import INFINITIES
from mstore.numeric.halves import Bits

Singles = npt.NDArray[np.float32]
Source = Callable[[], Iterator[Singles]]
"""Gives the elements of one matrix, from the first on, in runs; each call begins anew."""


@frozen
class Term:
    """One of the matrices: its elements, its weight, and which adapter, from 0, it is of."""

    source: Source
    weight: float
    position: int


def combined(terms: Sequence[Term], name: str, size: int, setting: Setting) -> Iterator[Singles]:
    """Yield the combined elements, in the runs of the sources.

    name, size: of the matrices; draws follow from the name, and densities are shares of the size.
    """
    kept = [_kept(term, name, size, setting) for term in terms]
    weights = [np.float32(term.weight) for term in terms]
    for parts in zip(*kept, strict=True):
        if setting.method.elects:
            yield _elected(parts, weights, setting.sign)
        else:
            yield _summed([weight * part for weight, part in zip(weights, parts, strict=True)])


def _kept(term: Term, name: str, size: int, setting: Setting) -> Iterator[Singles]:
    """Return the elements of one matrix that count; 0 in place of the others."""
    if setting.method.select is Select.ALL or setting.density >= 1:
        return term.source()
    if setting.method.select is Select.LARGEST:
        return _largest(term.source, int(setting.density * size))
    key = mask_key(setting.seed, term.position, name)
    return _drawn(term.source(), key, setting.density)


def _drawn(
    runs: Iterator[Singles], key: npt.NDArray[np.uint32], density: float
) -> Iterator[Singles]:
    limit = round(density * 2.0**32)
    first = 0
    for values in runs:
        yield values * masks.even(key, first, values.size, limit) / np.float32(density)
        first += values.size


def _largest(source: Source, count: int) -> Iterator[Singles]:
    """Yield the `count` elements of the largest magnitude; of equal ones the first."""
    threshold, equal = _threshold(source, count)
    for values in source():
        bits = _magnitude_bits(values)
        at = np.flatnonzero(bits == threshold)[:equal]
        equal -= at.size
        keep = bits > threshold
        keep[at] = True
        yield np.where(keep, values, np.float32(0))


def _threshold(source: Source, count: int) -> tuple[int, int]:
    """Return the bits of the count-th largest magnitude, and how many equal to it are kept."""
    if count == 0:
        return INFINITIES["F32"], 0
    counts = halves.no_counts()
    for values in source():
        halves.count_upper(_magnitude_bits(values), counts)
    high, left = halves.place(counts, count)
    counts = halves.no_counts()
    for values in source():
        halves.count_lower(_magnitude_bits(values), high, counts)
    low, left = halves.place(counts, left)
    return halves.joined(high, low), left


def _magnitude_bits(values: Singles) -> Bits:
    """Return numbers that order as the magnitudes do."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def _summed(parts: Sequence[Singles]) -> Singles:
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _elected(parts: Sequence[Singles], weights: Sequence[np.float32], method: str) -> Singles:
    """Return the mean of the weighted elements that have the sign of the majority; of none, 0."""
    signs = [np.sign(part) for part in parts]
    votes = _summed(signs if method == FREQUENCY else parts)
    majority = np.where(votes >= 0, np.float32(1), np.float32(-1))
    agree = [sign == majority for sign in signs]
    shares = [
        np.where(one, weight * part, np.float32(0))
        for one, weight, part in zip(agree, weights, parts, strict=True)
    ]
    count = _summed([one.astype(np.float32) for one in agree])
    return np.divide(_summed(shares), np.maximum(count, np.float32(1)), dtype=np.float32)
