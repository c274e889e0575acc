"""The compiled pass of sums in which every element has factors of its own.

Owns the arithmetic that `element_factors` promises.  Importing this module imports the compiler:
only the build does so.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from mstore.merge.arithmetic import arguments, tiles
from mstore.merge.arithmetic import arguments as a
from mstore.merge.arithmetic.tiles import BASE, DIFFERS, EXPERT, POSITIVE, SUM, TILE, TILES
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

_NOTHING: Final = np.uint32(0)
_MANY: Final = np.uint32(2)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@compiled
def _add(experts: Any, bases: Any, factors: Any, sums: Any, states: Any, lone: Any) -> None:
    """Add an expert's deltas times their factors, and keep elements of which all is taken.

    states: 0 where nothing was added, 1 where one whole delta was, else 2.
    """
    for i in range(experts.size):
        factor, own, base = factors[i], experts[i], bases[i]
        moves = (own != base) & (factor != _ZERO)
        part = np.float32(np.float32(bits_float(own) - bits_float(base)) * factor)
        sums[i] = float_bits(bits_float(sums[i]) + (part if moves else _ZERO))
        state = np.uint32(1) if (states[i] == _NOTHING) & (factor == _ONE) else _MANY
        states[i] = state if moves else states[i]
        lone[i] = own if moves else lone[i]


@compiled
def _finish(bases: Any, sums: Any, states: Any, lone: Any, scale: Any, out: Any) -> None:
    takes = scale == _ONE
    for i in range(bases.size):
        base = bases[i]
        mixed = np.float32(bits_float(sums[i]) * scale)
        total = quieten(float_bits(bits_float(base) + mixed))
        total = base if mixed == _ZERO else total
        out[i] = quieten(lone[i]) if takes & (states[i] == np.uint32(1)) else total


@entry("p", floats, tiles, arguments)
def factored(arguments_at: Any) -> None:
    """Do `element_factors.run`."""
    given = carray(arguments_at, (a.FIELDS,), np.int64)
    experts, base_code = given[a.EXPERTS], given[a.BASE_CODE]
    out_code, n = given[a.OUT_CODE], given[a.LENGTH]
    factors = carray(pointer(given[a.WEIGHTS_AT]), (experts, n), np.float32)
    scale = carray(pointer(given[a.FACTORS_AT]), (2,), np.float32)[1]
    base = carray(pointer(given[a.BASE_AT]), (given[a.BASE_LENGTH],), np.uint8)
    rows = carray(pointer(given[a.ROWS_AT]), (given[a.ROWS], given[a.STRIDE]), np.uint8)
    row_codes = carray(pointer(given[a.CODES_AT]), (given[a.CODES],), np.int64)
    row_of = carray(pointer(given[a.ROW_OF_AT]), (experts,), np.int64)
    out = carray(pointer(given[a.OUT_AT]), (given[a.OUT_LENGTH],), np.uint8)
    scratch = carray(pointer(given[a.TILES_AT]), (TILES,), np.uint32)
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        load_bits(base_code, base, start, count, scratch, BASE)
        bases, sums = scratch[BASE : BASE + count], scratch[SUM : SUM + count]
        states, lone = scratch[DIFFERS : DIFFERS + count], scratch[POSITIVE : POSITIVE + count]
        sums[:] = _NOTHING
        states[:] = _NOTHING
        for k in range(experts):
            if row_of[k] >= 0:
                load_bits(row_codes[row_of[k]], rows[row_of[k]], start, count, scratch, EXPERT)
                own = scratch[EXPERT : EXPERT + count]
                _add(own, bases, factors[k, start : start + count], sums, states, lone)
        _finish(bases, sums, states, lone, scale, sums)
        if base_code != out_code:
            quieten_all(sums)
        store_bits(out_code, scratch, SUM, count, out, start)
