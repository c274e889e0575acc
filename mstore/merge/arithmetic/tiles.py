"""Tiles: the scratch that the compiled passes of a merge work in, and the codes they are told.

Owns sizes and places within the scratch, each thread's own scratch, and the numbers that stand
for kinds of methods and for special quotas.  Needs no compiler.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TILE: Final = 1024
"""Elements a tile: so many that all tiles of a chunk's step stay in the first-level cache."""

# One scratch array holds all tiles at fixed distances: LLVM then sees that loops over several of
# them do not overlap.  The padding keeps element i of different tiles out of one cache set.
STRIDE: Final = TILE + 32
BASE: Final = 0 * STRIDE
SUM: Final = 1 * STRIDE
DIFFERS: Final = 2 * STRIDE
POSITIVE: Final = 3 * STRIDE
NEGATIVE: Final = 4 * STRIDE
POSITIVE_WEIGHT: Final = 5 * STRIDE
NEGATIVE_WEIGHT: Final = 6 * STRIDE
# Experts take turns in these four: sums over experts are then read and written once for four.
GROUP: Final = 4
EXPERT: Final = 7 * STRIDE
SECOND: Final = EXPERT + 1 * STRIDE
THIRD: Final = EXPERT + 2 * STRIDE
FOURTH: Final = EXPERT + 3 * STRIDE
WEIGHTS: Final = EXPERT + GROUP * STRIDE
TILES: Final = WEIGHTS + GROUP
DRAWS: Final = TILE + 8
LANES: Final = 64
"""Partial sums by index, of which attribution makes those of a chunk, in order."""

ADDITIVE: Final = 0
CONSENSUS: Final = 1
DIRECT: Final = 2

ALL: Final = 2**32
"""A mask limit that every draw is below."""

UNLIMITED: Final = -1
"""A quota that keeps every element whose magnitude equals the threshold."""

COUNTED: Final = -2
"""The same, and the elements are counted."""


_BYTE: Final = ctypes.c_char


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins, for as long as the caller holds it."""
    try:
        # Numpy's own way makes objects that cost more than a small pass.
        # (An array is a buffer, which its type does not say.)
        return ctypes.addressof(_BYTE.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # Read-only, or empty.
        return array.ctypes.data


class Scratch(threading.local):
    """What the passes of this thread work in: 50 KiB, and some words an expert."""

    def __init__(self) -> None:
        self._tiles = np.zeros(TILES, dtype=np.uint32)
        self._draws = np.zeros(DRAWS, dtype=np.uint32)
        self.tiles_at = address(self._tiles)
        self.draws_at = address(self._draws)
        self._arguments, self._arguments_at = memoryview(b""), 0

    def arguments(self, length: int) -> tuple[memoryview, int]:
        """Room for so many bytes, whole words of eight, and its address; contents are anything."""
        if len(self._arguments) < length:
            words = np.zeros(length // 8, dtype=np.int64)
            self._arguments, self._arguments_at = words.data.cast("B"), address(words)
        return self._arguments, self._arguments_at
