"""Compared block lists, and what reading their blocks costs in this store.

Owns which chunks of experts are the base's, which experts have the same blocks, and bytes at rest.
Reads records and how blocks are stored, no blocks.

A plan says what is merged, and is the same in any store.  How its blocks are stored differs from
store to store, and may change (`add` with another codec).  So costs are not part of a plan but
looked up on demand.  A plan record holds only plain bytes, which never change.

Comparing one tensor of a few chunks takes as long as comparing a hundred of them, so tensors whose
sides have the same types are compared together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from mstore.merge.measures.grid import Bools, Ints
from mstore.merge.planning.request import Request
from mstore.merge.planning.survey import Candidate
from mstore.models.adapters import low_rank
from mstore.models.adapters.inputs import Inputs
from mstore.models.stats.chunks import blocks_per_chunk, tensor_chunk
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED, Plan
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Corrupt, NotFound, Unavailable
from mstore.terms.ids import ID_BYTES, Buffer

Words = np.ndarray[Any, np.dtype[np.uint64]]
States = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")

TOGETHER: Final = 1 << 12
"""Chunks compared together, or those of one tensor."""

ID_WORDS: Final = ID_BYTES // 8


def batched(items: Sequence[T], chunks: Sequence[int]) -> Iterator[Sequence[T]]:
    """Yield runs of items of at most TOGETHER chunks, or single ones."""
    start = count = 0
    for at, more in enumerate(chunks):
        if count and count + more > TOGETHER:
            yield items[start:at]
            start, count = at, 0
        count += more
    if items[start:]:
        yield items[start:]


def chunk_ids(records: Sequence[Tensor], chunk: int, block_size: int) -> Words:
    """Return uint64[chunks, 4 * blocks per chunk] of records of one type, one after the other.

    A row has the ids of a chunk; the last row of each record is padded with zeros.
    """
    width = ID_BYTES * blocks_per_chunk(records[0].dtype, chunk, block_size)
    lists = [one.blocks + bytes(-len(one.blocks) % width) for one in records]
    return np.frombuffer(b"".join(lists), dtype=np.uint64).reshape(-1, width // 8)


def twins(sides: Sequence[Words], dtypes: Sequence[str]) -> Ints:
    """Return the first expert with the same blocks in the same chunk: int64[K, chunks].

    sides: block ids from `chunk_ids`.  Equal bytes of another dtype are not twins.
    """
    twin = np.repeat(np.arange(len(sides)), len(sides[0])).reshape(len(sides), -1)
    for dtype in dict.fromkeys(dtypes):
        members = np.array([k for k, own in enumerate(dtypes) if own == dtype])
        ids = np.stack([sides[k] for k in members])
        # One word per chunk to sort by.  Ids are hashes, so unequal chunks do not share a word by
        # chance; if someone constructs such chunks, they are merely read once more than necessary.
        weights = 2 * np.arange(ids.shape[2] // ID_WORDS, dtype=np.uint64) + np.uint64(1)
        keys = (ids[:, :, ::ID_WORDS] * weights).sum(axis=2, dtype=np.uint64)
        order = np.argsort(keys, axis=0, kind="stable")
        ranked = np.take_along_axis(keys, order, axis=0)
        news = np.ones(keys.shape, dtype=bool)
        news[1:] = ranked[1:] != ranked[:-1]
        if news.all():
            continue
        leads = np.maximum.accumulate(np.where(news, np.arange(len(members))[:, None], 0), axis=0)
        first = np.empty_like(order)
        np.put_along_axis(first, order, np.take_along_axis(order, leads, axis=0), axis=0)
        later, chunk = np.nonzero(first != np.arange(len(members))[:, None])
        earlier = first[later, chunk]
        same = (ids[later, chunk] == ids[earlier, chunk]).all(axis=1)
        twin[members[later[same]], chunk[same]] = members[earlier[same]]
    return twin


# -- the tensors of a survey -------------------------------------------------------------------

Compared = tuple[Bools, Ints, Ints]
"""Where experts are the base's, the first expert with the same blocks, and stored bytes that
reading costs: [K, chunks] each."""


class Comparer:
    """Compares the tensors of one survey, and looks up what the blocks of experts cost."""

    def __init__(self, catalog: Catalog, request: Request) -> None:
        self._catalog = catalog
        self._request = request
        self._found: dict[str, tuple[int, Compared]] = {}

    def compare(self, candidates: Collection[Candidate]) -> None:
        """Compare the blocks of stored tensors, and what they cost, many at a time."""
        # What all blocks cost is looked up at once: it is remembered for each.
        self._catalog.lengths.of(
            [
                record.blocks
                for one in candidates
                for id, record in one.pairs
                if id != one.base_id and not isinstance(record, AppliedTensor)
            ]
        )
        if self._request.companions:
            return
        groups: dict[tuple[int, tuple[str, ...]], dict[str, tuple[Tensor, list[Tensor]]]] = {}
        for one in candidates:
            operation = self._request.operation_of(one.name)
            output = self._request.dtype_of(one.name, one.base.dtype)
            records = [record for _, record in one.pairs]
            dtypes = (one.base.dtype, *(record.dtype for record in records))
            if (
                ITEMSIZES.keys() >= {*dtypes}
                and 0 not in one.base.shape
                and any(id != one.base_id for id, _ in one.pairs)
            ):
                size, row = self._catalog.block_size, operation.row(one.base.shape)
                chunk = tensor_chunk(size, one.base, records, output, row=row)
                groups.setdefault((chunk, dtypes), {})[one.name] = one.base, records
        for (chunk, _), members in groups.items():
            chunks = {name: _chunks(base, chunk) for name, (base, _) in members.items()}
            for some in batched([*members], [*chunks.values()]):
                equal, twin, cost = self._compared([members[name] for name in some], chunk)
                end = 0
                for name in some:
                    start, end = end, end + chunks[name]
                    at = np.s_[:, start:end]
                    self._found[name] = chunk, (equal[at], twin[at], cost[at])

    def found(self, name: str) -> tuple[int, Compared] | None:
        """Return the elements of a chunk, and what `compare` found of a tensor."""
        return self._found.get(name)

    def chunk_of(self, name: str) -> int | None:
        """Return the elements of a chunk of a tensor that `compare` found."""
        found = self._found.get(name)
        return None if found is None else found[0]

    def of(self, base: Tensor, experts: Sequence[Tensor], chunk: int) -> Compared:
        """Compare one tensor."""
        return self._compared([(base, experts)], chunk)

    def shared(self, records: Sequence[Tensor], chunk: int) -> tuple[Ints, Ints]:
        """Return the first record with the same blocks in each chunk, and what reading it costs."""
        sides = [chunk_ids([one], chunk, self._catalog.block_size) for one in records]
        twin = twins(sides, [record.dtype for record in records])
        members = [(one,) for one in records]
        return twin, self._costs(members, chunk, np.zeros(twin.shape, dtype=bool), twin)

    def _compared(self, tensors: Sequence[tuple[Tensor, Sequence[Tensor]]], chunk: int) -> Compared:
        size, bases = self._catalog.block_size, [base for base, _ in tensors]
        experts = list(zip(*(own for _, own in tensors), strict=True))
        base, dtypes = chunk_ids(bases, chunk, size), [own[0].dtype for own in experts]
        sides = [chunk_ids(own, chunk, size) for own in experts]
        equal = np.zeros((len(sides), len(base)), dtype=bool)
        for k, (side, dtype) in enumerate(zip(sides, dtypes, strict=True)):
            # Equal bytes of another type are other numbers.
            if dtype == bases[0].dtype:
                equal[k] = (side == base).all(axis=1)
        twin = twins(sides, dtypes)
        return equal, twin, self._costs(experts, chunk, equal, twin)

    def _costs(
        self, experts: Sequence[Sequence[Tensor]], chunk: int, equal: Bools, twin: Ints
    ) -> Ints:
        """Return stored bytes of each expert's chunks, int64[K, chunks]: 0 if equal to the base.

        experts: the tensors of each, one after the other.  An applied tensor is read whole or not
        at all: its bytes are those of its first chunk.
        """
        starts = [0, *itertools.accumulate(_chunks(one, chunk) for one in experts[0])]
        leads = ~equal & (twin == np.arange(len(experts))[:, None])
        is_read = np.logical_or.reduceat(leads, starts[:-1], axis=1)
        wanted = [(int(k), int(t), experts[k][t]) for k, t in zip(*is_read.nonzero(), strict=True)]
        stored = [one.blocks for *_, one in wanted if not isinstance(one, AppliedTensor)]
        lengths = iter(self._catalog.lengths.of(stored))
        adapters = [one for *_, one in wanted if isinstance(one, AppliedTensor)]
        factors = iter(low_rank.stored_bytes(self._catalog, adapters))
        cost = np.zeros(equal.shape, dtype=np.int64)
        for k, t, one in wanted:
            if isinstance(one, AppliedTensor):
                cost[k, starts[t]] = next(factors)
            else:
                per_chunk = blocks_per_chunk(one.dtype, chunk, self._catalog.block_size)
                own = next(lengths)
                if per_chunk > 1:
                    own = np.add.reduceat(own, np.arange(0, len(own), per_chunk))
                cost[k, starts[t] : starts[t + 1]] = own
        return np.where(equal, 0, np.take_along_axis(cost, twin, axis=0))


def _chunks(record: Tensor, chunk: int) -> int:
    return -(-math.prod(record.shape) // chunk)


# -- the tensors of a plan ---------------------------------------------------------------------


class Costs(msgspec.Struct, frozen=True):
    """Bytes at rest of experts: all blocks that matter, and those that the plan reads."""

    full: int
    planned: int


_IDLE: Final = bytes((EQUAL, BELOW))
_Sides = list[tuple[Tensor, bytes]]
"""Of one tensor: the records of the experts that matter to it, and the states of their chunks."""


class Lengths(Protocol):
    """Who knows how long blocks are at rest: the catalog, for one."""

    def stored_lengths(self, blocks: Buffer) -> Ints:
        """Return bytes at rest of each block, int64[blocks].

        blocks: the bytes of their ids, one behind the other.
        """


class Wanted(msgspec.Struct, frozen=True):
    """The blocks of experts that matter to a plan, each once in a chunk: uint64[blocks, 4] of ids.

    read: those that the plan reads; left: the others. adapters_read, adapters_left: bytes at rest
    of adapters, likewise.
    """

    read: Words
    left: Words
    adapters_read: int
    adapters_left: int

    def read_bytes(self, lengths: Lengths) -> int:
        """Return the bytes at rest that the plan reads.  Raises Corrupt, NotFound."""
        return self.adapters_read + _stored_bytes(self.read, lengths)

    def left_bytes(self, lengths: Lengths) -> int:
        """Return those that it leaves out.  Raises Corrupt, NotFound."""
        return self.adapters_left + _stored_bytes(self.left, lengths)


def _stored_bytes(ids: Words, lengths: Lengths) -> int:
    return int(lengths.stored_lengths(ids.reshape(-1).view(np.uint8).data).sum())


def costs_of(catalog: Catalog, plan: Plan) -> Costs:
    """Return a plan's costs in this store.  Raises NotFound, Corrupt if an input is missing."""
    wanted = wanted_of(catalog, plan)
    planned = wanted.read_bytes(catalog)
    return Costs(planned + wanted.left_bytes(catalog), planned)


def wanted_of(catalog: Catalog, plan: Plan) -> Wanted:
    """Return what matters to a plan.  Raises NotFound, Corrupt if an input is missing.

    Blocks that several experts share in a chunk are read, and counted, once.
    """
    inputs = Inputs.of(catalog, plan)
    # Look up the records of one expert together.
    records_of = zip(
        *(
            inputs.records([found[tensor.source(member)] for tensor in plan.tensors])
            for member, found in enumerate(inputs.experts, start=1)
        ),
        strict=True,
    )
    groups: dict[tuple[int, tuple[tuple[str, type], ...]], list[_Sides]] = {}
    for tensor, records in zip(plan.tensors, records_of, strict=True):
        every = zip(records, tensor.states, strict=True)
        # The others cost nothing; a companion that is only a fact may have another shape.
        sides = [(record, states) for record, states in every if states.strip(_IDLE)]
        if sides:
            kinds = tuple([(record.dtype, type(record)) for record, _ in sides])
            groups.setdefault((tensor.chunk_elements, kinds), []).append(sides)
    adapters: tuple[list[AppliedTensor], list[AppliedTensor]] = [], []
    read_blocks: list[Words] = []
    left_blocks: list[Words] = []
    for (chunk, kinds), members in groups.items():
        for some in batched(members, [len(sides[0][1]) for sides in members]):
            experts = list(zip(*some, strict=True))
            ids = [chunk_ids([one for one, _ in side], chunk, plan.block_size) for side in experts]
            raw = b"".join(states for side in experts for _, states in side)
            states = np.frombuffer(raw, dtype=np.uint8).reshape(len(ids), -1)
            leads, reads = _leads(twins(ids, [dtype for dtype, _ in kinds]), states)
            for side, own, lead, read in zip(experts, ids, leads, reads, strict=True):
                if not isinstance(side[0][0], AppliedTensor):
                    listed = own[lead].reshape(-1, ID_WORDS)
                    # Zeros, which are no block's hash, pad the last chunk.
                    there = listed.any(axis=1)
                    is_read = np.repeat(read[lead], own.shape[1] // ID_WORDS)
                    read_blocks.append(listed[there & is_read])
                    left_blocks.append(listed[there & ~is_read])
                    continue
                # An adapter's tensors are read whole, or not at all.
                end = 0
                for record, own_states in side:
                    at = slice(end, end := end + len(own_states))
                    if lead[at].any():
                        is_left = not read[at][lead[at]].any()
                        adapters[is_left].append(record)
    none = np.empty((0, ID_WORDS), np.uint64)
    costs = [sum(low_rank.stored_bytes(catalog, some)) for some in adapters]
    return Wanted(
        np.concatenate([none, *read_blocks]), np.concatenate([none, *left_blocks]), *costs
    )


def costs_to_report(catalog: Catalog, plan: Plan) -> Costs:
    """Return `costs_of`, or plain bytes if an input is not stored or the method cannot be used."""
    try:
        return costs_of(catalog, plan)
    except (NotFound, Corrupt, Unavailable, BadRequest):
        return Costs(plan.full_expert_bytes, plan.planned_expert_bytes)


def _leads(first: Ints, states: States) -> tuple[Bools, Bools]:
    """Return bool[K, chunks] twice: the experts that count, and whether their blocks are read.

    Of experts with equal blocks that matter in a chunk, the first counts; they are read if one of
    them is.

    first: as `twins`. states: uint8[K, chunks].
    """
    is_read = (states == READ) | (states == SHARED)
    matters = is_read | (states == OMITTED) | (states == DROPPED)
    columns = np.arange(first.shape[1])
    seen = np.zeros_like(matters)
    any_read = np.zeros_like(matters)
    leads = np.zeros_like(matters)
    for k, twin in enumerate(first):
        leads[k] = matters[k] & ~seen[twin, columns]
        seen[twin[matters[k]], columns[matters[k]]] = True
        any_read[twin[is_read[k]], columns[is_read[k]]] = True
    return leads, np.take_along_axis(any_read, first, axis=0)
