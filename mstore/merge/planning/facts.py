"""Facts: what a method must know of whole tensors before the first element is computed.

Inner products of the base and of experts.  They follow from sums of squares of tensors and of their
differences, <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2, which statistics keep by content: what was
measured once is not read again.  Trim thresholds are facts, too (`thresholds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mstore.blocks.meter import Meter
from mstore.errors import BadRequest
from mstore.ids import TensorId
from mstore.merge.methods.method import Gram
from mstore.objects.tensor import Tensor
from mstore.stats.analysis import measure_pair, measure_squares
from mstore.stats.store import StatsStore
from mstore.stats.table import DeltaTable
from mstore.store.catalog import Catalog

Side = tuple[TensorId, Tensor]


class Facts:
    """Measures facts, block by block, and keeps them.

    analyze: whether blocks may be read for what is not known; `meter` counts those of experts.
    """

    def __init__(
        self, catalog: Catalog, statistics: StatsStore, *, analyze: bool, meter: Meter
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._analyze = analyze
        self._meter = meter

    def gram(
        self,
        name: str,
        base: Side,
        experts: Sequence[Side],
        *,
        pairs: bool,
        pool: ThreadPoolExecutor,
    ) -> Gram:
        """Return the inner products of one tensor: float64[K + 1, K + 1], the base first.

        pairs: also those of experts with each other; they are NaN otherwise.  Raises BadRequest if
        a fact is not known and may not be measured, or if the tensor is not finite.
        """
        sides = [base, *experts]
        squares = [
            self._squares(name, side, pool, None if number == 0 else self._meter)
            for number, side in enumerate(sides)
        ]
        gram = [[math.nan] * len(sides) for _ in sides]
        for i, own in enumerate(squares):
            gram[i][i] = own
            for j in range(i):
                if j == 0 or pairs:
                    apart = self._apart(name, sides[j], sides[i], pool)
                    gram[i][j] = gram[j][i] = (own + squares[j] - apart) / 2
        return gram

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
        return _finite(name, self.squares(side, pool, meter))

    def _apart(self, name: str, one: Side, other: Side, pool: ThreadPoolExecutor) -> float:
        """Return the square of the distance of two tensors."""
        if one[0] == other[0]:
            return 0.0
        table = self._statistics.pair(one[0], other[0])
        if table is None:
            if not self._analyze:
                raise _unknown(name)
            table = self.measured(one, other, pool)
        assert table is not None
        return _finite(name, math.fsum(table.rows["sum_squares"].tolist()))


def _unknown(name: str) -> BadRequest:
    return BadRequest(
        "the method needs the norm of this tensor in each input, and it is not known",
        where=name,
        hint="run the command without --no-analyze",
    )


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise BadRequest(
            "the tensor has infinite or NaN elements, so it has no direction",
            where=name,
            hint=f"--skip {name}",
        )
    return value
