"""Multipliers: what an adapter makes of a base's weight by multiplying it.

IA3 scales rows or columns (Liu 2022, arXiv 2205.05638); OFT turns blocks of columns by orthogonal
matrices (Qiu 2023, arXiv 2306.07280), as PEFT 0.21 has both.  Owns what their tensors mean and
whether they fit; `low_rank` applies them to rows.

Everything is computed in a fixed order, a rotation in float64, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Shape = tuple[int, ...]

MOST_SIZE: Final = 512
"""Of a block that is turned: its matrix takes time by the third power of this."""
_TOGETHER: Final = 64
"""Columns that are turned together: what a pass computes at a time."""


class VectorScale(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Scales rows, or columns.  values: float32[rows], or [columns]."""

    values: Singles
    of_rows: bool

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes


class BlockTurn(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Turns runs of columns: a row w of a run becomes w + w @ change of the run.

    changes: float32[runs, size, size].
    """

    changes: Singles

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.changes.nbytes


Multiplier = VectorScale | BlockTurn


class MultiplierForm(NamedTuple):
    """One form.  Both take the shape of the base's tensor first.

    require: raises ValueError unless the adapter's tensor, of this shape, fits. made: takes the
    settings, which the adapter's config has, and the tensor.
    """

    require: Callable[[Shape, Shape], None]
    made: Callable[[Shape, Sequence[float], Singles], Multiplier]


# -- IA3 ------------------------------------------------------------------------------------------


def _scale(*, inputs: bool, transposed: bool = False) -> MultiplierForm:
    """Return the form of a vector for inputs or outputs; transposed: of [inputs, outputs]."""
    axis = int(inputs != transposed)

    def require(base: Shape, own: Shape) -> None:
        if axis >= len(base):
            raise ValueError("a vector has no inputs")
        length = base[axis]
        vector: Shape = (1, length) if inputs else (length, 1)
        if len(base) == 1:
            # A bias: of a matrix or of a convolution.
            vector = own if math.prod(own) == length else ()
        elif len(base) > 2:
            vector = (1, length, *(1 for _ in base[2:]))
        if own != vector:
            raise ValueError(f"a vector of {length} for {'inputs' if inputs else 'outputs'}")

    def made(base: Shape, _: Sequence[float], own: Singles) -> Multiplier:
        # A column of a convolution is an input at one place.
        places = math.prod(base[2:]) if axis else 1
        return VectorScale(np.repeat(own.reshape(-1), places), of_rows=not axis)

    return MultiplierForm(require, made)


# -- OFT ------------------------------------------------------------------------------------------


def block_size(numbers: int) -> int:
    """Return the rows of a skew matrix of so many numbers; raises ValueError."""
    size = (1 + math.isqrt(1 + 8 * numbers)) // 2
    if numbers < 1 or size * (size - 1) // 2 != numbers:
        raise ValueError(f"{numbers} numbers are no skew matrix")
    return size


def _require_blocks(base: Shape, own: Shape) -> None:
    if len(own) != 2 or len(base) < 2:
        raise ValueError("mstore turns blocks of a matrix, a row of numbers for each block")
    size, columns = block_size(own[1]), math.prod(base[1:])
    if size > MOST_SIZE:
        raise ValueError(f"blocks of {size}; the limit is {MOST_SIZE}")
    if columns % size or own[0] not in (1, columns // size):
        raise ValueError(f"{own[0]} blocks of {size} for {columns} columns")


def _turn_inputs(base: Shape, settings: Sequence[float], own: Singles) -> Multiplier:
    """A layer's inputs x become x R, so that its weight becomes W R^T."""
    return _turn(base, settings, own, (0, 2, 1))


def _turn_rows(base: Shape, settings: Sequence[float], own: Singles) -> Multiplier:
    """The rows of an embedding are what it gives: W R."""
    return _turn(base, settings, own, (0, 1, 2))


def _turn(
    base: Shape, settings: Sequence[float], own: Singles, axes: tuple[int, int, int]
) -> Multiplier:
    terms, limit = settings
    size = block_size(own.shape[1])
    count = math.prod(base[1:]) // size
    with np.errstate(all="ignore"):
        change = rotations(own.astype(np.float64), int(terms), limit).transpose(axes)
        # One block may be that of all columns.
        change = np.broadcast_to(change - np.eye(size), (count, size, size)).astype(np.float32)
    several = max(n for n in range(1, max(1, _TOGETHER // size) + 1) if count % n == 0)
    runs = np.zeros((count // several, several, size, several, size), np.float32)
    for number in range(several):
        runs[:, number, :, number, :] = change[number::several]
    return BlockTurn(runs.reshape(-1, several * size, several * size))


def rotations(numbers: Doubles, terms: int, limit: float) -> Doubles:
    """Return the orthogonal matrix of each skew one: (I - Q) (I + Q)^-1, by Cayley.

    numbers: [blocks, numbers above the diagonal of Q]. terms: of Neumann's series in place of the
    inverse, as PEFT adds them; 0: none. limit: the largest norm of Q times the root of the number
    of blocks (COFT); 0: none.
    """
    blocks = len(numbers)
    size = block_size(numbers.shape[1])
    if limit:
        norms = np.array([math.sqrt(2 * _exact_sum(row * row)) for row in numbers])
        most = limit / math.sqrt(blocks)
        shrunk = np.where(norms > most, most / np.where(norms > 0, norms, 1), 1.0)
        numbers = numbers * shrunk[:, None]
    skew = np.zeros((blocks, size, size))
    rows, columns = np.triu_indices(size, 1)
    skew[:, rows, columns] = numbers
    skew[:, columns, rows] = -numbers
    one = np.broadcast_to(np.eye(size), skew.shape)
    return _series(one, skew, terms) if terms else _solved(one + skew, one - skew)


def _exact_sum(values: Doubles) -> float:
    """Return the sum, rounded once, in whatever order a machine would add; inf for no number."""
    return math.fsum(values.tolist()) if np.isfinite(values).all() else math.inf


def _series(one: Doubles, skew: Doubles, terms: int) -> Doubles:
    """Return I + 2 Q + 2 Q^2 + ... and the last power once, which is at least the third."""
    total = one + 2 * skew if terms > 1 else one
    if terms > 2:
        last = max(3, terms - 1)
        power = skew
        for exponent in range(2, last + 1):
            power = _product(power, skew)
            total = total + (power if exponent == last else 2 * power)
    return total


def _product(left: Doubles, right: Doubles) -> Doubles:
    out = np.zeros_like(left)
    for k in range(left.shape[2]):
        out += left[:, :, k, None] * right[:, k, None, :]
    return out


def _solved(matrix: Doubles, right: Doubles) -> Doubles:
    """Return matrix^-1 @ right for each block, by elimination (Gauss and Jordan).

    The matrices are I + Q with a skew Q, so every pivot is at least 1, and none is exchanged.
    """
    size = matrix.shape[1]
    both = np.concatenate([matrix, right], axis=2)
    for k in range(size):
        row = both[:, k] / both[:, k, k, None]
        both -= both[:, :, k, None] * row[:, None, :]
        both[:, k] = row
    return both[:, :, size:]


MULTIPLIERS: Final[Mapping[str, MultiplierForm]] = {
    "ia3 outputs": _scale(inputs=False),
    "ia3 inputs": _scale(inputs=True),
    "ia3 outputs transposed": _scale(inputs=False, transposed=True),
    "ia3 inputs transposed": _scale(inputs=True, transposed=True),
    "oft": MultiplierForm(_require_blocks, _turn_inputs),
    "oft embedding": MultiplierForm(_require_blocks, _turn_rows),
}
"""By name."""
