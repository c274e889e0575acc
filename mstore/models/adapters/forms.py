"""Forms of changes of low rank: what the tensors of one module of an adapter make together.

Each form is a product left @ right, exactly: that of LoRA as it stands, others (LoHa, LoKr,
Tucker's form of a convolution) by what their formulas say, of a rank of their own.  So everything
that computes, charges and bounds products needs to know no other form.  Tensors of more than two
dimensions count as matrices, [first dimension, all others].

Sums are in a fixed order, in float32, so factors are the same on every machine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]
Pair = tuple[Singles, Singles]
Shape = tuple[int, ...]


class FactorForm(NamedTuple):
    """One form.

    parts: what its tensors are, in their order. factors: left [rows, rank] and right [rank,
    columns] of these tensors. shape: rows, columns and rank, of their shapes; raises ValueError.
    divisor: which part has as many rows as alpha is divided by; None: a product is not scaled.
    fits: whether a product of this shape is one for a matrix of another, from its first row and
    column on.
    """

    parts: tuple[str, ...]
    factors: Callable[..., Pair]
    shape: Callable[..., Shape]
    divisor: int | None
    fits: Callable[[Shape, Shape], bool] = operator.eq


def _matrix(one: Singles) -> Singles:
    return one.reshape(one.shape[0], -1)


def _plain(up: Singles, down: Singles) -> Pair:
    return _matrix(up), _matrix(down)


def _transposed(up: Singles, down: Singles) -> Pair:
    """The transposed product is that of the transposed factors, in the other order."""
    return down.T, up.T


def _core(core: Singles, other: Singles) -> Singles:
    """Return [i, (columns of other, places)]: the sum over j of core[i, j, places] * other[j]."""
    places = core.reshape(*core.shape[:2], -1)
    rows = other.reshape(other.shape[0], -1)
    out = np.zeros((core.shape[0], rows.shape[1], places.shape[2]), np.float32)
    for number, row in enumerate(rows):
        out += places[:, number, None, :] * row[None, :, None]
    return _matrix(out)


def _tucker(up: Singles, mid: Singles, down: Singles) -> Pair:
    """A convolution as up, a small one, and down (LyCORIS, Yeh 2023, arXiv 2309.14859)."""
    return _matrix(up), _core(mid, down)


def _hadamard(first: Pair, second: Pair) -> Pair:
    """(A B) * (C D), element by element, has the rank of both: of each pair of columns and rows."""
    (a, b), (c, d) = first, second
    left = (a[:, :, None] * c[:, None, :]).reshape(len(a), -1)
    right = (b[:, None, :] * d[None, :, :]).reshape(-1, b.shape[1])
    return left, right


def _loha(a: Singles, b: Singles, c: Singles, d: Singles) -> Pair:
    """(A B) * (C D) (Hyeon-Woo 2021, FedPara, arXiv 2108.06098)."""
    return _hadamard((a, _matrix(b)), (c, _matrix(d)))


def _loha_tucker(
    core: Singles, a: Singles, b: Singles, other: Singles, c: Singles, d: Singles
) -> Pair:
    return _hadamard((a.T, _core(core, b)), (c.T, _core(other, d)))


def _sum(left: Singles, right: Singles) -> Singles:
    out = np.zeros((len(left), right.shape[1]), np.float32)
    for number in range(left.shape[1]):
        out += left[:, number, None] * right[number]
    return out


def _kronecker(w1: Singles, left: Singles, right: Singles) -> Pair:
    """W1 x (left right): W1 x left times I x right, of the rank of `right` times W1's columns."""
    one = np.eye(w1.shape[1], dtype=np.float32)
    return np.kron(w1, left), np.kron(one, right)


def _thin(w2: Singles) -> Pair:
    """A matrix as a product with the identity, on the side where that is smaller."""
    whole = _matrix(w2)
    if whole.shape[0] <= whole.shape[1]:
        return np.eye(len(whole), dtype=np.float32), whole
    return whole, np.eye(whole.shape[1], dtype=np.float32)


def _lokr(w1: Singles, w2: Singles) -> Pair:
    return _kronecker(w1, *_thin(w2))


def _lokr_b(w1: Singles, a: Singles, b: Singles) -> Pair:
    return _kronecker(w1, a, _matrix(b))


def _lokr_t(w1: Singles, core: Singles, a: Singles, b: Singles) -> Pair:
    return _kronecker(w1, a.T, _core(core, b))


def _lokr_a(a: Singles, b: Singles, w2: Singles) -> Pair:
    return _kronecker(_sum(a, b), *_thin(w2))


def _lokr_ab(a: Singles, b: Singles, c: Singles, d: Singles) -> Pair:
    return _lokr_b(_sum(a, b), c, d)


def _lokr_at(a: Singles, b: Singles, core: Singles, c: Singles, d: Singles) -> Pair:
    return _lokr_t(_sum(a, b), core, c, d)


def _vera(b: Singles, up: Singles, down: Singles, d: Singles) -> Pair:
    """b * B and d * A (Kopiczko 2023, arXiv 2310.11454): the matrices are those of all layers."""
    return b[:, None] * up[: len(b)], d[:, None] * down


def _vera_transposed(b: Singles, up: Singles, down: Singles, d: Singles) -> Pair:
    return _transposed(*_vera(b, up, down, d))


# -- shapes ---------------------------------------------------------------------------------------


def _flat(one: Shape) -> Shape:
    return one[0], math.prod(one[1:])


def _fit(left: Shape, right: Shape) -> Shape:
    """Return rows, columns and rank of a product."""
    if len(left) != 2 or len(right) != 2:
        raise ValueError("matrices have two dimensions")
    if left[1] != right[0]:
        raise ValueError(f"{left[1]} columns and {right[0]} rows")
    return left[0], right[1], right[0]


def _back(one: Shape) -> Shape:
    return one[::-1]


def _core_shape(core: Shape, other: Shape) -> Shape:
    rows, columns, *places = core
    return rows, _fit((rows, columns), _flat(other))[1] * math.prod(places)


def _both(first: Shape, second: Shape) -> Shape:
    if first[:2] != second[:2]:
        raise ValueError(f"{list(first[:2])} and {list(second[:2])}")
    return (*first[:2], first[2] * second[2])


def _times(w1: Shape, inner: Shape) -> Shape:
    rows, columns = w1
    return rows * inner[0], columns * inner[1], columns * inner[2]


def _thin_shape(one: Shape) -> Shape:
    whole = _flat(one)
    return (*whole, min(whole))


def _vera_shape(b: Shape, up: Shape, down: Shape, d: Shape) -> Shape:
    [rows], [rank] = b, d
    if up[0] < rows or up[1:] != (rank,) or down[:1] != (rank,) or len(down) != 2:
        raise ValueError("vectors that do not fit the matrices of all layers")
    return rows, down[1], rank


def _vera_back(b: Shape, up: Shape, down: Shape, d: Shape) -> Shape:
    rows, columns, rank = _vera_shape(b, up, down, d)
    return columns, rows, rank


_VERA = ("vera_lambda_b", "vera_B", "vera_A", "vera_lambda_d")
_A, _B, _C, _D = "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"
_W1, _W1A, _W1B = "lokr_w1", "lokr_w1_a", "lokr_w1_b"
_W2, _W2A, _W2B, _T2 = "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"
FORMS: Final[Mapping[str, FactorForm]] = {
    "lora": FactorForm(
        ("up", "down"), _plain, lambda up, down: _fit(_flat(up), _flat(down)), divisor=1
    ),
    "transposed": FactorForm(
        ("up", "down"), _transposed, lambda up, down: _fit(_back(down), _back(up)), divisor=1
    ),
    "tucker": FactorForm(
        ("up", "mid", "down"),
        _tucker,
        lambda up, mid, down: _fit(_flat(up), _core_shape(mid, down)),
        divisor=2,
    ),
    "loha": FactorForm(
        (_A, _B, _C, _D),
        _loha,
        lambda a, b, c, d: _both(_fit(a, _flat(b)), _fit(c, _flat(d))),
        divisor=1,
    ),
    "loha tucker": FactorForm(
        ("hada_t1", _A, _B, "hada_t2", _C, _D),
        _loha_tucker,
        lambda t, a, b, u, c, d: _both(
            _fit(_back(a), _core_shape(t, b)), _fit(_back(c), _core_shape(u, d))
        ),
        divisor=2,
    ),
    "lokr": FactorForm((_W1, _W2), _lokr, lambda w, v: _times(w, _thin_shape(v)), divisor=None),
    "lokr of w2": FactorForm(
        (_W1, _W2A, _W2B), _lokr_b, lambda w, a, b: _times(w, _fit(a, _flat(b))), divisor=2
    ),
    "lokr of w2 tucker": FactorForm(
        (_W1, _T2, _W2A, _W2B),
        _lokr_t,
        lambda w, t, a, b: _times(w, _fit(_back(a), _core_shape(t, b))),
        divisor=3,
    ),
    "lokr of w1": FactorForm(
        (_W1A, _W1B, _W2),
        _lokr_a,
        lambda a, b, w: _times(_fit(a, b)[:2], _thin_shape(w)),
        divisor=1,
    ),
    "lokr of both": FactorForm(
        (_W1A, _W1B, _W2A, _W2B),
        _lokr_ab,
        lambda a, b, c, d: _times(_fit(a, b)[:2], _fit(c, _flat(d))),
        divisor=3,
    ),
    "lokr of both tucker": FactorForm(
        (_W1A, _W1B, _T2, _W2A, _W2B),
        _lokr_at,
        lambda a, b, t, c, d: _times(_fit(a, b)[:2], _fit(_back(c), _core_shape(t, d))),
        divisor=4,
    ),
    "difference": FactorForm(("diff",), _thin, _thin_shape, divisor=None),
    "vera": FactorForm(
        _VERA,
        _vera,
        _vera_shape,
        divisor=None,
        fits=lambda own, wanted: own[0] == wanted[0] and own[1] >= wanted[1],
    ),
    "vera transposed": FactorForm(
        _VERA,
        _vera_transposed,
        _vera_back,
        divisor=None,
        fits=lambda own, wanted: own[0] >= wanted[0] and own[1] == wanted[1],
    ),
}
"""By name.  The suffixes of LoHa and LoKr are those of LyCORIS."""

MOST_RANK: Final = 1 << 14
"""Of a product: its factors are in memory."""

_BY_PARTS: Final = {
    frozenset(form.parts): name for name, form in FORMS.items() if not name.endswith("transposed")
}


def stacked(rows: int, parts: Sequence[tuple[int, Singles, Singles]]) -> Pair:
    """Return products of some rows each as one product of all rows.

    parts: of each, the row where it begins, its left and its right.
    """
    right = np.concatenate([one for _, _, one in parts])
    left = np.zeros((rows, len(right)), np.float32)
    column = 0
    for at, own, other in parts:
        left[at : at + len(own), column : column + len(other)] = own
        column += len(other)
    return left, right


def form_of(parts: Collection[str]) -> str | None:
    """Return which form has these parts, None for none that is known."""
    return _BY_PARTS.get(frozenset(parts))


def product_shape(form: str, shapes: Sequence[Shape]) -> Shape:
    """Return rows, columns and rank of the product of tensors of these shapes.

    Raises ValueError if they do not fit each other, or the rank is out of bounds.
    """
    if not all(shape and all(shape) for shape in shapes):
        raise ValueError("an empty tensor")
    try:
        rows, columns, rank = FORMS[form].shape(*shapes)
    except IndexError as error:
        raise ValueError("too few dimensions") from error
    if rank > MOST_RANK:
        raise ValueError(f"rank {rank}; the limit is {MOST_RANK}")
    return rows, columns, rank
