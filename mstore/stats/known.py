"""What statistics know of many pairs at once: rows of their tables, and squares of distances.

Owns how a pair's rows are found with few lookups, from digests, from tables of one chunk opened
together, or from whole tables.  Owns the distances of two tensors neither of which is the base of
the other, which are kept as facts.  Does not own what rows mean (`chunk`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from blake3 import blake3

from mstore.ids import TensorId
from mstore.stats.chunk import Rows, finite
from mstore.stats.digests import Digest
from mstore.stats.many import SingleTables
from mstore.stats.store import StatsStore, readable

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
    found: dict[Pair, Digest] = {}
    if not sketches:
        known = zip(wanted, statistics.digests(wanted), strict=True)
        found = {pair: one for pair, one in known if one is not None}
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
