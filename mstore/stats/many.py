"""Batches of one-row tables, which tensors of a single chunk have.

A numpy call takes as long for one short histogram as for a hundred.  So tables are decompressed one
by one, then decoded, checked and cut together in one compiled pass.  Gives exactly the results of
`DeltaTable.decode` and `histogram.select`.  Gives no result for an unusual table (damaged, of
several chunks, empty, with a NaN); the caller decodes such a table by itself.  Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.numeric.passes import Pass
from mstore.stats.chunk import CHUNK, Rows, finite
from mstore.stats.histogram import NAN_BIN, Threshold
from mstore.stats.table import unpacked

_HERE: Final = Path(__file__)
_SOURCES: Final = tuple(
    _HERE.with_name(name) for name in ("chunk.py", "histogram.py", "table.py", "table_passes.py")
)
_open: Final = Pass("mstore.stats.table_passes", "open_singles", "pppipppppp", _SOURCES)

Ints = npt.NDArray[np.int64]


class SingleTables(msgspec.Struct, frozen=True, eq=False):
    """T tables of one row each; `places` are their positions among the encoded values.

    rows: CHUNK[T], every one finite. elements, chunk_elements: int64[T]. thresholds: where trimming
    cuts each; empty if nothing is trimmed.
    """

    places: Ints
    rows: Rows
    elements: Ints
    chunk_elements: Ints
    thresholds: Sequence[Threshold]

    @classmethod
    def decode(cls, values: Sequence[bytes | None], keep: Sequence[int] | None = None) -> Self:
        """Decode those of these encoded tables that are valid, finite and of one row.

        keep: for each table how many elements trimming keeps, at least 1; None for no trimming.
        """
        count = len(values)
        plain = [unpacked(value) for value in values]
        joined = np.frombuffer(b"".join(plain), dtype=np.uint8)
        ends = np.zeros(count + 1, dtype=np.int64)
        np.cumsum([len(one) for one in plain], out=ends[1:])
        wanted = np.zeros(count, dtype=np.int64) if keep is None else np.array(keep, dtype=np.int64)
        words = np.empty((3, NAN_BIN + 1), dtype=np.int64)
        rows = np.zeros(count, dtype=CHUNK)
        elements, chunks, counted = np.zeros((3, count), dtype=np.int64)
        cuts = np.zeros((count, 4), dtype=np.int64)
        _open(
            *(joined.ctypes.data, ends.ctypes.data, wanted.ctypes.data, count, words.ctypes.data),
            *(rows.ctypes.data, elements.ctypes.data, chunks.ctypes.data),
            *(counted.ctypes.data, cuts.ctypes.data),
        )
        places = np.flatnonzero(_sound(rows, elements, counted))
        return cls(
            places,
            rows[places],
            elements[places],
            chunks[places],
            () if keep is None else _thresholds(wanted[places], cuts[places]),
        )


def _sound(rows: Rows, elements: Ints, counted: Ints) -> npt.NDArray[np.bool_]:
    """Return bool[T]: which rows are finite and agree with the histogram."""
    sound = finite(rows)
    sound &= (counted == rows["nonzeros"]) & (counted <= elements)
    for name in ("sum_abs", "sum_squares", "max_abs", "base_squares"):
        sound &= rows[name] >= 0
    return sound


def _thresholds(keep: Ints, cuts: Any) -> list[Threshold]:
    """Return `histogram.select` of each, from the results of the pass."""
    bins, above, in_bin, inexact = cuts.T
    values = (np.maximum(bins, 0) << 16).astype("<u4").view("<f4")
    return [
        Threshold(value, beyond, k - beyond, inside, off_edge)
        if place >= 0
        else Threshold(value=0.0, above=beyond, needed=0, in_bin=0, inexact=0)
        for place, value, beyond, k, inside, off_edge in zip(
            *(column.tolist() for column in (bins, values, above, keep, in_bin, inexact)),
            strict=True,
        )
    ]
