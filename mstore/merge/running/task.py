"""Tasks: everything needed to compute one chunk of a merge, and where its bytes are stored.

Owns the step from a plan and the catalog to self-contained work: a `ChunkTask` names packs and byte
ranges, so a worker needs no index and may be in another process.  Does not read blocks, and does
not schedule tasks.

A task names the expert blocks that the plan reads, and no others: this is what holds a merge to its
plan.  Values are immutable and picklable; `Tasks` may be used from any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE
from mstore.blocks.reader import Meter
from mstore.merge.arithmetic import adapters, kernels
from mstore.merge.arithmetic.kernels import UNLIMITED, Mix
from mstore.merge.arithmetic.row_factors import ChunkFactors
from mstore.merge.measures.grid import split
from mstore.merge.methods.combination import Kernel
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import Operations
from mstore.merge.methods.selection import Cut, Region, Selection
from mstore.merge.planning.tensors import names_of_plan
from mstore.merge.running.workplace import BlockPlaces
from mstore.models.adapters.inputs import Inputs
from mstore.models.adapters.low_rank import FactorCache, Factors
from mstore.models.stats.chunks import blocks_per_chunk, read_tensor, row_length
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import EXPERT, READ, SHARED, Plan, PlanTensor
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import ID_BYTES, BlockId, TensorId, split_ids
from mstore.terms.phrases import call


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """A stored block: its id, its location and codec, and the block it is a difference to.

    base: None unless it is stored as a delta.  The base has the same plain length and is not itself
    a delta.
    """

    id: BlockId
    at: Location
    base: StoredBlock | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One side of a chunk: its element type, and its blocks in order.

    factors: what an adapter adds to the base's own row; there are no blocks then.
    """

    dtype: str
    sources: tuple[StoredBlock, ...]
    factors: Factors | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes at rest of these blocks, without the bases of their deltas."""
        return sum([source.at.stored_length for source in self.sources])


class TensorTask(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What all chunks of one tensor have in common.

    mix         the tensor's operation
    thresholds  float32[K], zeros if nothing is trimmed; float32[2 K] as for kernels.mix_chunk
    quotas      int64[K] or int64[2 K]: elements that tie at the threshold and are kept, over the
                whole tensor (kernels.UNLIMITED: all of them)
    limited     whether any of the quotas is less than all
    keys        uint32[K, 2], zeros if nothing is random
    selection   what is taken of each expert
    chunk_factors
                how factors follow from what is read
    kernel      what computes a chunk
    cut         where a selection of all experts together ends; None for others
    numbers     what planning remembered of each row; None if that is not in memory
    file        the output file of the tensor, and `offset`, its position there; they only say
                which blocks are adjacent
    """

    name: str
    shape: tuple[int, ...]
    elements: int
    chunk_elements: int
    base_dtype: str
    out_dtype: str
    mix: Mix
    thresholds: npt.NDArray[np.float32]
    quotas: npt.NDArray[np.int64]
    limited: bool
    keys: npt.NDArray[np.uint32]
    file: str
    offset: int
    selection: Selection
    chunk_factors: ChunkFactors | None
    kernel: Kernel
    cut: Cut | Region | None = None
    numbers: npt.NDArray[np.float32] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    @property
    def out_bytes(self) -> int:
        """Plain bytes of the output tensor."""
        return self.elements * ITEMSIZES[self.out_dtype]

    @property
    def row_length(self) -> int:
        """Elements of a row: of the last dimension, or all of a tensor with fewer than two."""
        return row_length(self.shape)

    @property
    def hands_on(self) -> bool:
        """Whether chunks pass on ties from one to the next (`mstore.merge.running.slices`)."""
        return self.limited and self.elements > self.chunk_elements

    def chunk_length(self, number: int) -> int:
        """Elements of chunk `number`."""
        return min(self.chunk_elements, self.elements - number * self.chunk_elements)


class ChunkTask(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One chunk to compute: element range [first_index, first_index + n) of `tensor`.

    rows: what is read from experts, each distinct run of blocks once. row_of: for each expert of
    the plan the row that it uses, or -1 if it is absent (its delta counts as zero).
    """

    tensor: TensorTask
    number: int
    n: int
    base: Row
    rows: tuple[Row, ...]
    row_of: tuple[int, ...]

    @property
    def first_index(self) -> int:
        """Flat index of the first element within the tensor."""
        return self.number * self.tensor.chunk_elements

    @property
    def out_bytes(self) -> int:
        """Plain bytes of the output."""
        return self.n * ITEMSIZES[self.tensor.out_dtype]

    @property
    def file_offset(self) -> int:
        """Offset of the output in `tensor.file`."""
        return self.tensor.offset + self.first_index * ITEMSIZES[self.tensor.out_dtype]

    @property
    def adds_products(self) -> bool:
        """Whether the output is a sum of what adapters add, so that no row need be in memory."""
        tensor = self.tensor
        return (
            bool(self.rows)
            and all(row.factors is not None and row.factors.is_sum for row in self.rows)
            and tensor.kernel is kernels.run
            and tensor.chunk_factors is None
            and adapters.adds(tensor.mix)
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that are read from experts."""
        return sum([row.stored_bytes for row in self.rows])

    @property
    def narrow_bytes(self) -> int:
        """Plain bytes of the base or of the output, whichever is smaller."""
        tensor = self.tensor
        return self.n * min(ITEMSIZES[tensor.base_dtype], ITEMSIZES[tensor.out_dtype])

    @property
    def row_bytes(self) -> int:
        """Plain bytes of the longest side."""
        widest = max([ITEMSIZES[row.dtype] for row in self.rows], default=0)
        return self.n * max(ITEMSIZES[self.base.dtype], widest)


_TAKES_PART: Final = bytes(state in (READ, SHARED) for state in range(256))


class Members(msgspec.Struct, frozen=True, gc=False):
    """One planned tensor in the base, each expert and each companion that is read, as records.

    states      a byte per chunk of each, as in the plan
    present     bool[K, chunks]: which of them take part in which chunk
    """

    base_id: TensorId
    base: Tensor
    expert_ids: tuple[TensorId, ...]
    experts: tuple[Tensor, ...]
    states: tuple[bytes, ...]
    present: npt.NDArray[np.bool_]


NamedRow = tuple[str, bytes, AppliedTensor | None]
"""The element type of a side of a chunk, its block list, and what computes it, if it is applied."""

_TOGETHER: Final = 64
"""Tensors whose records are read together."""


class Tasks:
    """Makes the tasks of one plan that fits this store (`merge.planning.validate`).

    expert_meter: counts the bytes of adapters, which are read when the first task of a tensor needs
    them, and travel with the tasks. places: where blocks lie for who computes; None: in this store.
    """

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        expert_meter: Meter | None = None,
        places: BlockPlaces | None = None,
    ) -> None:
        self.plan = plan
        self._catalog = catalog
        self._where = places or catalog
        self._planned = {tensor.name: tensor for tensor in plan.tensors}
        self._order = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        self._operations = Operations(plan)
        self._mixes: dict[int | str, Mix] = {}
        self._members: dict[str, Members] = {}
        self.inputs = Inputs.of(catalog, plan)
        self._base, self._experts = self.inputs.base, self.inputs.experts
        self._read = self._operations.read(plan)
        self._factors = FactorCache(catalog, expert_meter)
        count = len(self._read) - 1
        # Shared by tensors without trimming or random draws.
        self._nothing = (
            np.zeros(count, dtype=np.float32),
            np.full(count, UNLIMITED, dtype=np.int64),
            np.zeros((count, 2), dtype=np.uint32),
            False,
        )
        self.first = names_of_plan(catalog, plan, self._base, self._experts)
        """Each tensor of the base -> the name it is planned under (`planning.tensors`)."""

    def planned_name(self, name: str) -> str | None:
        """Return the name under which a tensor of the base is merged, None if it is not."""
        first = self.first.get(name)
        return first if first in self._planned else None

    def operation(self, name: str) -> Operation:
        """Return the operation of a planned tensor."""
        return self._operations.of(self._planned[name])

    def mix(self, name: str) -> Mix:
        """Return a planned tensor's operation for the kernel; one object for equal ones."""
        planned = self._planned[name]
        key = planned.operation if planned.mixture is None else name
        found = self._mixes.get(key)
        if found is None:
            found = self._mixes[key] = self.operation(name).mix()
        return found

    def out_dtype(self, planned: PlanTensor) -> str:
        """Return the element type that a planned tensor's output has."""
        return planned.dtype or self.plan.dtype or self.members(planned.name).base.dtype

    def new_tensors(self) -> dict[str, list[PlanTensor]]:
        """Return the tensors that the base has not, by the base's tensor that each is made of."""
        found: dict[str, list[PlanTensor]] = {}
        for tensor in self.plan.tensors:
            if tensor.name not in self._base:
                found.setdefault(tensor.source(0), []).append(tensor)
        return found

    def members(self, name: str) -> Members:
        """Return the records of a planned tensor, by the name it is planned under."""
        found = self._members.get(name)
        if found is None:
            self._load(self._order[name])
            found = self._members[name]
        return found

    def _load(self, first: int) -> None:
        tensors = self.plan.tensors[first : first + _TOGETHER]
        sides = [self.inputs.members[number] for number in self._read]
        ids = [
            side[tensor.source(k)]
            for tensor in tensors
            for k, side in zip(self._read, sides, strict=True)
        ]
        records = self.inputs.records(ids)
        for number, tensor in enumerate(tensors):
            at = slice(number * len(sides), (number + 1) * len(sides))
            base_id, *expert_ids = ids[at]
            base, *experts = records[at]
            states = tuple([tensor.states[k - 1] for k in self._read[1:]])
            takes_part = b"".join(states).translate(_TAKES_PART)
            present = np.frombuffer(takes_part, dtype=np.bool_).reshape(len(states), -1)
            self._members[tensor.name] = Members(
                base_id, base, tuple(expert_ids), tuple(experts), states, present
            )

    def tensor(self, name: str, file: str = "", offset: int = 0) -> TensorTask:
        """Return what a planned tensor's chunks share; `file` and `offset` as in TensorTask."""
        planned = self._planned[name]
        members = self.members(name)
        base = members.base
        operation = self.operation(name)
        thresholds, quotas, keys, limited = self._nothing
        selection = operation.selection
        cuts, drawn = selection.thresholds(planned.thresholds), selection.keys(name)
        if cuts is not None:
            thresholds, quotas = cuts
            limited = bool((quotas != UNLIMITED).any())
        if drawn is not None:
            keys = drawn
        return TensorTask(
            name=name,
            shape=base.shape,
            elements=math.prod(base.shape),
            chunk_elements=planned.chunk_elements,
            base_dtype=base.dtype,
            out_dtype=self.out_dtype(planned),
            mix=self.mix(name),
            thresholds=thresholds,
            quotas=quotas,
            limited=limited,
            keys=keys,
            file=file,
            offset=offset,
            selection=selection,
            chunk_factors=self._chunk_factors(planned, operation),
            kernel=operation.method.combine.kernel,
            cut=selection.cut(planned.thresholds, base.shape),
            numbers=self._catalog.row_numbers.get(members.base_id, members.expert_ids[0])
            if selection.remembers
            else None,
        )

    def _chunk_factors(self, planned: PlanTensor, operation: Operation) -> ChunkFactors | None:
        """Return how factors follow from what is read, and from companions that are facts."""
        factors = operation.chunk_factors
        asked = operation.method.companions
        if factors is None or not asked:
            return factors
        facts = []
        for one, numbers in split(asked, len(self.plan.experts), range(len(self.inputs.experts))):
            if not one.is_read:
                idle = operation.weightless if one.of == EXPERT else ()
                facts.append(
                    [
                        None if k < len(idle) and idle[k] else self._fact(planned, number)
                        for k, number in enumerate(numbers)
                    ]
                )
        return factors.bound(operation.given, facts)

    def _fact(self, planned: PlanTensor, number: int) -> npt.NDArray[Any] | None:
        name = planned.source(1 + number)
        if not self.inputs.has(number, name):
            return None
        [record] = self.inputs.records([self.inputs.experts[number][name]])
        return read_tensor(self._catalog, record, None)

    def reused(self, tensor: TensorTask) -> npt.NDArray[np.bool_]:
        """Return bool[chunks]: where the output is the base's own blocks and needs no computing."""
        if not self.operation(tensor.name).keeps_base or tensor.out_dtype != tensor.base_dtype:
            return np.zeros(tensor.chunks, dtype=np.bool_)
        reused: npt.NDArray[np.bool_] = np.logical_not(
            self.members(tensor.name).present.any(axis=0)
        )
        return reused

    def chunk(self, tensor: TensorTask, number: int) -> ChunkTask:
        """Return one chunk.  Raises Corrupt if a block is not stored."""
        return self.chunks(tensor, [number])[0]

    def chunks(self, tensor: TensorTask, numbers: Sequence[int]) -> list[ChunkTask]:
        """Return several chunks of one tensor, with one index lookup.  Raises Corrupt."""
        return self.chunks_of([(tensor, numbers)])[0]

    def chunks_of(
        self, wanted: Sequence[tuple[TensorTask, Sequence[int]]]
    ) -> list[list[ChunkTask]]:
        """Return the chunks of several tensors, with one index lookup for all of them."""
        named = [[self.named(tensor, n) for n in numbers] for tensor, numbers in wanted]
        every = [row for chunks in named for rows, _ in chunks for row in rows]
        sources = self._locate(
            id for _, blocks, record in every if record is None for id in split_ids(blocks)
        )
        factors = self._factors.of(record for *_, record in every if record is not None)
        made: list[list[ChunkTask]] = []
        for (tensor, numbers), found in zip(wanted, named, strict=True):
            tasks = []
            for number, (rows, row_of) in zip(numbers, found, strict=True):
                base, *others = [
                    Row(dtype, tuple([sources[block] for block in split_ids(blocks)]))
                    if record is None
                    else Row(dtype, (), factors[record])
                    for dtype, blocks, record in rows
                ]
                length = tensor.chunk_length(number)
                tasks.append(ChunkTask(tensor, number, length, base, tuple(others), row_of))
            made.append(tasks)
        return made

    def named(self, tensor: TensorTask, number: int) -> tuple[list[NamedRow], tuple[int, ...]]:
        """Return base and rows of a chunk, without where blocks lie, and `row_of`."""
        members = self.members(tensor.name)
        size, length = self._catalog.block_size, tensor.chunk_elements

        def named(record: Tensor) -> NamedRow:
            span = ID_BYTES * blocks_per_chunk(record.dtype, length, size)
            blocks = record.blocks[number * span : (number + 1) * span]
            return record.dtype, blocks, record if isinstance(record, AppliedTensor) else None

        # Only blocks of one dtype are planned as shared: equal bytes of another are two rows.
        rows: dict[NamedRow, int] = {}
        row_of = [
            rows.setdefault(named(expert), len(rows)) if there else -1
            for expert, there in zip(
                members.experts, members.present[:, number].tolist(), strict=True
            )
        ]
        return [named(members.base), *rows], tuple(row_of)

    def moved(self, source: StoredBlock) -> Location:
        """Return where a block is now whose pack is gone: gc may have copied it.

        Raises Conflict if it is no longer stored in the same form.
        """
        try:
            (place,) = self._catalog.locate([source.id])
        except Corrupt:
            place = None
        # The reader was charged for the old length and decodes by the old codec.
        if place is None or msgspec.structs.replace(
            place, pack=source.at.pack, offset=source.at.offset
        ) != (source.at):
            raise Conflict(
                "was collected while this command was running",
                where=f"block {source.id}",
                hint="run the command again",
            )
        return place

    def _locate(self, blocks: Iterable[bytes]) -> dict[bytes, StoredBlock]:
        wanted = [BlockId(block) for block in dict.fromkeys(blocks)]
        places = self._places(wanted)
        bases = {block: places[block].base for block in wanted}
        deltas = {block: BlockId(base) for block, base in bases.items() if base != NO_BASE}
        # One object per block: a pickled slice then stores it once.
        sources: dict[bytes, StoredBlock] = {
            block: StoredBlock(block, at) for block, at in places.items() if at.base == NO_BASE
        }
        for block, base in deltas.items():
            if base not in sources:
                raise Corrupt(
                    "stored as a delta whose base is a delta itself",
                    where=f"block {block}",
                    hint=call("fsck"),
                    block=block,
                )
        sources |= {
            block: StoredBlock(block, places[block], sources[base])
            for block, base in deltas.items()
        }
        return sources

    def _places(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        try:
            # `pin`, `unpin` and `gc` may change what is a delta of what at any time.
            return self._where.locate_with_bases(blocks)
        except Corrupt as error:
            if self._has_inputs():
                raise
            raise Conflict(
                "an input of the plan was collected while this command was running",
                where=error.texts[1],
                hint="run the command again",
            ) from error

    def _has_inputs(self) -> bool:
        """Return whether the inputs are still snapshots' contents; their records may be cached."""
        index = self._catalog.index
        with index.env.read() as transaction:
            return all(
                index.record(transaction, Manifest.kind, id) is not None
                for id in (e.manifest_id() for e in self.plan.inputs)
            )


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return ITEMSIZES[dtype]
