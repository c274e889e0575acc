"""Tiles: the scratch that the compiled passes of a merge work in, and the codes they are told.

Owns sizes and places within the scratch, each thread's own scratch, and the numbers that stand
for kinds of operators and for special quotas.  Needs no compiler.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

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


class Scratch(threading.local):
    """What the passes of this thread work in: 50 KiB, and two words an expert."""

    def __init__(self) -> None:
        self._tiles = np.zeros(TILES, dtype=np.uint32)
        self._draws = np.zeros(DRAWS, dtype=np.uint32)
        self._experts = np.zeros(0, dtype=np.int64)
        # Kept as numbers: taking an array's address costs more than a small pass.
        self.tiles_at = self._tiles.ctypes.data
        self.draws_at = self._draws.ctypes.data

    def experts_at(self, count: int) -> int:
        """The address of int64[2, count]."""
        if self._experts.size < 2 * count:
            self._experts = np.zeros(2 * count, dtype=np.int64)
        return self._experts.ctypes.data
