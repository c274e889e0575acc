"""Computing: from chunks in memory to the bytes of their output, and nothing else.

Runs the kernels, and counts the elements that become infinite or NaN and are finite in the base:
rows of the memo table and receipts of interrupted merges keep the counts of their chunk, so they
are known of every chunk.  Does not know where inputs come from (`loading`), where the output goes,
or in which order chunks are computed.  The kernels release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.kernels import count_ties
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.running.loading import Bytes, Loaded
from mstore.merge.running.task import TensorTask
from mstore.numeric.codes import INFINITIES, ITEMSIZES
from mstore.terms.errors import Incompatible


def blend(
    loaded: Loaded, quotas: npt.NDArray[np.int64] | Sequence[int], out: Bytes
) -> tuple[int, ...]:
    """Run the kernel into `out`, uint8[>= task.out_bytes]; return the result of `mix_chunk`.

    Raises Incompatible, with the tensor's name, for elements that the kernel refuses.
    """
    tensor = loaded.task.tensor
    chunk = chunk_of(loaded, quotas)
    own = masks_of(tensor, chunk), row_weights_of(tensor, chunk)
    try:
        return tensor.kernel(tensor.mix, chunk, out, tensor.out_dtype, *own)
    except Incompatible as error:
        error.locate(tensor.name)
        raise


def masks_of(tensor: TensorTask, chunk: Chunk) -> Bytes | None:
    """Return uint8[K, n], 1 where an element is taken; None if the kernel itself selects."""
    weights = tensor.mix.weights.tolist()
    return tensor.selection.masks(
        chunk, row_length=tensor.row_length, weights=weights, cut=tensor.cut
    )


def row_weights_of(tensor: TensorTask, chunk: Chunk) -> Singles | None:
    """Return the factor of each row of each expert, float32[R, K]; None if the tensor has them."""
    if tensor.row_factors is None:
        return None
    whole, weights = tensor.selection.is_whole, tensor.mix.weights.tolist()
    return tensor.row_factors.weights(chunk, tensor.row_length, weights, whole=whole)


def chunk_of(loaded: Loaded, quotas: npt.NDArray[np.int64] | Sequence[int]) -> Chunk:
    """Return a chunk in the form that passes take; quotas as for `mix_chunk`."""
    task, tensor = loaded.task, loaded.task.tensor
    return Chunk(
        base=loaded.sides[0],
        base_dtype=tensor.base_dtype,
        rows=loaded.sides[1:],
        row_dtypes=[row.dtype for row in task.rows],
        row_of=task.row_of,
        n=task.n,
        first_index=task.first_index,
        thresholds=tensor.thresholds,
        quotas=quotas,
        keys=tensor.keys,
    )


def tie_counts(loaded: Loaded, wanted: Sequence[bool]) -> list[int]:
    """Count, per threshold, the elements that tie at it; 0 where it is not `wanted`."""
    task, tensor = loaded.task, loaded.task.tensor
    ties = [0] * len(wanted)
    for slot in range(len(wanted)):
        row = task.row_of[slot % len(task.row_of)]
        if row >= 0 and wanted[slot]:
            ties[slot] = count_ties(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
                float(tensor.thresholds[slot]),
            )
    return ties


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
