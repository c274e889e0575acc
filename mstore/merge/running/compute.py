"""Computing: from chunks in memory to the bytes of their output, and nothing else.

Runs the kernels.  Does not know where inputs come from (`loading`), where the output goes, or in
which order chunks are computed.  The kernels release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.kernels import count_ties, mix_chunk
from mstore.merge.arithmetic.spread import TOGETHER, Cut, selected, spreads
from mstore.merge.running.loading import Bytes, Loaded
from mstore.numeric.codes import ITEMSIZES


def blend(
    loaded: Loaded, quotas: npt.NDArray[np.int64] | Sequence[int], out: Bytes
) -> tuple[int, ...]:
    """Run the kernel into `out`, uint8[>= task.out_bytes]; return the result of `mix_chunk`."""
    tensor = loaded.task.tensor
    chunk = chunk_of(loaded, quotas)
    return mix_chunk(tensor.mix, *chunk, out, tensor.out_dtype, masks_of(loaded))


def masks_of(loaded: Loaded) -> Bytes | None:
    """Return the masks of a method that ranks or selects elements, uint8[K, n], else None."""
    task, tensor = loaded.task, loaded.task.tensor
    if tensor.cut is not None:
        whole = np.empty((len(task.row_of), task.n), dtype=np.uint8)
        whole[:] = _selected(loaded, tensor.cut)
        return whole
    if not tensor.mix.ranked:
        return None
    found = np.ones((len(task.row_of), task.n), dtype=np.uint8)
    for k, (row, (density, epsilon)) in enumerate(zip(task.row_of, tensor.mix.ranked, strict=True)):
        if row >= 0 and density < 1:
            sizes = masks.magnitudes(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
            )
            chances = tensor.row_length, density, epsilon
            found[k] = masks.ranked(sizes, tensor.keys[k], task.first_index, *chances)
    return found


def _selected(loaded: Loaded, cut: Cut) -> npt.NDArray[np.bool_]:
    """Return bool[n]: the elements that the spread of what is loaded selects."""
    task, base = loaded.task, loaded.task.tensor.base_dtype
    found = np.empty(task.n, dtype=np.bool_)
    for start in range(0, task.n, TOGETHER):
        n = min(TOGETHER, task.n - start)
        moved = [
            masks.deltas(
                loaded.sides[0][start * ITEMSIZES[base] :],
                base,
                loaded.sides[1 + place][start * ITEMSIZES[row.dtype] :],
                row.dtype,
                n,
            )
            for place, row in enumerate(task.rows)
        ]
        sides = [None if row < 0 else moved[row] for row in task.row_of]
        found[start : start + n] = selected(spreads(sides, n), cut, task.first_index + start)
    return found


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
