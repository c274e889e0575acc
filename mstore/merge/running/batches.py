"""Batches: the chunks of a slice that are loaded and computed together.

Small chunks share a batch, of one tensor or of several, so that neighbours are read in one call.
Does not read anything.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Final

import msgspec

from mstore.merge.running.slices import Run, Slice
from mstore.merge.running.task import ChunkTask, TensorTask, item_size
from mstore.merge.running.ties import TieLedger

BATCH_BYTES: Final = 1 << 20
"""Small chunks are loaded together until one side of them reaches this many bytes."""

_LEAST_BYTES: Final = 1 << 12
"""The least that a chunk counts: a batch has at most 256 chunks."""


class Part(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in a batch, and the tensor's ledger if they pass on ties."""

    run: Run
    tasks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    ledger: TieLedger | None


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks that are loaded together: of one tensor, or of several that are small."""

    slice: Slice
    parts: tuple[Part, ...]

    @property
    def tasks(self) -> list[ChunkTask]:
        """All of them, in order."""
        return [task for part in self.parts for task in part.tasks]

    @property
    def stored_bytes(self) -> int:
        """Bytes at rest of its sides, without what these are differences to."""
        return sum([task.base.stored_bytes + task.expert_bytes for task in self.tasks])

    def fail(self, *, wholly: bool) -> None:
        """Report that this batch failed, and wake whoever waits for one of its chunks.

        wholly: no other chunk of its tensors will be computed either.
        """
        for part in self.parts:
            if part.ledger is not None:
                part.ledger.fail(-1 if wholly else part.tasks[0].number)


def batches(slice: Slice, together: int = BATCH_BYTES) -> Iterator[Batch]:
    """Batch a slice's chunks in order, small ones together.

    together: bytes of a side up to which tensors share a batch; 0 for no sharing.
    """
    parts: list[Part] = []
    count, longest = 0, 0
    for run in slice.runs:
        ledger = run.ledger() if run.tensor.hands_on else None
        step = batch_chunks(run.tensor)
        for first in range(0, len(run.chunks), step):
            cut = builtins.slice(first, first + step)
            part = Part(run, run.chunks[cut], run.keys[cut], ledger)
            length = max(_LEAST_BYTES, *(task.narrow_bytes for task in part.tasks))
            wide = max(longest, length)
            if parts and (count + len(part.tasks)) * wide > together:
                yield Batch(slice, tuple(parts))
                parts, count, wide = [], 0, length
            parts.append(part)
            count, longest = count + len(part.tasks), wide
    if parts:
        yield Batch(slice, tuple(parts))


def batch_chunks(tensor: TensorTask) -> int:
    """How many chunks of a tensor make a batch."""
    width = min(item_size(tensor.base_dtype), item_size(tensor.out_dtype))
    return max(1, BATCH_BYTES // (tensor.chunk_elements * width))
