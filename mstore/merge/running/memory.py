"""Memory: how many threads may compute at a time so that a merge stays within its bound.

What grows with a merge is the chunks in flight: a thread holds one group of the base and of every
expert that takes part, with what decoding them takes, and a few outputs wait to be written.  The
rest (the interpreter, compiled kernels, what a codec needs for the block that it is at, records of
the plan's tensors) is a reserve that does not grow with experts.  Arithmetic only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from mstore.errors import BadRequest
from mstore.merge.running.loading import SPARE_SIDES
from mstore.merge.running.slices import group_chunks
from mstore.merge.running.task import Tasks, item_size

MEMORY: Final = 512 << 20
"""Most anonymous memory of a merge, in bytes, unless it is told otherwise."""

RESERVE: Final = 128 << 20
"""Of that, what is not for chunks."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """threads: that compute side by side.  ahead: groups under way beyond the one written now."""

    threads: int
    ahead: int


def bounds(tasks: Tasks, *, memory: int, threads: int) -> Bounds:
    """As many of `threads` as fit.  Raises BadRequest where the largest chunk alone does not."""
    sides, output, largest = 0, 0, ""
    # Small tensors are loaded together until they are as long as a group of a large one.
    total = sum(math.prod(tasks.members(one.name).base.shape) for one in tasks.plan.tensors)
    for planned in tasks.plan.tensors:
        members = tasks.members(planned.name)
        rows = 1 + SPARE_SIDES + int(members.present().sum(axis=0).max(initial=0))
        dtypes = (members.base.dtype, *(expert.dtype for expert in members.experts))
        tensor = tasks.tensor(planned.name)
        elements = min(total, tensor.chunk_elements * group_chunks(tensor))
        needed = rows * elements * max(map(item_size, dtypes))
        if needed > sides:
            sides, largest = needed, planned.name
        output = max(output, elements * item_size(tensor.out_dtype))
    for count in range(threads, 0, -1):
        ahead = 2 * count
        # Outputs, plain and encoded: those waiting, one a thread, and the one being written.
        if RESERVE + count * sides + 2 * (ahead + 2) * output <= memory:
            return Bounds(count, ahead)
    least = RESERVE + sides + 2 * 4 * output
    raise BadRequest(
        f"one chunk of every expert takes {least} bytes of memory, and {memory} are allowed",
        where=largest,
        hint=f"--memory {-(-least >> 20) + 1}MiB",
    )
