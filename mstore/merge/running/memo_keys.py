"""Memo keys: hashes of everything that determines one chunk's output.

Owns which facts go into a key and how a row's value is encoded; `mstore.store.memo` keeps the rows.

    key    BLAKE3 derive_key("mstore 1 memo") of: version of the arithmetic, mix, element types,
           name of a method of another package and the version of that, length, base blocks, and
           for each expert that takes part, in plan order: weight, threshold, element type, blocks,
           and for a quota that ends within the tensor what the chunk's share of it follows from;
           for methods that draw the key words and the place in the tensor, and the mask limit where
           experts have different ones; for
           methods that mix the experts themselves all weights; for a selection by variance or
           importance the threshold, the number of experts, and how far into the chunk equal ones
           count; for one by what experts need, what makes it a need, and of how many; for
           rows or elements with factors of their own all weights, which expert each is, and what
           else factors follow from; of what is read
           with companions, whose each is
    value  the output's BlockIds; u32 (little-endian) for each expert that takes part with such a
           quota: how many ties the chunk took; u32: how many elements are infinite or NaN, and are
           finite in the base; u32: how many of these are finite in every expert; u16: how many
           numbers of ties there are

An absent expert does not affect a key if its absence does not affect the output, so a merge of K +
1 experts finds the results of K.  Pure functions of plan and records; no block is read or looked
up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Final

import msgspec
from blake3 import blake3

from mstore.merge.arithmetic.kernels import UNLIMITED, Mix
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import package_of
from mstore.merge.running.slices import ALL_FINITE, NotFinite
from mstore.merge.running.task import ChunkTask, Members, Tasks, TensorTask
from mstore.models.stats.chunks import blocks_per_chunk
from mstore.store.objects.plan import DROPPED, OMITTED
from mstore.terms.ids import ID_BYTES, BlockId

CONTEXT: Final = "mstore 1 memo"
ARITHMETIC: Final = 2
"""Increment whenever the kernels give other bytes for equal inputs."""

_TAKEN = struct.Struct("<I")
_END = struct.Struct("<IIH")
_NOTHING: Final = bytes(ID_BYTES)


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """A row's value.

    taken: ties that the chunk took, for each threshold of a participating expert whose quota has a
    limit, in the order of `TensorTask.quotas`. not_finite: new elements of the output.
    """

    blocks: tuple[BlockId, ...]
    taken: tuple[int, ...]
    not_finite: NotFinite

    @classmethod
    def of(
        cls, task: ChunkTask, blocks: Sequence[BlockId], taken: Sequence[int], not_finite: NotFinite
    ) -> Remembered:
        """Build from `taken` with one number for every threshold."""
        limited = limited_slots(task) if task.tensor.limited else []
        return cls(tuple(blocks), tuple([taken[k] for k in limited]), not_finite)

    def per_slot(self, positions: Sequence[int], slots: int) -> tuple[int, ...]:
        """Return the ties with one number for every threshold; `positions` of those in `taken`."""
        spread = [0] * slots
        for k, count in zip(positions, self.taken, strict=True):
            spread[k] = count
        return tuple(spread)

    def encode(self) -> bytes:
        """Encode the row's value."""
        ties = b"".join(map(_TAKEN.pack, self.taken))
        return (
            b"".join(self.blocks)
            + ties
            + _END.pack(self.not_finite.new, self.not_finite.made, len(self.taken))
        )

    @classmethod
    def decode(cls, value: bytes) -> Remembered | None:
        """Decode a row's value; None if it is invalid."""
        if len(value) < _END.size:
            return None
        new, made, count = _END.unpack_from(value, len(value) - _END.size)
        end = len(value) - _END.size - count * _TAKEN.size
        if end <= 0 or end % ID_BYTES:
            return None
        # Mostly one block; a generator takes longer than the rest of this.
        blocks = tuple([BlockId(value[at : at + ID_BYTES]) for at in range(0, end, ID_BYTES)])
        not_finite = NotFinite(new, made) if new else ALL_FINITE
        return cls(blocks, struct.unpack_from(f"<{count}I", value, end), not_finite)


def limited_slots(task: ChunkTask) -> list[int]:
    """Return the thresholds of participating experts whose ties are limited over the tensor."""
    limits, row_of = task.tensor.quotas.tolist(), task.row_of
    return [
        slot
        for slot, quota in enumerate(limits)
        if quota != UNLIMITED and row_of[slot % len(row_of)] >= 0
    ]


class MemoKeys:
    """The memo keys of one plan's chunks."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        # Keyed by method, operation and element types, of which a plan mostly has few.
        self._heads: dict[tuple[str, Mix, str, str], bytes] = {}
        # Which package it is, is read from disk.
        self._packages: dict[str, bytes] = {}

    def by_number(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the keys of some chunks of a tensor by number, numbers ascending."""
        return dict(zip(numbers, self.chunks(tensor, numbers), strict=True))

    def chunks(self, tensor: TensorTask, numbers: Sequence[int]) -> list[bytes]:
        """Return the keys (32 bytes each) of some chunks of a tensor, numbers ascending."""
        operation = self._tasks.operation(tensor.name)
        block_size = self._tasks.plan.block_size
        members = self._tasks.members(tensor.name)
        head = self._head_of(tensor, operation)
        base = members.base.blocks
        span = _span(tensor, members.base.dtype, block_size)
        sides = self._sides(tensor, members, operation)
        present, place = members.present.T.tolist(), operation.selection.place
        keys = []
        # Here a line is a call for each expert of each chunk: hundreds of thousands in a merge.
        for number in numbers:
            at = number.to_bytes(8, "little")
            pieces = [head, tensor.chunk_length(number).to_bytes(8, "little")]
            first = number * tensor.chunk_elements
            pieces.append(place(tensor.cut, first, tensor.chunk_length(number)))
            pieces.append(base[number * span : (number + 1) * span])
            for takes_part, (fixed, blocks, width, chains) in zip(
                present[number], sides, strict=True
            ):
                if takes_part:
                    pieces += (fixed, blocks[number * width : (number + 1) * width])
                    for chain in chains:
                        pieces += (chain.fixed, at, chain.before(number))
            keys.append(blake3(b"".join(pieces), derive_key_context=CONTEXT).digest())
        return keys

    def _head_of(self, tensor: TensorTask, operation: Operation) -> bytes:
        mix, method = tensor.mix, operation.method.name
        key = method, mix, tensor.base_dtype, tensor.out_dtype
        found = self._heads.get(key)
        if found is None:
            # Every expert is a summand of a sum of whole experts, present or not.
            weights = mix.weights.astype("<f4").tobytes() if operation.counts_all else b""
            types = _text(tensor.base_dtype) + _text(tensor.out_dtype)
            head = ARITHMETIC.to_bytes(4, "little") + mix.signature() + self._packaged(method)
            found = self._heads[key] = head + types + weights
        # Ranks, importance and angles follow from the rows.
        rows = tensor.row_length.to_bytes(8, "little") if operation.needs_rows else b""
        own = operation.chunk_factors
        return found + rows + (b"" if own is None else own.key(tensor.shape))

    def _packaged(self, method: str) -> bytes:
        """Return what tells methods of other packages apart, as flags do those of mstore."""
        found = self._packages.get(method)
        if found is None:
            package = package_of(method)
            found = b"" if package is None else _text(method) + _text(package[1])
            self._packages[method] = found
        return found

    def _sides(
        self, tensor: TensorTask, members: Members, operation: Operation
    ) -> list[tuple[bytes, bytes, int, list[_Chain]]]:
        """Return each expert's part of keys: constant bytes, block list, bytes of it per chunk."""
        thresholds = tensor.thresholds.astype("<f4", copy=False).tobytes()
        words = operation.selection.words(tensor.keys)
        weights = tensor.mix.weights[tensor.mix.has_base :].astype("<f4").tobytes()
        own = tensor.mix.own()
        experts = len(members.experts)
        quotas = tensor.quotas.tolist()
        spans = {
            dtype: _span(tensor, dtype, self._tasks.plan.block_size)
            for dtype in {expert.dtype for expert in members.experts}
        }
        sides = []
        for k, expert in enumerate(members.experts):
            slots = range(k, len(quotas), experts)
            limited = [slot for slot in slots if quotas[slot] != UNLIMITED]
            fixed = b"".join(
                (
                    operation.method.combine.who(operation, k, experts),
                    _text(expert.dtype),
                    weights[4 * k : 4 * k + 4],
                    thresholds[4 * k : 4 * k + 4],
                    words[8 * k : 8 * k + 8],
                    own[k],
                    b"\1" if k in limited else b"\0",
                    *(
                        thresholds[4 * slot : 4 * slot + 4] + bytes([slot in limited])
                        for slot in slots[1:]
                    ),
                )
            )
            width = spans[expert.dtype]
            chains = [_Chain(tensor, members, slot) for slot in limited]
            sides.append((fixed, expert.blocks, width, chains))
        return sides


def _span(tensor: TensorTask, dtype: str, block_size: int) -> int:
    return ID_BYTES * blocks_per_chunk(dtype, tensor.chunk_elements, block_size)


@cache
def _text(dtype: str) -> bytes:
    return dtype.encode() + b"\0"


class _Chain:
    """What determines the ties that earlier chunks took, for one threshold of a limited quota.

    That is both whole tensors, the quota, and which earlier chunks the plan leaves out; other
    unread chunks have no ties to take.
    """

    def __init__(self, tensor: TensorTask, members: Members, slot: int) -> None:
        k = slot % len(members.experts)
        quota = int(tensor.quotas[slot]).to_bytes(8, "little")
        self.fixed = members.base_id + members.expert_ids[k] + quota
        states = members.states[k]
        is_whole = OMITTED not in states and DROPPED not in states
        self._out = (
            [] if is_whole else [n for n, state in enumerate(states) if state in (OMITTED, DROPPED)]
        )
        self._seen = 0
        self._hash = None if is_whole else blake3(derive_key_context=CONTEXT)

    def before(self, number: int) -> bytes:
        """Return what tells which chunks before `number` are left out; numbers only grow.

        In a key, `fixed` and the number come before it.
        """
        if self._hash is None:
            return _NOTHING
        while self._seen < len(self._out) and self._out[self._seen] < number:
            self._hash.update(self._out[self._seen].to_bytes(8, "little"))
            self._seen += 1
        return self._hash.digest() if self._seen else _NOTHING
