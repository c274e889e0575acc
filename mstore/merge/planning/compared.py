"""Compared block lists: which chunks are the base's, and which experts have the same blocks.

A comparison takes as long for one tensor of a few chunks as for a hundred, so tensors whose sides
have the same types and blocks per chunk are compared together.  Reads records and how blocks are
stored, no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from mstore.merge.measures.grid import Bools
from mstore.merge.planning.request import Request
from mstore.merge.planning.surveyed import Candidate, Counts
from mstore.models.adapters import low_rank
from mstore.models.stats.chunks import blocks_per_chunk, tensor_chunk
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.ids import ID_BYTES

Words = np.ndarray[Any, np.dtype[np.uint64]]
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


def equal_chunks(
    base: Words, base_dtype: str, sides: Sequence[Words], dtypes: Sequence[str]
) -> Bools:
    """Return where experts have the base's blocks: bool[K, chunks]; never for another dtype."""
    equal = np.zeros((len(sides), len(base)), dtype=bool)
    for number, (side, dtype) in enumerate(zip(sides, dtypes, strict=True)):
        if dtype == base_dtype:
            equal[number] = (side == base).all(axis=1)
    return equal


def chunk_ids(record: Tensor, chunk: int, block_size: int) -> Words:
    """Return uint64[chunks, 4 * blocks per chunk]: ids as rows, a short last row zero-padded."""
    width = ID_WORDS * blocks_per_chunk(record.dtype, chunk, block_size)
    words = np.frombuffer(record.blocks, dtype=np.uint64)
    if len(words) % width:
        words = np.concatenate([words, np.zeros(-len(words) % width, dtype=np.uint64)])
    return words.reshape(-1, width)


def joined_ids(records: Sequence[Tensor], chunk: int, block_size: int) -> Words:
    """Return `chunk_ids` of several records of one type, one after the other."""
    width = ID_WORDS * blocks_per_chunk(records[0].dtype, chunk, block_size)
    lists = [record.blocks for record in records]
    if any(len(blocks) % (8 * width) for blocks in lists):
        return np.concatenate([chunk_ids(record, chunk, block_size) for record in records])
    return np.frombuffer(b"".join(lists), dtype=np.uint64).reshape(-1, width)


def twins(sides: Sequence[Words], dtypes: Sequence[str]) -> Counts:
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


Compared = tuple[int, Bools, Counts, Counts]
"""Of one tensor: elements of a chunk; where experts are the base's, the first expert with the same
blocks, and stored bytes that reading costs, [K, chunks] each."""


class Comparer:
    """Compares the tensors of one survey, and looks up what the blocks of experts cost."""

    def __init__(self, catalog: Catalog, request: Request) -> None:
        self._catalog = catalog
        self._request = request
        self._found: dict[str, Compared] = {}

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
        size, count = self._catalog.block_size, len(self._request.experts)
        groups: dict[tuple[str, tuple[str, ...], int], list[Candidate]] = {}
        for one in candidates:
            operation = self._request.operation_of(one.name)
            output = self._request.dtype_of(one.name, one.base.dtype)
            records = [record for _, record in one.pairs]
            dtypes = tuple(record.dtype for record in records)
            if (
                {one.base.dtype, *dtypes} <= ITEMSIZES.keys()
                and 0 not in one.base.shape
                and any(id != one.base_id for id, _ in one.pairs)
                and not any(isinstance(record, AppliedTensor) for record in records)
            ):
                chunk = tensor_chunk(size, one.base, records, output, whole=operation.needs_rows)
                groups.setdefault((one.base.dtype, dtypes, chunk), []).append(one)
        for (base_dtype, dtypes, chunk), members in groups.items():
            chunks = [-(-math.prod(one.base.shape) // chunk) for one in members]
            for some in batched(members, chunks):
                ids = joined_ids([one.base for one in some], chunk, size)
                sides = [
                    joined_ids([one.pairs[k][1] for one in some], chunk, size) for k in range(count)
                ]
                equal = equal_chunks(ids, base_dtype, sides, dtypes)
                twin = twins(sides, dtypes)
                cost = self._stored(some, [side.shape[1] // ID_WORDS for side in sides], equal)
                cost = np.where(equal, 0, np.take_along_axis(cost, twin, axis=0))
                end = 0
                for one in some:
                    start, end = end, end - (-math.prod(one.base.shape) // chunk)
                    at = slice(start, end)
                    self._found[one.name] = chunk, equal[:, at], twin[:, at], cost[:, at]

    def found(self, name: str) -> Compared | None:
        """Return what `compare` found of a tensor."""
        return self._found.get(name)

    def of(
        self, base: Tensor, experts: Sequence[Tensor], chunk: int
    ) -> tuple[Bools, Counts, Counts]:
        """Compare one tensor: where it is the base's, the first with the same blocks, costs."""
        size, dtypes = self._catalog.block_size, [record.dtype for record in experts]
        sides = [chunk_ids(record, chunk, size) for record in experts]
        equal = equal_chunks(chunk_ids(base, chunk, size), base.dtype, sides, dtypes)
        twin = twins(sides, dtypes)
        return equal, twin, self._costs(sides, equal, twin, experts)

    def shared(self, records: Sequence[Tensor], chunk: int) -> tuple[Counts, Counts]:
        """Return the first record with the same blocks in each chunk, and what reading it costs."""
        sides = [chunk_ids(record, chunk, self._catalog.block_size) for record in records]
        twin = twins(sides, [record.dtype for record in records])
        return twin, self._costs(sides, np.zeros(twin.shape, dtype=bool), twin, records)

    def _stored(self, some: Sequence[Candidate], per_chunk: Sequence[int], equal: Bools) -> Counts:
        """Return the stored bytes of chunks, int64[K, chunks]; per_chunk: blocks of each expert's.

        0 for a tensor that is the base's.
        """
        members = [
            (k, one.pairs[k][1].blocks, one.pairs[k][0] != one.base_id)
            for k in range(len(per_chunk))
            for one in some
        ]
        found = iter(
            self._catalog.lengths.of([blocks for _, blocks, differs in members if differs])
        )
        cost: list[list[Counts]] = [[] for _ in per_chunk]
        for k, blocks, differs in members:
            cost[k].append(
                _by_chunk(next(found), per_chunk[k])
                if differs
                else np.zeros(-(-len(blocks) // (ID_BYTES * per_chunk[k])), dtype=np.int64)
            )
        return np.array([np.concatenate(side) for side in cost]).reshape(equal.shape)

    def _costs(
        self, sides: Sequence[Words], equal: Bools, twin: Counts, records: Sequence[Tensor]
    ) -> Counts:
        """Return stored bytes of each expert's chunks, int64[K, chunks]: 0 if equal to the base.

        An applied tensor is read whole or not at all: its bytes are those of its first chunk.
        """
        cost = np.zeros(equal.shape, dtype=np.int64)
        wanted = ~equal & (twin == np.arange(len(sides))[:, None])
        for k, record in enumerate(records):
            if isinstance(record, AppliedTensor):
                wanted[k] = False
                cost[k, 0] = low_rank.stored_bytes(self._catalog, record)
        read = np.flatnonzero(wanted.any(axis=1)).tolist()
        found = self._catalog.lengths.of([records[k].blocks for k in read])
        for k, lengths in zip(read, found, strict=True):
            whole = _by_chunk(lengths, sides[k].shape[1] // ID_WORDS)
            cost[k] = np.where(wanted[k], whole, cost[k])
        return np.where(equal, 0, np.take_along_axis(cost, twin, axis=0))


def _by_chunk(lengths: Counts, blocks: int) -> Counts:
    """Return the sums of the lengths of blocks, `blocks` to a chunk; fewer in the last."""
    if blocks == 1:
        return lengths
    return np.add.reduceat(lengths, np.arange(0, len(lengths), blocks))
