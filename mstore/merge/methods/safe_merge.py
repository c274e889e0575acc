"""safe_merge: the expert's matrices; where one left what alignment changed, also a safe expert's.

The subspace of alignment is that of a matrix V = aligned - unaligned of two further models, which
are companions of the merge.  A change d of the first expert is judged by the cosine of V V^T d and
d, as SafeMERGE's authors do; how long V is has no effect on it.  All tensors but matrices stay the
first expert's, as does a matrix that it did not change: the authors only judge what an adapter has.

**The sums.** With <a, b> the sum of products of elements, the cosine needs

    <d, d>,   <V V^T d, d> = |V^T d|^2,   <V V^T d, V V^T d>

None of them needs V V^T d itself.  For a matrix of n <= m columns, with M = V^T d and G = V^T V,
they are <d, d>, <M, M> and <G M, M>; for a wide one, with S = V V^T and T = d d^T, <d, d>, <S, T>
and <S T, S>.  So rows of a tall matrix are read in runs; only squares of the smaller side are
kept in float64.  For the product d = L R of an adapter, as the authors have it, with
X = V^T L and B = R R^T, they are <L^T L, B>, <X^T X, B> and <(V X)^T V X, B>.

All products are made in one order on every machine (`numeric.matmul`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
from blake3 import blake3

from mstore.merge.arithmetic.masks import Singles
from mstore.merge.measures import BEYOND
from mstore.merge.measures.deltas import Chunks
from mstore.merge.measures.facts import Side, TensorFacts
from mstore.merge.measures.grid import Companion, Floats, Shape
from mstore.merge.methods.combinations import Gram, Mixed
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter, Range, Scalar
from mstore.merge.methods.selection import Selection, Whole
from mstore.numeric.matmul import add_blocks
from mstore.numeric.sums import halved
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option

ALIGNED: Final = "aligned"
UNALIGNED: Final = "unaligned"

_TILE: Final = 1 << 20
"""About so many elements of a matrix are in memory as float64 at a time."""
_STRIP: Final = 128
"""Rows of a product that a thread makes at a time."""
_FACTS: Final = b"safe_merge 1"
"""Names how the sums are made: another order may round otherwise."""

Sums = tuple[float, float, float]
"""<d, d>, <V V^T d, d> and <V V^T d, V V^T d>."""
_STAYS: Final[Sums] = (0.0, 0.0, 0.0)


def _matrix(name: str, shape: Shape) -> Shape | None:
    return shape if len(shape) == 2 else None


def _cosine(gram: Gram) -> float | None:
    change, projected = math.sqrt(gram[1][1]), math.sqrt(gram[2][2])
    if not change:
        return None
    # What alignment did not touch projects to nothing: the authors' cosine is 0 then.
    return gram[1][2] / (change * projected) if projected else 0.0


def _mix(gram: Gram, parameters: Mapping[str, Scalar], weights: Sequence[float]) -> Mixture:
    cosine = _cosine(gram)
    stays = cosine is None or cosine >= parameters["threshold"]
    share = 1.0 if stays else float(parameters["alpha"])
    return Mixture(0.0, (share, 1.0 - share), keeps_base=True)


class Projected(Mixed):
    """A mixture by the inner products of the first expert's change and its projection."""

    companions = (
        Companion(ALIGNED, of=None, shape=_matrix),
        Companion(UNALIGNED, of=None, shape=_matrix, unlike=ALIGNED),
    )

    def facts(self, select: type[Selection]) -> str:
        return "the cosine of the first expert's change with its projection"

    def _gram(self, operation: Operation, facts: TensorFacts) -> Gram:
        change, along, projected = _sums(facts)
        return [[0.0, 0.0, 0.0], [0.0, change, along], [0.0, along, projected]]


def _sums(facts: TensorFacts) -> Sums:
    [aligned], [unaligned] = facts.companions[ALIGNED], facts.companions[UNALIGNED]
    if len(facts.base.shape) != 2 or aligned is None or unaligned is None or facts.is_base(1):
        return _STAYS
    # The order of the two counts for nothing: V V^T is the same.
    pair = sorted((aligned, unaligned), key=lambda side: bytes(side[0]))
    key = _FACTS + bytes(pair[0][0]) + bytes(pair[1][0])
    what = [
        (facts.sides[1][0], blake3(key + bytes([n])).digest(length=16)) for n in range(len(_STAYS))
    ]
    change, along, projected = facts.once(what, lambda: _measured(facts, aligned, unaligned))
    lack = BEYOND, "its change cannot be projected"
    change = facts.finite(change, (0, 1), lack)
    if not (math.isfinite(along) and math.isfinite(projected)):
        raise BadRequest(
            f"the {ALIGNED} or the {UNALIGNED} model has infinite or NaN elements, or their "
            f"difference is {BEYOND}",
            where=facts.name,
            hint=Option("skip", (facts.name,)),
        )
    return change, along, projected


def _measured(facts: TensorFacts, aligned: Side, unaligned: Side) -> Sums:
    rows, columns = facts.base.shape
    factors = facts.product(1)
    with np.errstate(all="ignore"):
        if factors is not None:
            return _of_product(facts.pool, facts.deltas((unaligned, aligned)), *factors)
        tiles = _both(facts, aligned, unaligned)
        if columns <= rows:
            return _tall(facts.pool, tiles, columns)
        return _wide(facts.pool, tiles, rows, columns)


def _both(facts: TensorFacts, aligned: Side, unaligned: Side) -> Iterator[tuple[Singles, Singles]]:
    """Yield V and d, float32[r, columns] each, in runs of rows."""
    base, expert, columns = facts.sides[0], facts.sides[1], facts.base.shape[1]
    others = [side for side in (aligned, unaligned) if side[0] != base[0]]
    if len(others) == 1:
        # What is the base's is read once, and so are blocks that expert and other share.
        for change, vectors in _tiles(facts.deltas((base, expert, *others)), columns):
            yield vectors, change
        return
    apart = _tiles(facts.deltas((unaligned, aligned)), columns)
    changes = _tiles(facts.deltas((base, expert)), columns)
    for [vectors], [change] in zip(apart, changes, strict=True):
        yield vectors, change


def _tiles(chunks: Chunks, columns: int) -> Iterator[Singles]:
    """Yield the deltas of each expert in runs of whole rows: float32[experts, r, columns]."""
    length = max(1, _TILE // columns) * columns
    found = np.empty((chunks.experts, length), dtype=np.float32)
    filled = 0
    for number in chunks.numbers:
        for pieces in chunks.deltas(number):
            at, size = 0, pieces[0].size
            while at < size:
                count = min(size - at, length - filled)
                for own, piece in zip(found, pieces, strict=True):
                    own[filled : filled + count] = piece[at : at + count]
                at, filled = at + count, filled + count
                if filled == length:
                    yield found.reshape(chunks.experts, -1, columns)
                    filled = 0
    if filled:
        yield found[:, :filled].reshape(chunks.experts, -1, columns)


def _tall(pool: Executor, tiles: Iterator[tuple[Singles, Singles]], columns: int) -> Sums:
    across, own = np.zeros((2, columns, columns))
    change = 0.0
    for vectors, moved in tiles:
        _add(pool, across, vectors.T, moved)
        _add(pool, own, vectors.T, vectors)
        change += _inner(moved, moved)
    return change, _inner(across, across), _inner(_product(pool, own, across), across)


def _wide(
    pool: Executor, tiles: Iterator[tuple[Singles, Singles]], rows: int, columns: int
) -> Sums:
    every = np.empty((2, rows, columns), dtype=np.float32)
    own, changes = np.zeros((2, rows, rows))
    change, at = 0.0, 0
    for vectors, moved in tiles:
        end = at + len(vectors)
        every[0, at:end], every[1, at:end] = vectors, moved
        change, at = change + _inner(moved, moved), end
    step = max(1, _TILE // rows)
    for start in range(0, columns, step):
        for sums, part in zip((own, changes), every[:, :, start : start + step], strict=True):
            _add(pool, sums, part, part.T)
    return change, _inner(own, changes), _inner(_product(pool, own, changes), own)


def _of_product(pool: Executor, chunks: Chunks, left: Singles, right: Singles) -> Sums:
    rank, columns = right.shape
    across, projected = np.zeros((columns, rank)), np.zeros((rank, rank))
    at = 0
    for [vectors] in _tiles(chunks, columns):
        _add(pool, across, vectors.T, left[at : at + len(vectors)])
        at += len(vectors)
    for [vectors] in _tiles(chunks, columns):
        made = _product(pool, vectors, across)
        projected += _product(pool, made.T, made)
    sums = _product(pool, left.T, left), _product(pool, across.T, across), projected
    rights = _product(pool, right, right.T)
    change, along, square = (_inner(one, rights) for one in sums)
    return change, along, square


def _add(pool: Executor, sums: Floats, left: Singles, right: Singles) -> None:
    """Add left @ right to sums; threads take rows of the result, which changes no bit."""
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)[None]

    def some(at: int) -> None:
        own = slice(at, at + _STRIP)
        add_blocks(sums[own], left[own], right)

    # All are awaited, and errors raised.
    list(pool.map(some, range(0, len(left), _STRIP)))


def _product(pool: Executor, one: Singles | Floats, other: Singles | Floats) -> Floats:
    """Return the product of two matrices, each rounded to 24 bits of its elements."""
    found = np.zeros((len(one), other.shape[1]))
    (left, up), (right, more) = _rounded(one), _rounded(other)
    _add(pool, found, left, right)
    return np.ldexp(found, up + more)


def _rounded(values: Singles | Floats) -> tuple[Singles, int]:
    """Return float32 and the power of two that they are to be multiplied by."""
    _, power = np.frexp(np.abs(values).max(initial=0.0))
    return np.ldexp(values, -power).astype(np.float32), int(power)


def _inner(one: Singles | Floats, other: Singles | Floats) -> float:
    return halved((one.astype(np.float64) * other).ravel())


SAFE_MERGE: Final = Method(
    name="safe_merge",
    summary="the first expert; a matrix whose change left what alignment changed is mixed with a "
    "safe expert's",
    formula="expert_0 where cos(V V^T d_0, d_0) >= threshold, V = aligned - unaligned, else alpha "
    "expert_0 + (1 - alpha) expert_1, the safe one; each matrix by itself",
    source="Djuhera et al. 2025, arXiv 2503.17239 (SafeMERGE)",
    parameters=(
        Parameter("threshold", "float", 0.35, Range(0.0, 1.0)),
        Parameter("alpha", "float", 0.8, Range(0.0, 1.0)),
    ),
    select=Whole,
    combine=Projected(_mix, cosine=_cosine),
    experts=2,
    weighted=False,
    mind="what is left out is the base's, which is not the safe expert's",
    is_ours=True,
)
