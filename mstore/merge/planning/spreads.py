"""Where the selection by spread of one tensor ends, and what is left of each expert.

Exactly k elements of a tensor are selected.  The threshold is found by the bits of the spreads,
which order as the numbers do: the upper half in a first pass over all experts, the lower half in a
second.  A third adds up squares, and finds the element with which the number of equal ones is
reached.  Spreads of a tensor of up to 32 Mi elements are kept from the first pass on, so that the
second reads nothing; of a larger one no pass keeps more than chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mstore.blocks.meter import Meter
from mstore.merge.arithmetic import masks, pieces
from mstore.merge.arithmetic.masks import Bools, Singles
from mstore.merge.arithmetic.spread import Cut, spreads
from mstore.merge.methods.parameters import single
from mstore.numeric import halves
from mstore.numeric.halves import Bits, Counts
from mstore.objects.tensor import Tensor
from mstore.stats.chunks import chunk_blocks, chunk_reader, tensor_chunk
from mstore.store.catalog import Catalog

_MOST_KEPT = 1 << 25
"""Spreads of a tensor of up to so many elements are kept: 128 MiB."""


class Chunks:
    """The deltas of experts, chunk by chunk.  records: of the base and of each expert."""

    def __init__(self, catalog: Catalog, records: Sequence[Tensor], meter: Meter) -> None:
        self._catalog = catalog
        self._base, *self._experts = records
        self.elements = math.prod(self._base.shape)
        self.length = tensor_chunk(catalog.block_size, self._base, self._experts)
        self._read_base = chunk_reader(catalog, self._base, self.length, None)
        # What is equal in two of them is read once.
        alike = {(one.dtype, one.blocks): one for one in self._experts}
        self._readers = {
            key: chunk_reader(catalog, one, self.length, meter) for key, one in alike.items()
        }
        self.numbers = range(-(-self.elements // self.length))
        self.experts = len(self._experts)

    def deltas(self, number: int) -> Iterator[list[Singles]]:
        """Read a chunk of base and experts, equal blocks once; yield the deltas of all, in pieces.

        A piece is float32[n] of each expert, as `pieces.deltas` cuts them.
        """
        elements = min(self.length, self.elements - number * self.length)
        base, none = self._read_base(number), self._blocks(self._base, number)
        keys = [self._blocks(expert, number) for expert in self._experts]
        sides = {
            key: (self._readers[expert.dtype, expert.blocks](number), expert.dtype)
            for key, expert in dict(zip(keys, self._experts, strict=True)).items()
            if key != none
        }
        cut = pieces.deltas((base, self._base.dtype), list(sides.values()), elements)
        for start, end, moved in cut:
            found = dict(zip(sides, moved, strict=True))
            found[none] = np.zeros(end - start, dtype=np.float32)
            yield [found[key] for key in keys]

    def _blocks(self, record: Tensor, number: int) -> tuple[Any, ...]:
        blocks = chunk_blocks(record, self.length, number, self._catalog.block_size)
        return record.dtype, *blocks


class _Spreads:
    """The bits of a tensor's spreads, chunk by chunk; those of few elements are kept in memory.

    Any thread may ask for a chunk.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._keeps = chunks.elements <= _MOST_KEPT
        self._kept: dict[int, list[Bits]] = {}

    def bits(self, number: int) -> Iterable[Bits]:
        """Return the bits of a chunk, in pieces: uint32[n]."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        found = (_bits(deltas) for deltas in self._chunks.deltas(number))
        if not self._keeps:
            return found
        return self._kept.setdefault(number, list(found))

    def with_deltas(self, number: int) -> Iterator[tuple[list[Singles], Bits]]:
        """Yield the deltas of a chunk, and the bits of their spreads, in pieces."""
        kept = self._kept.get(number)
        pieces_of = self._chunks.deltas(number)
        if kept is None:
            yield from ((deltas, _bits(deltas)) for deltas in pieces_of)
        else:
            yield from zip(pieces_of, kept, strict=True)


class _Sums(NamedTuple):
    """Of a chunk: elements at the threshold, and each expert's squares above it and at it."""

    equal: int
    above: list[float]
    at: list[float]


def select(chunks: Chunks, share: float, pool: ThreadPoolExecutor) -> tuple[Cut, list[float]]:
    """Return where the selection of this share ends, and the sum of squares that it leaves.

    The share is of the elements with a spread; their number is rounded down, as mergekit does.
    """

    spread = _Spreads(chunks)

    def upper(number: int) -> Counts:
        found = halves.no_counts()
        for bits in spread.bits(number):
            halves.count_upper(bits, found)
            # Without a spread.
            found[0] -= bits.size - np.count_nonzero(bits)
        return found

    def lower(number: int) -> Counts:
        found = halves.no_counts()
        for bits in spread.bits(number):
            halves.count_lower(bits, top, found)
        return found

    def sums(number: int) -> _Sums:
        number_of_equal, above, at = 0, [], []
        for deltas, bits in spread.with_deltas(number):
            equal = bits == last
            number_of_equal += int(equal.sum())
            above.append(_squares(deltas, bits > last))
            at.append(_squares(deltas, equal))
        return _Sums(number_of_equal, _added(above), _added(at))

    high = _total(pool.map(upper, chunks.numbers))
    # In float32: mergekit multiplies so.
    count = int(single(single(int(high.sum())) * single(share)))
    if not count:
        return Cut(math.inf, 0), [0.0] * chunks.experts
    top, left = halves.place(high, count)
    low = _total(pool.map(lower, chunks.numbers))
    bottom, left = halves.place(low, left)
    last = halves.joined(top, bottom)
    value = float(np.uint32(last).view(np.float32))
    parts = list(pool.map(sums, chunks.numbers))
    kept = [part.above for part in parts]
    if left == low[bottom]:
        return Cut(value, -1), _added([*kept, *(part.at for part in parts)])
    through = np.cumsum([part.equal for part in parts])
    end = int(np.searchsorted(through, left))
    kept += [part.at for part in parts[:end]]
    left -= int(through[end]) - parts[end].equal
    before = end * chunks.length
    for deltas, bits in spread.with_deltas(end):
        places = np.flatnonzero(bits == last)[:left]
        mask = np.zeros(len(deltas[0]), dtype=bool)
        mask[places] = True
        kept.append(_squares(deltas, mask))
        left -= len(places)
        if not left:
            return Cut(value, before + int(places[-1]) + 1), _added(kept)
        before += len(mask)
    raise AssertionError("the counted elements are not there")


def _bits(deltas: Sequence[Singles]) -> Bits:
    """Return the spreads' bits."""
    return spreads(deltas, len(deltas[0])).view(np.uint32)


def _total(counts: Iterable[Counts]) -> Counts:
    total = halves.no_counts()
    for one in counts:
        total += one
    return total


def _squares(deltas: Sequence[Singles], mask: Bools) -> list[float]:
    """Return the sum of squares that a mask leaves of each expert."""
    return [masks.squares(one, mask) for one in deltas]


def _added(sums: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(own) for own in zip(*sums, strict=True)]
