"""Tiles: the scratch memory of a merge's compiled passes, and the codes of their arguments.

Owns sizes and offsets within the scratch, each thread's own scratch, and the numbers that stand for
kinds of methods and for special quotas.  Needs no compiler.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TILE: Final = 1024
"""Elements per tile, chosen so that all tiles of a step stay in the first-level cache."""
STRAIGHT: Final = 4 * TILE
"""Elements that straight steps take at a time."""

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
# Experts share these four tiles in turn, so sums are read and written once per four experts.
GROUP: Final = 4
EXPERT: Final = 7 * STRIDE
SECOND: Final = EXPERT + 1 * STRIDE
THIRD: Final = EXPERT + 2 * STRIDE
FOURTH: Final = EXPERT + 3 * STRIDE
WEIGHTS: Final = EXPERT + GROUP * STRIDE
TILES: Final = WEIGHTS + GROUP
TOGETHER: Final = 1 << 16
"""Elements that numpy works on at a time: temporary arrays are that large."""
LANES: Final = 64
"""Partial sums by index, from which attribution adds up a chunk's sums in order."""

ADDITIVE: Final = 0
CONSENSUS: Final = 1
DIRECT: Final = 2
ALONE: Final = 3
"""DIRECT with one term: the sum starts at -0, so that it is that term, whatever its sign."""
AVERAGED: Final = 5
FUSED: Final = 6
"""CONSENSUS of what is not weighed: weights count after the election."""
INFORMED: Final = 7
"""The average by Fishers (`informed_passes`): the second half of the weights are theirs."""
BALANCED: Final = 8
"""ADDITIVE, with factors of single elements (`competition_passes`)."""
MAJORITY: Final = 9
"""CONSENSUS, in which every expert that moves an element has one vote."""
FACTORED: Final = 10
"""ADDITIVE, with factors of single elements that are made before the pass (`element_factors`)."""
SUMMED: Final = 11
"""What is added to the base is there before the pass (`chunk_sums`)."""
NEAR: Final = 4
"""ALONE, of an expert that is moved back towards the base (`stages.swap`)."""

ALL: Final = 2**32
"""A mask limit that is above every draw."""

UNLIMITED: Final = -1
"""A quota that keeps every element whose magnitude equals the threshold."""

COUNTED: Final = -2
"""As UNLIMITED, and the elements are counted."""


_BYTE: Final = ctypes.c_char


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array; valid while the caller holds the array."""
    try:
        # Numpy's own way creates objects that cost more than a small pass.  (An array is a buffer,
        # but its type does not say so.)
        return ctypes.addressof(_BYTE.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # Read-only or empty.
        return array.ctypes.data


def rows_together(row_length: int) -> int:
    """Return the elements of as many whole rows as are worked on at a time, one at least."""
    return row_length * max(1, TOGETHER // row_length)


class Scratch(threading.local):
    """Scratch memory of this thread's passes: 50 KiB, and some words per expert."""

    def __init__(self) -> None:
        self._tiles = np.zeros(TILES, dtype=np.uint32)
        self._draws = np.zeros(TILE, dtype=np.uint32)
        self.tiles_at = address(self._tiles)
        self.draws_at = address(self._draws)
        self._arguments, self._arguments_at = memoryview(b""), 0

    def arguments(self, length: int) -> tuple[memoryview, int]:
        """Return room for this many bytes, whole words of eight, and its address; not zeroed."""
        if len(self._arguments) < length:
            words = np.zeros(length // 8, dtype=np.int64)
            self._arguments, self._arguments_at = words.data.cast("B"), address(words)
        return self._arguments, self._arguments_at
