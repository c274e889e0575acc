"""Search for ids in sorted rows: a start for each value of their leading bits, then halves.

Owns the arithmetic only: where the rows lie (in memory, in a mapped file) its callers know. Ids are
hashes, so about four rows share a bucket; where they are not, a search takes more steps and still
finds each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.terms.ids import ID_BYTES

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Leading = npt.NDArray[np.uint64]

_WORDS = ID_BYTES // 8
_IS_LITTLE = sys.byteorder == "little"
MOST_BITS: Final = 30
"""The most leading bits that choose a bucket."""


def words(ids: npt.NDArray[np.void]) -> Leading:
    """Return ids as uint64[ids, 4]: for equality alone the order of bytes does not matter."""
    return ids.view(np.uint64).reshape(-1, _WORDS)


def leading(ids: npt.NDArray[np.void]) -> Leading:
    """Return the first eight bytes of ids as numbers, in whose order the ids are."""
    first = words(ids)[:, 0]
    return first.byteswap() if _IS_LITTLE else first.copy()


def bucket_bits(count: int) -> int:
    """Return how many leading bits choose among the buckets of so many rows."""
    return min(max(1, count.bit_length() - 2), MOST_BITS)


def buckets(first: Leading, bits: int) -> Numbers:
    """Return the bucket of each of these leading numbers."""
    return (first >> np.uint64(64 - bits)).astype(np.int64)


def edges(start: int, stop: int, bits: int) -> Leading:
    """Return the least leading number of each of these buckets."""
    return np.arange(start, stop, dtype=np.uint64) << np.uint64(64 - bits)


def lower_bound(low: Numbers, high: Numbers, is_less: Callable[[Numbers], Flags]) -> Numbers:
    """Return, for each search, the first row from `low` on that is not less; `high` if all are.

    is_less: given a row number for each search, whether that row is less than what is searched
    for. It is asked only for rows from low to high, `high` included where a search has ended.
    """
    while (low < high).any():
        middle = (low + high) >> 1
        less = is_less(middle)
        low = np.where(less, np.minimum(middle + 1, high), low)
        high = np.where(less, high, np.maximum(middle, low))
    return low
