"""The compiled pass of merges whose sums are there before it (`chunk_sums`).

Importing this module imports the compiler: only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.tiles import BASE, SUM, TILE, TILES
from mstore.numeric import floats
from mstore.numeric.compiling import compiled, entry, pointer
from mstore.numeric.floats import (
    bits_float,
    float_bits,
    load_bits,
    quieten,
    quieten_all,
    store_bits,
)

_NOTHING: Final = 0.0


@compiled
def _finish(bases: Any, sums: Any, scale: Any, out: Any) -> None:
    for i in range(bases.size):
        mixed = sums[i] * np.float64(scale)
        total = np.float32(np.float64(bits_float(bases[i])) + mixed)
        out[i] = bases[i] if mixed == _NOTHING else quieten(float_bits(total))


@entry("p", floats, tiles, arguments)
def summed(arguments_at: Any) -> None:
    """Do `chunk_sums.run`."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    base_code, out_code, n = given[a.BASE_CODE], given[a.OUT_CODE], given[a.LENGTH]
    sums = carray(pointer(given[a.WEIGHTS_AT]), (n,), np.float64)
    scale = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)[1]
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    out = carray(pointer(given[a.OUT_AT]), (given[a.OUT_LENGTH],), np.uint8)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        load_bits(base_code, base, start, count, scratch, BASE)
        mixed = scratch[SUM : SUM + count]
        _finish(scratch[BASE : BASE + count], sums[start : start + count], scale, mixed)
        if base_code != out_code:
            quieten_all(mixed)
        store_bits(out_code, scratch, SUM, count, out, start)
