"""The survey of small tensors: tensors of one block each, compared and looked up in batches.

Gives the same results as `survey.Surveyor`, for a few hundred tensors in one pass over arrays: a
pass costs as much for one block as for hundreds.  A tensor with missing statistics or numbers that
are not finite is left to the caller, who surveys it by itself.  Reads the catalog and the
statistics; writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from mstore.ids import ID_BYTES, TensorId
from mstore.merge.measures.grid import Bools
from mstore.merge.planning.known_pairs import has_digest
from mstore.merge.planning.request import Request
from mstore.merge.planning.surveyed import NOTHING_KEPT, Counts, ExpertTensor, SurveyedTensor
from mstore.numeric.codes import ITEMSIZES
from mstore.objects.applied import AppliedTensor
from mstore.objects.tensor import Tensor
from mstore.stats.chunk import CHUNK
from mstore.stats.chunks import chunk_elements
from mstore.stats.histogram import Threshold
from mstore.stats.many import SingleTables
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog

TOGETHER: Final = 256
"""Number of tensors surveyed together."""

_WORDS: Final = ID_BYTES // 8


class Candidate(NamedTuple):
    """A tensor to survey: its record in the base and in each expert."""

    name: str
    base_id: TensorId
    base: Tensor
    pairs: list[tuple[TensorId, Tensor]]
    copies: int


class _Looks(msgspec.Struct, frozen=True):
    """What is known of T tensors by K experts.

    equal, twin, cost: [T, K], as in ExpertTensor. numbers: (row, thresholds) of each pair that has
    complete, finite statistics.
    """

    equal: Bools
    twin: Counts
    cost: Counts
    numbers: dict[tuple[TensorId, TensorId], tuple[Any, tuple[Threshold, ...]]]


class SmallSurvey:
    """Surveys small tensors for one request."""

    def __init__(self, catalog: Catalog, statistics: StatsStore, request: Request) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._request = request
        # A rule's tensors are surveyed one by one, and so are those that need other facts.
        own = request.operation
        self._trims = own.selection.trims
        others = own.measures or own.method.fishers or not has_digest(own)
        self._plain = not (request.rules or others) and own.is_even
        self._weightless = request.operation.weightless
        self._chunks: dict[str, int] = {}
        self._nothing = np.zeros(1, dtype=CHUNK)

    def takes(self, one: Candidate) -> bool:
        """Return whether all members store the tensor as one block and chunk, in one dtype."""
        base = one.base
        if (
            not self._plain
            or any(isinstance(record, AppliedTensor) for _, record in one.pairs)
            or len(base.blocks) != ID_BYTES
            or base.dtype not in ITEMSIZES
            or not base.nbytes
        ):
            return False
        # Without analysis a threshold may be a bin's edge, which needs its own cost computation.
        if self._trims and not self._request.analyze:
            return False
        if all(id == one.base_id for id, _ in one.pairs):
            return False
        return all(
            record.dtype == base.dtype and len(record.blocks) == ID_BYTES for _, record in one.pairs
        ) and math.prod(base.shape) <= self._chunk(base.dtype)

    def _chunk(self, dtype: str) -> int:
        found = self._chunks.get(dtype)
        if found is None:
            output = self._request.dtype or dtype
            found = self._chunks[dtype] = chunk_elements(self._catalog.block_size, dtype, output)
        return found

    def survey(self, batch: Sequence[Candidate]) -> list[SurveyedTensor | None]:
        """Survey a batch; None for a tensor that needs its own survey.  Raises Corrupt."""
        equal, twin = _compared(batch)
        looks = _Looks(equal, twin, self._costs(batch, equal, twin), self._numbers(batch))
        return [self._one(one, number, looks) for number, one in enumerate(batch)]

    def _one(self, one: Candidate, number: int, looks: _Looks) -> SurveyedTensor | None:
        experts = []
        equal, twin, cost = looks.equal[number], looks.twin[number], looks.cost[number]
        for k, (id, record) in enumerate(one.pairs):
            pair = (one.base_id, id)
            row: Any = self._nothing
            cuts: tuple[Threshold, ...] = (NOTHING_KEPT,) if self._trims else ()
            if id != one.base_id and not self._weightless[k]:
                found = looks.numbers.get(pair)
                if found is None:
                    return None
                row, cuts = found
            at = slice(k, k + 1)
            experts.append(ExpertTensor(pair, record, equal[at], twin[at], cost[at], row, cuts))
        elements, chunk = math.prod(one.base.shape), self._chunk(one.base.dtype)
        return SurveyedTensor(
            one.name,
            one.base,
            elements,
            chunk,
            tuple(experts),
            one.copies,
            self._request.operation,
        )

    def _costs(self, batch: Sequence[Candidate], equal: Bools, twin: Counts) -> Counts:
        """Return the stored bytes of each expert's block: 0 if it is the base's."""
        wanted = ~equal & (twin == np.arange(equal.shape[1]))
        blocks = [
            batch[number].pairs[k][1].blocks
            for number, k in zip(*(places.tolist() for places in np.nonzero(wanted)), strict=True)
        ]
        cost = np.zeros(equal.shape, dtype=np.int64)
        if blocks:
            cost[wanted] = self._catalog.stored_lengths(blocks)
        return np.where(equal, 0, np.take_along_axis(cost, twin, axis=1))

    def _numbers(
        self, batch: Sequence[Candidate]
    ) -> dict[tuple[TensorId, TensorId], tuple[Any, tuple[Threshold, ...]]]:
        """Return the row and the threshold of each pair with complete, finite statistics."""
        wanted = {
            (one.base_id, id): one.base
            for one in batch
            for (id, _), nothing in zip(one.pairs, self._weightless, strict=True)
            if id != one.base_id and not nothing
        }
        pairs = list(wanted)
        sizes = [math.prod(base.shape) for base in wanted.values()]
        chunks = [self._chunk(base.dtype) for base in wanted.values()]
        keep = (
            [self._request.operation.selection.ranks(size)[0] for size in sizes]
            if self._trims
            else None
        )
        found = SingleTables.decode(self._statistics.encoded_pairs(pairs), keep)
        elements, lengths = found.elements.tolist(), found.chunk_elements.tolist()
        numbers: dict[tuple[TensorId, TensorId], tuple[Any, tuple[Threshold, ...]]] = {}
        for number, place in enumerate(found.places.tolist()):
            if elements[number] == sizes[place] and lengths[number] == chunks[place]:
                cuts = (found.thresholds[number],) if self._trims else ()
                numbers[pairs[place]] = found.rows[number : number + 1], cuts
        return numbers


def _compared(batch: Sequence[Candidate]) -> tuple[Bools, Counts]:
    """Return equal and twin, [T, K], as in ExpertTensor."""
    count = len(batch[0].pairs)
    raw = b"".join(
        blocks
        for one in batch
        for blocks in (one.base.blocks, *(record.blocks for _, record in one.pairs))
    )
    ids = np.frombuffer(raw, dtype=np.uint64).reshape(len(batch), 1 + count, _WORDS)
    experts = ids[:, 1:]
    equal: Bools = (experts == ids[:, :1]).all(axis=2)
    twin = np.repeat(np.arange(count)[None], len(batch), axis=0)
    # From the last to the first, so that the first expert with a block wins.
    for k in range(count - 1, -1, -1):
        same = (experts[:, k:] == experts[:, k : k + 1]).all(axis=2)
        twin[:, k:] = np.where(same, k, twin[:, k:])
    return equal, twin
