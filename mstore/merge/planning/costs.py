"""What a plan costs in this store: bytes at rest of the expert blocks that it names.

A plan says what is merged, and is the same in any store.  How its blocks are stored differs from
store to store, and may change (`add` with another codec).  So costs are not part of a plan but
looked up on demand.  A plan record holds only plain bytes, which never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from mstore.merge.measures.grid import Bools
from mstore.merge.planning.compared import Words, batched, chunk_ids, twins
from mstore.merge.planning.surveyed import Counts
from mstore.models.adapters.inputs import Inputs
from mstore.models.adapters.low_rank import stored_bytes
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED, Plan, PlanTensor
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Corrupt, NotFound, Unavailable
from mstore.terms.ids import ID_BYTES

States = np.ndarray[Any, np.dtype[np.uint8]]


class Costs(msgspec.Struct, frozen=True):
    """Bytes at rest of experts: all blocks that matter, and those that the plan reads."""

    full: int
    planned: int


def costs_of(catalog: Catalog, plan: Plan) -> Costs:
    """Return a plan's costs in this store.  Raises NotFound, Corrupt if an input is missing.

    Blocks that several experts share in a chunk are read, and counted, once.
    """
    known = catalog.lengths.sums(plan.id())
    return Costs(*known) if known is not None else _looked_up(catalog, plan)


def _looked_up(catalog: Catalog, plan: Plan) -> Costs:
    inputs = Inputs.of(catalog, plan)
    experts = inputs.experts
    blocks: list[Words] = []
    read: list[Bools] = []
    applied = _Applied(catalog)
    # Look up the records of one expert together.
    sides_of = zip(
        *(
            inputs.records([found[tensor.source(member)] for tensor in plan.tensors])
            for member, found in enumerate(experts, start=1)
        ),
        strict=True,
    )
    single, alike = _Single(), _Alike()
    for tensor, records in zip(plan.tensors, sides_of, strict=True):
        if all(type(one) is Tensor and len(one.blocks) == ID_BYTES for one in records):
            single.take(tensor, records)
            continue
        # The others cost nothing; a companion that is only a fact may have another shape.
        matter = [k for k, one in enumerate(tensor.states) if one.strip(_IDLE)]
        if not matter:
            continue
        joined = b"".join(tensor.states[k] for k in matter)
        states = np.frombuffer(joined, dtype=np.uint8).reshape(len(matter), -1)
        own = [records[k] for k in matter]
        sides = [chunk_ids(one, tensor.chunk_elements, plan.block_size) for one in own]
        if all(type(one) is Tensor for one in own):
            alike.take(tuple(record.dtype for record in own), sides, states)
            continue
        leads, group_read = _led([record.dtype for record in own], sides, states)
        for record, side, lead, reads in zip(own, sides, leads, group_read, strict=True):
            if isinstance(record, AppliedTensor):
                applied.take(record, matters=bool(lead.any()), is_read=bool(reads[lead].any()))
                continue
            listed, is_read = _listed(side, lead, reads)
            blocks.append(listed)
            read.append(is_read)
    for listed, is_read in alike.blocks():
        blocks.append(listed)
        read.append(is_read)
    raw = np.concatenate(blocks).tobytes() if blocks else b""
    ids = [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)] + single.blocks
    if not ids:
        return Costs(applied.full, applied.planned)
    lengths = catalog.stored_lengths(ids)
    is_read = np.concatenate([*read, np.array(single.read, dtype=np.bool_)])
    return Costs(int(lengths.sum()) + applied.full, int(lengths[is_read].sum()) + applied.planned)


class _Applied:
    """Counts for applied tensors: the adapter's tensors are read whole, or not at all."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.full = 0
        self.planned = 0

    def take(self, record: AppliedTensor, *, matters: bool, is_read: bool) -> None:
        """Count one tensor of one expert."""
        cost = stored_bytes(self._catalog, record) if matters else 0
        self.full += cost
        self.planned += cost if is_read else 0


class _Alike:
    """Tensors whose sides have the same types and blocks per chunk: compared many at a time."""

    def __init__(self) -> None:
        self._parts: dict[tuple[object, ...], list[tuple[list[Words], States]]] = {}

    def take(self, dtypes: tuple[str, ...], sides: list[Words], states: States) -> None:
        """Add one tensor. states: uint8[K, chunks]."""
        key = (dtypes, *(side.shape[1] for side in sides))
        self._parts.setdefault(key, []).append((sides, states))

    def blocks(self) -> Iterator[tuple[Words, Bools]]:
        """Yield the blocks that count, and which of them are read."""
        for (dtypes, *_), parts in self._parts.items():
            for some in batched(parts, [states.shape[1] for _, states in parts]):
                sides = [np.concatenate(side) for side in zip(*(s for s, _ in some), strict=True)]
                states = np.concatenate([states for _, states in some], axis=1)
                leads, group_read = _led(cast(tuple[str, ...], dtypes), sides, states)
                for side, lead, reads in zip(sides, leads, group_read, strict=True):
                    yield _listed(side, lead, reads)


def _listed(side: Words, lead: Bools, reads: Bools) -> tuple[Words, Bools]:
    """Return the blocks of the leading chunks of one expert, and which of them are read."""
    own = side[lead].reshape(-1, ID_BYTES // 8)
    # The padding of a short last chunk is zeros, which are no block's hash.
    there = own.any(axis=1)
    return own[there], np.repeat(reads[lead], side.shape[1] * 8 // ID_BYTES)[there]


def _led(dtypes: Sequence[str], sides: Sequence[Words], states: States) -> tuple[Bools, Bools]:
    """Return `_groups` of chunks. states: uint8[K, chunks]."""
    is_read = (states == READ) | (states == SHARED)
    matters = is_read | (states == OMITTED) | (states == DROPPED)
    return _groups(twins(sides, dtypes), matters, is_read)


class _Single:
    """Counts for tensors of one block: the blocks of experts that matter, and those read."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.read: list[bool] = []

    def take(self, tensor: PlanTensor, records: Sequence[Tensor]) -> None:
        """Count the blocks of one tensor; a block that several experts share counts once."""
        found: dict[tuple[str, bytes], bool] = {}
        for record, (state,) in zip(records, tensor.states, strict=True):
            if state in _MATTERS:
                key = record.dtype, record.blocks
                found[key] = found.get(key, False) or state in _READ
        self.blocks += (blocks for _, blocks in found)
        self.read += found.values()


_READ = (READ, SHARED)
_MATTERS = (READ, SHARED, OMITTED, DROPPED)
_IDLE = bytes((EQUAL, BELOW))


def told_costs(catalog: Catalog, plan: Plan) -> Costs:
    """Return `costs_of`, or plain bytes if an input is not stored or the method cannot be used."""
    try:
        return costs_of(catalog, plan)
    except (NotFound, Corrupt, Unavailable, BadRequest):
        return Costs(plan.full_expert_bytes, plan.planned_expert_bytes)


def _groups(first: Counts, matters: Bools, is_read: Bools) -> tuple[Bools, Bools]:
    """Return bool[K, chunks] twice: the first relevant expert with equal blocks, and its reads.

    The first array marks the first of the experts with equal blocks that matter there, the second
    whether one of those is read.

    first: the first expert with the same blocks in the same chunk (`survey.twins`).
    """
    columns = np.arange(first.shape[1])
    seen = np.zeros_like(matters)
    any_read = np.zeros_like(matters)
    leads = np.zeros_like(matters)
    for k, twin in enumerate(first):
        leads[k] = matters[k] & ~seen[twin, columns]
        seen[twin[matters[k]], columns[matters[k]]] = True
        any_read[twin[is_read[k]], columns[is_read[k]]] = True
    return leads, np.take_along_axis(any_read, first, axis=0)
