"""Compared block lists: which chunks are the base's, and which experts have the same blocks.

A comparison takes as long for one tensor of a few chunks as for a hundred, so tensors whose sides
have the same types and blocks per chunk are compared together.  Pure functions of records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from mstore.ids import ID_BYTES
from mstore.merge.measures.grid import Bools
from mstore.merge.planning.surveyed import Counts
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import blocks_per_chunk

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
