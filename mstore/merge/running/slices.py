"""Slices: the self-contained pieces of work that a merge is cut into, their batches and results.

A slice is a run of chunks whose output makes one pack.  It needs no index: any process that sees
the store's packs and its tmp directory can compute it (`runners.execute`).  A batch is the chunks
of a slice that are loaded and computed together: small chunks share one, of one tensor or of
several, so that neighbours are read in one call.  Values only; slices and results can be pickled.

A tensor whose chunks pass on ties is never cut: its chunks are in one slice.  Slices are
idempotent; what they write is garbage until it is published.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.packs import SealedPack
from mstore.merge.running.task import ChunkTask, TensorTask, item_size
from mstore.merge.running.ties import TieLedger
from mstore.terms.ids import BlockId

SLICE_BYTES: Final = 128 << 20
"""Plain bytes of output per slice, unless a tensor that must not be cut has more."""


class TensorChunks(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in order, their memo keys, and the ties that finished chunks took.

    finished: (chunk, ties per expert) of chunks of this tensor that are not computed.
    """

    tensor: TensorTask
    chunks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    finished: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ledger(self) -> TieLedger:
        """Return a new ledger for these chunks."""
        numbers = [task.number for task in self.chunks]
        return TieLedger(self.tensor.quotas.tolist(), numbers, self.finished)


class Bounds(msgspec.Struct, frozen=True):
    """What computing may take: with these, memory stays within a limit (`engine.bounds`).

    threads: how many compute in parallel. ahead: batches under way beyond the current one.
    together: bytes of a side up to which small tensors share a batch (`batches`).
    """

    threads: int
    ahead: int
    together: int


class Slice(msgspec.Struct, frozen=True, eq=False):
    """One piece of work.

    place: where the packs lie that its chunks name by id; store: the store's directory, for packs
    that lie there. target: the pack to write; `execute` makes the name unique. policy: how its
    output is coded, None if it is not kept. bounds: for the process that computes it.
    """

    place: int
    store: Path
    target: Path
    block_size: int
    policy: Policy | None
    bounds: Bounds
    runs: tuple[TensorChunks, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that it reads from experts."""
        return sum(task.expert_bytes for run in self.runs for task in run.chunks)


class NotFinite(msgspec.Struct, frozen=True, gc=False):
    """Counts of elements that are infinite or NaN, and are finite in the base.

    made: those among them that are finite in every expert, too: the merge made them.
    """

    new: int = 0
    made: int = 0

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.new + other.new, self.made + other.made)


ALL_FINITE: Final = NotFinite()


class Result(msgspec.Struct, frozen=True, gc=False):
    """A computed chunk: ids of its output blocks, and its row for the memo table.

    expert_bytes: bytes read from experts for it.
    """

    tensor: str
    number: int
    blocks: tuple[BlockId, ...]
    key: bytes
    value: bytes
    expert_bytes: int
    not_finite: NotFinite


class Receipt(msgspec.Struct, frozen=True):
    """The result of a slice. pack: None if every block was already stored."""

    pack: SealedPack | None
    results: tuple[Result, ...]
    expert_bytes: int
    base_bytes: int


BATCH_BYTES: Final = 1 << 20
"""Small chunks are loaded together until one side of them reaches this many bytes."""

_LEAST_BYTES: Final = 1 << 12
"""The least that a chunk counts: a batch has at most 256 chunks."""


class BatchPart(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in a batch, and the tensor's ledger if they pass on ties."""

    run: TensorChunks
    tasks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    ledger: TieLedger | None


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks that are loaded together: of one tensor, or of several that are small."""

    slice: Slice
    parts: tuple[BatchPart, ...]

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
    parts: list[BatchPart] = []
    count, longest = 0, 0
    for run in slice.runs:
        ledger = run.ledger() if run.tensor.hands_on else None
        step = batch_chunks(run.tensor)
        for first in range(0, len(run.chunks), step):
            cut = builtins.slice(first, first + step)
            part = BatchPart(run, run.chunks[cut], run.keys[cut], ledger)
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
