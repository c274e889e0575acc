"""Tasks: all that one chunk of a merge needs to be computed, and where its bytes lie.

Owns the step from a plan and the catalog to self-contained work: a `ChunkTask` names packs and
byte ranges, so whoever computes it needs no index, and can be in another process.  Does not read
a block, and does not say what is computed when.

A task names the blocks of experts that the plan says are read, and no others: this is where a
merge is kept to its plan.  Values are immutable and picklable; `Tasks` may be used from any
number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.blocks.index import Location
from mstore.blocks.packs import NO_BASE, PackGone
from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.errors import Conflict, Corrupt
from mstore.ids import BlockId, TensorId
from mstore.merge.arithmetic.kernels import UNLIMITED, Mix
from mstore.merge.arithmetic.operators import OPERATORS, needs_thresholds, reuses_base
from mstore.merge.arithmetic.random import mask_keys
from mstore.merge.planning.tied import names_of_plan
from mstore.objects.manifest import Manifest
from mstore.objects.plan import READ, SHARED, Plan, PlanTensor
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_blocks
from mstore.store.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Source:
    """A block at rest: its id, where and how it is stored, and what it is a difference to.

    base: None unless it is stored as a delta.  It is of the same plain length, and no delta
    itself.
    """

    id: BlockId
    at: Location
    base: Source | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One side of a chunk: its element type, and its blocks in order."""

    dtype: str
    sources: tuple[Source, ...]

    @property
    def stored_bytes(self) -> int:
        """What reading it costs, without the blocks that its deltas are differences to."""
        return sum(source.at.stored_length for source in self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class TensorTask:
    """What all chunks of one tensor have in common.

    thresholds  float32[K], zeros where nothing is trimmed
    quotas      int64[K]: elements that tie at the threshold and are kept, over the whole tensor
                (kernels.UNLIMITED: all of them)
    keys        uint32[K, 2], zeros where nothing is random
    file        the output file that the tensor lies in, and `offset`, where in it; they only say
                which blocks are neighbours
    """

    name: str
    shape: tuple[int, ...]
    chunk_elements: int
    base_dtype: str
    out_dtype: str
    thresholds: npt.NDArray[np.float32]
    quotas: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint32]
    file: str
    offset: int

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    @property
    def out_bytes(self) -> int:
        """Plain bytes of the output tensor."""
        return nbytes(self.out_dtype, self.shape)

    @property
    def limited(self) -> bool:
        """Whether chunks hand ties on from one to the next (`mstore.merge.running.ties`)."""
        return bool((self.quotas != UNLIMITED).any())

    def chunk_length(self, number: int) -> int:
        """Elements of chunk `number`."""
        return min(self.chunk_elements, self.elements - number * self.chunk_elements)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTask:
    """One chunk to compute: element range [first_index, first_index + n) of `tensor`.

    rows: what is read of experts, each distinct run of blocks once.  row_of: for each expert of
    the plan the row that it takes, or -1 where it is absent (its delta counts as zero).
    """

    tensor: TensorTask
    number: int
    base: Row
    rows: tuple[Row, ...]
    row_of: tuple[int, ...]

    @property
    def n(self) -> int:
        """Elements."""
        return self.tensor.chunk_length(self.number)

    @property
    def first_index(self) -> int:
        """Flat index of the first element within the tensor."""
        return self.number * self.tensor.chunk_elements

    @property
    def out_bytes(self) -> int:
        """Plain bytes of the output."""
        return self.n * item_size(self.tensor.out_dtype)

    @property
    def file_offset(self) -> int:
        """Where the output lies in `tensor.file`."""
        return self.tensor.offset + self.first_index * item_size(self.tensor.out_dtype)

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that are read of experts."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def narrow_bytes(self) -> int:
        """Plain bytes of the base or of the output, whichever are fewer."""
        tensor = self.tensor
        return self.n * min(item_size(tensor.base_dtype), item_size(tensor.out_dtype))

    @property
    def row_bytes(self) -> int:
        """Plain bytes of the longest side."""
        return self.n * max(item_size(row.dtype) for row in (self.base, *self.rows))


_TAKES_PART: Final = bytes(state in (READ, SHARED) for state in range(256))


@dataclass(frozen=True, slots=True)
class Members:
    """One planned tensor in the base and in each expert of the plan, as records."""

    plan: PlanTensor
    base_id: TensorId
    base: Tensor
    expert_ids: tuple[TensorId, ...]
    experts: tuple[Tensor, ...]

    def present(self) -> npt.NDArray[np.bool_]:
        """bool[K, chunks]: which experts take part in which chunk."""
        raw = b"".join(self.plan.states)
        states = np.frombuffer(raw.translate(_TAKES_PART), dtype=np.bool_)
        return states.reshape(len(self.plan.states), -1)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A chunk before it is known where its blocks lie; as in ChunkTask."""

    number: int
    base: tuple[BlockId, ...]
    rows: tuple[tuple[str, tuple[BlockId, ...]], ...]
    row_of: tuple[int, ...]


_TOGETHER: Final = 64
"""Tensors whose records are read together."""


class Tasks:
    """Makes the tasks of one plan that fits this store (`merge.planning.fitting`)."""

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        self.plan = plan
        self._catalog = catalog
        self._parameters = dict(plan.parameters)
        self._planned = {tensor.name: tensor for tensor in plan.tensors}
        self._order = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        self._members: dict[str, Members] = {}
        self._base = catalog.manifest(plan.base_id()).tensors()
        self._experts = [
            catalog.manifest(expert.manifest_id()).tensors() for expert in plan.experts
        ]
        self._reuses = reuses_base(plan.method, self._parameters)
        self.first = names_of_plan(catalog, plan, self._base, self._experts)
        """Each tensor of the base -> the name it is planned under (`merge.planning.tied`)."""
        self.mix = Mix.build(plan.method, self._parameters, [e.weight for e in plan.experts])

    def is_planned(self, name: str, id: TensorId) -> bool:
        """Whether a tensor of the base, by name and record, is merged.

        A second tensor of the same name (a consolidated copy) is merged only if it is the same.
        """
        return self.first[name] in self._planned and id == self._base[name]

    def members(self, name: str) -> Members:
        """The records of a planned tensor, by the name it is planned under."""
        found = self._members.get(name)
        if found is None:
            self._load(self._order[name])
            found = self._members[name]
        return found

    def _load(self, first: int) -> None:
        """The members of a planned tensor, and of those after it: they are read together."""
        tensors = self.plan.tensors[first : first + _TOGETHER]
        sides = [self._base, *self._experts]
        ids = [side[tensor.name] for tensor in tensors for side in sides]
        records = self._catalog.tensors(ids)
        for number, tensor in enumerate(tensors):
            at = slice(number * len(sides), (number + 1) * len(sides))
            base_id, *expert_ids = ids[at]
            base, *experts = records[at]
            self._members[tensor.name] = Members(
                tensor, base_id, base, tuple(expert_ids), tuple(experts)
            )

    def tensor(self, name: str, file: str = "", offset: int = 0) -> TensorTask:
        """What the chunks of a planned tensor share; `file` and `offset` as in TensorTask."""
        planned = self._planned[name]
        base = self.members(name).base
        count = len(self._experts)
        thresholds = np.zeros(count, dtype=np.float32)
        quotas = np.full(count, UNLIMITED, dtype=np.int64)
        if needs_thresholds(self.plan.method, self._parameters):
            thresholds[:] = [threshold.value for threshold in planned.thresholds]
            quotas[:] = [threshold.quota for threshold in planned.thresholds]
        keys = np.zeros((count, 2), dtype=np.uint32)
        if OPERATORS[self.plan.method].random:
            keys = mask_keys(int(self._parameters["seed"]), count, name)
        return TensorTask(
            name=name,
            shape=base.shape,
            chunk_elements=planned.chunk_elements,
            base_dtype=base.dtype,
            out_dtype=self.plan.dtype or base.dtype,
            thresholds=thresholds,
            quotas=quotas,
            keys=keys,
            file=file,
            offset=offset,
        )

    def reused(self, tensor: TensorTask) -> npt.NDArray[np.bool_]:
        """bool[chunks]: whose output is the base's own blocks, so that nothing is computed."""
        if not self._reuses or tensor.out_dtype != tensor.base_dtype:
            return np.zeros(tensor.chunks, dtype=np.bool_)
        reused: npt.NDArray[np.bool_] = np.logical_not(
            self.members(tensor.name).present().any(axis=0)
        )
        return reused

    def chunk(self, tensor: TensorTask, number: int) -> ChunkTask:
        """One chunk.  Raises Corrupt where a block is not stored."""
        return self.chunks(tensor, [number])[0]

    def chunks(self, tensor: TensorTask, numbers: Sequence[int]) -> list[ChunkTask]:
        """Several chunks of one tensor, with one look into the index.  Raises Corrupt."""
        return self.chunks_of([(tensor, numbers)])[0]

    def chunks_of(
        self, wanted: Sequence[tuple[TensorTask, Sequence[int]]]
    ) -> list[list[ChunkTask]]:
        """The chunks of several tensors, with one look into the index for all of them."""
        drafts = [self._drafts(tensor, numbers) for tensor, numbers in wanted]
        sources = self._locate(
            itertools.chain.from_iterable(
                (*draft.base, *itertools.chain.from_iterable(blocks for _, blocks in draft.rows))
                for found in drafts
                for draft in found
            )
        )
        return [
            [
                ChunkTask(
                    tensor,
                    draft.number,
                    Row(tensor.base_dtype, tuple(sources[block] for block in draft.base)),
                    tuple(
                        Row(type, tuple(sources[b] for b in blocks)) for type, blocks in draft.rows
                    ),
                    draft.row_of,
                )
                for draft in found
            ]
            for (tensor, _), found in zip(wanted, drafts, strict=True)
        ]

    def _drafts(self, tensor: TensorTask, numbers: Sequence[int]) -> list[_Draft]:
        members = self.members(tensor.name)
        size, length = self._catalog.block_size, tensor.chunk_elements
        present = members.present()
        drafts = []
        for number in numbers:
            # Only blocks of one dtype are planned as shared: equal bytes of another are two rows.
            rows: dict[tuple[str, tuple[BlockId, ...]], int] = {}
            row_of = [-1] * len(members.experts)
            for k in np.flatnonzero(present[:, number]).tolist():
                expert = members.experts[k]
                blocks = tuple(chunk_blocks(expert, length, number, size))
                row_of[k] = rows.setdefault((expert.dtype, blocks), len(rows))
            base = tuple(chunk_blocks(members.base, length, number, size))
            drafts.append(_Draft(number, base, tuple(rows), tuple(row_of)))
        return drafts

    def moved(self, source: Source) -> Location:
        """Where a block lies now whose pack is gone: gc may have copied it into another.

        Raises Conflict where it is not stored any more as it was, PackGone where it never moved.
        """
        try:
            (place,) = self._catalog.locate([source.id])
        except Corrupt:
            place = None
        if place == source.at:
            raise PackGone(
                "a pack that the index names is missing",
                where=f"pack {source.at.pack}",
                hint="mstore fsck",
            )
        # Who paid for reading it paid for as many bytes, and knows what they decode with.
        if place is None or replace(place, pack=source.at.pack, offset=source.at.offset) != (
            source.at
        ):
            raise Conflict(
                "was collected while this command was running",
                where=f"block {source.id}",
                hint="run the command again",
            )
        return place

    def _locate(self, blocks: Iterable[BlockId]) -> dict[BlockId, Source]:
        wanted = list(dict.fromkeys(blocks))
        places = self._places(wanted)
        deltas = {block: BlockId(at.base) for block, at in places.items() if at.base != NO_BASE}
        others = [block for block in dict.fromkeys(deltas.values()) if block not in places]
        places |= self._places(others)
        # One object for a block wherever it is named: a slice that is pickled names it once.
        sources = {block: Source(block, at) for block, at in places.items() if at.base == NO_BASE}
        for block, base in deltas.items():
            if base not in sources:
                raise Corrupt(
                    "stored as a difference to a block that is one itself",
                    where=f"block {block}",
                    hint="mstore fsck",
                )
        sources |= {
            block: Source(block, places[block], sources[base]) for block, base in deltas.items()
        }
        return sources

    def _places(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        try:
            return dict(zip(blocks, self._catalog.locate(blocks), strict=True))
        except Corrupt as error:
            if self._has_inputs():
                raise
            raise Conflict(
                "an input of the plan was collected while this command was running",
                where=error.where,
                hint="run the command again",
            ) from error

    def _has_inputs(self) -> bool:
        """Whether the inputs are snapshots' contents still; their records may lie in a cache."""
        index = self._catalog.index
        with index.env.read() as transaction:
            return all(
                index.record(transaction, Manifest.kind, id) is not None
                for id in (self.plan.base_id(), *(e.manifest_id() for e in self.plan.experts))
            )


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].bits // 8
