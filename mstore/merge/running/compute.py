"""Computing: from chunks in memory to the bytes of their output, and nothing else.

Runs the kernels.  Knows neither where inputs come from (`loading`) nor where the output goes, nor
in which order chunks are wanted.  The kernels release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.kernels import Mix, count_ties, mix_chunk
from mstore.merge.running.loading import Bytes, Loaded


def blend(
    loaded: Loaded, mix: Mix, quotas: npt.NDArray[np.int64] | Sequence[int], out: Bytes
) -> tuple[int, ...]:
    """Run the kernel into `out`, uint8[>= task.out_bytes]; returns what `mix_chunk` does."""
    task, tensor = loaded.task, loaded.task.tensor
    return mix_chunk(
        mix,
        loaded.sides[0],
        tensor.base_dtype,
        loaded.sides[1:],
        [row.dtype for row in task.rows],
        task.row_of,
        task.n,
        task.first_index,
        tensor.thresholds,
        quotas,
        tensor.keys,
        out,
        tensor.out_dtype,
    )


def tie_counts(loaded: Loaded, wanted: Sequence[bool]) -> list[int]:
    """Per expert the elements of a chunk that tie at its threshold; 0 where it is not `wanted`."""
    task, tensor = loaded.task, loaded.task.tensor
    ties = [0] * len(task.row_of)
    for k, row in enumerate(task.row_of):
        if row >= 0 and wanted[k]:
            ties[k] = count_ties(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
                float(tensor.thresholds[k]),
            )
    return ties
