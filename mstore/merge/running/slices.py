"""Slices: the self-contained pieces of work that a merge is cut into, and their results.

A slice is a run of chunks whose output makes one pack.  It needs no index: any process that sees
the store's packs and its tmp directory can compute it (`running.worker`).  Values only; all of them
can be pickled.

A tensor whose chunks pass on ties is never cut: its chunks are in one slice.  Slices are
idempotent; what they write is garbage until it is published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.packs import SealedPack
from mstore.ids import BlockId
from mstore.merge.running.not_finite import NotFinite
from mstore.merge.running.task import ChunkTask, TensorTask
from mstore.merge.running.ties import TieLedger

SLICE_BYTES: Final = 128 << 20
"""Plain bytes of output per slice, unless a tensor that must not be cut has more."""


class Run(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in order, their memo keys, and the ties that known chunks took.

    known: (chunk, ties per expert) of chunks of this tensor that are not computed.
    """

    tensor: TensorTask
    chunks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    known: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ledger(self) -> TieLedger:
        """Return a new ledger for the chunks of this run."""
        numbers = [task.number for task in self.chunks]
        return TieLedger(self.tensor.quotas.tolist(), numbers, self.known)


class Bounds(msgspec.Struct, frozen=True):
    """What computing may take: with these, memory stays within a limit (`running.memory`).

    threads: how many compute in parallel. ahead: batches under way beyond the current one.
    together: bytes of a side up to which small tensors share a batch (`batches.batches`).
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
    runs: tuple[Run, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that it reads from experts."""
        return sum(task.expert_bytes for run in self.runs for task in run.chunks)


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
