"""Matrices combined element by element: which elements count, and what becomes of them.

Elements are combined in float32, in the order of the adapters, one operation after the other as
PEFT's, never fused: so the result depends on nothing but the elements.  Matrices come in runs of
elements, those of all in the same steps, and may come several times: thresholds are found by
counting, so none is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key
from mstore.models.adapters.truncation import Singles
from mstore.numeric import halves
from mstore.numeric.codes import INFINITIES
from mstore.numeric.halves import Bits

TOTAL: Final = "total"
"""The sign of the sum of the elements, not weighted."""
FREQUENCY: Final = "frequency"
"""The sign that more of the elements have."""
SIGNS: Final = (TOTAL, FREQUENCY)


class Select(Enum):
    """Which elements of a matrix count."""

    ALL = "all"
    LARGEST = "largest"
    DRAWN = "drawn"


Source = Callable[[], Iterator[Singles]]
"""Gives the elements of one matrix, from the first on, in runs; each call begins anew."""


class Term(msgspec.Struct, frozen=True):
    """One of the matrices: its elements, its weight, and which adapter, from 0, it is of."""

    source: Source
    weight: float
    position: int


class ElementRule(msgspec.Struct, frozen=True):
    """How elements are combined.

    density: the share of elements that `select` keeps. sign: how the majority is found whose sign
    elements must have to count, None if all count. seed: of the draws.
    """

    select: Select = Select.ALL
    density: float = 1.0
    sign: str | None = None
    seed: int = 0

    @property
    def is_sum(self) -> bool:
        """Whether the result is the weighted sum of all elements."""
        return self._keeps_all and self.sign is None

    @property
    def _keeps_all(self) -> bool:
        return self.select is Select.ALL or self.density >= 1

    def combined(self, terms: Sequence[Term], name: str, size: int) -> Iterator[Singles]:
        """Yield the combined elements, in the runs of the sources.

        name, size: of the matrices; draws follow from the name, and densities are shares of the
        size.
        """
        kept = [self._kept(term, name, size) for term in terms]
        weights = [np.float32(term.weight) for term in terms]
        for parts in zip(*kept, strict=True):
            if self.sign is not None:
                yield _elected(parts, weights, self.sign)
            else:
                yield _summed([weight * part for weight, part in zip(weights, parts, strict=True)])

    def _kept(self, term: Term, name: str, size: int) -> Iterator[Singles]:
        """Return the elements of one matrix that count; 0 in place of the others."""
        if self._keeps_all:
            return term.source()
        if self.select is Select.LARGEST:
            return _largest(term.source, int(self.density * size))
        return _drawn(term.source(), mask_key(self.seed, term.position, name), self.density)


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
    high, left = halves.place(halves.uppers(map(_magnitude_bits, source())), count)
    low, left = halves.place(halves.lowers(map(_magnitude_bits, source()), high), left)
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
