"""What statistics know of many pairs at once: rows of their tables, and squares of distances.

Owns how a pair's rows are found with few lookups: from digests, from tables of one chunk opened
together, from whole tables, or for an adapter's products from its factors (`product_rows`).  Owns
the distances of two tensors neither of which is the base of the other, which are kept as facts.
Does not own what rows mean (`chunk`).

A numpy call takes as long for one short histogram as for a hundred.  So tables of one row, which
tensors of a single chunk have, are decompressed one by one, then decoded, checked and cut together
in one compiled pass.  Gives exactly the results of `DeltaTable.decode` and `histogram.select`.
Gives no result for an unusual table (damaged, of several chunks, empty, with a NaN); the caller
decodes such a table by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.models.adapters.low_rank import Factors
from mstore.models.stats.chunk import CHUNK, Rows, finite
from mstore.models.stats.histogram import NAN_BIN, Threshold
from mstore.models.stats.store import StatsStore, readable
from mstore.models.stats.table import Digest, unpacked
from mstore.numeric.passes import Pass
from mstore.terms.ids import TensorId

_SOURCES: Final = (
    *("models/stats/chunk.py", "models/stats/histogram.py", "models/stats/table.py"),
    "models/stats/table_passes.py",
)
_open: Final = Pass("mstore.models.stats.table_passes", "open_singles", "pppipppppp", _SOURCES)

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


Pair = tuple[TensorId, TensorId]
_APART: Final = blake3(b"apart").digest(length=16)
"""Names the square of a distance of two experts."""
_PRODUCT: Final = blake3(b"norm of a product").digest(length=16)
"""Names the square that the norm of an adapter's product does not exceed."""


def known_rows(
    statistics: StatsStore, pairs: Sequence[Pair], *, sketches: bool = False
) -> dict[Pair, Digest]:
    """Return the rows of those of these pairs that have statistics.

    sketches: with their sketches, which take longer to find; without, they may be zero.
    """
    wanted = list(dict.fromkeys(pairs))
    found: dict[Pair, Digest] = statistics.opened(wanted)
    wanted = [pair for pair in wanted if pair not in found]
    if not sketches:
        known = zip(wanted, statistics.digests(wanted), strict=True)
        found |= {pair: one for pair, one in known if one is not None}
        wanted = [pair for pair in wanted if pair not in found]
    values = statistics.encoded_pairs(wanted)
    singles = SingleTables.decode(values)
    for at, place in enumerate(singles.places.tolist()):
        elements, chunk = int(singles.elements[at]), int(singles.chunk_elements[at])
        found[wanted[place]] = Digest(singles.rows[at : at + 1], elements, chunk, is_finite=True)
    for pair, value in zip(wanted, values, strict=True):
        table = None if pair in found else readable(value)
        if table is not None:
            is_finite = bool(finite(table.rows).all())
            found[pair] = Digest(table.rows, table.elements, table.chunk_elements, is_finite)
    return found


def sum_of_squares(rows: Rows) -> float:
    """Return the sum of squares of a pair's difference."""
    return math.fsum(rows["sum_squares"].tolist())


def known_products(statistics: StatsStore, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Return the squares that norms of adapters' products do not exceed, as far as they are kept.

    They exceed the squares themselves by the rounding of float32 at most (`products`).
    """
    facts = statistics.facts([(*pair, _PRODUCT) for pair in pairs])
    return {pair: value for pair, value in zip(pairs, facts, strict=True) if value is not None}


def keep_products(statistics: StatsStore, rows: Mapping[Pair, Rows]) -> None:
    """Keep the squares of products, whose rows these are."""
    known = known_products(statistics, list(rows))
    for pair, own in rows.items():
        if pair not in known:
            statistics.put_fact(*pair, _PRODUCT, sum_of_squares(own))


def known_apart(statistics: StatsStore, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Return the squares of the distances of those of these pairs for which it was measured."""
    found = dict.fromkeys((pair for pair in pairs if pair[0] == pair[1]), 0.0)
    others = [pair for pair in dict.fromkeys(pairs) if pair not in found]
    facts = statistics.facts([(min(pair), max(pair), _APART) for pair in others])
    found |= {pair: value for pair, value in zip(others, facts, strict=True) if value is not None}
    # One may have been measured as the base of the other.
    missing = [pair for pair in others if pair not in found]
    rows = known_rows(
        statistics, [turned for one, other in missing for turned in ((one, other), (other, one))]
    )
    for one, other in missing:
        known = rows.get((one, other)) or rows.get((other, one))
        if known is not None:
            found[one, other] = sum_of_squares(known.rows)
    return found


def keep_apart(statistics: StatsStore, pair: Pair, square: float) -> None:
    """Keep the square of the distance of two tensors."""
    statistics.put_fact(min(pair), max(pair), _APART, square)


_UNIT: Final = 2.0**-24
"""The largest relative error of one float32 operation."""
_DOUBLE: Final = 2.0**-52
_TINY: Final = 2.0**-148
"""More than one float32 operation may lose below the normal numbers."""
_LARGEST: Final = float(np.finfo(np.float32).max)
_MORE: Final = 1 + 2.0**-20
"""More than the rounding of a delta, and of float64 sums over rows and a few operations, can add.
"""


def product_rows(factors: Factors, base_squares: float, elements: int, chunk: int) -> Rows:
    """Return a row for each chunk of expert - base, where the expert is base + scale * product.

    The product has as many elements as a tensor of the model; its norm follows from the factors
    alone, for each row: |l_i R|^2 = l_i (R R^T) l_i^T.  What float32 may add is bounded (Higham,
    Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1), so a certified bound on a
    merge's error may rest on these rows as on measured ones.  Pure: the same bits on every machine.

    CHUNK[chunks], of numbers that are not exceeded: a chunk counts the rows of the matrix that it
    has a part of, `base_squares` (of the whole tensor) stand for each chunk's own, and every
    element as one that moves, unless none can.  The sketch is zero.  Factors of a sum alone.
    A row is infinite if a factor, the scale or the base is not finite, or if the product, or its
    sum with the base, may overflow.
    """
    assert factors.is_sum
    squares = factors.squares(elements, chunk)
    rank, columns = factors.right.shape
    scale = abs(float(factors.scale[0]))
    base = math.sqrt(base_squares) if base_squares >= 0 else math.nan
    right, widest = math.sqrt(squares.right), math.sqrt(squares.widest)
    # Of the sum of |l_ir r_rj|, by its norm: what float32 adds to a sum, then what float64 adds to
    # the products above.
    added = (2 * rank + 8) * _UNIT + math.sqrt((columns + 3 * rank + 16) * _DOUBLE)
    # An expert's element is rounded to float32, too: by a share of itself.
    rounded = 2 * _UNIT * base
    rows = np.zeros(len(squares.chunks), dtype=CHUNK)
    rows["base_squares"] = base_squares
    for number, (product, lefts, longest) in enumerate(squares.chunks):
        left = math.sqrt(lefts)
        is_sane = math.isfinite(left * right) and math.isfinite(scale)
        if is_sane and (left == 0 or right == 0):
            continue
        count = min(chunk, elements - number * chunk)
        sums = most = norm = math.inf
        if is_sane:
            lost = (2 * rank + 4) * _TINY * (1 + scale)
            sums = math.sqrt(longest) * widest * (1 + added)
            most = (scale * sums + rounded) * _MORE + lost
            moved = math.sqrt(max(0.0, product)) + added * left * right
            norm = (scale * moved + rounded) * _MORE + math.sqrt(count) * lost
        # An element of the expert may overflow, too.
        largest = (base + most) * _MORE
        if not (sums < _LARGEST and largest < _LARGEST and norm < _LARGEST):
            most = norm = math.inf
        row = rows[number]
        row["nonzeros"], row["max_abs"] = count, most
        row["sum_squares"] = norm * norm * _MORE
        row["sum_abs"] = norm * math.sqrt(count) * _MORE
    return rows
