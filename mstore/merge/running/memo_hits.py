"""Memo hits: chunks of a plan whose output an earlier merge has already made.

A hit is a row whose output blocks are all still stored.  Reads the memo table and the index, no
block.  Hits change what a merge reads and writes, but never what it selects, or a plan would not be
a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from mstore.adapters.low_rank import stored_bytes
from mstore.checkpoint.partition import block_count
from mstore.ids import ID_BYTES, BlockId
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.ready import Ready
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.objects.applied import AppliedTensor
from mstore.stats.chunks import blocks_per_chunk
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo

TOGETHER: Final = 64
"""Number of tensors whose chunks are looked up together."""

_BLOCKS_TOGETHER: Final = 1 << 14


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
    """Chunks of one tensor by number: known ones, and rows whose blocks are gone."""

    known: Mapping[int, Remembered]
    gone: Mapping[int, Remembered]


def find_hits(
    memo: Memo,
    has_blocks: Callable[[Sequence[BlockId]], Sequence[bool]],
    wanted: Sequence[tuple[Shape, Mapping[int, bytes]]],
    known: dict[bytes, Remembered],
) -> list[Hits]:
    """Look up chunks of several tensors together: for each its shape, and keys by chunk number.

    known: rows that were found before, by key; gets the new ones.  A row never changes, but its
    blocks may go: they are looked up each time.
    """
    asked = [key for _, keys in wanted for key in keys.values() if key not in known]
    for key, value in zip(asked, memo.outputs(asked), strict=True):
        row = None if value is None else Remembered.decode(value)
        if row is not None:
            known[key] = row
    found = [
        {
            number: row
            for number, key in keys.items()
            if (row := known.get(key)) is not None and shape.fits(number, row)
        }
        for shape, keys in wanted
    ]
    blocks = [block for rows in found for row in rows.values() for block in row.blocks]
    there = has_blocks(blocks) if blocks else []
    stored = {block for block, is_there in zip(blocks, there, strict=True) if is_there}
    return [_split(rows, stored) for rows in found]


def _split(rows: Mapping[int, Remembered], stored: set[BlockId]) -> Hits:
    known = {number: row for number, row in rows.items() if stored.issuperset(row.blocks)}
    return Hits(known, {number: row for number, row in rows.items() if number not in known})


def memo_expert_bytes(catalog: Catalog, memo: Memo, ready: Ready, planned: int) -> int:
    """Return how many of a plan's `planned` expert bytes a merge would not read now."""
    if not memo.file_bytes():
        return 0
    plan, tasks = ready.plan, ready.tasks
    known: list[tuple[TensorTask, list[int]]] = []
    unknown: list[tuple[TensorTask, list[int]]] = []
    for start in range(0, len(plan.tensors), TOGETHER):
        asked: list[tuple[TensorTask, Shape, dict[int, bytes]]] = []
        for one in plan.tensors[start : start + TOGETHER]:
            tensor = tasks.tensor(one.name)
            numbers = np.flatnonzero(~tasks.reused(tensor)).tolist()
            named = ready.keys(tensor, numbers)
            shape = Shape(tensor, tasks.members(one.name), catalog.block_size)
            asked.append((tensor, shape, named))
        wanted = [(shape, named) for _, shape, named in asked]
        hits = find_hits(memo, catalog.has_blocks, wanted, ready.rows)
        for (tensor, _, named), found in zip(asked, hits, strict=True):
            known.append((tensor, list(found.known)))
            unknown.append((tensor, [number for number in named if number not in found.known]))
    saved = _saved_adapters(catalog, tasks, known, unknown)
    # Looking up what a chunk costs is expensive, so sum over the smaller half.
    if _count(unknown) < _count(known):
        read = _saved_adapters(catalog, tasks, [*known, *unknown], []) - saved
        return planned - read - _expert_bytes(catalog, tasks, unknown)
    return _expert_bytes(catalog, tasks, known) + saved


def _saved_adapters(
    catalog: Catalog,
    tasks: Tasks,
    known: list[tuple[TensorTask, list[int]]],
    unknown: list[tuple[TensorTask, list[int]]],
) -> int:
    """Return the bytes of adapters that known chunks use and unknown ones do not.

    An adapter's tensors are read whole if one chunk needs them.
    """
    used: dict[str, dict[int, AppliedTensor]] = {}
    for parts, is_known in ((known, True), (unknown, False)):
        for tensor, numbers in parts:
            members = tasks.members(tensor.name)
            own = used.setdefault(tensor.name, {})
            # By contents: experts that are one adapter share what is read.
            ids = members.expert_ids
            for k, record in enumerate(members.experts):
                if isinstance(record, AppliedTensor) and members.present[k, numbers].any():
                    if is_known:
                        own[ids.index(ids[k])] = record
                    else:
                        own.pop(ids.index(ids[k]), None)
    return sum(stored_bytes(catalog, one) for own in used.values() for one in own.values())


def _count(parts: list[tuple[TensorTask, list[int]]]) -> int:
    return sum(len(numbers) for _, numbers in parts)


def _expert_bytes(catalog: Catalog, tasks: Tasks, parts: list[tuple[TensorTask, list[int]]]) -> int:
    """Return the bytes that reading the experts of some chunks costs (`ChunkTask.expert_bytes`)."""
    total = 0
    size = catalog.block_size
    blocks: list[bytes] = []
    for tensor, numbers in parts:
        if not numbers:
            continue
        members = tasks.members(tensor.name)
        present = members.present.T
        spans = [
            ID_BYTES * blocks_per_chunk(expert.dtype, tensor.chunk_elements, size)
            for expert in members.experts
        ]
        for number in numbers:
            rows = {
                (members.experts[k].dtype, members.experts[k].blocks[number * w : (number + 1) * w])
                for k in np.flatnonzero(present[number]).tolist()
                if not isinstance(members.experts[k], AppliedTensor)
                for w in (spans[k],)
            }
            blocks += (
                row[at : at + ID_BYTES] for _, row in rows for at in range(0, len(row), ID_BYTES)
            )
        if len(blocks) >= _BLOCKS_TOGETHER:
            total += int(catalog.stored_lengths(blocks).sum())
            blocks = []
    return total + int(catalog.stored_lengths(blocks).sum()) if blocks else total
