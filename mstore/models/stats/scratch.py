"""Scratch memory of the compiled passes: its sizes, and each thread's own."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from mstore.models.stats.chunk import SKETCH_BUCKETS

TILE: Final = 1024
"""Elements per tile.  A chunk starts at a multiple of it."""

QUARTER: Final = TILE // 4
SKETCH_LANES: Final = QUARTER + SKETCH_BUCKETS
LANES: Final = 3 * QUARTER + SKETCH_LANES
KEYS: Final = 1 << 15
COUNTERS: Final = 1 << 16
# Consecutive increments of one counter wait for each other, so four counters alternate.
TURNS: Final = 4


class Scratch(threading.local):
    """Scratch memory of this thread's passes: 1.6 MiB.

    The counters are all zero between calls, because every pass leaves them so.
    """

    def __init__(self) -> None:
        self.counters = np.zeros((COUNTERS, TURNS), dtype=np.uint32)
        self.tiles = np.zeros((4, TILE), dtype=np.uint32)
        self.keys = np.zeros(TILE, dtype=np.uint16)
        self.lanes = np.zeros(LANES, dtype=np.float64)
        self.results = np.zeros(5 + SKETCH_BUCKETS, dtype=np.float64)
        self.planes = np.zeros(KEYS * 18, dtype=np.uint8)
        self.found = np.zeros(1, dtype=np.int64)
        # Addresses are stored as ints: taking an array's address costs more than a small pass.
        self.counters_at = self.counters.ctypes.data
        self.tiles_at = self.tiles.ctypes.data
        self.keys_at = self.keys.ctypes.data
        self.lanes_at = self.lanes.ctypes.data
        self.results_at = self.results.ctypes.data
        self.planes_at = self.planes.ctypes.data
        self.found_at = self.found.ctypes.data
