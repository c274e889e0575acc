"""Multipliers: what an adapter makes of a base's weight by multiplying it.

IA3 scales rows or columns (Liu 2022, arXiv 2205.05638). OFT turns blocks of columns, as PEFT 0.21
has it, or of rows, as LyCORIS and sd-scripts have it, by orthogonal matrices (Qiu 2023, arXiv
2306.07280). GLoRA adds a product of the base, and one beside it (Chavan 2023, arXiv 2306.07967).
Owns what their tensors mean and whether they fit; `low_rank` applies them to rows.

Everything is computed in a fixed order, a rotation in float64, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.store.objects.tensor import FactoredProduct

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

    changes: float32[runs, size, size]. of_rows: runs of rows, of which a column w becomes
    w + change @ w. scales: float32[rows] for the result, else None.
    """

    changes: Singles
    of_rows: bool = False
    scales: Singles | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self.changes.nbytes + (0 if self.scales is None else self.scales.nbytes))


class BaseProduct(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Makes W + scale * (W a b + up down), where W a b is of the inputs at each place.

    a, down: float32[inputs, rank], [rank, columns]. b, up: float32[rank, inputs], [rows, rank].
    """

    a: Singles
    b: Singles
    up: Singles
    down: Singles
    scale: Singles

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(sum(one.nbytes for one in (self.a, self.b, self.up, self.down)))


Multiplier = VectorScale | BlockTurn | BaseProduct


class MultiplierForm(NamedTuple):
    """One form.  Both functions take the shape of the base's tensor first.

    require: raises ValueError unless the adapter's tensors, of these shapes, fit. made: takes the
    settings, which the adapter's config has, with the product's scale at the end, and the tensors.
    parts: what the tensors are, in their order, where keys say so. divisor: as of a `FactorForm`;
    OFT takes alpha as it is. turns_rows: whether rows depend on each other, as many as
    the last dimension of the first tensor.
    """

    require: Callable[..., None]
    made: Callable[..., Multiplier]
    parts: tuple[str, ...] = ()
    divisor: int | None = None
    takes_alpha: bool = False
    turns_rows: bool = False


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
    terms, limit, _ = settings
    size = block_size(own.shape[1])
    count = math.prod(base[1:]) // size
    with np.errstate(all="ignore"):
        change = rotations(own.astype(np.float64), int(terms), limit).transpose(axes)
        # One block may be that of all columns.
        change = np.broadcast_to(change - np.eye(size), (count, size, size))
    return BlockTurn(_runs(change))


def _runs(change: npt.NDArray[Any]) -> Singles:
    """Put blocks beside each other, so that a pass has enough to do."""
    count, size, _ = change.shape
    several = max(n for n in range(1, max(1, _TOGETHER // size) + 1) if count % n == 0)
    runs = np.zeros((count // several, several, size, several, size), np.float32)
    for number in range(several):
        runs[:, number, :, number, :] = change[number::several]
    return runs.reshape(-1, several * size, several * size)


def _require_turned_rows(base: Shape, own: Shape, scales: Shape | None = None) -> None:
    if len(own) != 3 or own[1] != own[2] or len(base) < 2 or own[0] * own[1] != base[0]:
        raise ValueError("mstore turns blocks of rows, a square matrix for each block")
    if own[1] > MOST_SIZE:
        raise ValueError(f"blocks of {own[1]}; the limit is {MOST_SIZE}")
    if scales is not None and (scales[:1] != base[:1] or math.prod(scales) != base[0]):
        raise ValueError("a number for each row")


def _turned_rows(
    base: Shape, settings: Sequence[float], own: Singles, scales: Singles | None = None
) -> Multiplier:
    """R^T W with R = (I + Q) (I - Q)^-1, the transposed of Cayley's form of Q."""
    most = settings[-1] * base[0]
    with np.errstate(all="ignore"):
        skew = own.astype(np.float64)
        skew = skew - skew.transpose(0, 2, 1)
        # For constrained OFT, alpha says how large Q may be, in all blocks together.
        norm = math.sqrt(_exact_sum(skew.reshape(-1) ** 2)) + 1e-8
        if most > 0 and norm > most:
            skew = skew * (most / norm)
        one = np.broadcast_to(np.eye(own.shape[1]), skew.shape)
        change = (_solved(one + skew, one - skew) - one).astype(np.float32)
    return BlockTurn(change, of_rows=True, scales=None if scales is None else scales.reshape(-1))


# -- of LyCORIS -----------------------------------------------------------------------------------


def _require_channels(base: Shape, own: Shape, side: Shape) -> None:
    if math.prod(side) != 1 or len(base) < 2 or math.prod(own) not in base[:2]:
        raise ValueError("a vector for inputs or outputs, and a number that says which")


def _channels(base: Shape, _: Sequence[float], own: Singles, side: Singles) -> Multiplier:
    """W times 1 + the vector, of inputs or outputs; where only one is so long, of that."""
    of_rows = not side.reshape(-1)[0] if base[0] == base[1] else own.size == base[0]
    places = 1 if of_rows else math.prod(base[2:])
    return VectorScale(np.repeat(np.float32(1) + own.reshape(-1), places), of_rows=of_rows)


def _require_base_product(base: Shape, a1: Shape, a2: Shape, b1: Shape, b2: Shape) -> None:
    if len(base) < 2:
        raise ValueError("a vector has no inputs")
    flat = [(one[0], math.prod(one[1:])) for one in (a1, a2, b1, b2) if one]
    rank = a2[0] if a2 else 0
    wanted = [(base[1], rank), (rank, base[1]), (base[0], rank), (rank, math.prod(base[1:]))]
    if not rank or flat != wanted:
        raise ValueError("a1 and b1 are of rank columns, a2 and b2 of rank rows")


def _base_product(
    base: Shape, settings: Sequence[float], a1: Singles, a2: Singles, b1: Singles, b2: Singles
) -> Multiplier:
    a, b, up, down = (np.ascontiguousarray(one.reshape(len(one), -1)) for one in (a1, a2, b1, b2))
    return BaseProduct(a, b, up, down, np.array(settings[-1:], np.float32))


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
    "ia3 of lycoris": MultiplierForm(_require_channels, _channels, ("vector", "on_input")),
    "oft of lycoris": MultiplierForm(
        _require_turned_rows, _turned_rows, ("oft_blocks",), takes_alpha=True, turns_rows=True
    ),
    "oft of lycoris rescaled": MultiplierForm(
        _require_turned_rows,
        _turned_rows,
        ("oft_blocks", "rescale"),
        takes_alpha=True,
        turns_rows=True,
    ),
    "glora": MultiplierForm(
        _require_base_product, _base_product, ("a1", "a2", "b1", "b2"), divisor=1
    ),
}
"""By name.  The parts are those of LyCORIS."""

_BY_PARTS: Final = {frozenset(form.parts): name for name, form in MULTIPLIERS.items() if form.parts}


def multiplier_of(parts: Collection[str]) -> str | None:
    """Return which form has these parts, None for none that is known."""
    return _BY_PARTS.get(frozenset(parts))


def rows_together(product: FactoredProduct) -> int:
    """Return how many rows of a tensor depend on each other, where a product multiplies it."""
    form = MULTIPLIERS.get(product.form)
    return product.factors[0].shape[-1] if form is not None and form.turns_rows else 1
