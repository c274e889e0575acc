"""Finished chunks: an earlier merge or an interrupted run made their output.

Owns the lookup of both sources, and the rows that a run adds to the memo table.  A hit is a row
whose output blocks are all still stored; a chunk whose remembered blocks were collected is computed
again, and must come out the same.  Hits change what a merge reads and writes, but never what it
selects, or a plan would not be a function of its inputs.

Of what an interrupted merge left (`leftovers`), a pack is checked only if its receipt has a chunk
that the merge needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.methods.registry import changed
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.leftovers import rows_of
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.slices import Result
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.merge.running.workplace import Delivered
from mstore.store.leases import RECEIPT
from mstore.store.memo import Memo
from mstore.store.objects.tensor import block_count
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId
from mstore.terms.phrases import call

TOGETHER: Final = 64
"""Number of tensors whose chunks are looked up together."""


class Shape:
    """What a valid row of one tensor's chunks looks like."""

    def __init__(self, tensor: TensorTask, members: Members, block_size: int) -> None:
        self.per_chunk = tensor.chunk_elements * item_size(tensor.out_dtype) // block_size
        self.blocks = block_count(tensor.out_bytes, block_size)
        self._slots = len(tensor.quotas)
        # Per chunk, the thresholds of participating experts whose ties are limited.
        self._limited: list[list[int]] | None = None
        if tensor.limited:
            experts = len(members.experts)
            ends = [slot for slot, quota in enumerate(tensor.quotas.tolist()) if quota != UNLIMITED]
            columns = members.present.T.tolist()
            self._limited = [[s for s in ends if column[s % experts]] for column in columns]

    def fits(self, number: int, row: Remembered) -> bool:
        """Return whether a row can belong to chunk `number`."""
        blocks = min(self.per_chunk, self.blocks - number * self.per_chunk)
        taken = 0 if self._limited is None else len(self._limited[number])
        return len(row.blocks) == blocks and len(row.taken) == taken

    def ties(self, number: int, row: Remembered) -> tuple[int, ...]:
        """Return a chunk's ties for every threshold; empty if no chunk passes on ties."""
        if self._limited is None:
            return ()
        return row.per_slot(self._limited[number], self._slots)


class Hits(msgspec.Struct, frozen=True, gc=False):
    """Rows of one tensor's chunks, by number: whose blocks are stored, and whose are gone."""

    stored: dict[int, Remembered]
    gone: dict[int, Remembered]


def find_hits(
    memo: Memo,
    has_blocks: Callable[[Sequence[BlockId]], Sequence[bool]],
    wanted: Sequence[tuple[Shape, Mapping[int, bytes]]],
) -> list[Hits]:
    """Look up chunks of several tensors together: for each its shape, and keys by chunk number."""
    rows: dict[bytes, Remembered] = {}
    asked = [key for _, keys in wanted for key in keys.values()]
    for key, value in zip(asked, memo.outputs(asked), strict=True):
        row = None if value is None else Remembered.decode(value)
        if row is not None:
            rows[key] = row
    found = [
        {
            number: row
            for number, key in keys.items()
            if (row := rows.get(key)) is not None and shape.fits(number, row)
        }
        for shape, keys in wanted
    ]
    blocks = [block for own in found for row in own.values() for block in row.blocks]
    there = has_blocks(blocks) if blocks else []
    stored = {block for block, is_there in zip(blocks, there, strict=True) if is_there}
    hits = [Hits({}, {}) for _ in found]
    for own, hit in zip(found, hits, strict=True):
        for number, row in own.items():
            (hit.stored if stored.issuperset(row.blocks) else hit.gone)[number] = row
    return hits


# -- leftovers ---------------------------------------------------------------------------------


class FinishedChunk(msgspec.Struct, frozen=True):
    """A chunk of a receipt: its row, how many expert bytes were read for it, and the receipt."""

    row: Remembered
    expert_bytes: int
    receipt: Path


class Leftovers:
    """The leftovers in one directory, for one delivery. Belongs to one thread."""

    def __init__(self, directory: Path, delivery: Delivery) -> None:
        self._delivery = delivery
        self._found: dict[bytes, FinishedChunk] = {}
        self._packs: dict[Path, Delivered | None] = {}
        with fs.translated(directory):
            names = [name for name in fs.listed(directory) if name.endswith(RECEIPT)]
        for path in map(directory.joinpath, names):
            for key, value, expert_bytes in rows_of(path):
                row = Remembered.decode(value)
                if row is not None:
                    self._found[key] = FinishedChunk(row, expert_bytes, path)

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self, key: bytes) -> tuple[FinishedChunk, Delivered] | None:
        """Return the chunk of a memo key with its pack, if that is sound: it is tried once."""
        found = self._found.get(key)
        if found is None:
            return None
        if found.receipt not in self._packs:
            self._packs[found.receipt] = self._delivery.found(found.receipt)
        pack = self._packs[found.receipt]
        return None if pack is None else (found, pack)


# -- both --------------------------------------------------------------------------------------


class FinishedChunks:
    """The finished chunks of one run, by memo key.  Belongs to one thread.

    sink: None if the output is not stored: then none is finished, and no key is needed. memo: None
    to use no memo table. written: the blocks that this run has written; grows by those of adopted
    packs.

    hits: chunks found in the memo table. resumed_bytes: expert bytes that an interrupted run read
    for the chunks taken from it. rows: new rows for the memo table.
    """

    def __init__(
        self,
        tasks: Tasks,
        sink: Transaction | None,
        memo: Memo | None,
        delivery: Delivery,
        written: set[BlockId],
    ) -> None:
        self._sink = sink
        self._memo = memo
        self._written = written
        self._tasks = tasks
        self._keys = MemoKeys(tasks)
        self._delivery = delivery
        self._leftovers = None if sink is None else Leftovers(sink.directory, delivery)
        self._adopted: set[Path] = set()
        self._expected: dict[bytes, tuple[BlockId, ...]] = {}
        self.hits = 0
        self.resumed_bytes = 0
        self.rows: list[tuple[bytes, bytes]] = []

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks, by number; empty keys if none is needed."""
        if self._sink is None:
            return dict.fromkeys(numbers, b"")
        return self._keys.by_number(tensor, numbers)

    def find(
        self, shapes: Sequence[Shape], keys: Sequence[Mapping[int, bytes]]
    ) -> list[dict[int, Remembered]]:
        """Return the finished chunks of some tensors, by number, with one lookup for all."""
        if self._sink is None:
            return [{} for _ in shapes]
        hits = [Hits({}, {}) for _ in shapes]
        if self._memo is not None:
            wanted = list(zip(shapes, keys, strict=True))
            hits = find_hits(self._memo, self._sink.has_blocks, wanted)
        return [
            self._of_tensor(self._sink, shape, named, found)
            for shape, named, found in zip(shapes, keys, hits, strict=True)
        ]

    def _of_tensor(
        self, sink: Transaction, shape: Shape, keys: Mapping[int, bytes], hits: Hits
    ) -> dict[int, Remembered]:
        rows = dict(hits.stored)
        self.hits += len(hits.stored)
        # gc deleted their blocks: recomputing them must give the same ids.
        self._expected.update((keys[number], row.blocks) for number, row in hits.gone.items())
        if self._leftovers:
            for number in sorted(keys.keys() - rows.keys()):
                found = self._leftovers.find(keys[number])
                if found is None or not shape.fits(number, found[0].row):
                    continue
                chunk, pack = found
                if chunk.receipt not in self._adopted:
                    self._adopted.add(chunk.receipt)
                    self._written.update(self._delivery.adopt(sink, pack))
                if all(sink.has_blocks(chunk.row.blocks)):
                    rows[number] = chunk.row
                    self.resumed_bytes += chunk.expert_bytes
                    self._keep(keys[number], chunk.row.encode())
        return rows

    def learn(self, result: Result) -> None:
        """Add a computed chunk.  Raises Corrupt if the memo table remembers another output."""
        expected = self._expected.get(result.key)
        if expected is not None and expected != result.blocks:
            raise Corrupt(
                "the recomputed chunk differs from the memo table",
                where=f"{result.tensor}, chunk {result.number}",
                hint=changed(self._tasks.operation(result.tensor).method.name)
                or call("fsck", read_data=True),
            )
        if result.key:
            self._keep(result.key, result.value)

    def _keep(self, key: bytes, value: bytes) -> None:
        if self._memo is not None:
            self.rows.append((key, value))
