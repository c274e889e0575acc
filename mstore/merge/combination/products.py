"""The combined product of one module, as two factors, from the factors of the adapters.

Everything here is in memory but a combined product of many elements, which is a mapped file.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from mstore import fs
from mstore.merge.combination.elements import ElementRule, Term
from mstore.models.adapters.low_rank import Factors
from mstore.models.adapters.truncation import (
    Doubles,
    Singles,
    decomposed,
    decomposed_product,
    norm_of_product,
    squares_left,
)
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
class ModuleProducts:
    """What the adapters have for one module.

    names: of lora_A and lora_B. directory: for files without a name.
    """

    name: str
    read: Sequence[Read]
    names: tuple[str, str]
    directory: Path


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """lora_A and lora_B of the result.

    squares_left: of them as they are stored, the squared norms of the combined product and of what
    they leave of it; None of factors that are combined as they are.
    """

    down: Singles
    up: Singles
    squares_left: Callable[[Singles, Singles], tuple[float, float]] | None = None


def joined(read: Sequence[Read]) -> Combined:
    """Return factors whose product is the weighted sum of the products."""
    down = [np.float32(one.scale) * (np.float32(one.weight) * one.down) for one in read]
    return Combined(np.concatenate(down), np.concatenate([one.up for one in read], axis=1))


def united(module: ModuleProducts, elements: ElementRule) -> Combined:
    """Return factors that are each combined from those of the adapters."""
    weights = [one.weight * one.scale for one in module.read]
    roots = [math.sqrt(abs(weight)) for weight in weights]
    # lora_A has the sign: on both it would be lost.
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    downs, ups = [one.down for one in module.read], [one.up for one in module.read]
    return Combined(
        _united(downs, signed, module, module.names[0], elements),
        _united(ups, roots, module, module.names[1], elements),
    )


def _united(
    factors: Sequence[Singles],
    weights: Sequence[float],
    module: ModuleProducts,
    name: str,
    elements: ElementRule,
) -> Singles:
    terms = [
        Term(in_one_run(factor), weight, one.position)
        for factor, weight, one in zip(factors, weights, module.read, strict=True)
    ]
    (found,) = elements.combined(terms, name, factors[0].size)
    return found.reshape(factors[0].shape)


def in_one_run(values: Singles) -> Callable[[], Iterator[Singles]]:
    """Return a source of all elements of a matrix in one run."""
    return lambda: iter([values.reshape(-1)])


def of_elements(
    module: ModuleProducts, rank: int, elements: ElementRule, clamp: float | None
) -> Combined:
    """Return factors of at most a rank whose product is near the combined products."""
    if elements.is_sum:
        # A sum of products is a product: no matrix is needed.
        left = np.concatenate([one.up.astype(np.float64) for one in module.read], axis=1)
        right = np.concatenate(
            [one.weight * one.scale * one.down.astype(np.float64) for one in module.read]
        )
        return of_product(left, right, rank, clamp)
    matrix = _product(module, elements)
    seed = zlib.crc32(module.name.encode())
    found = decomposed(matrix, min(rank, *matrix.shape), seed=seed)
    return Combined(*_truncated(*found, rank, clamp), partial(_left_of_matrix, matrix))


def of_product(left: Doubles, right: Doubles, rank: int, clamp: float | None = None) -> Combined:
    """Return factors of at most a rank whose product is near left @ right."""
    u, values, v = decomposed_product(left, right)
    measure = partial(_left_of_product, left, right, float(np.square(values).sum()))
    return Combined(*_truncated(u, values, v, rank, clamp), measure)


def _truncated(
    u: Singles | Doubles,
    values: Singles | Doubles,
    v: Singles | Doubles,
    rank: int,
    clamp: float | None,
) -> tuple[Singles, Singles]:
    """Return lora_A and lora_B of a decomposition.

    lora_A has singular vectors, lora_B the others times the singular values, as PEFT's have.
    """
    up = (u[:, :rank] * values[:rank]).astype(np.float32)
    down = v[:rank].astype(np.float32)
    if clamp is not None:
        high = np.quantile(np.concatenate([up.reshape(-1), down.reshape(-1)]), clamp)
        down, up = (np.clip(one, -high, high).astype(np.float32) for one in (down, up))
    return down, up


def _product(module: ModuleProducts, elements: ElementRule) -> Singles:
    shape = module.read[0].shape
    terms = [
        Term(partial(_finite, one, module.name), one.weight, one.position) for one in module.read
    ]
    runs = elements.combined(terms, f"{module.name}.weight", math.prod(shape))
    data = fs.unnamed(module.directory, (run.tobytes() for run in runs))
    matrix = np.frombuffer(data, dtype=np.float32).reshape(shape)
    if not np.isfinite(matrix).all():
        raise not_finite(module.name)
    return matrix


def _finite(one: Read, module: str) -> Iterator[Singles]:
    """Yield the runs of a product.  Raises Incompatible, as elections do not count a NaN."""
    for run in one.runs():
        if not np.isfinite(run).all():
            raise not_finite(module)
        yield run


def not_finite(module: str) -> Incompatible:
    """Return the error of a module whose combined product float32 does not hold."""
    return Incompatible("its product has elements that are not finite", where=module)


def _left_of_product(
    left: Doubles, right: Doubles, squares: float, down: Singles, up: Singles
) -> tuple[float, float]:
    rest = norm_of_product(np.concatenate([left, -up], axis=1), np.concatenate([right, down]))
    return squares, rest**2


def _left_of_matrix(matrix: Singles, down: Singles, up: Singles) -> tuple[float, float]:
    return squares_left(matrix, up, down)
