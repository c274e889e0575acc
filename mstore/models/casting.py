"""Casting: tensors with elements of another type, computed on threads.

Blocks are read, scaled, rounded, hashed and encoded on threads: memory is a few groups of blocks
per thread, whatever the tensor's size.  Scales are mapped files without a name.  The calling thread
puts finished blocks into the transaction, in the order of the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.blocks.codecs import Encoded, elements_of, encode
from mstore.models.scales import Scale, apply
from mstore.numeric.casts import SIZES, Values, narrowed, widened
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor, partition
from mstore.store.transaction import Transaction
from mstore.terms.ids import BlockId, Buffer

_GROUP_BYTES: Final = 4 << 20


Change = Callable[[Values, int], Values]
"""Returns other elements in place of these, from a flat index on; called on threads."""


class CastJob(msgspec.Struct, frozen=True):
    """A tensor to cast: the stored one, its scale if it has one, and the new one, without blocks.

    begin: where the new tensor begins in its file. change: of elements, before they are rounded.
    """

    source: Tensor
    scale: Scale | None
    target: Tensor
    begin: int
    change: Change | None = None


class CastTensor(msgspec.Struct, frozen=True):
    """A new tensor, and how much was too large.

    overflowed: elements, for its type. products: of weights and scales, for float32.
    """

    record: Tensor
    overflowed: int
    products: int


class _CastBlocks(msgspec.Struct, frozen=True):
    """Some whole blocks of a job: its number, its first element and how many it has."""

    job: int
    first: int
    count: int


class _Done(msgspec.Struct, frozen=True):
    """The new blocks of a group; None for the bytes of one that is stored."""

    ids: list[BlockId]
    encoded: list[Encoded | None]
    overflowed: int
    products: int


def largest(
    catalog: Catalog,
    records: Sequence[Tensor],
    pool: ThreadPoolExecutor,
    *,
    ahead: int,
    tick: Callable[[int], None],
) -> list[float]:
    """Return the largest magnitude of each tensor; NaN or infinite if it has such elements."""
    found = [0.0] * len(records)

    def submitted(group: _CastBlocks) -> Future[float]:
        return pool.submit(_largest, catalog, records[group.job], group)

    groups = (
        group
        for number, record in enumerate(records)
        for group in _groups(number, record, SIZES[record.dtype], catalog.block_size)
    )
    with closing(in_order(submitted, groups, ahead=ahead)) as done:
        for group, one in done:
            # A NaN stays one.
            found[group.job] = float(np.maximum(found[group.job], one))
            tick(group.count * SIZES[records[group.job].dtype])
    return found


def _largest(catalog: Catalog, record: Tensor, group: _CastBlocks) -> float:
    return float(np.abs(widened(_read(catalog, record, group), record.dtype)).max())


def _groups(number: int, record: Tensor, target: int, block_size: int) -> Iterator[_CastBlocks]:
    """Yield the groups of a job.  target: bytes of an element of the new tensor."""
    sizes = SIZES[record.dtype], target
    # Powers of two: whole blocks of either type.
    each = max(_GROUP_BYTES // max(sizes), block_size // min(sizes))
    for first, count in partition(record.nbytes // sizes[0], each):
        yield _CastBlocks(number, first, count)


def _read(catalog: Catalog, record: Tensor, group: _CastBlocks) -> npt.NDArray[np.uint8]:
    each = catalog.block_size // SIZES[record.dtype]
    numbers = range(group.first // each, -(-(group.first + group.count) // each))
    return catalog.read_blocks([record.block(number) for number in numbers])


class Caster:
    """Casts tensors, on a pool of threads."""

    def __init__(
        self, catalog: Catalog, transaction: Transaction, pool: ThreadPoolExecutor
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._pool = pool

    def cast(
        self, jobs: Sequence[CastJob], path: str, *, ahead: int, tick: Callable[[int], None]
    ) -> list[CastTensor]:
        """Store the new blocks of tensors of one file; return the tensors, which are not stored.

        tick: called with the bytes that were read.
        """
        ids: list[list[BlockId]] = [[] for _ in jobs]
        overflowed, products = [0] * len(jobs), [0] * len(jobs)
        scales: dict[int, Buffer] = {}

        def submitted(group: _CastBlocks) -> Future[_Done]:
            job = jobs[group.job]
            if job.scale is not None and group.job not in scales:
                scales.clear()
                scales[group.job] = self._mapped(job.scale.record)
            return self._pool.submit(self._group, job, group, scales.get(group.job))

        groups = (
            group
            for number, job in enumerate(jobs)
            for group in _groups(
                number, job.source, SIZES[job.target.dtype], self._catalog.block_size
            )
        )
        with closing(in_order(submitted, groups, ahead=ahead)) as done:
            for group, found in done:
                job = jobs[group.job]
                begin = job.begin + group.first * SIZES[job.target.dtype]
                offsets = itertools.count(begin, self._catalog.block_size)
                blocks = list(zip(found.ids, found.encoded, offsets, strict=False))
                self._transaction.put_blocks(blocks, path)
                ids[group.job] += found.ids
                overflowed[group.job] += found.overflowed
                products[group.job] += found.products
                tick(group.count * SIZES[job.source.dtype])
        return [
            CastTensor(
                Tensor(job.target.dtype, job.target.shape, job.target.nbytes, b"".join(own)),
                *lost,
            )
            for job, own, *lost in zip(jobs, ids, overflowed, products, strict=True)
        ]

    def _mapped(self, record: Tensor) -> Buffer:
        blocks = (self._catalog.read_block(block) for block in record.block_ids())
        return fs.unnamed(self._transaction.directory, blocks)

    def _group(self, job: CastJob, group: _CastBlocks, scale: Buffer | None) -> _Done:
        """Return the new blocks of a group.  Runs on the pool."""
        dtype = job.target.dtype
        values = widened(_read(self._catalog, job.source, group), job.source.dtype)
        lost = 0
        if job.scale is not None and scale is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                before = np.isinf(values)
                # A weight with a scale has 8 bits.
                apply(values.view(np.float32), group.first, job.scale, scale)
                lost = int(np.count_nonzero(np.isinf(values) & ~before))
        if job.change is not None:
            values = job.change(values, group.first)
        data, overflowed = narrowed(values, dtype)
        if dtype == "F8_E4M3":
            # There infinite elements count, and these became so here.
            overflowed -= lost
        plain = data.data
        spans = partition(len(plain), self._catalog.block_size)
        blocks = [plain[at : at + length] for at, length in spans]
        ids = [BlockId.of(block) for block in blocks]
        known = self._transaction.has_blocks(ids)
        elements, policy = elements_of(dtype), self._catalog.config.codec
        encoded = [
            None if is_known else encode(block, elements, policy)
            for block, is_known in zip(blocks, known, strict=True)
        ]
        return _Done(ids, encoded, overflowed, lost)
