"""Facts: what a method must know of whole tensors before the first element is computed.

Owns how facts are read, measured and kept, and the errors where they cannot be: sums of squares of
tensors, of their differences and of companions, and any number that a selection or a combination
measures of a pair of tensors.  In which layer a tensor is, is a fact that needs no reading.  Each
says itself what it needs (`Selection.measure`, `Combination.settle`).  Statistics keep facts by
content: what was measured once is not read again.  Trim thresholds are facts, too
(`planning.thresholds`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.measures import NEEDS_ANALYSIS
from mstore.merge.measures.deltas import Chunks
from mstore.merge.measures.grid import Companion
from mstore.models.adapters.low_rank import load_factors
from mstore.models.stats.analysis import measure_apart, measure_pair, measure_squares
from mstore.models.stats.chunks import ReadChunk, chunk_reader, read_tensor, tensor_chunk
from mstore.models.stats.pairs import known_apart, sum_of_squares
from mstore.models.stats.store import StatsStore
from mstore.models.stats.table import DeltaTable
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option

Side = tuple[TensorId, Tensor]

Readers = tuple[int, ReadChunk, ReadChunk]
"""The elements of a chunk, and what reads those of the base and of an expert."""

Lack = tuple[str, str]
"""What is wrong where all elements are finite, and what a tensor lacks then."""


class Facts:
    """Measures facts, block by block, and keeps them.

    analyze: whether blocks may be read for what is not known; `meter` counts those of experts.
    models: the names of the models that have each content of a tensor, by its name, for errors.
    layer: the layer of a tensor of the base, by its name there, and of how many; None: in no layer.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        *,
        analyze: bool,
        meter: Meter,
        models: Callable[[str], Mapping[TensorId, str]],
        layer: Callable[[str], tuple[int, int] | None],
    ) -> None:
        self.catalog = catalog
        self.statistics = statistics
        self.analyze = analyze
        self.meter = meter
        self.models = models
        self.layer = layer
        self.memory = np.empty(0, dtype=np.float32)

    def of(
        self,
        name: str,
        base: Side,
        experts: Sequence[Side],
        pool: ThreadPoolExecutor,
        *,
        source: str | None = None,
        companions: Mapping[str, Sequence[Side | None]] | None = None,
    ) -> TensorFacts:
        """Return the facts of one tensor in the base and in each expert.

        source: its name in the base, if it has another one there. companions: as `TensorFacts`.
        """
        return TensorFacts(self, name, source or name, (base, *experts), pool, companions or {})

    def totals(
        self, one: Companion, where: str, side: Side, chunk: int, pool: ThreadPoolExecutor
    ) -> npt.NDArray[np.float64] | None:
        """Return the sums over chunks of a companion's tensor: float64[totals, chunks].

        None if they are not known and may not be measured.  Raises, with `where`, what the
        companion says of elements that are none of its role.
        """
        measure, (id, record) = one.measure, side
        if measure is None:
            return None
        what = blake3(one.role.encode() + chunk.to_bytes(8, "little")).digest(length=16)
        chunks = -(-math.prod(record.shape) // chunk)
        found = self.statistics.sums(id, what)
        if found is not None and len(found) == one.totals * chunks:
            return found.reshape(one.totals, chunks)
        if not self.analyze:
            return None
        read = chunk_reader(self.catalog, record, chunk, self.meter)

        def of_chunk(number: int) -> Sequence[float]:
            data = read(number)
            return measure(data, record.dtype, len(data) // ITEMSIZES[record.dtype])

        sums = np.array(list(pool.map(of_chunk, range(chunks))), dtype=np.float64).T
        if one.refuse is not None and np.isnan(sums).any():
            raise one.refuse(where)
        self.statistics.put_sums(id, what, sums.ravel())
        return sums

    def squares(self, side: Side, pool: ThreadPoolExecutor, meter: Meter | None = None) -> float:
        """Return the sum of squares of a tensor, measured if it is not known; meter: of reads."""
        id, record = side
        squares = self.statistics.squares(id)
        if squares is None:
            squares = measure_squares(self.catalog, record, pool, meter)
            self.statistics.put_squares(id, squares)
        return squares

    def measured(self, one: Side, other: Side, pool: ThreadPoolExecutor) -> DeltaTable | None:
        """Measure the difference of two tensors, keep it, and return its statistics."""
        measure = measure_pair(self.catalog, one[1], other[1], pool, self.meter)
        self.statistics.put_pair(measure.finish(one[0], other[0]))
        return self.statistics.pair(one[0], other[0])


class TensorFacts:
    """The facts of one tensor; `sides` are the base, 0, and each expert, from 1 on.

    companions: by role the tensors of those that are not read with experts, None where one has
    none.

    Every call raises BadRequest if a fact is not known and may not be measured, or is not finite.
    """

    def __init__(
        self,
        facts: Facts,
        name: str,
        source: str,
        sides: tuple[Side, ...],
        pool: ThreadPoolExecutor,
        companions: Mapping[str, Sequence[Side | None]],
    ) -> None:
        self._facts = facts
        self.companions = companions
        self._source = source
        self.name = name
        self.sides = sides
        self.pool = pool

    @property
    def base(self) -> Tensor:
        """The base's record."""
        return self.sides[0][1]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.base.shape)

    @property
    def layer(self) -> tuple[int, int] | None:
        """The layer of the base that it is in, and how many that stack has; None: in no layer."""
        return self._facts.layer(self._source)

    @property
    def experts(self) -> range:
        """The numbers of the experts among the sides."""
        return range(1, len(self.sides))

    def is_base(self, side: int) -> bool:
        """Return whether an expert's tensor is the base's."""
        return self.sides[side][0] == self.sides[0][0]

    def once(
        self, what: Sequence[tuple[TensorId, bytes]], measure: Callable[[], Iterable[float]]
    ) -> list[float]:
        """Return facts of the base with other tensors, each kept under 16 bytes.

        measure: makes all, if one is not known.  Raises BadRequest if it may not.
        """

        def those(places: Sequence[int]) -> list[float]:
            every = list(measure())
            return [every[place] for place in places]

        return self.each(what, those)

    def each(
        self,
        what: Sequence[tuple[TensorId, bytes]],
        measure: Callable[[Sequence[int]], Iterable[float]],
    ) -> list[float]:
        """Return facts as `once` does; measure: makes those at the places that are not known."""
        base, statistics = self.sides[0][0], self._facts.statistics
        found = statistics.facts([(base, id, key) for id, key in what])
        missing = [place for place, one in enumerate(found) if one is None]
        if missing:
            self._require_analysis()
            for place, value in zip(missing, map(float, measure(missing)), strict=True):
                found[place] = value
                statistics.put_fact(base, *what[place], value)
        return [one for one in found if one is not None]

    def memory(self, n: int) -> npt.NDArray[np.float32]:
        """Return memory for n numbers: the same one for each tensor, since new memory is slow."""
        facts = self._facts
        if facts.memory.size < n:
            facts.memory = np.empty(n, dtype=np.float32)
        return facts.memory[:n]

    def remember(self, side: int, numbers: npt.NDArray[np.float32]) -> None:
        """Keep a number of each row of an expert in memory, for `Selection.masks`."""
        ids = self.sides[0][0], self.sides[side][0]
        self._facts.catalog.row_numbers.put(*ids, numbers)

    def squares(self, side: int, lack: Lack) -> float:
        """Return the sum of squares of a side."""
        one = self.sides[side]
        if self._facts.statistics.squares(one[0]) is None:
            self._require_analysis()
        meter = self._facts.meter if side else None
        return self.finite(self._facts.squares(one, self.pool, meter), (side,), lack)

    def apart(self, side: int, lack: Lack) -> float:
        """Return the square of the distance of an expert from the base.

        Planning needs the rest of the statistics of such a pair, too.
        """
        pair = self.sides[0][0], self.sides[side][0]
        found = known_apart(self._facts.statistics, [pair]).get(pair)
        if found is None:
            found = sum_of_squares(self._measured(side).rows)
        return self.finite(found, (0, side), lack)

    def largest(self, side: int, lack: Lack) -> float:
        """Return the largest magnitude of an expert's deltas."""
        if self.is_base(side):
            return 0.0
        table = self._facts.statistics.pair(self.sides[0][0], self.sides[side][0])
        rows = (table or self._measured(side)).rows
        return self.finite(float(rows["max_abs"].max()), (0, side), lack)

    def _measured(self, side: int) -> DeltaTable:
        self._require_analysis()
        table = self._facts.measured(self.sides[0], self.sides[side], self.pool)
        assert table is not None
        return table

    def between(self, sides: Sequence[int], lack: Lack) -> dict[tuple[int, int], float]:
        """Return the square of the distance of each two of these; all are read together."""
        facts = self._facts
        pairs = list(itertools.combinations(sides, 2))
        ids = {(j, i): (self.sides[j][0], self.sides[i][0]) for j, i in pairs}
        known = known_apart(facts.statistics, list(ids.values()))
        found = {pair: known[own] for pair, own in ids.items() if own in known}
        missing = [pair for pair in pairs if pair not in found]
        if missing:
            self._require_analysis()
            measured = measure_apart(
                facts.catalog, facts.statistics, self.sides, missing, self.pool, facts.meter
            )
            found |= dict(zip(missing, measured, strict=True))
        return {pair: self.finite(square, pair, lack) for pair, square in found.items()}

    def chunks(self, experts: Sequence[int] | None = None) -> Chunks:
        """Return the deltas of these experts, or of all, to be read chunk by chunk."""
        own = self.experts if experts is None else experts
        return self.deltas([self.sides[side] for side in (0, *own)])

    def deltas(self, sides: Sequence[Side]) -> Chunks:
        """Return the deltas of tensors from the first of these, to be read chunk by chunk."""
        return Chunks(self._facts.catalog, [record for _, record in sides], self._facts.meter)

    def product(self, side: int) -> tuple[Singles, Singles] | None:
        """Return the factors of an expert's delta, float32[rows, rank] and [rank, columns].

        None if it is not the product of an adapter and nothing else.
        """
        record = self.sides[side][1]
        if not isinstance(record, AppliedTensor) or not record.is_sum:
            return None
        [found] = load_factors(self._facts.catalog, [record], self._facts.meter)
        return found.left * found.scale, found.right

    def array(self, side: Side) -> npt.NDArray[Any]:
        """Read a companion's whole tensor, as `read_tensor`."""
        self._require_analysis()
        return read_tensor(self._facts.catalog, side[1], self._facts.meter)

    def readers(self, side: int, row: int) -> Readers:
        """Return the elements of a chunk, and what reads those of the base and of an expert.

        row: a chunk is whole rows of so many elements.
        """
        catalog, other = self._facts.catalog, self.sides[side][1]
        chunk = tensor_chunk(catalog.block_size, self.base, [other], row=row)
        return (
            chunk,
            chunk_reader(catalog, self.base, chunk, None),
            chunk_reader(catalog, other, chunk, self._facts.meter),
        )

    def finite(self, value: float, sides: Sequence[int], lack: Lack) -> float:
        """Return a fact of these sides.  Raises BadRequest, with the reason, if it is not finite.

        Squares of elements are added up in float64, so their sum is finite if the elements are.
        """
        if math.isfinite(value):
            return value
        facts, (what, lacks) = self._facts, lack
        own = [self.sides[side] for side in sides]
        known = [
            facts.squares(side, self.pool, facts.meter)
            if facts.analyze
            else facts.statistics.squares(side[0])
            for side in own
        ]
        sick = [
            id
            for (id, _), one in zip(own, known, strict=True)
            if one is not None and not math.isfinite(one)
        ]
        if sick:
            models = facts.models(self.name)
            told = " and ".join(dict.fromkeys(models[id] for id in sick if id in models))
            why = "the tensor has infinite or NaN elements" + (f" in {told}" if told else "")
        elif None in known:
            why = f"the tensor has infinite or NaN elements, or {what}"
        else:
            why = f"all elements of the tensor are finite, but {what}"
        hint = Option("skip", (self.name,))
        raise BadRequest(f"{why}, so {lacks}", where=self.name, hint=hint)

    def _require_analysis(self) -> None:
        if not self._facts.analyze:
            raise BadRequest(
                "the method needs facts about this tensor in all inputs, and not all are known",
                where=self.name,
                hint=NEEDS_ANALYSIS,
            )
