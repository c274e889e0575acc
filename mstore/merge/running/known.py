"""Known chunks: those whose output exists, because an earlier merge or an interrupted run made it.

Owns the lookup of both sources, and the rows that a run adds to the memo table.  A hit is a row
whose output blocks are all still stored; a chunk whose remembered blocks were collected is computed
again, and must come out the same.  Hits change what a merge reads and writes, but never what it
selects, or a plan would not be a function of its inputs.  Reads the memo table and the index, no
block.

A report of a plan looks at every chunk, to tell what the memo table saves.  The merge that follows
needs the same tasks and keys, and takes them from `Ready`: all of it follows from contents, so what
happens to the store meanwhile changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from mstore.blocks.packs import Kind
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.resume import Leftovers
from mstore.merge.running.slices import Result
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.models.adapters.low_rank import stored_bytes
from mstore.models.stats.chunks import blocks_per_chunk
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.objects.applied import AppliedTensor
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import block_count
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, BlockId
from mstore.terms.phrases import call

MOST: Final = 1 << 20
"""The most chunks of experts in a plan that is worth keeping: some 100 MB of ids, keys and rows."""


class Ready:
    """The tasks of a plan that fits this store, and the memo keys of its chunks.

    What follows from the plan and from its inputs alone.  Belongs to one run at a time.

    keeps: keys and rows are kept for another look, if the plan is not too large; otherwise each is
    computed when it is asked for.
    """

    def __init__(self, catalog: Catalog, plan: Plan, *, keeps: bool = False) -> None:
        self.plan = plan
        self.tasks = Tasks(catalog, plan)
        self.keeps = keeps and _chunks(plan) <= MOST
        self._rows: dict[bytes, Remembered] = {}
        self._makes = MemoKeys(self.tasks)
        # By tensor: the chunks last asked for, and their keys.
        self._made: dict[str, tuple[list[int], list[bytes]]] = {}

    @property
    def rows(self) -> dict[bytes, Remembered]:
        """Rows of the memo table by key, as far as they were looked up; takes new ones."""
        return self._rows if self.keeps else {}

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks of a tensor, by number; numbers ascending."""
        asked = list(numbers)
        known = self._made.get(tensor.name)
        if known is None or known[0] != asked:
            known = asked, self._makes.chunks(tensor, asked)
            if self.keeps:
                self._made[tensor.name] = known
        return dict(zip(*known, strict=True))


def _chunks(plan: Plan) -> int:
    return sum([len(states) for tensor in plan.tensors for states in tensor.states])


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


class KnownChunks:
    """What is known of the chunks of one run, by memo key.  Belongs to one thread.

    sink: None if the output is not stored: then no chunk is known, and no key is needed. memo: None
    to use no memo table. written: the blocks that this run has written; grows by those of adopted
    packs.

    hits: chunks found in the memo table. resumed_bytes: expert bytes that an interrupted run read
    for the chunks taken from it. rows: new rows for the memo table.
    """

    def __init__(
        self,
        catalog: Catalog,
        ready: Ready,
        sink: Transaction | None,
        memo: Memo | None,
        written: set[BlockId],
    ) -> None:
        self._sink = sink
        self._memo = memo
        self._written = written
        self._ready = ready
        self._leftovers = None if sink is None else Leftovers(sink.directory, catalog)
        self._adopted: set[Path] = set()
        self._expected: dict[bytes, tuple[BlockId, ...]] = {}
        self.hits = 0
        self.resumed_bytes = 0
        self.rows: list[tuple[bytes, bytes]] = []

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks, by number; empty keys if none is needed."""
        if self._sink is None:
            return dict.fromkeys(numbers, b"")
        return self._ready.keys(tensor, numbers)

    def find(
        self, shapes: Sequence[Shape], keys: Sequence[Mapping[int, bytes]]
    ) -> list[dict[int, Remembered]]:
        """Return the known chunks of some tensors, by number, with one lookup for all of them."""
        if self._sink is None:
            return [{} for _ in shapes]
        hits = [Hits({}, {}) for _ in shapes]
        if self._memo is not None:
            wanted = list(zip(shapes, keys, strict=True))
            hits = find_hits(self._memo, self._sink.has_blocks, wanted, self._ready.rows)
        return [
            self._known_of(self._sink, shape, named, found)
            for shape, named, found in zip(shapes, keys, hits, strict=True)
        ]

    def _known_of(
        self, sink: Transaction, shape: Shape, keys: Mapping[int, bytes], hits: Hits
    ) -> dict[int, Remembered]:
        rows: dict[int, Remembered] = dict(hits.known)
        self.hits += len(hits.known)
        # gc deleted their blocks: recomputing them must give the same ids.
        self._expected.update((keys[number], row.blocks) for number, row in hits.gone.items())
        if self._leftovers:
            for number in sorted(keys.keys() - rows.keys()):
                found = self._leftovers.find(keys[number])
                if found is None or not shape.fits(number, found.row):
                    continue
                self._adopt(sink, self._leftovers, found.pack)
                if all(sink.has_blocks(found.row.blocks)):
                    rows[number] = found.row
                    self.resumed_bytes += found.expert_bytes
                    self.rows.append((keys[number], found.row.encode()))
        return rows

    def _adopt(self, sink: Transaction, leftovers: Leftovers, path: Path) -> None:
        pack = leftovers.pack(path)
        if pack is not None and path not in self._adopted:
            self._adopted.add(path)
            self._written.update(
                BlockId(entry.id) for entry in pack.entries if entry.kind == Kind.BLOCK
            )
            sink.adopt(pack)

    def learn(self, result: Result) -> None:
        """Add a computed chunk.  Raises Corrupt if the memo table remembers another output."""
        expected = self._expected.get(result.key)
        if expected is not None and expected != result.blocks:
            raise Corrupt(
                "the recomputed chunk differs from the memo table",
                where=f"{result.tensor}, chunk {result.number}",
                hint=call("fsck", read_data=True),
            )
        if result.key:
            self.rows.append((result.key, result.value))
