"""Many tables of one row at once: what tensors of a single chunk have.

A call into numpy takes as long for one short histogram as for a hundred, so tables are unpacked one
by one and decoded and checked together.  Gives exactly what `DeltaTable.decode` and
`histogram.select` give; of a table that is anything but plain (damaged, of several chunks, empty,
with a NaN) it gives nothing, and whoever wants it decodes it by itself.  Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mstore.stats.chunk import CHUNK, Rows, finite
from mstore.stats.histogram import INFINITY_BIN, Threshold
from mstore.stats.table import unpacked_single

_BIN_BYTES = 2 + 8 + 8
_WORD = 8


@dataclass(frozen=True, slots=True, eq=False)
class SingleTables:
    """T tables of one row each: those of `places` among the values that they were decoded from.

    rows: CHUNK[T], every one finite.  elements, chunk_elements: int64[T].  The histograms one after
    the other: bins, counts, inexact int64[H], and where each begins: starts int64[T].
    """

    places: npt.NDArray[np.int64]
    rows: Rows
    elements: npt.NDArray[np.int64]
    chunk_elements: npt.NDArray[np.int64]
    bins: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    inexact: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, values: Sequence[bytes | None]) -> Self:
        """Those of these encoded tables that are plain."""
        opened = [None if value is None else unpacked_single(value) for value in values]
        there = [(place, one) for place, one in enumerate(opened) if one is not None]
        heads = np.array([(place, *one[:3]) for place, one in there], dtype=np.int64).reshape(-1, 4)
        sizes = heads[:, 3]
        raw = b"".join([one[3][: CHUNK.itemsize] for _, one in there])
        rows = np.frombuffer(raw, dtype=CHUNK)
        columns = [
            np.frombuffer(one[3], dtype=np.uint8, offset=CHUNK.itemsize).reshape(_BIN_BYTES, -1)
            for _, one in there
        ]
        planes = np.concatenate(columns, axis=1) if columns else np.zeros((_BIN_BYTES, 0), np.uint8)
        steps = planes[0].astype(np.int64) | (planes[1].astype(np.int64) << 8)
        exact, inexact = _words(planes[2:10]), _words(planes[10:])
        starts = np.cumsum(sizes) - sizes
        found = cls(
            heads[:, 0],
            rows,
            heads[:, 1],
            heads[:, 2],
            _running(steps, starts, sizes),
            exact + inexact,
            inexact,
            starts,
        )
        return found._only(found._plain(steps, exact, sizes), sizes)

    def _plain(
        self, steps: npt.NDArray[np.int64], exact: npt.NDArray[np.int64], sizes: Any
    ) -> npt.NDArray[np.bool_]:
        """bool[T]: which are sound and finite."""
        if not len(self.starts):
            return np.zeros(0, dtype=np.bool_)
        limit = np.repeat(self.elements, sizes)
        # A word of eight bytes that is negative here is larger than any number of elements.
        odd = (exact < 0) | (exact > limit) | (self.inexact < 0) | (self.inexact > limit)
        odd |= (self.counts < 1) | (self.bins >= INFINITY_BIN)
        odd |= (self.bins == 0) & (exact != 0)
        rising = steps > 0
        rising[self.starts] = True
        odd |= ~rising
        counted = np.add.reduceat(np.where(odd, 0, self.counts), self.starts)
        sound = ~np.logical_or.reduceat(odd, self.starts)
        sound &= (counted == self.rows["nonzeros"]) & (counted <= self.elements)
        sound &= finite(self.rows)
        for name in ("sum_abs", "sum_squares", "max_abs", "base_squares"):
            sound &= self.rows[name] >= 0
        return sound

    def _only(self, wanted: npt.NDArray[np.bool_], sizes: npt.NDArray[np.int64]) -> Self:
        if wanted.all():
            return self
        bins = np.repeat(wanted, sizes)
        kept = sizes[wanted]
        return type(self)(
            self.places[wanted],
            self.rows[wanted],
            self.elements[wanted],
            self.chunk_elements[wanted],
            self.bins[bins],
            self.counts[bins],
            self.inexact[bins],
            np.cumsum(kept) - kept,
        )

    def thresholds(self, keep: Sequence[int]) -> list[Threshold]:
        """`histogram.select` of each with its own number of elements to keep."""
        if not len(self.starts):
            return []
        ends = np.append(self.starts[1:], len(self.bins))
        through = np.cumsum(self.counts)
        before = through - self.counts
        total = through[ends - 1] - before[self.starts]
        # The last bin that still has k elements at or above its edge: so many may come before it.
        spare = total - np.asarray(keep, dtype=np.int64)
        limit = np.repeat(spare + before[self.starts], ends - self.starts)
        place = self.starts + np.add.reduceat((before <= limit).astype(np.int64), self.starts) - 1
        # Where all are kept, whatever stands here is not used.
        place = np.maximum(place, self.starts)
        above = total - (through[place] - before[self.starts])
        values = (self.bins[place] << 16).astype("<u4").view("<f4")
        columns = (
            *(spare, total, values, above, self.counts[place], self.inexact[place]),
            np.asarray(keep, dtype=np.int64),
        )
        return [
            Threshold(value, beyond, k - beyond, in_bin, inexact)
            if rest >= 0
            else Threshold(value=0.0, above=nonzeros, needed=0, in_bin=0, inexact=0)
            for rest, nonzeros, value, beyond, in_bin, inexact, k in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


def _words(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """int64[H] from uint8[8, H]: the lowest bytes of all, then the second, ..."""
    words = np.zeros(planes.shape[1], dtype=np.int64)
    for number in range(_WORD):
        if planes[number].any():
            words |= planes[number].astype(np.int64) << (8 * number)
    return words


def _running(
    steps: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Sums of the steps from each start on."""
    sums = np.cumsum(steps)
    return sums - np.repeat((sums - steps)[starts] if len(starts) else starts, sizes)
