"""The combined product of one module, as two factors, from the factors of the adapters.

Everything here is in memory but a combined product of many elements, which is a mapped file.

Elements are combined in float32, in the order of the adapters, one operation after the other as
PEFT's, never fused: so the result depends on nothing but the elements.  Matrices come in runs of
elements, those of all in the same steps, and may come several times: thresholds are found by
counting, so none is in memory as a whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key
from mstore.merge.combination.methods import FREQUENCY, Select, Setting
from mstore.models.adapters.low_rank import Factors
from mstore.models.adapters.truncation import (
    Doubles,
    Singles,
    decomposed,
    decomposed_product,
    norm_of_product,
    squares_left,
)
from mstore.numeric import halves
from mstore.numeric.codes import INFINITIES
from mstore.numeric.halves import Bits
from mstore.terms.errors import Incompatible

_RUN: Final = 1 << 22
"""Elements of a product at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The product of one adapter: scale * up @ down.

    down: float32[rank, columns]. up: float32[rows, rank]. position: which adapter, from 0.
    """

    down: Singles
    up: Singles
    scale: float
    weight: float
    position: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        return self.up.shape[0], self.down.shape[1]

    def runs(self) -> Iterator[Singles]:
        """Yield the elements of the product in runs, each a sum in the order of the rank."""
        factors = Factors(self.up, self.down, np.array([self.scale], dtype=np.float32), None)
        size = math.prod(self.shape)
        for first in range(0, size, _RUN):
            n = min(_RUN, size - first)
            found = np.empty(4 * n, dtype=np.uint8)
            factors.apply(np.zeros(4 * n, dtype=np.uint8), "F32", first, n, found)
            yield found.view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Truncated:
    """A combined product, truncated.

    squares_left: of lora_A and lora_B, the squared norms of the combined product and of what they
    leave of it.
    """

    down: Singles
    up: Singles
    squares_left: Callable[[Singles, Singles], tuple[float, float]]


def joined(read: Sequence[Read]) -> tuple[Singles, Singles]:
    """Return lora_A and lora_B whose product is the weighted sum of the products."""
    down = [np.float32(one.scale) * (np.float32(one.weight) * one.down) for one in read]
    return np.concatenate(down), np.concatenate([one.up for one in read], axis=1)


def united(
    read: Sequence[Read], names: tuple[str, str], setting: Setting
) -> tuple[Singles, Singles]:
    """Return lora_A and lora_B, each combined from those of the adapters; names: theirs."""
    weights = [one.weight * one.scale for one in read]
    roots = [math.sqrt(abs(weight)) for weight in weights]
    # lora_A has the sign: on both it would be lost.
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    return (
        _combined([one.down for one in read], signed, read, names[0], setting),
        _combined([one.up for one in read], roots, read, names[1], setting),
    )


def _combined(
    factors: Sequence[Singles],
    weights: Sequence[float],
    read: Sequence[Read],
    name: str,
    setting: Setting,
) -> Singles:
    terms = [
        Term(partial(_whole, factor.reshape(-1)), weight, one.position)
        for factor, weight, one in zip(factors, weights, read, strict=True)
    ]
    (found,) = combined(terms, name, factors[0].size, setting)
    return found.reshape(factors[0].shape)


def _whole(elements: Singles) -> Iterator[Singles]:
    """Yield all elements in one run."""
    yield elements


def truncated(
    read: Sequence[Read], module: str, rank: int, setting: Setting, directory: Path
) -> Truncated:
    """Return factors of at most a rank whose product is near the combined products.

    lora_A has singular vectors, lora_B the others times the singular values, as PEFT's have.
    directory: for a file without a name.
    """
    u: Singles | Doubles
    values: Singles | Doubles
    v: Singles | Doubles
    keeps_all = setting.method.select is Select.ALL or setting.density >= 1
    if keeps_all and not setting.method.elects:
        # A sum of products is a product: no matrix is needed.
        left = np.concatenate([one.up.astype(np.float64) for one in read], axis=1)
        right = np.concatenate(
            [one.weight * one.scale * one.down.astype(np.float64) for one in read]
        )
        u, values, v = decomposed_product(left, right)
        measure = partial(_left_of_product, left, right, float(np.square(values).sum()))
    else:
        matrix = _product(read, module, setting, directory)
        seed = zlib.crc32(module.encode())
        u, values, v = decomposed(matrix, min(rank, *matrix.shape), seed=seed)
        measure = partial(_left_of_matrix, matrix)
    up = (u[:, :rank] * values[:rank]).astype(np.float32)
    down = v[:rank].astype(np.float32)
    if setting.clamp is not None:
        high = np.quantile(np.concatenate([up.reshape(-1), down.reshape(-1)]), setting.clamp)
        down, up = (np.clip(one, -high, high).astype(np.float32) for one in (down, up))
    return Truncated(down, up, measure)


def _product(read: Sequence[Read], module: str, setting: Setting, directory: Path) -> Singles:
    """Return the combined products as a matrix.  Raises Incompatible if they are too large."""
    terms = [Term(partial(_finite, one, module), one.weight, one.position) for one in read]
    size = math.prod(read[0].shape)
    runs = combined(terms, f"{module}.weight", size, setting)
    data = fs.unnamed(directory, (run.tobytes() for run in runs))
    matrix = np.frombuffer(data, dtype=np.float32).reshape(read[0].shape)
    if not np.isfinite(matrix).all():
        raise _not_finite(module)
    return matrix


def _finite(one: Read, module: str) -> Iterator[Singles]:
    """Yield the runs of a product.  Raises Incompatible, as elections do not count a NaN."""
    for run in one.runs():
        if not np.isfinite(run).all():
            raise _not_finite(module)
        yield run


def _not_finite(module: str) -> Incompatible:
    return Incompatible("its product has elements that are not finite", where=module)


def _left_of_product(
    left: Doubles, right: Doubles, squares: float, down: Singles, up: Singles
) -> tuple[float, float]:
    rest = norm_of_product(np.concatenate([left, -up], axis=1), np.concatenate([right, down]))
    return squares, rest**2


def _left_of_matrix(matrix: Singles, down: Singles, up: Singles) -> tuple[float, float]:
    return squares_left(matrix, up, down)


Source = Callable[[], Iterator[Singles]]
"""Gives the elements of one matrix, from the first on, in runs; each call begins anew."""


class Term(msgspec.Struct, frozen=True):
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
