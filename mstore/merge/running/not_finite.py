"""New elements that are not finite: infinite or NaN in a merge, and finite in its base.

Counts them in a chunk while its inputs and its output are in memory.  Rows of the memo table and
receipts of interrupted merges keep the counts of their chunk, so they are known of every chunk.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.running.loading import Bytes, Loaded
from mstore.numeric.codes import INFINITIES, ITEMSIZES

_SIGN: Final = {2: 0x8000, 4: 0x80000000}


def not_finite(data: Bytes, dtype: str) -> npt.NDArray[np.bool_]:
    """Return bool[elements]: which of these stored elements are infinite or NaN."""
    size = ITEMSIZES[dtype]
    bits = data.view(f"<u{size}")
    found: npt.NDArray[np.bool_] = (bits & ~bits.dtype.type(_SIGN[size])) >= INFINITIES[dtype]
    return found


class NotFinite(msgspec.Struct, frozen=True, gc=False):
    """Counts of elements that are infinite or NaN, and are finite in the base.

    made: those among them that are finite in every expert, too: the merge made them.
    """

    new: int = 0
    made: int = 0

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.new + other.new, self.made + other.made)


ALL_FINITE: Final = NotFinite()


def count_new(loaded: Loaded, out: Bytes) -> NotFinite:
    """Count the elements of a chunk that are not finite in its output and finite in the base."""
    task, tensor = loaded.task, loaded.task.tensor
    if _is_finite(out, tensor.out_dtype):
        return ALL_FINITE
    base, *experts = loaded.sides
    new = not_finite(out, tensor.out_dtype)
    new &= ~not_finite(base[: task.n * ITEMSIZES[tensor.base_dtype]], tensor.base_dtype)
    made = new.copy()
    for row, side in zip(task.rows, experts, strict=True):
        # An adapter's product is made here: its factors may be finite.
        if row.factors is None:
            made &= ~not_finite(side[: task.n * ITEMSIZES[row.dtype]], row.dtype)
    return NotFinite(int(new.sum()), int(made.sum()))


def _is_finite(data: Bytes, dtype: str) -> bool:
    """Return whether all of these stored elements are finite.

    Two maxima, of the bits as signed and as unsigned numbers, take a fifth of the time of a mask
    and a comparison.  Of positive elements the largest bits are the first maximum, of negative
    ones the second.
    """
    size, infinity = ITEMSIZES[dtype], INFINITIES[dtype]
    if data.view(f"<i{size}").max() >= infinity:
        return False
    highest = int(data.view(f"<u{size}").max())
    return highest < _SIGN[size] | infinity
