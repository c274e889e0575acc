"""Known pairs: statistics that a survey needs, many at a time.

A table takes some 100 us to unpack, and a survey of 20 experts looks at thousands; of most it needs
the rows and one cut.  So these are kept beside the tables (`mstore.stats.digests`), found for all
tensors together, and made from the table where they are missing.  Tables of one chunk have no
digests: they are opened together (`mstore.stats.many`).  A survey gives the same with digests and
without.  Belongs to one survey; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mstore.ids import TensorId
from mstore.merge.methods.method import Operation
from mstore.merge.planning.request import Request
from mstore.merge.planning.surveyed import KEEPS_NONE
from mstore.stats.digests import Digest
from mstore.stats.histogram import Threshold
from mstore.stats.many import SingleTables
from mstore.stats.store import StatsStore
from mstore.stats.table import DeltaTable

Pair = tuple[TensorId, TensorId]
TOGETHER: Final = 1 << 10
"""Tables of one chunk that are opened together."""
BY_SKETCH: Final = "conflict"
"""The score that compares sketches, which digests leave out."""


def has_digest(operation: Operation) -> bool:
    """Return whether a digest tells all of a pair: not between two thresholds."""
    return operation.selection.cuts <= 1


class KnownPairs:
    """What one survey knows of pairs without opening each table."""

    def __init__(self, statistics: StatsStore, request: Request) -> None:
        self._statistics = statistics
        self._is_usable = request.score != BY_SKETCH
        self._rows: dict[Pair, Digest] = {}
        self._cuts: dict[tuple[TensorId, TensorId, int], Threshold] = {}

    def fetch(self, wanted: Iterable[tuple[Pair, int, int, Operation, int]]) -> None:
        """Fetch what is known of many pairs: each with elements, chunk, operation, and expert."""
        pairs: dict[Pair, None] = {}
        singles: dict[tuple[Pair, int], None] = {}
        cuts: dict[tuple[TensorId, TensorId, int], None] = {}
        for pair, elements, chunk, operation, number in wanted:
            (rank,) = operation.selection.ranks(elements, number) or (0,)
            if elements <= chunk:
                singles[pair, rank] = None
            elif self._is_usable:
                pairs[pair] = None
                if rank:
                    cuts[*pair, rank] = None
        self._open(list(singles))
        rows = zip(pairs, self._statistics.digests(list(pairs)), strict=True)
        self._rows |= {pair: row for pair, row in rows if row is not None}
        found = zip(cuts, self._statistics.cuts(list(cuts)), strict=True)
        self._cuts |= {key: cut for key, cut in found if cut is not None}

    def _open(self, singles: Sequence[tuple[Pair, int]]) -> None:
        """Open tables of one chunk together, each with the rank that it is cut at, 0 for none."""
        for start in range(0, len(singles), TOGETHER):
            some = singles[start : start + TOGETHER]
            ranks = [rank for _, rank in some]
            tables = self._statistics.encoded_pairs([pair for pair, _ in some])
            found = SingleTables.decode(tables, ranks if all(ranks) else None)
            sizes = zip(found.elements.tolist(), found.chunk_elements.tolist(), strict=True)
            for number, (place, size) in enumerate(zip(found.places.tolist(), sizes, strict=True)):
                pair, rank = some[place]
                self._rows[pair] = Digest(found.rows[number : number + 1], *size, is_finite=True)
                if found.thresholds:
                    self._cuts[*pair, rank] = found.thresholds[number]

    def find(
        self, pair: Pair, elements: int, chunk: int, ranks: Sequence[int]
    ) -> tuple[Digest, tuple[Threshold, ...]] | None:
        """Return rows that fit a tensor's elements and chunks, and the cut at each rank.

        None if one of them is not known: the table has to be read.
        """
        row = self._rows.get(pair)
        if row is None or row.elements != elements or chunk % row.chunk_elements:
            return None
        cuts = []
        for rank in ranks:
            cut = self._cuts.get((*pair, rank)) if rank else KEEPS_NONE
            if cut is None:
                return None
            cuts.append(cut)
        return row, tuple(cuts)

    def learn(
        self, pair: Pair, table: DeltaTable, ranks: Sequence[int], cuts: Sequence[Threshold]
    ) -> None:
        """Keep what was read from a table, for later surveys."""
        if not self._is_usable or len(table.rows) < 2:
            return
        if pair not in self._rows:
            self._statistics.put_digest(*pair, table)
        for rank, cut in zip(ranks, cuts, strict=True):
            if rank and (*pair, rank) not in self._cuts:
                self._statistics.put_cut(*pair, rank, cut)
                self._cuts[*pair, rank] = cut
