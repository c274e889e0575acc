"""Facts: what a method must know of whole tensors before the first element is computed.

The L1 norms of deltas before and after a random mask, numbers of elements that experts move alone
and with others, squares of what a variance selects, quartiles of importance, and inner products of
the base and of experts, or of deltas.  The last follow from sums of squares of tensors and of their
differences, <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2, which statistics keep by content: what was
measured once is not read again.  Deltas are small next to the base: their products follow from
differences alone, never from products of whole tensors.  Sums of Fishers are facts of one tensor.
Trim thresholds are facts, too (`thresholds`).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.blocks.meter import Meter
from mstore.errors import BadRequest
from mstore.ids import TensorId
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.agreement import shared_counts
from mstore.merge.arithmetic.informed import sums_of, unsound_fisher
from mstore.merge.arithmetic.random import mask_keys
from mstore.merge.arithmetic.spread import Cut
from mstore.merge.methods.method import Gram, Operation
from mstore.merge.planning import importance
from mstore.merge.planning.spreads import Chunks, select
from mstore.merge.planning.surveyed import NEEDS_ANALYSIS
from mstore.numeric.codes import ITEMSIZES
from mstore.objects.plan import Mixture
from mstore.objects.tensor import Tensor
from mstore.phrases import Option
from mstore.stats.analysis import measure_apart, measure_pair, measure_squares
from mstore.stats.chunks import chunk_reader, row_length, tensor_chunk
from mstore.stats.known import known_apart, sum_of_squares
from mstore.stats.store import StatsStore
from mstore.stats.table import DeltaTable
from mstore.store.catalog import Catalog

Side = tuple[TensorId, Tensor]
_SMALLEST_NORM: Final = 1e-7
"""Below this, a norm is not restored (as in mergekit)."""
_FISHER: Final = b"fisher"
_NORMS: Final = b"norms 2"
"""Names how norms are summed: another order may round otherwise."""

_Lack = tuple[str, str]
"""What is wrong where all elements are finite, and what a tensor lacks then."""
_BEYOND: Final = "a difference of two inputs is beyond float32"
_ANGLES: Final = (_BEYOND, "its angles cannot be measured")
_NORM: Final = (_BEYOND, "the L1 norm of a delta cannot be restored")
_WEIGHTS: Final = (_BEYOND, "its experts cannot be weighed by squares of deltas")
_QUARTILES: Final = (
    "the importance of an element is infinite or NaN",
    "importance has no quartiles",
)


class Facts:
    """Measures facts, block by block, and keeps them.

    analyze: whether blocks may be read for what is not known; `meter` counts those of experts.
    models: the names of the models that have each content of a tensor, by its name, for errors.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        *,
        analyze: bool,
        meter: Meter,
        models: Callable[[str], Mapping[TensorId, str]],
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._analyze = analyze
        self._meter = meter
        self._models = models

    def gram(
        self,
        name: str,
        base: Side,
        experts: Sequence[Side],
        *,
        operation: Operation,
        pool: ThreadPoolExecutor,
    ) -> Gram:
        """Return the inner products of one tensor: float64[K + 1, K + 1], the base first.

        The base is the origin if the operation compares deltas, else zero is.  NaN: of experts of
        weight 0, which are not read, and of experts with each other unless the method needs them.
        Raises BadRequest if a fact is not known and may not be measured, or if the tensor is not
        finite.
        """
        sides = [base, *experts]
        counted = [0, *(k for k, nothing in enumerate(operation.weightless, 1) if not nothing)]
        gram = [[math.nan] * len(sides) for _ in sides]
        if not operation.compares_deltas:
            for i in counted:
                meter = None if i == 0 else self._meter
                gram[i][i] = self._squares(name, sides[i], pool, meter)
        else:
            for i in counted:
                gram[i][i] = self._apart(name, base, sides[i], pool, _ANGLES)
                gram[i][0] = gram[0][i] = 0.0
        between: dict[tuple[int, int], float] = {}
        if not operation.compares_deltas:
            between = {
                (0, i): self._apart(name, base, sides[i], pool, _ANGLES) for i in counted[1:]
            }
        if operation.method.pairs:
            between |= self._between(name, sides, counted[1:], pool)
        for (j, i), apart in between.items():
            gram[i][j] = gram[j][i] = (gram[i][i] + gram[j][j] - apart) / 2
        return gram

    def restored(
        self, name: str, operation: Operation, sides: Sequence[Side], pool: ThreadPoolExecutor
    ) -> Operation:
        """Return the operation with the factors that restore the L1 norm of each expert's delta.

        sides: the base and each expert.  The norms are those of the whole delta before and after
        the mask; the factor is 1 where one of them is below 1e-7.  Raises as `gram`.
        """
        base, *experts = sides
        keys = mask_keys(operation.seed, len(experts), name)
        factors = []
        for k, expert in enumerate(experts):
            still = expert[0] == base[0] or operation.weightless[k] or operation.densities[k] >= 1
            if still:
                factors.append(1.0)
                continue
            chances = (operation.densities[k], operation.epsilons[k] if operation.is_ranked else -1)
            what = _NORMS + struct.pack("<2d", *chances) + keys[k].tobytes()
            mask = blake3(what).digest(length=16)
            found = self._statistics.fact(base[0], expert[0], mask)
            if found is None:
                if not self._analyze:
                    raise _unknown(name)
                found = self._ratio(operation, k, keys[k], base[1], expert[1], pool)
                self._statistics.put_fact(base[0], expert[0], mask, found)
            factors.append(self._finite(name, found, (base, expert), pool, _NORM))
        return operation.settled(Mixture(0.0, tuple(factors), keeps_base=True))

    def _ratio(
        self,
        operation: Operation,
        expert: int,
        key: npt.NDArray[np.uint32],
        base: Tensor,
        other: Tensor,
        pool: ThreadPoolExecutor,
    ) -> float:
        """Measure the L1 norm of a delta over that of what the mask leaves of it."""
        catalog, elements = self._catalog, math.prod(base.shape)
        chunk = tensor_chunk(catalog.block_size, base, [other], whole=operation.is_ranked)
        density, epsilon = operation.densities[expert], operation.epsilons[expert]
        read_base = chunk_reader(catalog, base, chunk, None)
        read_other = chunk_reader(catalog, other, chunk, self._meter)

        def norms(number: int) -> tuple[float, float]:
            first = number * chunk
            n = min(chunk, elements - first)
            own, data = read_base(number), read_other(number)
            sides = own, base.dtype, data, other.dtype, n
            if not operation.is_ranked:
                return masks.even_norms(*sides, key, first, operation.mask_limits[expert])
            moved = masks.deltas(*sides)
            kept = masks.ranked(moved, key, first, row_length(base.shape), density, epsilon)
            return masks.norms(moved, kept)

        found = list(pool.map(norms, range(-(-elements // chunk))))
        before, after = (math.fsum(column) for column in zip(*found, strict=True))
        return 1.0 if min(before, after) < _SMALLEST_NORM else before / after

    def fisher(
        self, where: str, id: TensorId, record: Tensor, chunk: int, pool: ThreadPoolExecutor
    ) -> npt.NDArray[np.float64] | None:
        """Return the sums of a Fisher's tensor over chunks, and of its squares: float64[2, chunks].

        None if they are not known and may not be measured.

        Raises Incompatible, with `where`, for elements that are negative, infinite or NaN.
        """
        what = blake3(_FISHER + chunk.to_bytes(8, "little")).digest(length=16)
        chunks = -(-math.prod(record.shape) // chunk)
        found = self._statistics.sums(id, what)
        if found is not None and len(found) == 2 * chunks:
            return found.reshape(2, chunks)
        if not self._analyze:
            return None
        read = chunk_reader(self._catalog, record, chunk, self._meter)

        def totals(number: int) -> tuple[float, float]:
            data = read(number)
            return sums_of(data, record.dtype, len(data) // ITEMSIZES[record.dtype])

        sums = np.array(list(pool.map(totals, range(chunks))), dtype=np.float64).T
        if np.isnan(sums).any():
            raise unsound_fisher(where)
        self._statistics.put_sums(id, what, sums.ravel())
        return sums

    def counted(
        self, name: str, operation: Operation, sides: Sequence[Side], pool: ThreadPoolExecutor
    ) -> Operation:
        """Return the operation with the factors of what each expert alone moves.

        sides: the base and each expert.  Raises as `gram`.
        """
        (base_id, _), *experts = sides
        ids = [id for id, _ in experts]
        # What an expert shares follows from who the others are, in any order.
        known = [
            _shared_key(operation.least, [id for j, id in enumerate(ids) if j != k])
            for k in range(len(ids))
        ]
        found = [
            [self._statistics.fact(base_id, id, key) for key in keys]
            for id, keys in zip(ids, known, strict=True)
        ]
        counts = [(int(a), int(b)) for a, b in found if a is not None and b is not None]
        if len(counts) < len(ids):
            if not self._analyze:
                raise _unknown(name)
            counts = self._counts(operation.least, [record for _, record in sides], pool)
            for id, keys, own in zip(ids, known, counts, strict=True):
                for key, count in zip(keys, own, strict=True):
                    self._statistics.put_fact(base_id, id, key, float(count))
        return operation.counted(counts)

    def _counts(
        self, least: float, records: Sequence[Tensor], pool: ThreadPoolExecutor
    ) -> list[tuple[int, int]]:
        """Count each expert's deltas of `least` and more where others have one, and where not."""
        chunks = Chunks(self._catalog, records, self._meter)

        def count(number: int) -> npt.NDArray[np.int64]:
            found = np.zeros((chunks.experts, 2), dtype=np.int64)
            for deltas in chunks.deltas(number):
                kept = [np.abs(one) >= np.float32(least) for one in deltas]
                found += shared_counts(kept)
            return found

        total = np.zeros((chunks.experts, 2), dtype=np.int64)
        for own in pool.map(count, chunks.numbers):
            total += own
        return [(shared, alone) for shared, alone in total.tolist()]

    def weighed(
        self, name: str, operation: Operation, sides: Sequence[Side], pool: ThreadPoolExecutor
    ) -> tuple[Operation, Cut | None]:
        """Return the operation with its weights, and where its selection ends, if it has one.

        sides: the base and each expert.  Raises as `gram`.
        """
        base, *experts = sides
        cut = None
        if not operation.is_varied:
            squares = [self._apart(name, base, expert, pool, _WEIGHTS) for expert in experts]
        else:
            cut, squares = self._selection(name, operation.select_share, sides, pool)
            squares = [self._finite(name, one, sides, pool, _WEIGHTS) for one in squares]
        return operation.weighed(squares, math.prod(base[1].shape)), cut

    def _selection(
        self, name: str, share: float, sides: Sequence[Side], pool: ThreadPoolExecutor
    ) -> tuple[Cut, list[float]]:
        """Return where a selection ends, and the squares that it leaves of each expert."""
        (base, _), *experts = sides
        ids = [id for id, _ in experts]
        # Sums in another order may round otherwise.
        what = struct.pack("<d", share) + b"".join(ids)
        keys = [
            (ids[max(0, place)], blake3(b"spread 2 %d" % place + what).digest(length=16))
            for place in range(-2, len(ids))
        ]
        found = [self._statistics.fact(base, id, key) for id, key in keys]
        known = [one for one in found if one is not None]
        if len(known) == len(keys):
            value, before, *squares = known
            return Cut(value, int(before)), squares
        if not self._analyze:
            raise _unknown(name)
        chunks = Chunks(self._catalog, [record for _, record in sides], self._meter)
        cut, squares = select(chunks, share, pool)
        for (id, key), number in zip(keys, (*cut, *squares), strict=True):
            self._statistics.put_fact(base, id, key, float(number))
        return cut, squares

    def important(
        self, name: str, base: Side, expert: Side, pool: ThreadPoolExecutor
    ) -> tuple[Cut, float]:
        """Return from where on elements are important enough, and at most their sum of squares.

        Raises as `gram`.
        """
        if base[0] == expert[0]:
            return Cut(0.0, -1), 0.0
        keys = [blake3(what).digest(length=16) for what in (b"importance", b"important squares")]
        found = [self._statistics.fact(base[0], expert[0], key) for key in keys]
        least, kept = found
        if least is None or kept is None:
            if not self._analyze:
                raise _unknown(name)
            least, kept = importance.select(self._catalog, base[1], expert[1], self._meter, pool)
            for key, number in zip(keys, (least, kept), strict=True):
                self._statistics.put_fact(base[0], expert[0], key, number)
        return Cut(self._finite(name, least, (base, expert), pool, _QUARTILES), -1), kept

    def squares(self, side: Side, pool: ThreadPoolExecutor, meter: Meter | None = None) -> float:
        """Return the sum of squares of a tensor, measured if it is not known; meter: of reads."""
        id, record = side
        squares = self._statistics.squares(id)
        if squares is None:
            squares = measure_squares(self._catalog, record, pool, meter)
            self._statistics.put_squares(id, squares)
        return squares

    def measured(self, one: Side, other: Side, pool: ThreadPoolExecutor) -> DeltaTable | None:
        """Measure the difference of two tensors, keep it, and return its statistics."""
        measure = measure_pair(self._catalog, one[1], other[1], pool, self._meter)
        self._statistics.put_pair(measure.finish(one[0], other[0]))
        return self._statistics.pair(one[0], other[0])

    def _squares(
        self, name: str, side: Side, pool: ThreadPoolExecutor, meter: Meter | None
    ) -> float:
        if not self._analyze and self._statistics.squares(side[0]) is None:
            raise _unknown(name)
        return self._finite(name, self.squares(side, pool, meter), (side,), pool, _ANGLES)

    def _between(
        self, name: str, sides: Sequence[Side], experts: Sequence[int], pool: ThreadPoolExecutor
    ) -> dict[tuple[int, int], float]:
        """Return the square of the distance of each two of the experts; all are read together."""
        pairs = list(itertools.combinations(experts, 2))
        ids = {(j, i): (sides[j][0], sides[i][0]) for j, i in pairs}
        known = known_apart(self._statistics, list(ids.values()))
        found = {pair: known[own] for pair, own in ids.items() if own in known}
        missing = [pair for pair in pairs if pair not in found]
        if missing:
            if not self._analyze:
                raise _unknown(name)
            measured = measure_apart(
                self._catalog, self._statistics, sides, missing, pool, self._meter
            )
            found |= dict(zip(missing, measured, strict=True))
        return {
            (j, i): self._finite(name, square, (sides[j], sides[i]), pool, _ANGLES)
            for (j, i), square in found.items()
        }

    def _apart(
        self, name: str, one: Side, other: Side, pool: ThreadPoolExecutor, lack: _Lack
    ) -> float:
        """Return the square of the distance of an expert from the base.

        Planning needs the rest of the statistics of such a pair, too.
        """
        pair = one[0], other[0]
        found = known_apart(self._statistics, [pair]).get(pair)
        if found is None:
            if not self._analyze:
                raise _unknown(name)
            table = self.measured(one, other, pool)
            assert table is not None
            found = sum_of_squares(table.rows)
        return self._finite(name, found, (one, other), pool, lack)

    def _finite(
        self,
        name: str,
        value: float,
        sides: Sequence[Side],
        pool: ThreadPoolExecutor,
        lack: _Lack,
    ) -> float:
        """Return a fact of these tensors.  Raises BadRequest, with the reason, if it is not finite.

        Squares of elements are added up in float64, so their sum is finite if the elements are.
        """
        if math.isfinite(value):
            return value
        what, lacks = lack
        known = [
            self.squares(side, pool, self._meter)
            if self._analyze
            else self._statistics.squares(side[0])
            for side in sides
        ]
        sick = [
            id
            for (id, _), one in zip(sides, known, strict=True)
            if one is not None and not math.isfinite(one)
        ]
        if sick:
            models = self._models(name)
            told = " and ".join(dict.fromkeys(models[id] for id in sick if id in models))
            why = "the tensor has infinite or NaN elements" + (f" in {told}" if told else "")
        elif None in known:
            why = f"the tensor has infinite or NaN elements, or {what}"
        else:
            why = f"all elements of the tensor are finite, but {what}"
        raise BadRequest(f"{why}, so {lacks}", where=name, hint=Option("skip", (name,)))


def _shared_key(least: float, others: Sequence[TensorId]) -> tuple[bytes, bytes]:
    """Return what the two counts of an expert are kept under."""
    what = struct.pack("<f", least) + b"".join(sorted(others))
    shared, alone = (blake3(kind + what).digest(length=16) for kind in (b"shared", b"alone"))
    return shared, alone


def _unknown(name: str) -> BadRequest:
    return BadRequest(
        "the method needs facts about this tensor in all inputs, and not all are known",
        where=name,
        hint=NEEDS_ANALYSIS,
    )
