"""The random generator of masks: one 32-bit draw an element, a hash of its place, compiled.

The hash is triple32 (Wellons 2018, github.com/skeeto/hash-prospector): three multiplications modulo
2^32 between shifts, each of which can be undone.  The key goes in at two places: its first word
before the first shift, its second before the second multiplication.  So each key gives another
order of the 2^32 draws.

Owns the hash and what an element puts into it; `masks` owns the keys.  Has no state; releases the
GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mstore.numeric.compiling import compiled, inlined

_FIRST: Final = np.uint32(0xED5AD4BB)
_SECOND: Final = np.uint32(0xAC4C1B51)
_THIRD: Final = np.uint32(0x31848BAB)
_STRETCH: Final = np.uint32(0x9E3779B9)
"""What is added to the second word of the key for each 2^32 elements before."""


@inlined
def _draw(place: Any, key0: Any, key1: Any) -> Any:
    """Return the draw of a place below 2^32; all are uint32."""
    x = np.uint32(place ^ key0)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(17))) * _FIRST)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(11))) + key1)
    x = np.uint32(x * _SECOND)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * _THIRD)
    return np.uint32(x ^ np.uint32(x >> np.uint32(14)))


@compiled
def _fill(place: Any, key0: Any, key1: Any, draws: Any) -> None:
    for i in range(draws.size):
        draws[i] = _draw(np.uint32(place + np.uint32(i)), key0, key1)


@compiled
def fill_draws(key0: int, key1: int, first: int, draws: Any) -> None:
    """Write the draws of elements from flat index `first` on: uint32[n]."""
    start = 0
    while start < draws.size:
        at = np.uint64(first + start)
        stretch = np.uint32(at >> np.uint64(32))
        place = np.uint32(at)
        # A stretch of 2^32 places ends seldom within an array.
        end = min(draws.size, start + (1 << 32) - np.int64(place))
        second = np.uint32(np.uint32(key1) + np.uint32(stretch * _STRETCH))
        _fill(place, np.uint32(key0), second, draws[start:end])
        start = end
