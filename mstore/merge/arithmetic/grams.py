"""Gram matrices: how much a layer's inputs vary together, and what differences are multiplied by.

A Gram matrix at rest is blocks on its diagonal, of `width` inputs each: uint8[blocks, size].  The
last block may have fewer inputs; the others are zeros.  A block is

    float32[width]       the root of the mean square of each input, little-endian
    int8[width (width - 1) / 2]
                         the correlations of inputs below the diagonal, row by row, 127 for 1; not
                         centred: the mean of a product over the roots of the mean squares

Eight bits lose nothing that a merge shows: correlations are shrunk before they are inverted.

Owns that form and the matrices M_k = G_k (sum of the G_k)^-1 (`grams.c`).  No BLAS or LAPACK, whose
bits differ between processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import address
from mstore.numeric.matmul import Doubles, Singles
from mstore.numeric.passes import Pass
from mstore.terms.errors import Incompatible
from mstore.terms.phrases import Option

_turns: Final = Pass(
    "mstore.merge.arithmetic.grams", "turns", "piiippppp", ("merge/arithmetic/grams.c",)
)

Bytes = npt.NDArray[np.uint8]

Form = tuple[int, int]
"""How many inputs a block of a Gram matrix has, and how many its layer has."""

KEPT: Final = 2
"""Tensors whose matrices are kept: those of one block of layers often have the same inputs."""


class Turns(msgspec.Struct, frozen=True, eq=False):
    """What the differences of each expert are multiplied by, from the right.

    matrices: float32[K, blocks, width, width]. norms: float64[K], not less than the largest
    singular value of any of an expert's; empty if they were not asked for.
    """

    matrices: Singles
    norms: Doubles


def width_of(size: int) -> int | None:
    """Return how many inputs a block of so many bytes is of; None if there is no such block."""
    width = round(((49 + 8 * size) ** 0.5 - 7) / 2)
    return width if width > 0 and bytes_of(width) == size else None


def bytes_of(width: int) -> int:
    """Return the bytes of a block of so many inputs."""
    return 4 * width + width * (width - 1) // 2


def turns(
    packed: Sequence[Bytes], weights: Sequence[float], shrink: float, *, norms: bool = True
) -> Turns:
    """Return M_k of each expert.  Raises Incompatible for a sum of matrices that has no inverse.

    packed: of each expert, uint8[blocks, size], all of one shape. weights: of the experts, w_k G_k
    are added. shrink: correlations of different inputs are multiplied by it.
    """
    blocks, size = packed[0].shape
    width = width_of(size)
    assert width is not None
    assert all(one.shape == (blocks, size) for one in packed)
    own = [np.ascontiguousarray(one) for one in packed]
    places = np.array([address(one) for one in own], dtype=np.int64)
    given = np.array([*weights, sum(weights), shrink])
    count, state = len(own), np.zeros(1, dtype=np.int64)
    scratch = np.empty((2 * width + 6) * width)
    found = np.empty((count, blocks, width, width), dtype=np.float32)
    values = np.empty(count if norms else 0)
    _turns(
        *(address(places), count, blocks, width, address(given), address(scratch)),
        *(address(found), address(values) if norms else 0, address(state)),
    )
    if state[0] >= 0:
        first = int(state[0]) * width
        raise Incompatible(
            f"the sum of the Gram matrices has no inverse: inputs {first} to {first + width - 1} "
            "vary together too much",
            hint=Option("parameters", {"shrink": 0.5}),
        )
    # Rounded up.  A sum of `width` products is off by so many units of the sum of its magnitudes,
    # and that norm is at most the root of `width` times the other, for both factors.
    return Turns(found, np.sqrt(np.sqrt(np.sqrt(values))) * (1 + 2.0**-50 * (width + 2) ** 2))


def require(packed: Sequence[Bytes], form: Form) -> None:
    """Raise Incompatible unless these are Gram matrices of this form."""
    width, inputs = form
    for one in packed:
        blocks, size = one.shape
        theirs = width_of(size)
        if theirs is None:
            raise Incompatible("its Gram matrix has blocks of no size that one has")
        if blocks != -(-inputs // theirs):
            raise Incompatible(
                f"its Gram matrix is of {(blocks - 1) * theirs + 1} to {blocks * theirs} inputs, "
                f"and the layer has {inputs}: it is of another model"
            )
        if theirs != width:
            is_whole = blocks == 1
            has = "one block" if is_whole else f"{blocks} blocks of {theirs}"
            raise Incompatible(
                f"its Gram matrix has {has}, and the merge takes {-(-inputs // width)} of {width} "
                "inputs",
                hint=Option("parameters", {"block": "full" if is_whole else theirs}),
            )
        roots = np.ascontiguousarray(one[:, : 4 * width]).view("<f4")
        if not ((roots >= 0) & (roots < np.inf)).all():
            raise Incompatible("its Gram matrix has roots that are no numbers")


_kept: dict[tuple[bytes, Form], Turns] = {}
_lock: Final = Lock()


def kept_turns(
    key: bytes, packed: Sequence[Bytes], weights: Sequence[float], shrink: float, form: Form
) -> Turns:
    """Return `turns` of matrices of a form; the last ones are kept for the next chunks.

    key: a digest of all before `form`.  Raises as `require` and `turns`, for a plan that is not
    ours.
    """
    with _lock:
        found = _kept.pop((key, form), None)
        if found is None:
            while len(_kept) >= KEPT:
                del _kept[next(iter(_kept))]
            require(packed, form)
            found = turns(packed, weights, shrink, norms=False)
        _kept[key, form] = found
        return found
