"""Memory: how many threads may compute at a time so that a process stays within its bound.

The process is that of the merge, or the worker of an executor: each slice carries the result
(`slices.Bounds`), and one that computes several slices at a time may take the bound for each.

The chunks in flight grow with a merge: each thread holds one batch of the base and of every
participating expert, plus decoding buffers, and a few outputs wait to be written.  The rest (the
interpreter, compiled kernels, a codec's buffers for its current block, records of the plan's
tensors) is a reserve that does not grow with experts.  Arithmetic only.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from mstore.merge.running.loading import SPARE_SIDES
from mstore.merge.running.slices import BATCH_BYTES, Bounds, batch_chunks
from mstore.merge.running.task import Tasks, item_size
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, phrase
from mstore.terms.sizes import format_size

MEMORY: Final = 512 << 20
"""Default limit of anonymous memory, in bytes: of a merge, or of a slice computed elsewhere."""

RESERVE: Final = 128 << 20
"""The part of it that is not for chunks: the fixed working memory of the process."""


class _Need(msgspec.Struct, frozen=True):
    """Bytes for one thread's inputs and for one output, of the largest tensor."""

    sides: int
    output: int
    largest: str

    def of(self, threads: int) -> int:
        """Return the bytes for this many threads."""
        # Outputs, plain and encoded: those waiting, one per thread, and the one being written.
        return RESERVE + threads * self.sides + 2 * (2 * threads + 2) * self.output

    def fitting(self, memory: int, threads: int) -> int:
        """Return how many of these threads fit, perhaps none."""
        return next((count for count in range(threads, 0, -1) if self.of(count) <= memory), 0)


def bounds(tasks: Tasks, *, memory: int, threads: int) -> Bounds:
    """Fit as many of `threads` as possible.  Raises BadRequest if the largest chunk is too big."""
    shapes = _shapes(tasks)
    alone = _need(shapes, 0)
    count = alone.fitting(memory, threads)
    if not count:
        least = alone.of(1)
        raise BadRequest(
            f"{format_size(memory)} of memory is too little: {format_size(RESERVE)} is the fixed "
            "working memory of the process, and one chunk of the base and of each expert takes "
            f"{format_size(least - RESERVE)} more",
            where=alone.largest,
            hint=phrase(
                "the least that works: {memory}",
                memory=Option("memory", -(-least >> 20) << 20),
            ),
        )
    # Small tensors share a batch as long as that costs no thread.
    shared = (BATCH_BYTES, BATCH_BYTES // 4, BATCH_BYTES // 16)
    fits = (size for size in shared if _need(shapes, size).of(count) <= memory)
    return Bounds(count, 2 * count, next(fits, 0))


class _Shape(NamedTuple):
    """The memory needs of one tensor.

    They are the rows held, the elements of its own batch, and the item size of the narrower of base
    and output, of the widest side and of the output.
    """

    rows: int
    elements: int
    narrow: int
    wide: int
    out: int


class _Shapes(NamedTuple):
    """The distinct shapes of a plan, with the first tensor of each; elements of all tensors."""

    first: dict[_Shape, str]
    elements: int


def _shapes(tasks: Tasks) -> _Shapes:
    first: dict[_Shape, str] = {}
    total = 0
    for planned in tasks.plan.tensors:
        members = tasks.members(planned.name)
        tensor = tasks.tensor(planned.name)
        base, out = item_size(tensor.base_dtype), item_size(tensor.out_dtype)
        wide = max([base, *[item_size(expert.dtype) for expert in members.experts]])
        there = int(members.present.sum(axis=0).max(initial=0))
        elements = min(tensor.elements, tensor.chunk_elements * batch_chunks(tensor))
        total += tensor.elements
        beside = tensor.selection.mask_bytes(there)
        if tensor.row_factors is not None:
            beside += tensor.row_factors.bytes_each(len(members.experts))
        masks = -(-beside // wide)
        shape = _Shape(1 + SPARE_SIDES + there + masks, elements, min(base, out), wide, out)
        first.setdefault(shape, planned.name)
    return _Shapes(first, total)


def _need(shapes: _Shapes, together: int) -> _Need:
    """Return the largest need; together: as in Bounds."""
    sides, output, largest = 0, 0, ""
    for one, name in shapes.first.items():
        elements = max(one.elements, min(shapes.elements, together // one.narrow))
        needed = one.rows * elements * one.wide
        if needed > sides:
            sides, largest = needed, name
        output = max(output, elements * one.out)
    return _Need(sides, output, largest)
